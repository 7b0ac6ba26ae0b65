"""Prompts of the benchmarks of early exit, and what they have in common."""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from deepenough.data.corpus import open_corpus
from deepenough.decoding.api import early_exit
from deepenough.decoding.early_exit import make_policy
from deepenough.decoding.exit_scoring import choose_exits, measured_prices
from deepenough.decoding.instructions import instructions
from deepenough.decoding.losses import full_words
from deepenough.decoding.own_text import Written
from deepenough.hf.loading import load as load_model
from deepenough.shortcut.modeling import Shortcuts


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--shortcuts", required=True, help="folder of the model's shortcuts")
    parser.add_argument("--corpus", default="wikitext-2-raw")
    parser.add_argument("--split", default="test")
    parser.add_argument("--prompt-tokens", type=int, default=32, help="of a paragraph")
    parser.add_argument("--policy", default="gap", choices=["gap", "top", "entropy"])
    parser.add_argument("--exits", type=int, nargs="*", help="by default those that pay here")
    parser.add_argument("--shortlist", type=int, default=4096, help="0 for all words")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--save", action="store_true")


def load(arguments: argparse.Namespace) -> tuple[Any, Any, Shortcuts]:
    torch.set_num_threads(arguments.threads)
    model, tokenizer = load_model(arguments.model)
    return model, tokenizer, Shortcuts.from_pretrained(arguments.shortcuts)


def make_prompts(tokenizer: Any, arguments: argparse.Namespace, count: int) -> list[list[int]]:
    """Beginnings of paragraphs and instructions in turn, the paragraphs drawn at random."""
    lines = [
        line for line in open_corpus(arguments.corpus).lines(arguments.split) if len(line) > 200
    ]
    random.Random(0).shuffle(lines)
    paragraphs = iter(lines)
    orders = islice(instructions(seed=1), 10_000)
    prompts: list[list[int]] = []
    while len(prompts) < count:
        paragraph, order = next(paragraphs, None), next(orders)
        if paragraph is not None:
            prompts.append(tokenizer(paragraph.strip())["input_ids"][: arguments.prompt_tokens])
        if tokenizer.chat_template:
            message = [{"role": "user", "content": order}]
            order = tokenizer.apply_chat_template(
                message, tokenize=False, add_generation_prompt=True
            )
        prompts.append(tokenizer(order)["input_ids"])
    return prompts[:count]


def make_exiting(
    model: Any, shortcuts: Shortcuts, arguments: argparse.Namespace, threshold: float, fill: str
) -> Any:
    """An exiting model whose exits, unless given, are chosen by what they cost here."""
    words = min(arguments.shortlist, model.config.vocab_size)
    options = {
        "mode": "exit",
        "policy": make_policy(arguments.policy, threshold),
        "kv_propagation": fill,
        "exit_vocab": torch.arange(words) if words else None,
    }
    fast = early_exit(model, shortcuts, exit_layers=arguments.exits or [1], **options)
    if not arguments.exits:
        early = fast.exit_rule
        prices = measured_prices(fast.decoding_engine, early)
        print("prices, in ms:", {name: 1e3 * value for name, value in vars(prices).items()})
        arguments.exits = choose_exits(fast.decoding_engine, early, prices=prices)
        print("exits:", arguments.exits, flush=True)
        fast = early_exit(model, shortcuts, exit_layers=arguments.exits, **options)
    return fast


def padded(prompts: Sequence[Sequence[int]]) -> dict[str, Tensor]:
    """Prompts side by side, padded on the left."""
    width = max(map(len, prompts))
    ids = [[0] * (width - len(prompt)) + list(prompt) for prompt in prompts]
    mask = [[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    return {"input_ids": torch.tensor(ids), "attention_mask": torch.tensor(mask)}


def options_of(model: Any, new_tokens: int) -> dict[str, Any]:
    pad = model.generation_config.pad_token_id
    return {"do_sample": False, "max_new_tokens": new_tokens, "pad_token_id": pad or 0}


def new_tokens_of(output: Tensor, width: int, ends: set[int]) -> list[list[int]]:
    """Each row's new tokens up to and with its end."""
    rows = []
    for row in output[:, width:].tolist():
        stop = next((place for place, token in enumerate(row) if token in ends), len(row) - 1)
        rows.append(row[: stop + 1])
    return rows


def end_tokens(model: Any) -> set[int]:
    end = model.generation_config.eos_token_id
    return set(end if isinstance(end, list) else [] if end is None else [end])


def agreement(
    engine: Any, prompts: Sequence[Sequence[int]], rows: Sequence[Sequence[int]]
) -> float:
    """Of the words that were written, the share that the full model would have said there."""
    texts = [
        Written(torch.tensor([*prompt, *row]), torch.empty(0), len(prompt))
        for prompt, row in zip(prompts, rows, strict=True)
    ]
    full = torch.cat(full_words(engine, texts))
    own = torch.tensor([token for row in rows for token in row])
    return float((own == full).double().mean())


def interleaved(
    ways: dict[str, Callable[[Any], int]], inputs: Sequence[Any], rounds: int
) -> dict[str, float]:
    """Median tokens a second of ways that take turns; each gives its number of new tokens."""
    for way in ways.values():
        way(inputs[0])
    rates: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(rounds):
        seconds, tokens = dict.fromkeys(ways, 0.0), dict.fromkeys(ways, 0)
        for given in inputs:
            for name, way in ways.items():
                began = time.perf_counter()
                tokens[name] += way(given)
                seconds[name] += time.perf_counter() - began
        for name in ways:
            rates[name].append(tokens[name] / seconds[name])
        shown = {name: round(each[-1], 2) for name, each in rates.items()}
        print(f"round {turn + 1} of {rounds}:", shown, flush=True)
    return {name: statistics.median(each) for name, each in rates.items()}

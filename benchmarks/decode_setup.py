"""Models and prompts of the decoding benchmarks, and what they count.

Everything that builds a decoder of this package is here, so that its interface is named once.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import cycle, islice, product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.figures import require
from deepenough.data.corpus import open_corpus
from deepenough.decoding.api import early_exit, speculate
from deepenough.decoding.calibration import full_tokens
from deepenough.decoding.draft_model import DraftModel
from deepenough.decoding.early_exit import KVPropagation
from deepenough.decoding.self_generated import SelfGenerated
from deepenough.hf import loading
from deepenough.shortcut.modeling import Shortcuts

CORPUS = "wikitext-2-raw"
PROMPT_TOKENS = 32
"""Tokens that are taken of a paragraph."""
DRAFT_VOCAB = 4096
"""Most frequent tokens that exits predict among."""
INSTRUCTIONS = (
    "Explain {} to a child.",
    "Write a short story about {}.",
    "What should I know about {}?",
    "List five facts about {}.",
    "Give me advice on {}.",
    "Write a letter to a friend about {}.",
    "Compare {} with something similar.",
    "Summarise the history of {}.",
)
"""Others than those that draft heads are trained on."""
SUBJECTS = (
    *("baking bread", "learning to swim", "city parks", "saving money", "writing poems", "gardens"),
    *("chess", "good sleep", "spiders", "the Roman army", "mountain goats", "singing", "maps"),
    *("the moon", "old bridges", "bees", "the printing press", "volcanoes", "trains", "coffee"),
    *("the human heart", "rivers", "lighthouses", "paper", "telescopes", "winter"),
)
TIE = 1e-3
"""Two best logits that are closer than this are decided by rounding."""


def load(model: str, threads: int) -> tuple[Any, Any]:
    """Return a model and its tokenizer, and set torch's threads."""
    torch.set_num_threads(threads)
    return loading.load(model)


def save_bf16(folder: str | Path) -> None:
    """Save SmolLM2 and its tokenizer in bf16."""
    model, tokenizer = loading.load("smollm2")
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def load_maps(folder: str) -> Shortcuts:
    """Return the maps between layers that `shortcut_real` leaves."""
    return Shortcuts.from_pretrained(
        require(folder, "python -m benchmarks shortcut_real makes it.")
    )


def make_prompts(tokenizer: Any, count: int, split: str = "test") -> list[list[int]]:
    """Return tokens of paragraphs' beginnings and of instructions in turn.

    Paragraphs are drawn at random from a split of WikiText-2; instructions have the model's chat
    template.
    """
    lines = [line for line in open_corpus(CORPUS).lines(split) if len(line) > 200]
    random.Random(0).shuffle(lines)
    paragraphs = iter(lines)
    prompts: list[list[int]] = []
    for form, subject in islice(cycle(product(INSTRUCTIONS, SUBJECTS)), count):
        text = form.format(subject)
        paragraph = next(paragraphs, None)
        if paragraph is not None:
            prompts.append(tokenizer(paragraph.strip())["input_ids"][:PROMPT_TOKENS])
        if tokenizer.chat_template:
            message = [{"role": "user", "content": text}]
            text = tokenizer.apply_chat_template(
                message, tokenize=False, add_generation_prompt=True
            )
        prompts.append(tokenizer(text)["input_ids"])
    return prompts[:count]


def make_loop(model: Any) -> Any:
    """Return the model in this package's decoding loop, without drafts."""
    return speculate(model, "none")


def make_speculating(
    model: Any, tuned: DraftModel, drafts: list[str] | None = None, num_drafts: int | None = None
) -> Any:
    """Return a model that decodes with drafts.

    Args:
        model: The model.
        tuned: What `deepenough decode tune` has made of it.
        drafts: Sources of drafts; by default those that tuning chose.
        num_drafts: Drafted tokens a pass; by default as many as tuning chose.
    """
    given: dict[str, Any] = {"num_draft_tokens": num_drafts} if drafts else {}
    return speculate(model, drafts, draft_model=tuned, **given)


def make_exiting(
    model: Any, shortcuts: Shortcuts, threshold: float, fill: KVPropagation, exits: Sequence[int]
) -> Any:
    """Return a model that exits at the given layers, by the gap of the two best probabilities."""
    return early_exit(
        model,
        shortcuts,
        threshold,
        exit_layers=list(exits),
        kv_propagation=fill,
        exit_vocab=torch.arange(min(DRAFT_VOCAB, model.config.vocab_size)),
    )


def padded(prompts: Sequence[Sequence[int]]) -> dict[str, Tensor]:
    """Return prompts as one batch, padded on the left."""
    width = max(map(len, prompts))
    ids = [[0] * (width - len(prompt)) + list(prompt) for prompt in prompts]
    mask = [[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    return {"input_ids": torch.tensor(ids), "attention_mask": torch.tensor(mask)}


def greedy(model: Any, new_tokens: int) -> dict[str, Any]:
    """Return the options of greedy decoding with at most so many new tokens."""
    pad = model.generation_config.pad_token_id
    return {"do_sample": False, "max_new_tokens": new_tokens, "pad_token_id": pad or 0}


def new_tokens_of(output: Tensor, width: int, model: Any) -> list[list[int]]:
    """Return each row's new tokens up to and with its end token."""
    end = model.generation_config.eos_token_id
    ends = set(end if isinstance(end, list) else [] if end is None else [end])
    rows = []
    for row in output[:, width:].tolist():
        stop = next((place for place, token in enumerate(row) if token in ends), len(row) - 1)
        rows.append(row[: stop + 1])
    return rows


def write_rows(
    generator: Any, prompts: Sequence[list[int]], model: Any, new_tokens: int
) -> list[list[int]]:
    """Return the new tokens of prompts that are continued as one batch."""
    given = padded(prompts)
    output = generator.generate(**given, **greedy(model, new_tokens))
    return new_tokens_of(output, given["input_ids"].shape[1], model)


def agreement(
    engine: Any, prompts: Sequence[Sequence[int]], rows: Sequence[Sequence[int]]
) -> float:
    """Return the share of written tokens that the full model would have chosen at their place."""
    texts = [
        SelfGenerated(torch.tensor([*prompt, *row]), torch.empty(0), len(prompt))
        for prompt, row in zip(prompts, rows, strict=True)
    ]
    full = torch.cat([full_tokens(engine, text) for text in texts])
    own = torch.tensor([token for row in rows for token in row])
    return float((own == full).double().mean())


def equality(
    model: Any,
    prompts: Sequence[list[int]],
    expected: Sequence[list[int]],
    found: Sequence[list[int]],
) -> dict[str, int]:
    """Return how many continuations are identical, differ first at a tie, or differ otherwise."""
    counts = {"identical": 0, "ties": 0, "different": 0}
    for prompt, one, other in zip(prompts, expected, found, strict=True):
        if one == other:
            counts["identical"] += 1
            continue
        pairs = enumerate(zip(one, other, strict=False))
        place = next((n for n, (a, b) in pairs if a != b), min(len(one), len(other)))
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt, *one[:place]]])).logits[0, -1]
        best = logits.topk(2).values
        counts["ties" if float(best[0] - best[1]) < TIE else "different"] += 1
    return counts


def train_small_gpt2(folder: str, steps: int = 1200) -> None:
    """Train a small model of GPT-2's layout on WikiText-2 and save it for decoding benchmarks.

    It has 6 layers of width 256 and reads batches of 8 x 128 tokens. GPT-2's own weights would say
    more where a hub is in reach.
    """
    from transformers import GPT2Config, GPT2LMHeadModel

    from deepenough.data.config import DatasetConfig
    from deepenough.data.tokens import prepare

    batch, length = 8, 128
    prepared = prepare(CORPUS, DatasetConfig())
    ids = torch.as_tensor(prepared.tokens["train"].ids)
    torch.manual_seed(0)
    tokenizer = prepared.tokenizer
    config = GPT2Config(
        vocab_size=len(tokenizer),
        n_positions=512,
        n_embd=256,
        n_layer=6,
        n_head=4,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    model = GPT2LMHeadModel(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-3, total_steps=steps)
    for step in range(steps):
        starts = torch.randint(0, len(ids) - length, (batch,))
        rows = torch.stack([ids[start : start + length] for start in starts]).long()
        loss = model(input_ids=rows, labels=rows).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if step % 100 == 0:
            print(f"step {step}: loss {float(loss):.3f}", flush=True)
    model.save_pretrained(Path(folder))
    tokenizer.save_pretrained(Path(folder))

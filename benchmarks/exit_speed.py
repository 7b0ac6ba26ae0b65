"""Tokens a second of lossless decoding beside transformers' own ways, and whether they are equal.

    python benchmarks/exit_speed.py --model smollm2 --carry runs/carry-smollm2 [--save]
    python benchmarks/exit_speed.py --model smollm2 --tuned runs/tuned-smollm2 [--save]

Prompts are the beginnings of WikiText-2 paragraphs and instructions, half of each; greedy, at most
`--new-tokens` new tokens each, ended by the model's own end token. All ways take turns on each
prompt; a round is all prompts, and the median over rounds is reported. `--carry` names the folder
of carry maps: if there are none, they are fitted on the model's own continuations of *other* texts
and kept there. `--tuned` names what `deepenough exit tune` has made, also on other texts: its draft
head takes part, and so do its carry maps if no others are given. `chosen` is what it found to be
the fastest.

The tokens of every way are compared with those of `generate` on the timed prompts. Where they
differ, the first difference is looked at: if the model's two best logits there are closer than
0.001, it is rounding that decides, and it is counted apart. `--checked 200` times nothing but
compares on so many prompts, all ways in batches of `--checked-at-once`; it needs no quiet machine.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from exit_prompts import end_tokens, new_tokens_of, options_of, padded
from record import save_result
from torch import Tensor

from deepenough.data.corpus import open_corpus
from deepenough.decoding.api import speculate
from deepenough.decoding.carry_fit import fit_carry
from deepenough.decoding.drafters import INDEX, LinearDrafter
from deepenough.decoding.engine import make_engine
from deepenough.decoding.tuned import Tuned
from deepenough.hf.loading import load
from deepenough.training.trainer import keep_freed_memory

PROMPT_TOKENS = 32
TIE = 1e-3
ORDERS = (
    "Explain {} to a child.",
    "Write a short story about {}.",
    "What should I know about {}?",
    "List five facts about {}.",
    "Give me advice on {}.",
    "Write a letter to a friend about {}.",
    "Compare {} with something similar.",
    "Summarise the history of {}.",
)
THINGS = (
    *("the moon", "baking bread", "old bridges", "learning to swim", "bees", "city parks"),
    *("the printing press", "saving money", "volcanoes", "writing poems", "trains", "gardens"),
    *("the human heart", "chess", "rivers", "good sleep", "lighthouses", "spiders", "coffee"),
    *("the Roman army", "paper", "mountain goats", "telescopes", "singing", "winter", "maps"),
)


@dataclass
class Way:
    """A model that generates, and with which options."""

    model: Any
    options: dict[str, Any]

    def __call__(self, prompt: dict[str, Any]) -> Any:
        return self.model.generate(**prompt, **self.options)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--carry", type=Path, help="folder of carry maps")
    parser.add_argument("--tuned", type=Path, help="folder of deepenough exit tune")
    parser.add_argument("--fit-tokens", type=int, default=30_000)
    parser.add_argument("--corpus", default="wikitext-2-raw")
    parser.add_argument("--prompts", type=int, default=6, help="prompts that are timed")
    parser.add_argument("--checked", type=int, default=0, help="compare only, on so many")
    parser.add_argument("--checked-at-once", type=int, default=8)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--drafts", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--exit-layer", type=int, default=4, help="for assistant_early_exit")
    parser.add_argument("--without", nargs="*", default=[], help="ways that are left out")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--save", action="store_true")
    arguments = parser.parse_args()
    if arguments.carry is None and arguments.tuned is None:
        parser.error("give --carry, --tuned or both")
    torch.set_num_threads(arguments.threads)
    keep_freed_memory()
    model, tokenizer = load(arguments.model)
    tuned = None if arguments.tuned is None else Tuned.from_pretrained(arguments.tuned)
    if arguments.carry is None and tuned is not None:
        carry = tuned.carry
    else:
        carry = load_or_fit(model, tokenizer, arguments)
    ways = make_ways(model, carry, tuned, arguments)
    texts = prompts(tokenizer, arguments.corpus, "valid", test=True)
    result: dict[str, Any] = {
        "model": arguments.model,
        "new_tokens": arguments.new_tokens,
        "carry": carry.meta["fit"],
        "tuned": None if tuned is None else facts(tuned),
    }
    if arguments.checked:
        checked, at_once = list(islice(texts, arguments.checked)), arguments.checked_at_once
        result |= {"prompts": len(checked), "ways": equal_tokens(model, ways, checked, at_once)}
    else:
        timed = list(islice(texts, arguments.prompts))
        result |= {"prompts": len(timed), "rounds": arguments.rounds}
        result["ways"] = compare(model, ways, timed, arguments.rounds)
        result["milliseconds"] = breakdown(model, arguments.rounds)
    kind = "equal" if arguments.checked else "speed"
    place = Path(arguments.model)
    name = (place.parent if place.name == "model" else place).name.lower()
    name += "" if tuned is None else "_tuned"
    save_result(f"exit_{kind}_{name}", result, arguments.save)


TRANSFORMERS = ("generate", "assistant_early_exit", "prompt_lookup")


def facts(tuned: Tuned) -> dict[str, Any]:
    """How the head came about, and what was chosen with it."""
    chosen = {
        name: tuned.choice.get(name)
        for name in ("names", "num_draft_tokens", "vocab_size", "layer")
    }
    return {n: v for n, v in tuned.meta.items() if n != "prompts"} | {"chosen": chosen}


def make_ways(
    model: Any, carry: LinearDrafter, tuned: Tuned | None, arguments: argparse.Namespace
) -> dict[str, Way]:
    options = options_of(model, arguments.new_tokens)

    def way(generator: Any, **more: Any) -> Way:
        return Way(generator, options | more)

    ways = {
        "generate": way(model),
        "assistant_early_exit": way(model, assistant_early_exit=arguments.exit_layer),
        "prompt_lookup": way(model, prompt_lookup_num_tokens=2),
        "loop": way(speculate(model, "none")),
    }
    sources = {"lookup": ["lookup"], "carry": ["carry"], "both": ["lookup", "carry"]}
    if tuned is not None:
        sources |= {"tuned": ["tuned"], "lookup_tuned": ["lookup", "tuned"]}
    given: dict[str, Any] = {"mode": "speculative", "carry": carry, "tuned": tuned}
    for number in arguments.drafts:
        for name, drafts in sources.items():
            fast = speculate(model, **given, drafter=drafts, num_draft_tokens=number)
            ways[f"{name}_{number}"] = way(fast)
    if tuned is not None and tuned.choice:
        ways["chosen"] = way(speculate(model, **given))
    return {name: each for name, each in ways.items() if name not in arguments.without}


def prompts(tokenizer: Any, corpus: str, split: str, test: bool) -> Iterator[dict[str, Tensor]]:
    """Tokens of paragraphs and instructions in turn, without end."""
    paragraph, order = paragraphs(corpus, split), orders(tokenizer, test)
    while True:
        yield encoded(tokenizer, next(paragraph), PROMPT_TOKENS)
        yield encoded(tokenizer, next(order), None)


def encoded(tokenizer: Any, text: str, most: int | None) -> dict[str, Tensor]:
    ids = torch.tensor([tokenizer(text)["input_ids"][:most]])
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def paragraphs(corpus: str, split: str) -> Iterator[str]:
    while True:
        for line in open_corpus(corpus).lines(split):
            if len(line) > 200:
                yield line.strip()


def orders(tokenizer: Any, test: bool) -> Iterator[str]:
    """Instructions as the model's chat template has them; those of a test are of other things."""
    things = THINGS[1::2] if test else THINGS[::2]
    while True:
        for order in ORDERS:
            for thing in things:
                text = order.format(thing)
                if tokenizer.chat_template:
                    message = [{"role": "user", "content": text}]
                    text = tokenizer.apply_chat_template(
                        message, tokenize=False, add_generation_prompt=True
                    )
                yield text


def load_or_fit(model: Any, tokenizer: Any, arguments: argparse.Namespace) -> LinearDrafter:
    if (arguments.carry / INDEX).is_file():
        return LinearDrafter.from_pretrained(arguments.carry)
    paragraph, order = paragraphs(arguments.corpus, "train"), orders(tokenizer, test=False)
    texts = (text for pair in zip(paragraph, order, strict=True) for text in pair)
    carry = fit_carry(
        model,
        tokenizer,
        texts,
        tokens=arguments.fit_tokens,
        prompt_tokens=2 * PROMPT_TOKENS,
        new_tokens=arguments.new_tokens,
        maps=max(2, *arguments.drafts),
        progress=lambda done, wanted: print(f"carry: {done} of {wanted} tokens", flush=True),
    )
    carry.save_pretrained(arguments.carry)
    return carry


def compare(
    model: Any, ways: dict[str, Way], timed: list[dict[str, Tensor]], rounds: int
) -> dict[str, Any]:
    """Rates and equality of all ways, interleaved."""
    outputs: dict[str, list[Tensor]] = {name: [way(timed[0])] for name, way in ways.items()}
    rates: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(rounds):
        seconds = dict.fromkeys(ways, 0.0)
        tokens = dict.fromkeys(ways, 0)
        found: dict[str, list[Tensor]] = {name: [] for name in ways}
        for prompt in timed:
            for name, way in ways.items():
                began = time.perf_counter()
                output = way(prompt)
                seconds[name] += time.perf_counter() - began
                tokens[name] += output.shape[1] - prompt["input_ids"].shape[1]
                found[name].append(output)
        outputs = found
        for name in ways:
            rates[name].append(tokens[name] / seconds[name])
        print(f"round {turn + 1} of {rounds}:", {n: round(r[-1], 2) for n, r in rates.items()})
    base = statistics.median(rates["generate"])
    loop = statistics.median(rates["loop"])
    return {
        name: {
            "tokens_per_second": statistics.median(rates[name]),
            "times_generate": statistics.median(rates[name]) / base,
            "times_loop": statistics.median(rates[name]) / loop,
            **equality(model, outputs["generate"], outputs[name]),
            **({} if name in TRANSFORMERS else accepted(ways[name], timed)),
        }
        for name in ways
    }


def accepted(way: Way, timed: list[dict[str, Tensor]]) -> dict[str, float]:
    return guesses([way({**prompt, "return_dict_in_generate": True}) for prompt in timed])


def guesses(outputs: list[Any]) -> dict[str, float]:
    """Guesses made and confirmed in a pass of the model, on average."""
    passes = sum(output.passes for output in outputs)
    return {
        "drafted_a_pass": sum(output.drafted for output in outputs) / passes,
        "accepted_a_pass": sum(output.accepted for output in outputs) / passes,
    }


def equal_tokens(
    model: Any, ways: dict[str, Way], checked: list[dict[str, Tensor]], at_once: int
) -> dict[str, Any]:
    rows = [prompt["input_ids"][0].tolist() for prompt in checked]
    batches = [rows[first : first + at_once] for first in range(0, len(rows), at_once)]
    ends = end_tokens(model)
    expected: list[Tensor] = []
    result = {}
    for name, way in ways.items():
        outputs = [way(padded(batch) | {"return_dict_in_generate": True}) for batch in batches]
        new = [
            row
            for batch, output in zip(batches, outputs, strict=True)
            for row in new_tokens_of(output.sequences, max(map(len, batch)), ends)
        ]
        found = [torch.tensor([[*row, *more]]) for row, more in zip(rows, new, strict=True)]
        expected = expected or found  # `generate` comes first
        result[name] = equality(model, expected, found)
        if name not in TRANSFORMERS:
            result[name] |= guesses(outputs)
        print(name, result[name], flush=True)
    return result


def equality(model: Any, expected: list[Tensor], found: list[Tensor]) -> dict[str, int]:
    """Texts that are equal, that differ where two words are equally good, and that differ."""
    counts = {"identical": 0, "ties": 0, "different": 0}
    for one, other in zip(expected, found, strict=True):
        if one.shape == other.shape and torch.equal(one, other):
            counts["identical"] += 1
            continue
        length = min(one.shape[1], other.shape[1])
        unequal = (one[0, :length] != other[0, :length]).nonzero()
        place = int(unequal[0]) if len(unequal) else length
        with torch.no_grad():
            best = model(one[:, :place]).logits[0, -1].topk(2).values
        counts["ties" if float(best[0] - best[1]) < TIE else "different"] += 1
    return counts


@torch.inference_mode()
def breakdown(model: Any, rounds: int) -> dict[str, dict[str, float]]:
    """Where a pass spends its time, for 1 to 4 tokens at once after 64: medians."""
    engine = make_engine(model)
    limit = model.config.vocab_size
    prompt = torch.arange(1, 65)[None].remainder(limit)
    result = {}
    for count in (1, 2, 3, 4):
        tokens = torch.arange(1, count + 1)[None].remainder(limit)
        engine.prefill(prompt, None, 64 + count)
        times: dict[str, list[float]] = {"embedding": [], "layers": [], "head": []}
        for _ in range(3 * rounds):
            marks = [time.perf_counter()]
            step = engine.enter(tokens)
            marks.append(time.perf_counter())
            hidden = engine.through(step, step.hidden, 0, engine.num_layers)
            marks.append(time.perf_counter())
            engine.head(engine.norm(hidden)).argmax(-1).tolist()
            marks.append(time.perf_counter())
            for name, start, end in zip(times, marks[:-1], marks[1:], strict=True):
                times[name].append(1e3 * (end - start))
        result[f"{count}_tokens"] = {n: round(statistics.median(t), 3) for n, t in times.items()}
    engine.release()
    return result


if __name__ == "__main__":
    main()

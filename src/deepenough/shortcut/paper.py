"""What the scripts of "Jump to Conclusions" make, of one model and one text, in one run folder.

Sentences are drawn from raw text, and from each a position (a `[MASK]` there for masked models). On
some of them `deepenough shortcut paper` fits all maps; on the others it measures the five mappings
of the paper (`id`, `mat`, and attention, feed-forward or norms made linear) at every layer, r^2 and
early exit over lambda. Beside the maps and records the folder then holds

- `sentences.txt`: one a line, those that were fitted on first;
- `results.safetensors`: of each mode M and sample, `[layers, N]`, `M.top` (the ten likeliest
  tokens), `M.surprisal`, `M.gap` and the other scores of `lens.TokenScores`, and the layer at which
  it exits, `exit.M`, `[lambdas, N]`;
- `results.csv`: the means over samples, with 95 % intervals.

Departures: sentences are split by rules of our own in the place of spaCy's model, and are distinct;
sampling has a seed; a position is never that of a special token; and `t` is the position in masked
models too, where the script has 3 (`--at-position 3`).
"""

import csv
import itertools
import random
import re
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from deepenough.artifacts import atomic_path, save_tensors
from deepenough.data.corpus import open_corpus
from deepenough.errors import UserError
from deepenough.runs import Record
from deepenough.shortcut.config import ExitSweep, SentencesConfig
from deepenough.shortcut.evaluation import Evaluation
from deepenough.shortcut.lens import TokenScores

NUM_TOP = 10
RESULTS, MEANS, SENTENCES = "results.safetensors", "results.csv", "sentences.txt"

#: The end of a sentence, closing quotes and brackets included, before what may begin another.
_END = re.compile(
    r"""\s?(?P<mark>[.!?…]+)(?:\s?["'”’)\]]+)?(?=\s+["'“‘(\[]*[^\W_a-z])|[。！？]+[」』”）]*"""
)
#: What a full stop may follow without ending a sentence: abbreviations, initials, dotted letters.
_GOES_ON = re.compile(
    r"(?:mrs?|ms|dr|prof|st|mt|ft|gen|col|capt|lt|sgt|rev|hon|gov|sen|rep|pres|nos?|vol|figs?|eqs?"
    r"|sec|ch|pp?|eds?|cf|ca|approx|vs|al|viz|jan|feb|mar|apr|jun|jul|aug|sept?|oct|nov|dec"
    r"|(?-i:[A-HJ-Z])|(?:[a-z]\.)+[a-z])",
    re.IGNORECASE,
)


def split_sentences(text: str) -> list[str]:
    """Return the sentences of a paragraph, without the space around them.

    A sentence ends at `.`, `!`, `?` or their like before a capital, a digit or a letter without
    cases; not at the full stop of an abbreviation such as Dr. or e.g., or of an initial.
    """
    found, start = [], 0
    for end in _END.finditer(text):
        word = text[start : end.start()].rpartition(" ")[2].strip("\"'“”‘’()[]")
        if end["mark"] == "." and text[end.start()] == "." and _GOES_ON.fullmatch(word):
            continue
        found.append(text[start : end.end()].strip())
        start = end.end()
    return [sentence for sentence in (*found, text[start:].strip()) if sentence]


def draw_sentences(data: str, chosen: SentencesConfig) -> tuple[list[str], list[str]]:
    """Return distinct sentences of a text, drawn at random: to fit on, and to measure on.

    Each line is a paragraph; headings of wiki text (`= Title =`) are left out.
    """
    lines = open_corpus(data).lines(chosen.split)
    wanted, drawn = chosen.train + chosen.test, random.Random(chosen.seed)
    kept: list[str] = []
    seen: set[int] = set()
    for line in itertools.islice(lines, chosen.lines):
        for sentence in split_sentences(line) if not line.lstrip().startswith("=") else ():
            if len(sentence.split()) < chosen.min_words or hash(sentence) in seen:
                continue
            seen.add(hash(sentence))
            # A reservoir: all sentences so far are kept with the same probability.
            if len(kept) < wanted:
                kept.append(sentence)
            elif (place := drawn.randrange(len(seen))) < wanted:
                kept[place] = sentence
    if len(kept) < wanted:
        raise UserError(
            f"{data} ({chosen.split}) has {len(kept)} different sentences of {chosen.min_words} "
            f"words or more, and {chosen.train} + {chosen.test} are wanted: give more text, or "
            "smaller --sentences.train and --sentences.test."
        )
    drawn.shuffle(kept)
    return kept[: chosen.train], kept[chosen.train :]


def save_samples(evaluation: Evaluation, exit: ExitSweep, folder: Path) -> None:
    """Write the scores of every sample, in the order of the sentences, as `RESULTS`."""
    order = evaluation.text.argsort(stable=True)
    found: dict[str, Tensor] = {"position": evaluation.position[order].int()}
    found["sentence"] = evaluation.text[order].int()
    for mode in dict.fromkeys(mode for mode, _ in evaluation.scores):
        layers = sorted(layer for own, layer in evaluation.scores if own == mode)
        columns = zip(*(evaluation.scores[mode, layer] for layer in layers), strict=True)
        for name, column in zip(TokenScores._fields, columns, strict=True):
            tensor = torch.stack(column)[:, order]
            found[f"{mode}.{name}"] = tensor if tensor.is_floating_point() else tensor.int()
    for mode in evaluation.exit_modes():
        lambdas, exits = zip(*evaluation.exits(mode, exit), strict=True)
        found["exit.lambdas"] = torch.tensor(lambdas, dtype=torch.float64)
        found[f"exit.{mode}"] = torch.stack(exits)[:, order].short()
    save_tensors(folder / RESULTS, found, {"format": "deepenough-shortcut-samples"})


def save_means(records: Sequence[Record], folder: Path) -> None:
    """Write the means of every mode and layer, and of every mode and lambda, as `MEANS`."""
    rows = []
    for record in records:
        if record.kind in ("layer", "exit"):
            values = dict(record.values)
            for name, ends in values.pop("intervals").items():
                values |= {f"{name}_low": ends[0], f"{name}_high": ends[1]}
            rows.append({"kind": record.kind, "layers_mean": values.get("layer"), **values})
    path = folder / MEANS
    with atomic_path(path) as partial, open(partial, "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, dict.fromkeys(name for row in rows for name in row))
        writer.writeheader()
        writer.writerows(rows)

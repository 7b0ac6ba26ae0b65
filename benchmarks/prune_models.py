"""What a story teller of 15M weights and a MiniLM classifier lose by maps and by dropped layers.

`stories15M` is pruned on stories that it has written itself and measured on others of its own.
MiniLM gets a head for SST-2 by a short fine-tuning, is pruned on sentences of the training split,
and measured on the development set: there accuracy stands for perplexity. What is finished stays in
the folder of the runs:

    python -m benchmarks prune_models stories=$MODELS/stories15M runs=runs/prune-models
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from benchmarks.figures import require
from benchmarks.prune_smollm2 import prune_all
from deepenough.data.classification import open_classification
from deepenough.data.config import ClassificationConfig
from deepenough.hf.loading import find_place, load
from deepenough.training.trainer import keep_freed_memory

QUICK = False
SEEDS = [0]
LENGTH, TEXTS = 200, 64
"""Tokens of a story, and stories that are written at once."""


def measure(
    runs: str = "runs/prune-models",
    stories: str = "stories15M",
    shares: Sequence[float] = (0.83, 0.73),
    fit_tokens: int = 40_000,
    steps: int = 300,
    threads: int = 1,
) -> dict[str, Any]:
    """Prune both models in all ways and return what each is worth.

    Args:
        runs: Folder of the pruned models and of what is finished.
        stories: Folder of stories15M.
        shares: Shares of the layers' weights to keep.
        fit_tokens: Tokens to fit maps on.
        steps: Steps of the fine-tuning on SST-2.
        threads: Threads of torch.
    """
    keep_freed_memory()
    torch.set_num_threads(threads)
    folder = Path(runs)
    require(stories, "give the folder of a Llama model as stories=FOLDER.")
    teller, tokenizer = load(stories)
    written = own_stories(teller, tokenizer, fit_tokens + 12_000, folder / "stories.txt")
    others, written = written[:60], written[60:]
    auto: Any = AutoModelForCausalLM
    found = {
        "stories15m": prune_all(
            teller,
            tokenizer,
            written,
            others,
            folder / "stories",
            shares,
            fit_tokens,
            auto,
            above=True,
        )
    }
    texts = open_classification("sst2", ClassificationConfig()).splits
    classifier, words = fine_tuned(folder / "classifier", texts["train"], steps)
    sentences = [example.text for example in texts["train"] if len(example.text.split()) > 7]
    valid = [example.text for example in texts["valid"]]
    auto = AutoModelForSequenceClassification
    place = folder / "minilm"
    own = prune_all(
        classifier, words, sentences, valid, place, shares, fit_tokens, auto, above=True
    )
    for share in shares:
        for name, scores in own[f"keep_{round(100 * share)}"].items():
            place = folder / "minilm" / f"weights-{share}-{name}" / "model"
            pruned = AutoModelForSequenceClassification.from_pretrained(place).eval()
            scores["accuracy"] = accuracy(pruned, words, texts["valid"])
    full = {"accuracy": accuracy(classifier, words, texts["valid"])}
    return {**found, "minilm_sst2": {"full": full, **own}, "settings": {"threads": threads}}


@torch.no_grad()
def own_stories(model: Any, tokenizer: Any, num_tokens: int, path: Path) -> list[str]:
    """Return texts that a model has written, of so many tokens, kept in a file."""
    if not path.is_file():
        torch.manual_seed(0)
        start = torch.full((TEXTS, 1), tokenizer.bos_token_id or 1)
        found: list[str] = []
        while len(found) * LENGTH < num_tokens:
            ids = model.generate(start, max_new_tokens=LENGTH, do_sample=True, pad_token_id=0)
            found += tokenizer.batch_decode(ids, skip_special_tokens=True)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("\x1e".join(found), encoding="utf-8")
    return path.read_text(encoding="utf-8").split("\x1e")


def fine_tuned(folder: Path, examples: Sequence[Any], steps: int) -> tuple[Any, Any]:
    """Return MiniLM with a head for two classes, trained for so many steps of 32 sentences."""
    _, tokenizer = load("minilm")
    if not (folder / "config.json").is_file():
        torch.manual_seed(0)
        place = find_place("minilm")
        model = AutoModelForSequenceClassification.from_pretrained(place, num_labels=2).train()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        order = torch.randperm(len(examples)).tolist()
        for step in range(steps):
            rows = [examples[place] for place in order[32 * step : 32 * (step + 1)]]
            batch = tokenizer([row.text for row in rows], padding=True, return_tensors="pt")
            labels = torch.tensor([int(row.label) for row in rows])
            loss = model(**batch, labels=labels).loss
            for group in optimizer.param_groups:
                group["lr"] = 1e-4 * min(1.0, (step + 1) / 30, 1.2 * (1 - step / steps))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if step % 50 == 0:
                print(f"step {step}: loss {float(loss.detach()):.3f}", flush=True)
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    return AutoModelForSequenceClassification.from_pretrained(folder).eval(), tokenizer


@torch.no_grad()
def accuracy(model: Any, tokenizer: Any, examples: Sequence[Any]) -> float:
    """Return the share of examples that a classifier labels rightly."""

    def right() -> Iterator[int]:
        for first in range(0, len(examples), 32):
            rows = examples[first : first + 32]
            batch = tokenizer([row.text for row in rows], padding=True, return_tensors="pt")
            chosen = model(**batch).logits.argmax(-1).tolist()
            yield sum(own == int(row.label) for own, row in zip(chosen, rows, strict=True))

    return sum(right()) / len(examples)

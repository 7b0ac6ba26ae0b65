"""Make the folder of a model that ships from the folder of a finished run.

    python models/ship.py runs/lazy-recipe/lazy-turn-0 lazy-multi30k --scores scores.json

Weights are rounded to 16 bits and records of the training thinned out. A classifier keeps only the
word pieces that its training text has, and single characters to spell the rest with. The scores,
measured with these weights, go into the card together with the command that measured them, and what
that command recorded goes into the records, so that a report shows it:

    {"training": "deepenough lazy train ...", "command": "deepenough lazy eval lazy-multi30k",
     "BLEU, test 2016": 38.4}
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from deepenough.artifacts import seal, verify
from deepenough.config import load_yaml
from deepenough.runs import Record, RunFolder, append_record, read_records

FOLDER = Path(__file__).parent / "src" / "deepenough_models"
RECORDS = 200
CARD = """---
license: {license}
library_name: deepenough
---
# {name}

{about}

```bash
{command}
```

| measured with the weights in this folder (16 bits) | |
|---|---|
{scores}

Trained with deepenough {version}, seed {seed}. All settings are in `config.yaml`, the course of the
training in `metrics.jsonl`:

```bash
{training}
```
"""


def ship(run: Path, name: str, top: Path = FOLDER) -> Path:
    """Write a model's folder, without its card, and return it.

    Of a search, the model that was trained from what it found ships, with the records of the search
    before its own.
    """
    source, folder = RunFolder.open(run), top / name
    records = list(thinned(read_records(source.metrics)[0]))
    if (source.derived / "model" / "config.json").is_file():
        source = RunFolder.open(source.derived)
        records += thinned(read_records(source.metrics)[0])
    verify(source.model)
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(source.model, folder / "model")
    shutil.copy(source.config, folder / "config.yaml")
    for record in records:
        append_record(folder / "metrics.jsonl", record)
    weights = folder / "model" / "model.safetensors"
    halves = {key: tensor.half() for key, tensor in load_file(weights).items()}
    if not all(bool(torch.isfinite(half).all()) for half in halves.values()):
        raise SystemExit(f"{run} has weights that 16 bits cannot hold.")
    save_file(halves, weights, metadata={"format": "pt"})
    weights.chmod(0o644)
    seal(folder / "model")
    return folder


def thinned(records: list[Record]) -> Iterable[Record]:
    """Return all measurements, and at most 200 losses of the training."""
    losses = [record for record in records if record.kind == "train"]
    kept = {id(record) for record in losses[:: max(1, len(losses) // RECORDS)]}
    return (record for record in records if record.kind != "train" or id(record) in kept)


def keep_measurements(folder: Path) -> None:
    """Add to a model's records what has been measured of it since it was installed."""
    known, _ = read_records(folder / "metrics.jsonl")
    measured, _ = read_records(RunFolder.open(folder.name).metrics)
    for record in measured[len(known) :]:
        append_record(folder / "metrics.jsonl", record)


def keep_pieces(folder: Path, texts: Iterable[str], most: int) -> None:
    """Leave a BERT-like model only the pieces of some texts, the most frequent ones.

    Words whose piece is gone are spelt with shorter ones, at worst with characters.
    """
    path = folder / "tokenizer.json"
    tokenizer = json.loads(path.read_text(encoding="utf-8"))
    vocab: dict[str, int] = tokenizer["model"]["vocab"]
    from transformers import AutoTokenizer

    split = AutoTokenizer.from_pretrained(folder)
    counts = Counter(piece for text in texts for piece in split.tokenize(text))
    special = {token["content"] for token in tokenizer["added_tokens"]}
    spelling = {piece for piece in vocab if len(piece.removeprefix("##")) == 1}
    frequent = [piece for piece, _ in counts.most_common() if piece not in special | spelling]
    kept = special | spelling | set(frequent[: most - len(special | spelling)])
    rows = [row for piece, row in sorted(vocab.items(), key=lambda item: item[1]) if piece in kept]
    new = {row: number for number, row in enumerate(rows)}
    tokenizer["model"]["vocab"] = {p: new[r] for p, r in vocab.items() if p in kept}
    renumber(tokenizer, new)
    path.write_text(json.dumps(tokenizer, ensure_ascii=False), encoding="utf-8")
    (folder / "vocab.txt").unlink(missing_ok=True)
    weights = load_file(folder / "model.safetensors")
    for key, tensor in weights.items():
        if key.endswith("word_embeddings.weight"):
            weights[key] = tensor[torch.tensor(rows)].contiguous()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config_path = folder / "config.json"
    config = json.loads(config_path.read_text(encoding="utf-8"))
    resize(config, len(vocab), len(rows), new)
    config_path.write_text(json.dumps(config, indent=2), encoding="utf-8")


def renumber(tokenizer: dict[str, Any], new: dict[int, int]) -> None:
    """Give the special tokens of a tokenizer's file their new numbers."""
    for token in tokenizer["added_tokens"]:
        token["id"] = new[token["id"]]
    for token in (tokenizer.get("post_processor") or {}).get("special_tokens", {}).values():
        token["ids"] = [new[number] for number in token["ids"]]
    if isinstance(tokenizer.get("padding"), dict):
        tokenizer["padding"]["pad_id"] = new[tokenizer["padding"]["pad_id"]]


def resize(config: dict[str, Any], before: int, after: int, new: dict[int, int]) -> None:
    """Give a model's settings the new size of the vocabulary and numbers of tokens."""
    for key, value in config.items():
        if isinstance(value, dict):
            resize(value, before, after, new)
        elif key == "vocab_size" and value == before:
            config[key] = after
        elif key.endswith("_token_id") and value is not None:
            config[key] = new[value]


def write_card(folder: Path, about: str, license_: str, scores: dict[str, Any]) -> None:
    """Write the card of a model; `scores` also has the commands that trained and measured it."""
    settings = load_yaml(folder / "config.yaml")
    commands = ("command", "training")
    rows = [f"| {key} | {value} |" for key, value in scores.items() if key not in commands]
    provenance = settings.get("provenance", {})
    (folder / "scores.json").write_text(json.dumps(scores, indent=1) + "\n", encoding="utf-8")
    (folder / "README.md").write_text(
        CARD.format(
            name=folder.name,
            about=about,
            license=license_,
            command=scores["command"],
            scores="\n".join(rows),
            version=provenance.get("versions", {}).get("deepenough", ""),
            training=scores["training"],
            seed=settings.get("train", {}).get("seed"),
        ),
        encoding="utf-8",
    )


def main() -> None:
    """Make the folder and, with scores, the card."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path)
    parser.add_argument("name")
    parser.add_argument("--pieces", type=int, help="keep so many word pieces of SST-2's text")
    parser.add_argument("--about", default="")
    parser.add_argument("--license", default="apache-2.0")
    parser.add_argument("--scores", type=Path, help="JSON with the scores for the card")
    options = parser.parse_args()
    folder = FOLDER / options.name
    if options.scores is None:
        folder = ship(options.run, options.name)
        if options.pieces:
            from deepenough.data.classification import open_classification
            from deepenough.data.config import ClassificationConfig

            splits = open_classification("sst2", ClassificationConfig()).splits
            texts = (f"{example.text} {example.pair or ''}" for example in splits["train"])
            keep_pieces(folder / "model", texts, options.pieces)
            seal(folder / "model")
    else:
        scores = json.loads(options.scores.read_text(encoding="utf-8"))
        write_card(folder, options.about, options.license, scores)
        keep_measurements(folder)
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    print(f"{folder}: {size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()

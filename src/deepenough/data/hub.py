"""Text corpora of the Hugging Face hub, streamed through `datasets` once and kept as text files.

A corpus is read several times (to train a tokenizer, to fingerprint, to encode), so its rows go
into the cache on first use and are read from there afterwards, without a network.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from deepenough.data.cache import cache_folder, entry, key_of
from deepenough.data.text_files import SPLIT_NAMES
from deepenough.errors import UserError

TEXT_COLUMN = "text"


def hub_files(name: str, cache: str | os.PathLike[str] | None, looked: str) -> list[Path]:
    """One text file per split of `owner/name[:config[:column]]`.

    `looked` says, for the error, where else the name was looked for.
    """
    folder = entry(cache_folder(cache) / "hub" / key_of(name), partial(_fetch, name, looked))
    return sorted(folder.iterdir())


def _fetch(name: str, looked: str, folder: Path) -> None:
    repository, _, rest = name.partition(":")
    config, _, column = rest.partition(":")
    for split, rows in open_splits(repository, config or None, looked).items():
        with (folder / f"{split}.txt").open("w", encoding="utf-8", errors="replace") as file:
            for row in rows:
                file.write(_text_of(row, column or TEXT_COLUMN, name) + "\n")


def open_splits(repository: str, config: str | None, looked: str) -> Mapping[str, Any]:
    """The splits of a dataset by our names for them, rows streamed; UserError if there is none."""
    try:
        import datasets  # here, because importing it takes seconds and most corpora are local

        found = datasets.load_dataset(repository, config, streaming=True)
    except Exception as error:  # datasets raises many kinds, also for a missing network
        reason = str(error).strip().split("\n")[0]
        raise UserError(
            f"No corpus {repository!r}: {looked}, and the datasets hub did not give it "
            f"({type(error).__name__}: {reason})."
        ) from error
    splits = {SPLIT_NAMES[split]: found[split] for split in found if split in SPLIT_NAMES}
    if "train" not in splits:
        raise UserError(
            f"The dataset {repository} has no train split: it has {', '.join(found) or 'none'}."
        )
    return splits


def _text_of(row: Mapping[str, Any], column: str, name: str) -> str:
    if column not in row:
        raise UserError(
            f"The dataset {name} has no column {column!r} but {', '.join(row)}: "
            "name one as hf:name:config:column."
        )
    return str(row[column])

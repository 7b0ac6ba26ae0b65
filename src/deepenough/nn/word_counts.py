"""How often each word occurs, read from a file of counts or counted in a file of token ids.

Files are read as bytes: words may be in any encoding, only the numbers are looked at. A million
lines take about half a second, token files of any size are counted in bounded memory.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from deepenough.errors import UserError

_IDS_AT_ONCE = 1 << 22
_MAX_VOCABULARY = 1 << 28
"""An id beyond this is no word but a file read with the wrong type of number."""


def read_counts(path: str | os.PathLike[str]) -> npt.NDArray[Any]:
    """The numbers of a text file in their order: int64 if all are whole, else float64.

    Either numbers between white space, or lines `word<TAB>count`: the first line decides, by having
    exactly one tab.
    """
    text = _file(path).read_bytes().removeprefix(b"\xef\xbb\xbf")
    if _first_line(text).count(b"\t") == 1:
        lines = text.split(b"\n")
        fields = [line.rpartition(b"\t")[2] for line in lines if line and not line.isspace()]
    else:
        fields = text.split()
    if not fields:
        raise UserError(f"The file {path} holds no counts; give one number per word.")
    try:
        counts = _numbers(fields)
    except ValueError as error:
        field = next(field for field in fields if not _is_number(field))
        shown = field.decode("utf-8", "replace").strip()[:40]
        raise UserError(
            f"{shown!r} in {path} is not a number; give counts between white space or lines "
            "word<TAB>count."
        ) from error
    if not np.isfinite(counts).all() or (counts < 0).any():
        raise UserError(f"The counts in {path} must be finite and not negative; correct the file.")
    if not counts.any():
        raise UserError(f"The counts in {path} are all zero; give those of a text.")
    return counts


def count_tokens(
    path: str | os.PathLike[str], dtype: str | None = None, vocab_size: int | None = None
) -> npt.NDArray[np.int64]:
    """How often each id occurs in a file of token ids.

    The file is a token folder of deepenough's cache (or the `ids.bin` in it), a `.npy` array of
    whole numbers, or raw numbers of type `dtype`. `vocab_size` adds the words that never occur.
    """
    ids, known_size = _open_ids(Path(path), dtype)
    if ids.size == 0:
        raise UserError(f"The token file {path} is empty; give one with token ids.")
    size = max(int(ids.max()) + 1, known_size, vocab_size or 0)
    if int(ids.min()) < 0 or size > _MAX_VOCABULARY:
        raise UserError(
            f"The token file {path} holds ids that are no words ({ids.min()} to {ids.max()}); "
            "check the type of its numbers and give it with --dtype."
        )
    if vocab_size is not None and size > vocab_size:
        raise UserError(
            f"The token file {path} needs a vocabulary of {size} words, more than the "
            f"{vocab_size} given; correct --vocab_size."
        )
    counts = np.zeros(size, dtype=np.int64)
    for start in range(0, len(ids), _IDS_AT_ONCE):
        counts += np.bincount(ids[start : start + _IDS_AT_ONCE].astype(np.int64), minlength=size)
    return counts


def _open_ids(path: Path, dtype: str | None) -> tuple[npt.NDArray[Any], int]:
    """The ids, mapped from disk, and the size of their vocabulary as far as the file knows it."""
    folder = path if path.is_dir() else path.parent
    if (
        dtype is None
        and (folder / "counts.json").is_file()
        and path in (folder, folder / "ids.bin")
    ):
        from deepenough.data.tokens import TokenFile  # here: it loads transformers, for seconds

        try:
            tokens = TokenFile.open(folder)
            return tokens.ids, tokens.vocab_size
        except (OSError, ValueError, TypeError) as error:
            raise UserError(f"The token folder {folder} is damaged; prepare it again.") from error
    _file(path)
    if path.suffix == ".npy":
        try:
            ids = np.load(path, mmap_mode="r", allow_pickle=False)
        except (ValueError, EOFError) as error:
            raise UserError(
                f"The file {path} is not a readable .npy array; save it again."
            ) from error
        if ids.ndim != 1 or ids.dtype.kind not in "iu":
            raise UserError(f"The array in {path} must be one row of whole numbers, the token ids.")
        return ids, 0
    if dtype is None:
        raise UserError(
            f"The numbers in {path} could be of any type; say which with --dtype, such as uint16."
        )
    item = np.dtype(dtype)
    if path.stat().st_size % item.itemsize:
        raise UserError(
            f"The size of {path} is no multiple of {item.itemsize} bytes, so its numbers are not "
            f"{dtype}; give their type with --dtype."
        )
    if path.stat().st_size == 0:
        return np.zeros(0, dtype=item), 0
    return np.memmap(path, dtype=item, mode="r"), 0


def _file(path: str | os.PathLike[str]) -> Path:
    file = Path(path)
    if not file.exists() or file.is_dir():  # a pipe is welcome
        kind = "is a folder" if file.is_dir() else "does not exist"
        raise UserError(f"The file {path} {kind}; give the path of a file.")
    if not os.access(file, os.R_OK):
        raise UserError(f"The file {path} may not be read; change its permissions.")
    return file


def _first_line(text: bytes) -> bytes:
    """The first line that is not blank."""
    start = len(text) - len(text.lstrip())
    # The word itself may begin with white space: go back to where its line begins.
    return text[text.rfind(b"\n", 0, start) + 1 :].partition(b"\n")[0]


def _numbers(fields: list[bytes]) -> npt.NDArray[Any]:
    try:
        counts = np.array(list(map(int, fields)))
    except ValueError:
        counts = None
    # Python's integers have no limit; those beyond int64 arrive as another type.
    if counts is None or counts.dtype != np.int64:
        counts = np.array(list(map(float, fields)))
    return counts


def _is_number(field: bytes) -> bool:
    try:
        float(field)
    except ValueError:
        return False
    return True

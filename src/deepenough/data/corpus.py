"""Corpora: named sources of text lines in up to three splits, always streamed.

Whatever the source, a split is one thing: a function that starts a fresh iterator of lines. What a
source lacks in valid and test text is cut from its training text by blocks of neighbouring lines,
spread evenly and the same on every run.

Lines end at a line feed alone (a carriage return before it is dropped), because `str.splitlines`
would also cut at form feeds and exotic separators and so change the line count of a corpus.
"""

from __future__ import annotations

import ast
import codecs
import glob
import hashlib
import logging
import os
import re
import sys
import sysconfig
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any, BinaryIO

from deepenough.artifacts import cache_folder, entry, key_of
from deepenough.config import nearest
from deepenough.errors import UserError

logger = logging.getLogger("deepenough")

Lines = Callable[[], Iterator[str]]

DATA_VARIABLE = "DEEPENOUGH_DATA"
SPLITS = ("train", "valid", "test")
SPLIT_NAMES = {
    "train": "train",
    "training": "train",
    "valid": "valid",
    "validation": "valid",
    "val": "valid",
    "dev": "valid",
    "test": "test",
}
TEXT_SUFFIXES = frozenset({".txt", ".text", ".md", ".rst", ".tex", ".tokens", ".raw"})
# A file without line feeds must not be read whole; a line longer than this is cut into several.
MAX_LINE_BYTES = 1 << 20
BLOCK_LINES = 20
FEWEST_BLOCKS = 40
GOLDEN_RATIO = 0.6180339887498949


@dataclass(frozen=True)
class Corpus:
    """A text source; `sources` maps each split to a function that starts its lines."""

    name: str
    sources: Mapping[str, Lines]

    @property
    def splits(self) -> tuple[str, ...]:
        """Return the names of the splits that the corpus has."""
        return tuple(split for split in SPLITS if split in self.sources)

    def lines(self, split: str) -> Iterator[str]:
        """Return a fresh iterator of the split's lines, without line ends."""
        if split not in self.sources:
            raise UserError(
                f"The corpus {self.name} has no split {split!r}: it has {', '.join(self.splits)}."
            )
        lines = self.sources[split]()
        first = next(lines, None)
        if first is None:
            raise UserError(
                f"The {split} split of the corpus {self.name} is empty: give a text "
                "of more lines or files named train, valid and test, or set valid_fraction and "
                "test_fraction to 0."
            )
        return chain([first], lines)

    def fingerprint(self, split: str) -> str:
        """Return a hash of the split's content, streamed."""
        digest = hashlib.blake2b(digest_size=16)
        for line in self.lines(split):
            digest.update(line.encode("utf-8", errors="surrogatepass"))
            digest.update(b"\n")
        return digest.hexdigest()


def open_corpus(
    name: str,
    *,
    valid_fraction: float = 0.05,
    test_fraction: float = 0.05,
    cache: str | os.PathLike[str] | None = None,
) -> Corpus:
    """Find a corpus by name.

    In this order: `python` (the prose inside Python itself), a file, a folder or a glob, the same
    under `$DEEPENOUGH_DATA`, and a hub name of the form `owner/name`. `hf:name`, `hf:name:config`
    and `hf:name:config:column` always mean the hub.
    """
    if not (valid_fraction >= 0 and test_fraction >= 0 and valid_fraction + test_fraction < 1):
        raise UserError(
            "valid_fraction and test_fraction must be at least 0 and together below 1: "
            f"got {valid_fraction} and {test_fraction}."
        )
    if name == "python":
        files = {"train": [prose_file(cache)]}
    else:
        files = group_by_split(_find_local(name) or _find_on_hub(name, cache))
    sources: dict[str, Lines] = {split: partial(read_lines, files[split]) for split in files}
    missing = {
        split: fraction
        for split, fraction in (("valid", valid_fraction), ("test", test_fraction))
        if split not in sources and fraction > 0
    }
    if missing:
        train = sources["train"]
        for split in ("train", *missing):
            sources[split] = partial(_held_out, train, split, missing)
    corpus = Corpus(name, sources)
    corpus.lines("train")  # an empty corpus is refused here, not in the middle of a run
    return corpus


def _held_out(lines: Lines, wanted: str, fractions: Mapping[str, float]) -> Iterator[str]:
    """Yield the lines of one split; consecutive lines go to it together, fewer in a short text."""
    num_lines = sum(1 for _ in islice(lines(), FEWEST_BLOCKS * BLOCK_LINES))
    length = max(1, num_lines // FEWEST_BLOCKS)
    for number, line in enumerate(lines()):
        if split_of(number // length, fractions) == wanted:
            yield line


def split_of(number: int, fractions: Mapping[str, float]) -> str:
    """Return the split of a numbered piece of the training text; `fractions` are held out."""
    # Multiples of the golden ratio fill the unit interval evenly, whatever the fractions are.
    place = (number + 1) * GOLDEN_RATIO % 1.0
    for split, fraction in fractions.items():
        if place < fraction:
            return split
        place -= fraction
    return "train"


# -- where texts are found -------------------------------------------------------------------------


def candidates(name: str) -> list[Path]:
    """Return the places a relative name may mean: as given, then under `$DEEPENOUGH_DATA`."""
    given = Path(name).expanduser()
    base = os.environ.get(DATA_VARIABLE)
    return [given, Path(base) / given] if base and not given.is_absolute() else [given]


def _find_local(name: str) -> list[Path]:
    """Return the files that a name means on this machine, none for a name of the hub."""
    for candidate in [] if name.startswith("hf:") else candidates(name):
        if candidate.is_dir():
            paths = [path for path in sorted(candidate.rglob("*")) if _is_text(path, candidate)]
            if not paths:
                raise UserError(
                    f"The folder {candidate} holds no text file ({', '.join(sorted(TEXT_SUFFIXES))}"
                    "): name other files by a glob."
                )
            return paths
        if candidate.is_file():
            return [candidate]
        found = sorted(Path(path) for path in glob.glob(str(candidate), recursive=True))
        if files := {path.resolve(): path for path in reversed(found) if path.is_file()}:
            return sorted(files.values())  # each once, however links lead to it
    return []


def _is_text(path: Path, folder: Path) -> bool:
    hidden = any(part.startswith(".") for part in path.relative_to(folder).parts)
    return path.suffix.lower() in TEXT_SUFFIXES and path.is_file() and not hidden


def _find_on_hub(name: str, cache: str | os.PathLike[str] | None) -> list[Path]:
    """Return one text file per split of `owner/name[:config[:column]]`, kept in the cache."""
    if not name.startswith("hf:") and not is_hub_name(name):
        raise UserError(
            f"No corpus {name!r}: no file, folder or glob of that name is here or under "
            f"${DATA_VARIABLE} ({os.environ.get(DATA_VARIABLE) or 'unset'}).{did_you_mean(name)}"
        )
    name = name.removeprefix("hf:")

    def fetch(folder: Path) -> None:
        repository, _, rest = name.partition(":")
        config, _, column = rest.partition(":")
        column = column or "text"
        for split, rows in open_splits(repository, config or None).items():
            with (folder / f"{split}.txt").open("w", encoding="utf-8", errors="replace") as file:
                for row in rows:
                    if column not in row:
                        raise UserError(
                            f"The dataset {name} has no column {column!r} but {', '.join(row)}: "
                            "name one as hf:name:config:column."
                        )
                    file.write(f"{row[column]}\n")

    return sorted(entry(cache_folder(cache) / "hub" / key_of(name), fetch).iterdir())


def is_hub_name(name: str) -> bool:
    """Return whether a name has the form `owner/name`; any other is looked for here alone."""
    repository = name.partition(":")[0]
    is_local = name.startswith((".", "/", "~")) or "*" in name
    return repository.count("/") == 1 and not is_local


def did_you_mean(name: str) -> str:
    """Return a question that names the nearest corpus, folder or file at hand, or nothing."""
    folder = Path(name).parent
    base = Path(os.environ.get(DATA_VARIABLE) or os.devnull)
    known = [path.name for path in base.iterdir() if path.is_dir()] if base.is_dir() else []
    if folder.is_dir():
        known += [str(folder / path.name) for path in folder.iterdir()]
    found = nearest(name, ["python", *known])
    return f" Did you mean {found}?" if found else ""


def open_splits(repository: str, config: str | None) -> Mapping[str, Any]:
    """Return the streamed splits of a dataset by our names; a missing dataset is refused."""
    try:
        import datasets  # here, because importing it takes seconds and most corpora are local

        found = datasets.load_dataset(repository, config, streaming=True)
    except Exception as error:  # datasets raises many kinds, also for a missing network
        reason = str(error).strip().split("\n")[0]
        raise UserError(
            f"The datasets hub did not give {repository!r} ({type(error).__name__}: {reason}); "
            f"data of your own are named by their path, here or under ${DATA_VARIABLE}."
        ) from error
    splits = {SPLIT_NAMES[split]: found[split] for split in found if split in SPLIT_NAMES}
    if "train" not in splits:
        raise UserError(
            f"The dataset {repository} has no train split: it has {', '.join(found) or 'none'}."
        )
    return splits


def group_by_split(paths: Iterable[Path]) -> dict[str, list[Path]]:
    """Return files by the split their names speak of (`train.txt`, `wiki.valid.tokens`).

    Where no file is named for training, names mean nothing and all files are training text.
    """
    paths = list(paths)
    named: dict[str, list[Path]] = {}
    for path in paths:
        if split := named_split(path.name):
            named.setdefault(split, []).append(path)
    return named if "train" in named else {"train": paths}


def named_split(name: str) -> str | None:
    """Return the split that a file's name speaks of, if it does."""
    words = re.split(r"[._-]", name.lower())
    return next((SPLIT_NAMES[word] for word in words if word in SPLIT_NAMES), None)


# -- lines of files --------------------------------------------------------------------------------

_warned: set[str] = set()


def read_lines(paths: Iterable[Path], strict: bool = False) -> Iterator[str]:
    """Yield all lines of UTF-8 files without their ends; `strict` refuses what is no UTF-8."""
    for path in paths:
        try:
            with path.open("rb") as file:
                yield from _decoded(file, str(path), strict)
        except OSError as error:
            raise UserError(f"{path} cannot be read: {error.strerror}.") from error


def read_input_lines(file: str | None) -> Iterator[str]:
    """Yield the lines of a file, or of standard input, without their ends."""
    if file is None:
        return _decoded(sys.stdin.buffer, "standard input", strict=False)
    return read_lines([Path(file)])


def _decoded(file: BinaryIO, name: str, strict: bool) -> Iterator[str]:
    """Yield each line decoded; unless `strict`, bytes that are no UTF-8 are replaced."""
    decoder = codecs.getincrementaldecoder("utf-8-sig")("strict" if strict else "replace")
    for number, raw in enumerate(iter(lambda: file.readline(MAX_LINE_BYTES), b""), start=1):
        if number == 1 and raw.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
            raise UserError(f"{name} is UTF-16 text: save it as UTF-8.")
        try:
            # Of a line that was cut, half a character is kept for the next part.
            line = decoder.decode(raw, final=len(raw) < MAX_LINE_BYTES)
        except UnicodeDecodeError as error:
            raise UserError(
                f"{name} is not UTF-8 (line {number}): convert it first, for instance with "
                "iconv -f LATIN1 -t UTF-8."
            ) from error
        if "\ufffd" in line and b"\xef\xbf\xbd" not in raw and name not in _warned:
            _warned.add(name)
            logger.warning(
                "%s has bytes that are not UTF-8, the first in line %d: they were replaced by "
                "U+FFFD.",
                name,
                number,
            )
        yield line.removesuffix("\n").removesuffix("\r")


# -- the prose inside Python -----------------------------------------------------------------------

LEFT_OUT = frozenset({"test", "tests", "idle_test", "site-packages", "dist-packages"})
# One-line docstrings are mostly fragments ("Return the name."), hardly prose.
MIN_CHARACTERS = 80
FILE = "prose.txt"


def prose_file(cache: str | os.PathLike[str] | None = None) -> Path:
    """Return the corpus as a text file in the cache: parsing the library takes some seconds."""
    root = Path(sysconfig.get_path("stdlib"))

    def write(folder: Path) -> None:
        documents = [topics[name] for name in sorted(topics)]
        documents += _docstrings(root)
        with (folder / FILE).open("w", encoding="utf-8", errors="replace", newline="\n") as file:
            for document in dict.fromkeys(documents):  # inherited docstrings occur twice
                for line in document.strip("\n").split("\n"):
                    file.write(line.rstrip() + "\n")
                file.write("\n")

    return entry(cache_folder(cache) / "python" / key_of(sys.version, str(root)), write) / FILE


def _docstrings(root: Path) -> Iterator[str]:
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for path in sorted(root.rglob("*.py")):
        if not LEFT_OUT.isdisjoint(path.relative_to(root).parts):
            continue
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # old modules hold invalid escapes
                tree = ast.parse(path.read_bytes())
        except (SyntaxError, ValueError, OSError):
            continue  # templates and deliberately broken files
        texts = [ast.get_docstring(n) for n in ast.walk(tree) if isinstance(n, documented)]
        yield from (text for text in texts if text and len(text) >= MIN_CHARACTERS)

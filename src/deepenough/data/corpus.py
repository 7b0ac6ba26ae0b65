"""Corpora: named sources of text lines in up to three splits, always streamed.

Whatever the source, a split is one thing: a function that starts a fresh iterator of lines. What a
source lacks in valid and test text is cut from its training text by blocks of neighbouring lines,
spread evenly and the same on every run.
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
from io import BufferedReader
from itertools import islice
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

from deepenough.artifacts import cache_folder, entry, key_of
from deepenough.config import nearest
from deepenough.errors import UserError

Lines = Callable[[], Iterator[str]]

SPLITS = ("train", "valid", "test")
DATA_VARIABLE = "DEEPENOUGH_DATA"
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
        """Yield a fresh iterator of the split's lines, without line ends."""
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
        return _prepend(first, lines)

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
    sources = _find(name, cache)
    missing = {
        split: fraction
        for split, fraction in (("valid", valid_fraction), ("test", test_fraction))
        if split not in sources and fraction > 0
    }
    if missing:
        sources |= _hold_out(sources["train"], missing)
    corpus = Corpus(name, sources)
    corpus.lines("train")  # an empty corpus is refused here, not in the middle of a run
    return corpus


def _find(name: str, cache: str | os.PathLike[str] | None) -> dict[str, Lines]:
    if name == "python":
        return {"train": partial(read_lines, [prose_file(cache)])}
    if not name.startswith("hf:"):
        local = _find_local(name)
        if local is not None:
            return local
        if not is_hub_name(name):
            raise UserError(f"No corpus {name!r}: {_where_looked(name)}.{did_you_mean(name)}")
    return _sources_of(hub_files(name.removeprefix("hf:"), cache, _where_looked(name)))


def _find_local(name: str) -> dict[str, Lines] | None:
    for candidate in candidates(name):
        if candidate.is_file():
            return {"train": partial(read_lines, [candidate])}
        if candidate.is_dir():
            paths = text_files_under(candidate)
            if not paths:
                raise UserError(
                    f"The folder {candidate} holds no text file ({', '.join(sorted(TEXT_SUFFIXES))}"
                    "): name other files by a glob."
                )
            return _sources_of(paths)
        paths = sorted(Path(path) for path in glob.glob(str(candidate), recursive=True))
        paths = [path for path in paths if path.is_file()]
        if paths:
            return _sources_of(paths)
    return None


def candidates(name: str) -> list[Path]:
    """Return the places a relative name may mean: as given, then under `$DEEPENOUGH_DATA`."""
    given = Path(name).expanduser()
    base = os.environ.get(DATA_VARIABLE)
    return [given, Path(base) / given] if base and not given.is_absolute() else [given]


def _sources_of(paths: list[Path]) -> dict[str, Lines]:
    return {split: partial(read_lines, files) for split, files in group_by_split(paths).items()}


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


def _where_looked(name: str) -> str:
    if name.startswith("hf:"):
        return "hf: means the hub alone"
    base = os.environ.get(DATA_VARIABLE)
    elsewhere = f"nor under {base} (${DATA_VARIABLE})" if base else f"and ${DATA_VARIABLE} is unset"
    return f"no file, folder or glob of that name is here, {elsewhere}"


def _hold_out(lines: Lines, fractions: Mapping[str, float]) -> dict[str, Lines]:
    length = _block_length(lines)
    return {
        split: partial(_lines_in_blocks, lines, length, split, fractions)
        for split in ("train", *fractions)
    }


def _block_length(lines: Lines) -> int:
    """Return how many consecutive lines go to one split together; fewer in a short text."""
    num_lines = sum(1 for _ in islice(lines(), FEWEST_BLOCKS * BLOCK_LINES))
    return max(1, num_lines // FEWEST_BLOCKS)


def _lines_in_blocks(
    lines: Lines, length: int, wanted: str, fractions: Mapping[str, float]
) -> Iterator[str]:
    for number, line in enumerate(lines()):
        if _split_of_block(number // length, fractions) == wanted:
            yield line


def _split_of_block(block: int, fractions: Mapping[str, float]) -> str:
    # Multiples of the golden ratio fill the unit interval evenly, whatever the fractions are.
    place = (block + 1) * GOLDEN_RATIO % 1.0
    for split, fraction in fractions.items():
        if place < fraction:
            return split
        place -= fraction
    return "train"


def _prepend(first: str, rest: Iterator[str]) -> Iterator[str]:
    yield first
    yield from rest


TEXT_COLUMN = "text"


def hub_files(name: str, cache: str | os.PathLike[str] | None, looked: str) -> list[Path]:
    """Return one text file per split of `owner/name[:config[:column]]`.

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
    """Return the streamed splits of a dataset by our names; a missing dataset is refused."""
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


LEFT_OUT = frozenset({"test", "tests", "idle_test", "site-packages", "dist-packages"})
# One-line docstrings are mostly fragments ("Return the name."), hardly prose.
MIN_CHARACTERS = 80
FILE = "prose.txt"


def prose_file(cache: str | os.PathLike[str] | None = None) -> Path:
    """Return the corpus as a text file in the cache: parsing the library takes some seconds."""
    root = Path(sysconfig.get_path("stdlib"))
    folder = cache_folder(cache) / "python" / key_of(sys.version, str(root))
    return entry(folder, lambda folder: _write(root, folder / FILE)) / FILE


def _write(root: Path, path: Path) -> None:
    documents = [topics[name] for name in sorted(topics)]
    documents += _docstrings(root)
    with path.open("w", encoding="utf-8", errors="replace", newline="\n") as file:
        for document in dict.fromkeys(documents):  # inherited docstrings occur twice
            for line in document.strip("\n").split("\n"):
                file.write(line.rstrip() + "\n")
            file.write("\n")


def _docstrings(root: Path) -> Iterator[str]:
    for path in sorted(root.rglob("*.py")):
        if LEFT_OUT.isdisjoint(path.relative_to(root).parts):
            yield from _docstrings_of(path)


def _docstrings_of(path: Path) -> Iterator[str]:
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # old modules hold invalid escapes
            tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError, OSError):
        return  # templates and deliberately broken files
    for node in ast.walk(tree):
        if isinstance(node, documented):
            text = ast.get_docstring(node)
            if text is not None and len(text) >= MIN_CHARACTERS:
                yield text


# -- text files ------------------------------------------------------------------------------------
#
# Lines of text files, streamed, and which split of a corpus each file belongs to.
#
# Lines end at a line feed alone (a carriage return before it is dropped), because `str.splitlines`
# would also cut at form feeds and exotic separators and so change the line count of a corpus.

logger = logging.getLogger("deepenough")

TEXT_SUFFIXES = frozenset({".txt", ".text", ".md", ".rst", ".tex", ".tokens", ".raw"})
SPLIT_NAMES = {
    "train": "train",
    "training": "train",
    "valid": "valid",
    "validation": "valid",
    "val": "valid",
    "dev": "valid",
    "test": "test",
}
# A file without line feeds must not be read whole; a line longer than this is cut into several.
MAX_LINE_BYTES = 1 << 20

_warned: set[Path] = set()


def read_lines(paths: Iterable[Path]) -> Iterator[str]:
    """Yield all lines of the files without their ends; bytes that are no UTF-8 are replaced."""
    for path in paths:
        yield from _lines_of(path)


def _lines_of(path: Path) -> Iterator[str]:
    num_invalid = 0
    with _open(path) as file:
        start = file.peek(3)
        check_utf8(start, path)
        if start.startswith(codecs.BOM_UTF8):  # a byte order mark is no text
            file.read(len(codecs.BOM_UTF8))
        rest = b""  # the tail of a cut that fell inside a character
        while chunk := file.readline(MAX_LINE_BYTES):
            raw, rest = rest + chunk, b""
            if raw.endswith(b"\n"):
                raw = raw[:-2] if raw.endswith(b"\r\n") else raw[:-1]
            elif len(chunk) == MAX_LINE_BYTES:
                cut = _character_boundary(raw)
                raw, rest = raw[:cut], raw[cut:]
            try:
                yield raw.decode("utf-8")
            except UnicodeDecodeError:
                num_invalid += 1
                yield raw.decode("utf-8", errors="replace")
        if rest:
            num_invalid += 1
            yield rest.decode("utf-8", errors="replace")
    if num_invalid and path not in _warned:
        _warned.add(path)
        logger.warning(
            "%s: %d line%s had bytes that are not UTF-8; they were replaced by U+FFFD.",
            path,
            num_invalid,
            "" if num_invalid == 1 else "s",
        )


def check_utf8(start: bytes, name: str | Path) -> None:
    """Refuse UTF-16 text by its first bytes: replacing what is not UTF-8 would leave nothing."""
    if start.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise UserError(f"{name} is UTF-16 text: save it as UTF-8.")


def _open(path: Path) -> BufferedReader:
    try:
        return path.open("rb")
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}.") from error


def _character_boundary(raw: bytes) -> int:
    """Return the last position near the end at which a UTF-8 character may start."""
    for back in range(1, 5):
        if raw[-back] & 0xC0 != 0x80:
            return len(raw) - back
    return len(raw)


def text_files_under(folder: Path) -> list[Path]:
    """Return every text file in the folder and below it, hidden ones left out, in a fixed order."""
    return sorted(
        path
        for path in folder.rglob("*")
        if path.suffix.lower() in TEXT_SUFFIXES
        and path.is_file()
        and not any(part.startswith(".") for part in path.relative_to(folder).parts)
    )


def group_by_split(paths: Iterable[Path]) -> dict[str, list[Path]]:
    """Files by the split their names speak of (`train.txt`, `wiki.valid.tokens`).

    Where no file is named for training, names mean nothing and all files are training text.
    """
    paths = list(paths)
    named: dict[str, list[Path]] = {}
    for path in paths:
        words = re.split(r"[._-]", path.name.lower())
        split = next((SPLIT_NAMES[word] for word in words if word in SPLIT_NAMES), None)
        if split is not None:
            named.setdefault(split, []).append(path)
    return named if "train" in named else {"train": paths}


def read_input_lines(file: str | None) -> Iterator[str]:
    """Yield the lines of a file, or of standard input, without their ends."""
    if file is None:
        yield from _decoded(sys.stdin.buffer, "standard input")
        return
    try:
        with open(file, "rb") as lines:
            yield from _decoded(lines, file)
    except OSError as error:
        raise UserError(f"{file} cannot be read: {error.strerror}.") from error


def _decoded(lines: Iterable[bytes], name: str) -> Iterator[str]:
    """Yield each line decoded; what is no UTF-8 is replaced, with one warning."""
    told = False
    for number, raw in enumerate(lines, start=1):
        if number == 1:
            check_utf8(raw, name)
            raw = raw.removeprefix(codecs.BOM_UTF8)
        line = raw.decode("utf-8", errors="replace").rstrip("\r\n")
        if not told and "\ufffd" in line:
            told = True
            logger.warning("%s, line %d: what is not UTF-8 was replaced.", name, number)
        yield line

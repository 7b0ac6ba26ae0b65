"""Corpora: named sources of text lines in up to three splits, always streamed.

Whatever the source, a split is one thing: a function that starts a fresh iterator of lines. What a
source lacks in valid and test text is cut from its training text by blocks of neighbouring lines,
spread evenly and the same on every run.

A text of too few lines, such as text8 with its one, is cut between words instead, its end held out.
Files compressed by gzip or Zstandard, and texts in rows of JSON, are read as what they are.

Lines end at a line feed alone (a carriage return before it is dropped), because `str.splitlines`
would also cut at form feeds and exotic separators and so change the line count of a corpus.
"""

import ast
import codecs
import contextlib
import glob
import gzip
import hashlib
import importlib
import logging
import os
import re
import sys
import sysconfig
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from io import BufferedReader, BytesIO
from itertools import accumulate, chain, islice
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any, BinaryIO, cast

from deepenough.artifacts import cache_folder, entry, key_of, parse_json
from deepenough.config import nearest
from deepenough.errors import UserError

logger = logging.getLogger("deepenough")

Lines = Callable[[], Iterator[str]]

DATA_VARIABLE = "DEEPENOUGH_DATA"
STREAM = "hf-stream:"
SPLITS = ("train", "valid", "test")
SPLIT_NAMES = {
    "train": "train",
    "training": "train",
    "valid": "valid",
    "validation": "valid",
    "val": "valid",
    "dev": "valid",
    "test": "test",
    "validation_matched": "valid",  # MNLI: texts of the genres trained on, and of others
    "validation_mismatched": "valid_mismatched",
    "test_matched": "test",
}
TEXT_SUFFIXES = frozenset({".txt", ".text", ".md", ".rst", ".tex", ".tokens", ".raw"})
ROW_SUFFIXES = frozenset({".jsonl", ".ndjson"})
ROW_COLUMNS = ("text", "content")
# A file without line feeds must not be read whole; a line longer than this is cut into several.
MAX_LINE_BYTES = 1 << 20
MAX_ROW_BYTES = 1 << 26
# A cut between words moves no further than this to find their end.
LONGEST_WORD = 200
BLOCK_LINES = 20
FEWEST_BLOCKS = 40
GOLDEN_RATIO = 0.6180339887498949


@dataclass(frozen=True)
class Corpus:
    """A text source; `sources` maps each split to a function that starts its lines."""

    name: str
    sources: Mapping[str, Lines]
    held_out: Collection[str] = ()
    """Splits that the source itself lacks, cut from its training text."""
    cut_at_end: bool = False
    """Whether these are the end of a text of too few lines."""
    identity: str | None = None
    """What decides the content, where the source knows it: it need not be read for that."""

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
        """Return a hash of the split's content, streamed, or of what decides it."""
        if self.identity is not None:
            return key_of(self.identity, split)
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
    and `hf:name:config:column` always mean the hub. `hf-stream:` in the place of `hf:` keeps no
    copy of the text, and takes a folder that `datasets` can load, too.
    """
    if not (valid_fraction >= 0 and test_fraction >= 0 and valid_fraction + test_fraction < 1):
        raise UserError(
            "valid_fraction and test_fraction must be at least 0 and together below 1: "
            f"got {valid_fraction} and {test_fraction}."
        )
    if not name.strip():
        raise UserError("The name of the text is empty: give a file, a folder or a corpus.")
    sources, identity = _find_stream(name) if name.startswith(STREAM) else ({}, None)
    if not sources:
        if name == "python":
            files = {"train": [prose_file(cache)]}
        else:
            files = group_by_split(_find_local(name) or _find_on_hub(name, cache))
        sources = {split: partial(read_texts, files[split]) for split in files}
    missing = {
        split: fraction
        for split, fraction in (("valid", valid_fraction), ("test", test_fraction))
        if split not in sources and fraction > 0
    }
    train = sources["train"]
    cut_at_end = bool(missing) and _has_too_few_lines(train, missing)
    for split in ("train", *missing) if missing else ():
        sources[split] = partial(_end if cut_at_end else _held_out, train, split, missing)
    if identity is not None:
        identity = key_of(identity, repr(missing), str(cut_at_end))
    corpus = Corpus(name, sources, tuple(missing), cut_at_end, identity)
    corpus.lines("train")  # an empty corpus is refused here, not in the middle of a run
    return corpus


def _held_out(lines: Lines, wanted: str, fractions: Mapping[str, float]) -> Iterator[str]:
    """Yield the lines of one split; consecutive lines go to it together, fewer in a short text."""
    num_lines = sum(1 for _ in islice(lines(), FEWEST_BLOCKS * BLOCK_LINES))
    length = max(1, num_lines // FEWEST_BLOCKS)
    for number, line in enumerate(lines()):
        if split_of(number // length, fractions) == wanted:
            yield line


def _has_too_few_lines(lines: Lines, fractions: Mapping[str, float]) -> bool:
    """Return whether lines could not fill every split, or are no lines but parts of a long one."""
    first = list(islice(lines(), FEWEST_BLOCKS))
    splits = {split_of(number, fractions) for number in range(len(first))}
    unfilled = len(first) < FEWEST_BLOCKS and len(splits) <= len(fractions)
    return unfilled or len(first[0].encode("utf-8", "replace")) > MAX_LINE_BYTES - 4


def _end(lines: Lines, wanted: str, fractions: Mapping[str, float]) -> Iterator[str]:
    """Yield one split of a text that is cut between words: what is held out is its end."""
    size, place = sum(len(line) + 1 for line in lines()), 0
    shares = [0.0, 1 - sum(fractions.values()), *fractions.values()]
    number = ["train", *fractions].index(wanted)
    begin, end = list(accumulate(share * size for share in shares))[number : number + 2]
    for line in lines():
        part = line[_word_at(line, begin - place) : _word_at(line, end - place)]
        if part.strip():
            yield part
        place += len(line) + 1


def _word_at(line: str, place: float) -> int:
    """Return where the first word after a place of a line begins."""
    index = int(min(max(0, place), len(line)))
    space = line.find(" ", index, index + LONGEST_WORD) if 0 < index < len(line) else -1
    return index if space < 0 else space + 1


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
            every = sorted(candidate.rglob("*"))
            for suffixes in (TEXT_SUFFIXES, ROW_SUFFIXES):
                if paths := _once(p for p in every if _is_text(p, candidate, suffixes)):
                    return paths
            raise UserError(
                f"The folder {candidate} holds no text file "
                f"({', '.join(sorted(TEXT_SUFFIXES | ROW_SUFFIXES))}): name other files by a glob."
            )
        if candidate.is_file():
            return [candidate]
        if files := _once(sorted(Path(path) for path in _glob(str(candidate)))):
            return files
    return []


def _glob(pattern: str) -> Iterator[str]:
    """Yield what a pattern matches; `**` enters every folder once, however links lead to it."""
    parts = re.split(r"(?:^|/)\*\*(?:/|$)", pattern, maxsplit=1)
    if len(parts) == 1:
        yield from glob.glob(pattern)
        return
    top = os.sep if pattern.startswith("/**") else parts[0] or os.curdir
    entered: set[str] = set()
    for start in glob.glob(top):
        for folder, inner, _ in os.walk(start, followlinks=True):
            inner[:] = sorted(name for name in inner if not name.startswith("."))
            if (real := os.path.realpath(folder)) in entered:
                inner.clear()
                continue
            entered.add(real)
            yield from _glob(os.path.join(glob.escape(folder), parts[1] or "*"))


def _once(paths: Iterable[Path]) -> list[Path]:
    """Return the files among paths, each by the first of its names."""
    files: dict[str, Path] = {}
    for path in paths:
        if path.is_file():
            files.setdefault(os.path.realpath(path), path)
    return list(files.values())


def _is_text(path: Path, folder: Path, suffixes: Collection[str]) -> bool:
    hidden = any(part.startswith(".") for part in path.relative_to(folder).parts)
    return _suffix(path) in suffixes and path.is_file() and not hidden


def _suffix(path: Path) -> str:
    """Return the ending of a file's name, that of a compressed file without that of its packing."""
    return Path(re.sub(r"\.(gz|zst)$", "", path.name.lower())).suffix


def _find_on_hub(name: str, cache: str | os.PathLike[str] | None) -> list[Path]:
    """Return one text file per split of `owner/name[:config[:column]]`, kept in the cache."""
    if not name.startswith("hf:") and not is_hub_name(name):
        raise UserError(
            f"No corpus {name!r}: no file, folder or glob of that name is here or under "
            f"${DATA_VARIABLE} ({os.environ.get(DATA_VARIABLE) or 'unset'}).{did_you_mean(name)}"
        )
    name = name.removeprefix("hf:")
    repository, config, column = _parts(name)

    def fetch(folder: Path) -> None:
        for split, rows in open_splits(repository, config).items():
            with (folder / f"{split}.txt").open("w", encoding="utf-8", errors="replace") as file:
                file.writelines(f"{text}\n" for text in _column(rows, column, name))

    return sorted(entry(cache_folder(cache) / "hub" / key_of(name), fetch).iterdir())


def _parts(name: str) -> tuple[str, str | None, str]:
    """Return repository, config and column of `owner/name[:config[:column]]`."""
    repository, _, rest = name.partition(":")
    config, _, column = rest.partition(":")
    return repository, config or None, column or "text"


def _column(rows: Iterable[Mapping[str, Any]], column: str, name: str) -> Iterator[str]:
    """Yield the texts of a dataset's rows; one without the column is refused."""
    for row in rows:
        if column not in row:
            raise UserError(
                f"The dataset {name} has no column {column!r} but {', '.join(row)}: "
                "name one as hf:name:config:column."
            )
        yield str(row[column])


def _find_stream(name: str) -> tuple[dict[str, Lines], str | None]:
    """Return the splits of a dataset as they are fetched, and what decides their content.

    That is every file's name and date, or its commit on the hub: `datasets` knows them at once.
    """
    name = name.removeprefix(STREAM)
    repository, config, column = _parts(name)
    folder = next((str(place) for place in candidates(repository) if place.is_dir()), repository)
    builder = _from_hub("load_dataset_builder", folder, config)
    files = builder.config.data_files or {}
    known = {split: (list(own), own.origin_metadata) for split, own in files.items()}
    splits = _by_our_names(builder.as_streaming_dataset(), repository)
    sources = {
        split: cast(Lines, partial(_stream, rows, column, name)) for split, rows in splits.items()
    }
    return sources, key_of(name, folder, repr(known)) if known else None


def _stream(rows: Iterable[Mapping[str, Any]], column: str, name: str) -> Iterator[str]:
    """Yield the lines of a dataset's texts, as they would be read from a file of them."""
    try:
        for text in _column(rows, column, name):
            yield from _decoded(BytesIO(f"{text}\n".encode(errors="replace")), name, strict=True)
    except UserError:
        raise
    except Exception as error:  # datasets raises many kinds, also when the network fails
        said = str(error).strip().partition("\n")[0]
        raise UserError(
            f"The stream of the dataset {name} broke off ({type(error).__name__}: {said}): repeat "
            "the command."
        ) from error


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
        known += [path.name for path in folder.iterdir()]
    found = nearest(Path(name).name, ["python", *known])
    return f" Did you mean {folder / found}?" if found else ""


def open_splits(repository: str, config: str | None) -> Mapping[str, Any]:
    """Return the streamed splits of a dataset by our names; a missing dataset is refused."""
    return _by_our_names(_from_hub("load_dataset", repository, config, streaming=True), repository)


def _from_hub(function: str, repository: str, config: str | None, **options: Any) -> Any:
    """Return what a function of `datasets` finds under a name; a missing dataset is refused."""
    import datasets  # here, because importing it takes seconds and most corpora are local

    from deepenough.hf.loading import is_only_local

    was_offline, is_offline = datasets.config.HF_HUB_OFFLINE, is_only_local(repository)
    datasets.config.HF_HUB_OFFLINE = was_offline or is_offline
    try:
        return getattr(datasets, function)(repository, config, **options)
    except Exception as error:  # datasets raises many kinds, also for a missing network
        said = str(error).strip().partition("\n")[0]
        reason = "it cannot be reached" if is_offline else f"{type(error).__name__}: {said}"
        raise UserError(
            f"There is no file or folder {repository!r} here or under ${DATA_VARIABLE}, and the "
            f"datasets hub did not give it ({reason}): check the spelling and the network, or "
            "give the path of your data."
        ) from error
    finally:
        datasets.config.HF_HUB_OFFLINE = was_offline


def _by_our_names(found: Mapping[str, Any], repository: str) -> dict[str, Any]:
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
    split = next((SPLIT_NAMES[word] for word in words if word in SPLIT_NAMES), None)
    return f"{split}_mismatched" if split and "mismatched" in words else split  # of MNLI


# -- lines of files --------------------------------------------------------------------------------

_warned: set[str] = set()


def read_texts(paths: Iterable[Path]) -> Iterator[str]:
    """Yield all lines of text files, and of the texts in files of JSON rows."""
    for path in paths:
        if _suffix(path) not in ROW_SUFFIXES:
            yield from read_lines([path])
            continue
        for number, row in enumerate(read_rows(path), start=1):
            texts = [row[name] for name in ROW_COLUMNS if isinstance(row.get(name), str)]
            if not texts:
                raise UserError(
                    f"Row {number} of {path} has no text but {', '.join(map(str, row))!s:.80}: "
                    f"call the column of its text {' or '.join(ROW_COLUMNS)}."
                )
            yield from texts[0].split("\n")


def read_rows(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the objects of a file with one JSON object a line."""
    for number, line in enumerate(read_lines([path], longest=MAX_ROW_BYTES), start=1):
        if not line.strip():
            continue
        try:
            yield parse_json(line)
        except ValueError as error:
            raise UserError(
                f"Line {number} of {path} is no JSON object: write lines such as "
                '{"text": "...", "label": 0}.'
            ) from error


def read_lines(paths: Iterable[Path], strict: bool = True, longest: int = 0) -> Iterator[str]:
    """Yield all lines of UTF-8 files without their ends; `strict` refuses what is no UTF-8."""
    for path in paths:
        try:
            with path.open("rb") as file:
                yield from _decoded(_unpacked(file, path), str(path), strict, longest)
        except UserError:
            raise
        except Exception as error:  # a damaged file raises what its packing does
            reason = getattr(error, "strerror", None) or error
            raise UserError(
                f"{path} cannot be read ({reason}): give a whole text file that you may read."
            ) from error


def _unpacked(file: BufferedReader, path: Path) -> BinaryIO:
    """Return a file as it is read, decompressed if gzip or Zstandard has compressed it."""
    start = file.peek(4)[:4]
    if start[:2] == b"\x1f\x8b":
        return cast(BinaryIO, gzip.open(file))
    if start != b"\x28\xb5\x2f\xfd":
        return file
    for module in ("compression.zstd", "zstandard"):  # Python's own from 3.14 on
        with contextlib.suppress(ImportError):
            return BufferedReader(importlib.import_module(module).open(file, "rb"))
    raise UserError(f"{path} is compressed by Zstandard: pip install zstandard to read it.")


def read_input_lines(file: str | None) -> Iterator[str]:
    """Yield the lines of a file, or of standard input, without their ends."""
    if file is None:
        return _decoded(sys.stdin.buffer, "standard input", strict=False)
    return read_lines([Path(file)], strict=False)


def _decoded(file: BinaryIO, name: str, strict: bool, longest: int = 0) -> Iterator[str]:
    """Yield each line decoded; unless `strict`, bytes that are no UTF-8 are replaced."""
    longest = longest or MAX_LINE_BYTES
    decoder = codecs.getincrementaldecoder("utf-8-sig")("strict" if strict else "replace")
    for number, raw in enumerate(iter(lambda: file.readline(longest), b""), start=1):
        if number == 1 and raw.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
            raise UserError(f"{name} is UTF-16 text: save it as UTF-8.")
        if b"\0" in raw:
            raise UserError(
                f"{name} is not text (line {number} holds a NUL byte): give a UTF-8 text file."
            )
        try:
            # Of a line that was cut, half a character is kept for the next part.
            line = decoder.decode(raw, final=len(raw) < longest)
        except UnicodeDecodeError as error:
            raise UserError(
                f"{name} is not UTF-8 text (line {number}): give a text file, or convert it first, "
                "for instance with iconv -f LATIN1 -t UTF-8."
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

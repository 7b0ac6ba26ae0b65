"""Hostile files: each may cost the user a sentence, and nothing more.

Every case writes a file that someone with bad intentions might have made, and gives it to the part
of the product that reads such files. A good outcome is a `UserError`, or a result where the file is
harmless once it is read rightly (a run whose name is markup). Whatever else is a defect: code that
ran (it would have left the file `RAN`), another exception, a hang, memory beyond `MAX_MEGABYTES`.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import logging
import os
import pickle
import random
import resource
import signal
import struct
import sys
import tempfile
import traceback
import warnings
import zipfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from deepenough.errors import UserError

RAN = "ran"
SECONDS, MAX_MEGABYTES = 20, 600
MARKUP = '"><script>alert(1)</script><img src=x onerror=alert(2)>'

Case = Callable[[Path], Any]
CASES: dict[str, Case] = {}


def case(name: str) -> Callable[[Case], Case]:
    def add(check: Case) -> Case:
        assert name not in CASES, name
        CASES[name] = check
        return check

    return add


# -- pickles of the source project ---------------------------------------------------------------


def _imported(content: bytes) -> Case:
    def check(folder: Path) -> Any:
        from deepenough.shortcut.source_pickles import import_source

        (folder / "0_1.pickle").write_bytes(content.replace(b"RAN", os.fsencode(folder / RAN)))
        found = import_source(folder).matrix(0, 1)
        raise AssertionError(f"a matrix of {tuple(found.shape)} came out of it")

    return check


class _Call:
    """What calls a function when it is unpickled."""

    def __init__(self, function: Any, *arguments: Any, state: Any = None) -> None:
        self.parts = (function, arguments, state) if state is not None else (function, arguments)

    def __reduce__(self) -> Any:
        return self.parts


def _tensor(
    numbers: Any, offset: Any = 0, size: Any = (2, 2), stride: Any = (2, 1), hooks: Any = None
) -> bytes:
    """Return the pickle of a tensor with any view of any numbers."""
    rebuild = torch._utils._rebuild_tensor_v2
    return pickle.dumps(_Call(rebuild, numbers, offset, size, stride, False, hooks or {}))


def _storage(count: int, *, keys: bool = True, data: bytes | None = None) -> _Call:
    """Return numbers as torch writes them into a pickle; the count may be a lie."""
    magic, protocol = 0x1950A86A20F9469CFC6C, 1001
    machine = {"protocol_version": protocol, "little_endian": True, "type_sizes": {}}
    parts = [pickle.dumps(part, 2) for part in (magic, protocol, machine)]
    about = b"\x80\x02(X\x07\x00\x00\x00storagectorch\nFloatStorage\n"
    about += b"X\x01\x00\x00\x000X\x03\x00\x00\x00cpu"
    about += pickle.dumps(count, 2)[2:-1] + b"NtQ."
    parts += [about, pickle.dumps(["0"] if keys else [], 2)]
    raw = struct.pack("<q", count) + b"\0\0\x80\x3f" * 4 if data is None else data
    return _Call(torch.storage._load_from_bytes, b"".join(parts) + raw)


def _numbers(count: int) -> Any:
    """Return numbers that are there, as a tensor's pickle has them."""
    return torch.storage.TypedStorage(
        wrap_storage=torch.ones(count).untyped_storage(), dtype=torch.float32, _internal=True
    )


def _system() -> _Call:
    return _Call(os.system, "touch RAN")


def _zipped() -> _Call:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", b"\0" * 50_000_000)
    return _Call(torch.storage._load_from_bytes, file.getvalue())


_PICKLES: dict[str, bytes] = {
    "a call of the system": pickle.dumps(_system()),
    "a call of the system, protocol 0": b"cposix\nsystem\n(S'touch RAN'\ntR.",
    "a call in a list behind a matrix": pickle.dumps([torch.ones(2, 2), _system()]),
    "a call as the numbers": _tensor(_system()),
    "a call within the numbers": _tensor(
        _Call(torch.storage._load_from_bytes, pickle.dumps(_system()))
    ),
    "a call as the hooks": _tensor(torch.ones(4).untyped_storage(), hooks=_system()),
    "eval": b'cbuiltins\neval\n(S\'open("RAN", "w")\'\ntR.',
    "getattr": b"cbuiltins\ngetattr\n(ctorch\nstorage\nS'x'\ntR.",
    "import of a module": b"cimportlib\nimport_module\n(S'antigravity'\ntR.",
    "torch.load itself": b"ctorch\nload\n(S'RAN'\ntR.",
    "torch.hub": b"ctorch.hub\nload\n(S'evil/evil'\nS'evil'\ntR.",
    "the unpickler by its own name": b"cdeepenough.shortcut.source_pickles\n_rebuild\n.",
    "a dotted name": b"\x80\x04\x8c\x0ctorch._utils\x8c\x15_rebuild_tensor_v2.x.y\x93.",
    "an object outside": b"\x80\x02X\x01\x00\x00\x00aQ.",
    "a changed function": b"ctorch._utils\n_rebuild_tensor_v2\n}S'__name__'\nS'x'\nsb.",
    "an instance the old way": b"(icollections\nOrderedDict\n.",
    "an extension code": b"\x80\x02\x82\x01.",
    "a place in the memo far away": b"\x80\x02K\x01r\xff\xff\xff\x7f.",
    "a long number": b"\x80\x02\x8b\xff\xff\xff\x7f.",
    "bytes of a terabyte": b"\x80\x04\x8e" + struct.pack("<Q", 1 << 40) + b"x.",
    "lists in lists": b"\x80\x02" + b"]" * 200_000 + b"a" * 199_999 + b".",
    "lists that double": b"\x80\x02]q\x00" + b"h\x00h\x00\x86q\x00" * 60 + b".",
    "numbers that are not there": _tensor(
        _storage(100, keys=False, data=b""), 0, (10, 10), (10, 1)
    ),
    "a gigabyte of numbers that are not there": _tensor(_storage(1 << 28, keys=False, data=b"")),
    "more numbers than follow": _tensor(_storage(1 << 20)),
    "numbers in an archive": _tensor(_zipped()),
    "a view beyond its numbers": _tensor(_numbers(4), 0, (8, 8), (8, 1)),
    "an offset beyond its numbers": _tensor(_numbers(4), 3),
    "an offset before its numbers": _tensor(_numbers(4), -3),
    "a step backwards": _tensor(_numbers(4), 3, (2, 2), (-2, -1)),
    "a step of nothing, a billion times": _tensor(_numbers(4), 0, (1 << 30, 1 << 30), (0, 0)),
    "steps that overlap": _tensor(_numbers(1 << 16), 0, (1 << 15, 1 << 15), (1, 1)),
    "a size that overflows": _tensor(_numbers(4), 0, (1 << 62, 4), (1, 1)),
    "a size of no numbers": _tensor(_numbers(4), 0, ("2", None), (2, 1)),
    "numbers that are not finite": pickle.dumps(torch.full((2, 2), torch.nan)),
    "a pickle cut short": pickle.dumps(torch.ones(4, 4))[:-30],
}
for _name, _content in _PICKLES.items():
    CASES[f"pickle: {_name}"] = _imported(_content)


@case("pickle: a device without end")
def _(folder: Path) -> Any:
    from deepenough.shortcut.source_pickles import import_source

    (folder / "0_1.pickle").symlink_to("/dev/zero")
    import_source(folder)


# -- safetensors ---------------------------------------------------------------------------------


def _shortcuts(folder: Path, header: bytes, body: bytes, **changes: Any) -> Any:
    from deepenough.shortcut.modeling import Shortcuts

    tensors = struct.pack("<Q", changes.pop("length", len(header))) + header + body
    (folder / "shortcuts.safetensors").write_bytes(tensors)
    index = {"format": "deepenough-shortcuts", "version": 2, "num_layers": 1, "width": 2,
             "affine": False, "targets": "all", "meta": {},
             "sha256": hashlib.sha256(tensors).hexdigest()}  # fmt: skip
    (folder / "shortcuts.json").write_text(json.dumps(index | changes))
    found = Shortcuts.from_pretrained(folder)
    raise AssertionError(f"shortcuts of {found.num_layers} layers came out of it")


def _header(**tensors: Any) -> bytes:
    return json.dumps({name.replace("_", "."): about for name, about in tensors.items()}).encode()


GOOD = {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]}
_TENSORS: dict[str, tuple[bytes, bytes, dict[str, Any]]] = {
    "a header of exabytes": (b"{}", b"", {"length": 1 << 62}),
    "a header that is no JSON": (b"[[[[", b"", {}),
    "a header of brackets": (b"[" * 100_000, b"", {}),
    "tensors that overlap": (_header(A_0_1=GOOD, b=GOOD), b"\0" * 16, {}),
    "offsets that are negative": (
        _header(A_0_1=GOOD | {"data_offsets": [-16, 0]}), b"\0" * 16, {},
    ),
    "offsets beyond the file": (
        _header(A_0_1=GOOD | {"data_offsets": [0, 1 << 40]}), b"\0" * 16, {},
    ),
    "offsets that go backwards": (
        _header(A_0_1=GOOD | {"data_offsets": [16, 0]}), b"\0" * 16, {},
    ),
    "a shape larger than its bytes": (
        _header(A_0_1=GOOD | {"shape": [1 << 31, 1 << 31]}), b"\0" * 16, {},
    ),
    "a shape that overflows": (
        _header(A_0_1=GOOD | {"shape": [1 << 63, 1 << 63, 4]}), b"\0" * 16, {},
    ),
    "a dtype that is none": (_header(A_0_1=GOOD | {"dtype": "object"}), b"\0" * 16, {}),
    "a tensor called as a path": (
        json.dumps({"../../ran": GOOD}).encode(), b"\0" * 16, {},
    ),
    "a tensor nobody asked for": (
        _header(A_0_1=GOOD, x=GOOD | {"data_offsets": [16, 32]}), b"\0" * 32, {},
    ),
    "a billion layers": (_header(A_0_1=GOOD), b"\0" * 16, {"num_layers": 10**9}),
    "a billion columns": (_header(A_0_1=GOOD), b"\0" * 16, {"width": 10**9}),
    "layers that are no number": (_header(A_0_1=GOOD), b"\0" * 16, {"num_layers": "1" * 5000}),
    "an index of infinity": (_header(A_0_1=GOOD), b"\0" * 16, {"width": float("inf")}),
    "whole numbers for maps": (
        _header(A_0_1=GOOD | {"dtype": "I32"}), b"\0" * 16, {},
    ),
    "a checksum of another file": (_header(A_0_1=GOOD), b"\0" * 16, {"sha256": "0" * 64}),
}  # fmt: skip
for _name, (_head, _body, _changes) in _TENSORS.items():
    CASES[f"safetensors: {_name}"] = lambda folder, h=_head, b=_body, c=_changes: _shortcuts(
        folder, h, b, **dict(c)
    )


# -- JSON and YAML -------------------------------------------------------------------------------

_DEEP = b"[" * 200_000


@case("JSON: a record of brackets")
def _(folder: Path) -> Any:
    from deepenough.report.page import read_report

    (folder / "metrics.jsonl").write_bytes(_DEEP + b"\n" + b'{"a":' * 200_000 + b"\n")
    read_report([folder])


@case("JSON: a record of large numbers")
def _(folder: Path) -> Any:
    from deepenough.report.page import read_report

    large = "1" + "0" * 4000
    line = f'{{"step": {large}, "kind": "train", "time": 1e999, "loss": {large}}}\n'
    (folder / "metrics.jsonl").write_text(line)
    read_report([folder])


@case("JSON: a comparison of brackets")
def _(folder: Path) -> Any:
    from deepenough.report.figures import read_frontier

    (folder / "frontier.json").write_bytes(_DEEP)
    read_frontier(folder)


@case("JSON: a guarantee of brackets")
def _(folder: Path) -> Any:
    from deepenough.decoding.calibration import Calibration

    (folder / "calibration.json").write_bytes(b'{"format":' + _DEEP)
    Calibration.from_pretrained(folder)


@case("JSON: a draft model of any size")
def _(folder: Path) -> Any:
    from deepenough.decoding.draft_model import DraftModel
    from deepenough.decoding.drafters import LinearDrafter
    from deepenough.decoding.eagle3 import Eagle3Config, Eagle3Head

    linear = LinearDrafter([(torch.ones(4, 8), torch.ones(4))], torch.arange(4))
    DraftModel(
        linear, Eagle3Head(Eagle3Config(4, 2, 1, 2, 8, 6, 1e-6, 1e4, (0, 1, 2)))
    ).save_pretrained(folder)
    file = folder / "draft_model.json"
    index = json.loads(file.read_text())
    index["head"] |= {"hidden_size": 10**6, "intermediate_size": 10**7}
    index.pop("checksum", None)
    file.write_text(json.dumps(index))
    DraftModel.from_pretrained(folder)


def _settings(text: str) -> Case:
    def check(folder: Path) -> Any:
        from deepenough.config import resolve
        from deepenough.par.config import ParTrainConfig

        (folder / "config.yaml").write_text(text.replace("RAN", str(folder / RAN)))
        return resolve(ParTrainConfig, folder / "config.yaml")

    return check


_LAUGHS = "\n".join(
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}' if n else 'lol'] * 9)}]" for n in range(12)
)
_YAMLS = {
    "a billion laughs": _LAUGHS,
    "a billion laughs in a setting": f"{_LAUGHS}\ndata: *a11",
    "a list that holds itself": "model: &a\n  cutoffs: &b [*b]\n",
    "a section that holds itself": "model: &a\n  pattern: *a\n",
    "a call of the system": "data: !!python/object/apply:os.system ['touch RAN']",
    "a new object": "data: !!python/object/new:os.system ['touch RAN']",
    "a name": "data: !!python/name:os.system",
    "a module": "data: !!python/module:antigravity",
    "a date that is none": "data: 2020-99-99",
    "a tag that does not fit": "data: !!bool maybe",
    "brackets": "data: " + "[" * 20_000,
    "a number without end": "seed: " + "9" * 100_000,
    "megabytes": "data: x\n" + "# comment\n" * 1_000_000,
    "a NUL": "data: a\0b",
}
for _name, _text in _YAMLS.items():
    CASES[f"YAML: {_name}"] = _settings(_text)


@case("YAML: a device without end")
def _(folder: Path) -> Any:
    from deepenough.config import resolve
    from deepenough.par.config import ParTrainConfig

    (folder / "config.yaml").symlink_to("/dev/zero")
    resolve(ParTrainConfig, folder / "config.yaml")


# -- runs ----------------------------------------------------------------------------------------


def _page(folder: Path, name: str, **values: Any) -> None:
    from deepenough.report.page import compose, read_report, write_page
    from tests.fuzz.kinds import check_page_text

    run = folder / name
    run.mkdir()
    (run / "config.yaml").write_text(json.dumps({"method": "par", "model": {"pattern": MARKUP}}))
    record = {"step": 1, "kind": "train", "time": 1.0, "loss": 2.0} | values
    (run / "metrics.jsonl").write_text(json.dumps(record) + "\n")
    report = read_report([run], MARKUP)
    check_page_text(compose(report))
    write_page(report, folder / "page.html")
    check_page_text((folder / "page.html").read_text(encoding="utf-8"))


@case("run: called as markup")
def _(folder: Path) -> Any:
    _page(folder, MARKUP.replace("/", "_"))


@case("run: called with half a character")
def _(folder: Path) -> Any:
    _page(folder, os.fsdecode(b"run\xff\xfe\x01"))


@case("run: tokens of markup and NUL")
def _(folder: Path) -> Any:
    tokens = [MARKUP, "\0", "\ud800", "<!--", "]]>"]
    table = {"words": [tokens] * 2, "probability": [[0.5] * 5] * 2, "agrees": [[True] * 5] * 2}
    _page(folder, "run", kind="lens", prompt=MARKUP, tokens=tokens, layers=[0, 1], **table)


@case("run: markup in a picture")
def _(folder: Path) -> Any:
    from xml.etree import ElementTree

    from deepenough.figure import read_run
    from deepenough.report.drawing import save
    from deepenough.report.figures import run_figures

    run = folder / MARKUP.replace("/", "_")
    run.mkdir()
    (run / "metrics.jsonl").write_text('{"step": 1, "kind": "train", "time": 1.0, "loss": 2.0}\n')
    for figure in run_figures(read_run(run)):
        for file in save(figure, folder / "pictures", ("svg",)):
            names = {element.tag.rpartition("}")[2] for element in ElementTree.parse(file).iter()}
            assert not names & {"script", "img", "foreignObject"}, names


@case("run: records that are a device")
def _(folder: Path) -> Any:
    from deepenough.report.page import read_report

    (folder / "metrics.jsonl").symlink_to("/dev/zero")
    read_report([folder])


@case("run: a line without end")
def _(folder: Path) -> Any:
    from deepenough.report.page import read_report

    (folder / "metrics.jsonl").write_bytes(b"x" * 20_000_000)
    read_report([folder])


@case("run: costs that overflow")
def _(folder: Path) -> Any:
    from deepenough.par.training import derive_run
    from deepenough.runs import RunFolder

    cost = {"attention": 10**400, "dense": -1, "identity": "x", "rest": None}
    lines = [{"step": 0, "kind": "cost", "time": 0, **cost}]
    lines.append({"step": 1, "kind": "train", "time": 0, "pi": [[0.2, 0.3, 0.5]]})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    derive_run(RunFolder(folder), 0.5)


# -- data ----------------------------------------------------------------------------------------


def _table(name: str, content: bytes, harmless: bool = False) -> Case:
    def check(folder: Path) -> Any:
        from deepenough.data.classification import open_classification
        from deepenough.data.config import ClassificationConfig

        (folder / name).write_bytes(content)
        found = open_classification(str(folder / name), ClassificationConfig(valid_fraction=0.0))
        assert harmless, f"{len(found.splits['train'])} examples came out of it"

    return check


_ROWS = b"text,label\n"
_TABLES = {
    "a cell of megabytes": ("a.csv", _ROWS + b"x" * 10_000_000 + b",1\ny,0\n", True),
    "a cell that is never closed": ("a.csv", _ROWS + b'"x' + b"y,1\n" * 10_000, False),
    "NUL bytes": ("a.csv", _ROWS + b"\0" * 1000 + b",1\n", False),
    "UTF-16": ("a.csv", "text,label\nx,1\ny,0\n".encode("utf-16"), False),
    "a hundred thousand columns": ("a.csv", b"a," * 100_000 + b"b\n1,2\n", False),
    "a formula": ("a.csv", _ROWS + b"=cmd|' /C calc'!A0,1\n@SUM(1),0\n", True),
    "a label without end": ("a.csv", _ROWS + b"x," + b"9" * 100_000 + b"\ny,0\n", False),
    "brackets": ("a.jsonl", b'{"text": ' + _DEEP + b"\n", False),
    "half a character": (
        "a.jsonl",
        b'{"text":"\\ud800","label":1}\n{"text":"b","label":0}\n',
        True,
    ),
    "a list for a text": ("a.jsonl", b'{"text":["a"],"label":1}\n{"text":"b","label":0}\n', False),
    "a picture": ("a.csv", b"\x89PNG\r\n\x1a\n" + bytes(range(256)) * 100, False),
}
for _name, (_file, _content, _harmless) in _TABLES.items():
    CASES[f"table: {_name}"] = _table(_file, _content, _harmless)


@case("text: UTF-16")
def _(folder: Path) -> Any:
    from deepenough.data.corpus import open_corpus

    (folder / "text.txt").write_bytes("a text\n".encode("utf-16") * 10)
    list(open_corpus(str(folder / "text.txt")).lines("train"))


@case("text: a line of megabytes")
def _(folder: Path) -> Any:
    from deepenough.data.corpus import open_corpus

    (folder / "text.txt").write_bytes(b"a" * 30_000_000)
    assert sum(len(line) for line in open_corpus(str(folder / "text.txt")).lines("train"))


@case("text: a folder that holds itself")
def _(folder: Path) -> Any:
    from deepenough.data.corpus import open_corpus

    (folder / "a").mkdir()
    (folder / "a" / "text.txt").write_text("one\ntwo\nthree\n")
    (folder / "a" / "again").symlink_to(folder / "a", target_is_directory=True)
    corpus = open_corpus(str(folder / "**" / "*.txt"), valid_fraction=0.0, test_fraction=0.0)
    assert len(list(corpus.lines("train"))) == 3, "a file was read more than once"


@case("counts: a word for a number")
def _(folder: Path) -> Any:
    from deepenough.nn.cutoffs import read_counts

    (folder / "counts.txt").write_bytes(b"the\t" + b"9" * 100_000 + b"\n")
    read_counts(str(folder / "counts.txt"))


# -- models and tokenizers -----------------------------------------------------------------------


def _tokenizer(content: bytes) -> Case:
    def check(folder: Path) -> Any:
        from deepenough.data.tokenizer import load_tokenizer

        (folder / "tokenizer.json").write_bytes(content)
        (folder / "tokenizer_config.json").write_text("{}")
        load_tokenizer(folder)
        raise AssertionError("a tokenizer came out of it")

    return check


for _name, _content in {
    "half a JSON": b'{"model": {"type": "BPE"',
    "brackets": b'{"model": ' + _DEEP,
    "of no type": b'{"model": {"type": "Evil", "vocab": {}}}',
    "ids without end": b'{"version":"1.0","model":{"type":"BPE","vocab":{"a":99999999999999},'
    b'"merges":[]}}',
    "empty": b"",
}.items():
    CASES[f"tokenizer.json: {_name}"] = _tokenizer(_content)


@case("SentencePiece: bytes")
def _(folder: Path) -> Any:
    from deepenough.data.tokenizer import load_tokenizer

    (folder / "a.model").write_bytes(bytes(range(256)) * 40)
    load_tokenizer(folder / "a.model")


def _model_folder(folder: Path, **config: Any) -> Path:
    place = folder / "model"
    place.mkdir()
    (place / "config.json").write_text(json.dumps({"model_type": "evil"} | config))
    code = f"open({str(folder / RAN)!r}, 'w')\n"
    (place / "evil.py").write_text(code)
    return place


_MAP = {"AutoConfig": "evil.EvilConfig", "AutoModelForCausalLM": "evil.Evil", "AutoModel": "evil.E"}


@case("model: code of its own")
def _(folder: Path) -> Any:
    from deepenough.hf.loading import load

    load(str(_model_folder(folder, auto_map=_MAP)))


@case("model: a tokenizer with code of its own")
def _(folder: Path) -> Any:
    from deepenough.data.tokenizer import load_tokenizer

    place = _model_folder(folder)
    names = {"auto_map": {"AutoTokenizer": ["evil.Evil", None]}, "tokenizer_class": "Evil"}
    (place / "tokenizer_config.json").write_text(json.dumps(names))
    load_tokenizer(place)


@case("model: code of its own, to be pondered with")
def _(folder: Path) -> Any:
    from deepenough.__main__ import main

    place = _model_folder(folder, auto_map=_MAP)
    (folder / "rows.tsv").write_text("text\tlabel\n" + "a\t1\nb\t0\n" * 20)
    words = ["ponder", "train", "--data", str(folder / "rows.tsv"), "--out", str(folder / "out")]
    if main([*words, f"--model.encoder={place}"]) == 2:
        raise UserError("It was refused.")


@case("model: pickled weights")
def _(folder: Path) -> Any:
    from deepenough.hf.loading import load

    place = _model_folder(folder, model_type="gpt2", architectures=["GPT2LMHeadModel"], n_layer=1)
    (place / "pytorch_model.bin").write_bytes(
        pickle.dumps(_system()).replace(b"RAN", os.fsencode(folder / RAN))
    )
    load(str(place))


@case("model: weights of exabytes")
def _(folder: Path) -> Any:
    from deepenough.hf.loading import load

    place = _model_folder(folder, model_type="gpt2", architectures=["GPT2LMHeadModel"], n_layer=1)
    (place / "model.safetensors").write_bytes(struct.pack("<Q", 1 << 62) + b"{}")
    load(str(place))


@case("model: a config that is a list")
def _(folder: Path) -> Any:
    from deepenough.hf.loading import load

    place = _model_folder(folder)
    (place / "config.json").write_text("[1, 2, 3]")
    load(str(place))


@case("model: a config of brackets")
def _(folder: Path) -> Any:
    from deepenough.hf.loading import load

    place = _model_folder(folder)
    (place / "config.json").write_bytes(_DEEP)
    load(str(place))


class Hang(BaseException):
    """A case has taken too long; not an OSError, which readers of files catch."""


# -- running them --------------------------------------------------------------------------------


def outcome(name: str) -> str:
    """Run one case and return "refused", "harmless", or what was wrong."""

    def stop(*_: Any) -> None:
        raise Hang(f"longer than {SECONDS} s")

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    earlier = signal.signal(signal.SIGALRM, stop)
    signal.alarm(SECONDS)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "f"
        folder.mkdir()
        try:
            CASES[name](folder)
            found = "harmless"
        except UserError as error:
            found = (
                "refused" if str(error).strip() and len(str(error)) < 1000 else "a long sentence"
            )
        except BaseException as error:
            where = traceback.extract_tb(error.__traceback__)[-1]
            found = f"{type(error).__name__}: {error!s:.150} ({where.filename}:{where.lineno})"
        finally:
            signal.alarm(0)
            signal.signal(signal.SIGALRM, earlier)
        if (folder / RAN).exists() or Path(RAN).exists():
            found = "code of the file ran"
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    return f"took {grown:.0f} MB" if grown > MAX_MEGABYTES else found


def run(seed: int = 0, only: str | None = None) -> dict[str, int]:
    """Run all cases, or those with `only` in their name, in an order that the seed draws.

    Returns:
        How many there were, were refused, were harmless, and were bad, which are printed.
    """
    names = [name for name in CASES if only is None or only in name]
    random.Random(seed).shuffle(names)
    counts = Counter({"cases": 0, "refused": 0, "harmless": 0, "bad": 0})
    with _quiet():
        for name in names:
            found = outcome(name)
            counts["cases"] += 1
            counts[found if found in counts else "bad"] += 1
            if found not in counts:
                print(f"{name}: {found}", flush=True)
    return dict(counts)


class _quiet:
    """Without a terminal to ask and without warnings; what was there before comes back."""

    def __enter__(self) -> None:
        self.stdin, sys.stdin = sys.stdin, io.StringIO("y\n" * 100)  # whoever asks is told yes
        self.stderr, sys.stderr = sys.stderr, io.StringIO()
        self.caught = warnings.catch_warnings()
        self.caught.__enter__()
        warnings.simplefilter("ignore")
        logging.disable(logging.CRITICAL)

    def __exit__(self, *_: Any) -> None:
        sys.stdin, sys.stderr = self.stdin, self.stderr
        self.caught.__exit__(None, None, None)
        logging.disable(logging.NOTSET)


def main(argv: list[str] | None = None) -> int:
    """Run the command line; exit code 1 if a file did more than it may."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults hostile", description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", help="part of the names of the cases to run")
    given = parser.parse_args(argv)
    counts = run(given.seed, given.only)
    print(", ".join(f"{number} {what}" for what, number in counts.items()))
    return 1 if counts["bad"] else 0


if __name__ == "__main__":
    sys.exit(main())

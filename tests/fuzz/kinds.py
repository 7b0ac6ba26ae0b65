"""The eleven kinds of bad input: how a case of each is made, and what its outcome must be.

`make` draws a case, `check` gives it to the product. Nothing, or a `UserError` that is a sentence,
is a good outcome; `AssertionError` says that something bad was accepted. Any other exception, and a
case that takes too long, is a defect.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import io
import json
import math
import os
import pickle
import random
import shutil
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from unittest.mock import patch
from xml.etree import ElementTree

import torch
import yaml

from deepenough.errors import UserError
from deepenough.runs import Record
from tests.fuzz.mutations import damage, mutate, scalar, spell, text, value


@dataclass(frozen=True)
class Kind:
    """One kind of input."""

    name: str
    cases: int
    """How many the whole run tries."""
    make: Callable[[random.Random, World], Any]
    check: Callable[[Any, World], None]


class World:
    """Good files to begin with, and a folder for the bad ones; made when they are first needed."""

    def __init__(self) -> None:
        memory = Path("/dev/shm")
        self._folder = tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None)
        self.path = Path(self._folder.name)
        self.bad = self.path / "bad"
        self.bad.mkdir()

    def close(self) -> None:
        self._folder.cleanup()

    def emptied(self) -> Path:
        """Return the folder for bad files, with nothing in it."""
        for entry in self.bad.iterdir():
            shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
        return self.bad

    @functools.cached_property
    def runs(self) -> dict[str, list[dict[str, Any]]]:
        """Return the records of a run of every method."""
        from tests.report import conftest

        made = {
            "par": conftest.write_search,
            "shortcut": conftest.write_shortcut,
            "ponder": conftest.write_ponder,
            "lazy": conftest.write_lazy,
        }
        found = {}
        for name, write in made.items():
            lines = (write(self.path / name) / "metrics.jsonl").read_text().splitlines()
            found[name] = [json.loads(line) for line in (*lines[:6], *lines[-12:])]
            for record in found[name]:
                record.pop("crc", None)  # the checksum of a line, which no change fits
        grid = [
            {"encoder_steps": e, "decoder_steps": d, "bleu": 30.0 + e}
            for e in (1, 2)
            for d in (1, 2)
        ]
        found["lazy"] += [{"step": 1, "kind": "steps", "time": 1.0, **row} for row in grid]
        for kind, row in (
            ("valid", {"loss": 3.0, "perplexity": 20.1}),
            ("cka", {"table": [[1.0, 0.5], [0.5, 1.0]]}),
        ):
            found["shortcut"].append({"step": 7, "kind": kind, "time": 1.0, **row})
        cost = {"attention": 3.0, "dense": 2.0, "identity": 0.0, "rest": 1.0, "unit": "flops"}
        found["par"].append({"step": 0, "kind": "cost", "time": 1.0, **cost})
        return found

    @functools.cached_property
    def comparison(self) -> dict[str, Any]:
        """Return what a frontier.json holds."""
        from tests.report.conftest import write_comparison

        folder = write_comparison(self.path / "both", self.path / "mine")
        content: dict[str, Any] = json.loads((folder / "frontier.json").read_text())
        for point in content["points"]:
            point |= {"units": 64, "flops_counted": 1e6, "relative_time": 1.0}
            point |= {"relative_time_low": 0.9, "relative_time_high": 1.1}
        content["bookkeeping"] = 0.01
        content["protocol"] |= {"seed": 0, "processor": "a processor"}
        content["provenance"] = {"versions": {"python": "3.11"}}
        return content

    @functools.cached_property
    def shortcuts(self) -> Path:
        """Return a folder of saved shortcuts."""
        from deepenough.shortcut.modeling import Shortcuts

        torch.manual_seed(0)
        fitted = Shortcuts.fit_states([torch.randn(12, 4) for _ in range(4)], affine=True)
        fitted.tuned = {1: (torch.randn(4, 4), torch.randn(4))}
        fitted.meta |= {"model": {"model": "tiny"}, "data": {"texts": 4}}
        fitted.save_pretrained(self.path / "shortcuts")
        return self.path / "shortcuts"

    @functools.cached_property
    def drafts(self) -> Path:
        """Return a folder of a calibration, a linear drafter and a draft model."""
        from deepenough.decoding.calibration import Calibration
        from deepenough.decoding.draft_model import DraftModel
        from deepenough.decoding.drafters import LinearDrafter
        from deepenough.decoding.eagle3 import Eagle3Config, Eagle3Head

        folder = self.path / "drafts"
        torch.manual_seed(0)
        maps = [(torch.randn(4, 8), torch.randn(4)), (torch.randn(4, 12), torch.randn(4))]
        linear = LinearDrafter(maps, torch.arange(6), {"model": {"fingerprint": "0"}})
        head = Eagle3Head(Eagle3Config(4, 2, 1, 2, 8, 6, 1e-6, 1e4, (0, 1, 2)))
        DraftModel(linear, head).save_pretrained(folder)
        Calibration(
            threshold=0.9, policy="gap", policy_options={}, exit_layers=(1, 2),
            kv_propagation="deferred", exit_vocab=(1, 2, 3), max_disagreement=0.05, confidence=0.95,
            texts=100, tokens=6400, thresholds=(0.99, 0.9, 0.8), risks=(0.0, 0.01, 0.2),
            p_values=(0.001, 0.01, 1.0), layers=2.5, model={"fingerprint": "0"}, maps="0" * 64,
        ).save_pretrained(folder)  # fmt: skip
        return folder

    @functools.cached_property
    def readers(self) -> dict[str, Callable[[str], Any]]:
        """Return what reads a prompt, each with a tiny model behind it."""
        from tests.fuzz.prompts import readers

        return readers(self.path)

    @functools.cached_property
    def commands(self) -> dict[str, Any]:
        """Return all commands; those that train or measure stop once their settings are checked."""
        from deepenough import cli

        whole = ("report", "cutoffs", "par derive", "par plot", "ponder plot")
        return {
            name: command if name in whole else dataclasses.replace(command, run=_nothing, draws="")
            for name, command in cli.commands().items()
        }

    @functools.cached_property
    def settings(self) -> dict[type, dict[str, Any]]:
        """Return the settings class of every command with its default settings as YAML has them."""
        from deepenough import cli
        from deepenough.config import options

        found = {}
        for command in cli.commands().values():
            cls = cli._settings_class(command, [])
            tree: dict[str, Any] = {"method": "par", "provenance": {"commit": "0"}}
            for option in options(cls):
                *sections, name = option.name.split(".")
                place = tree
                for section in sections:
                    place = place.setdefault(section, {})
                known = option.default is not dataclasses.MISSING
                place[name] = option.default if known else "runs/mine"
            found[cls] = tree
        return found


def _nothing(config: Any) -> None:
    return None


def is_number(found: Any, low: float = -math.inf) -> bool:
    """Return whether a value is a finite number and no truth value."""
    return type(found) in (int, float) and abs(found) <= sys.float_info.max and found >= low


# -- derive ----------------------------------------------------------------------------------------


def make_derive(rng: random.Random, world: World) -> Any:
    num = rng.randrange(1, 4)
    rows = [[0.2, 0.5, 0.3], [0.7, 0.1, 0.2], [0.1, 0.1, 0.8]][:num]
    if rng.random() < 0.6:
        rows = mutate(rng, rows)
    costs: Any = {"attention": 3.0, "dense": 2.0, "identity": 0.0, "rest": 1.0}
    if rng.random() < 0.25:
        costs = mutate(rng, costs | {"unit": "flops"})
    budget = scalar(rng) if rng.random() < 0.15 else rng.choice((None, 0.7, 1.0))
    fixed = scalar(rng) if rng.random() < 0.15 else rng.choice((None, None, "*-a"[-num:]))
    return rows, costs, budget, fixed, rng.random() < 0.02


def check_derive(case: Any, world: World) -> None:
    from deepenough.par.search import derive
    from deepenough.par.training import derive_run, recorded_costs
    from deepenough.runs import RunFolder

    rows, costs, budget, fixed, in_a_run = case
    if in_a_run:
        folder = world.emptied()
        config = {"method": "par", "search": {}, "model": {"pattern": fixed}}
        (folder / "config.yaml").write_text(json.dumps(config))
        lines = [{"kind": "cost", "step": 0, "time": 0.0, **(costs if type(costs) is dict else {})}]
        lines.append({"kind": "train", "step": 1, "time": 0.0, "pi": rows})
        (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        found = derive_run(RunFolder(folder), budget).pattern
    else:
        table = None
        if type(costs) is dict and not {"step", "kind", "time"} & costs.keys():
            table = recorded_costs([Record(0, "cost", costs)])
        found = derive(rows, table, budget, fixed)
    assert len(found) == len(rows) and set(found) <= set("ad-") and set(found) != {"-"}, found
    for row in rows:
        assert len(row) == 3 and all(is_number(p, 0) for p in row), row
        assert abs(sum(row) - 1) < 0.011, row
    assert budget is None or is_number(budget, 0), budget
    if fixed is not None:
        assert isinstance(fixed, str) and all(
            f in ("*", a) for f, a in zip(fixed, found, strict=True)
        )


# -- frontier.json ---------------------------------------------------------------------------------


def make_frontier(rng: random.Random, world: World) -> Any:
    return spell(rng, mutate(rng, world.comparison))


def check_frontier(case: bytes, world: World) -> None:
    from deepenough.figure import as_json
    from deepenough.report.figures import frontier_section, read_frontier

    file = world.bad / "frontier.json"
    file.write_bytes(case)
    frontier = read_frontier(world.bad)
    section = frontier_section(frontier)
    json.dumps([as_json(figure) for figure in section.figures], allow_nan=False)
    for row in frontier.points:
        for name in ("quality", "quality_low", "quality_high"):
            assert is_number(getattr(row, name)), (name, row)
        for name in ("layers", "flops", "milliseconds"):
            assert is_number(getattr(row, name), 0), (name, row)
        assert row.quality_low <= row.quality <= row.quality_high, row
        assert isinstance(row.name, str) and isinstance(row.run, str), row
    assert isinstance(frontier.task.quality, str) and isinstance(frontier.task.unit, str)


# -- pages -----------------------------------------------------------------------------------------

TAGS = {
    *(
        "html",
        "head",
        "meta",
        "title",
        "style",
        "body",
        "header",
        "h1",
        "h2",
        "h3",
        "h4",
        "nav",
        "a",
    ),
    *(
        "main",
        "section",
        "p",
        "ul",
        "li",
        "div",
        "figure",
        "figcaption",
        "button",
        "code",
        "script",
    ),
    *("noscript", "footer", "span", "link", "strong", "dialog"),
}


class Page(HTMLParser):
    """The elements of a page, and what stands in its scripts."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=False)
        self.tags: list[str] = []
        self.data = ""
        self.inside = ""

    def handle_starttag(self, tag: str, attributes: Any) -> None:
        self.tags.append(tag)
        names = {name for name, _ in attributes}
        assert not any(name.startswith("on") or name in ("src", "style") for name in names), names
        assert all(name != "href" or v.startswith("#") for name, v in attributes), attributes
        if tag == "script":
            self.inside = dict(attributes).get("type", "script")

    def handle_endtag(self, tag: str) -> None:
        self.inside = "" if tag == "script" else self.inside

    def handle_data(self, data: str) -> None:
        if self.inside == "application/json":
            self.data += data


def check_page_text(page: str) -> None:
    """Assert that a page is valid, whatever the texts in it."""
    page.encode("utf-8")
    assert not any(ord(c) < 32 and c not in "\n\t\r" for c in page), "a control character"
    found = Page()
    found.feed(page)
    found.close()
    assert set(found.tags) <= TAGS, set(found.tags) - TAGS
    json.loads(found.data)


def make_page(rng: random.Random, world: World) -> Any:
    """Draw a run with bad texts where texts stand, a bad folder and a bad title."""
    method = rng.choice(list(world.runs))
    records = [dict(record) for record in rng.sample(world.runs[method], 4)]
    records += [
        r
        for r in world.runs[method]
        if r["kind"] in ("lens", "lazy_tokens", "ponder_passes", "fit")
    ]
    records = json.loads(json.dumps(records))
    bad = text(rng)
    for record in records:
        for key, old in record.items():
            if key not in ("kind", "step", "time") and isinstance(old, str):
                record[key] = bad if rng.random() < 0.5 else old + text(rng)
            elif isinstance(old, list) and old and isinstance(old[0], str):
                record[key] = [text(rng) if rng.random() < 0.5 else item for item in old]
            elif isinstance(old, dict) and "tokens" in old:
                old["tokens"] = [text(rng) for _ in old["tokens"]]
    name = (
        text(rng)
        .replace("/", "_")
        .replace("\0", "_")
        .encode("utf-8", "surrogateescape" if rng.random() < 0.5 else "ignore")
        if rng.random() < 0.5
        else b"run"
    )
    return method, records, rng.choice(("", text(rng))), name, rng.random() < 0.002


def _safe_make_page(rng: random.Random, world: World) -> Any:
    while True:
        with contextlib.suppress(UnicodeEncodeError):  # a name that no file can have
            return make_page(rng, world)


def check_page(case: Any, world: World) -> None:
    from deepenough.report.drawing import save
    from deepenough.report.page import compose, read_report, write_markdown, write_page

    method, records, title, name, pictures = case
    folder = world.emptied() / os.fsdecode(name[:100].strip(b". ") or b"run")
    folder.mkdir()
    (folder / "config.yaml").write_text(f"method: {method}\n")
    (folder / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    report = read_report([folder], title)
    check_page_text(compose(report))
    write_page(report, world.bad / "page.html")
    check_page_text((world.bad / "page.html").read_text(encoding="utf-8"))
    if pictures:
        for written in write_markdown(report, world.bad / "page.md"):
            if written.suffix == ".md":
                assert "\0" not in written.read_text(encoding="utf-8")
        for figure in report.entries[0].section.figures[:1]:
            for file in save(figure, world.bad / "svg", ("svg",)):
                ElementTree.parse(file)


# -- word counts -----------------------------------------------------------------------------------


def make_counts(rng: random.Random, world: World) -> Any:
    numbers = [
        rng.choice((rng.randrange(1000), rng.random(), rng.choice((0, 2**63, 1e300))))
        for _ in range(rng.randrange(1, 9))
    ]
    if rng.random() < 0.3:
        given = [scalar(rng) if rng.random() < 0.3 else number for number in numbers]
        return rng.choice((given, value(rng))), scalar(rng) if rng.random() < 0.3 else 2
    if rng.random() < 0.5:
        spelt = "\n".join(f"{text(rng) if rng.random() < 0.2 else 'the'}\t{n}" for n in numbers)
    else:
        spelt = rng.choice((" ", "\n", "\t")).join(
            f"{scalar(rng) if rng.random() < 0.1 else n}" for n in numbers
        )
    content = spelt.encode("utf-8", "surrogatepass")
    return damage(rng, content) if rng.random() < 0.6 else content, rng.randrange(0, 5)


def check_counts(case: Any, world: World) -> None:
    from deepenough.nn.cutoffs import optimal_cutoffs, optimal_cutoffs_ref, read_counts

    given, clusters = case
    if isinstance(given, bytes):
        file = world.bad / "counts.txt"
        file.write_bytes(given)
        given = read_counts(str(file))
    found = optimal_cutoffs(given, clusters)
    bounds = [0, *found.cutoffs, len(given)]
    assert len(found.cutoffs) == clusters - 1 and bounds == sorted(set(bounds)), found
    assert type(clusters) is int, clusters
    assert all(type(n) not in (bool, str) and math.isfinite(n) and n >= 0 for n in given), given
    assert math.isfinite(found.cost) and found.cost >= 0, found
    if len(given) < 7:
        ref = optimal_cutoffs_ref(given, clusters)
        assert math.isclose(found.cost, ref.cost, rel_tol=1e-9, abs_tol=1e-9), (found, ref)


# -- metrics.jsonl ---------------------------------------------------------------------------------


def make_metrics(rng: random.Random, world: World) -> Any:
    method = rng.choice(list(world.runs))
    records = mutate(rng, world.runs[method])
    if not isinstance(records, list):
        records = [records]
    lines = b"".join(spell(rng, record) + b"\n" for record in records)
    config = rng.choice(
        (None, mutate(rng, {"method": method, "model": {"pattern": "ad"}, "search": {}}))
    )
    return damage(rng, lines) if rng.random() < 0.1 else lines, config, rng.random() < 0.002


def check_metrics(case: Any, world: World) -> None:
    from deepenough.figure import as_json, read_run
    from deepenough.report.drawing import save
    from deepenough.report.figures import run_figures
    from deepenough.report.page import compose, read_report

    lines, config, pictures = case
    folder = world.bad / "run"
    folder.mkdir(exist_ok=True)
    (folder / "metrics.jsonl").write_bytes(lines)
    (folder / "config.yaml").write_text(yaml.safe_dump(config) if config else "method: par\n")
    check_page_text(compose(read_report([folder])))
    figures = run_figures(read_run(folder))
    json.dumps([as_json(figure) for figure in figures], allow_nan=False)
    if pictures:
        for figure in figures:
            save(figure, world.bad / "pictures", ("png",))


# -- shortcuts -------------------------------------------------------------------------------------


def _unsigned(file: Path) -> Any:
    """Return what a JSON file holds without the checksum of its content, which no change fits."""
    content = json.loads(file.read_text())
    content.pop("checksum", None)
    return content


def _artifact(rng: random.Random, folder: Path, stem: str) -> tuple[Any, bytes, bool]:
    """Draw an index and the bytes of its tensors, and whether the checksum is made to fit."""
    index = _unsigned(folder / f"{stem}.json")
    tensors = (folder / f"{stem}.safetensors").read_bytes()
    which = rng.random()
    if which < 0.6:
        index = mutate(rng, index)
    elif which < 0.8:
        tensors = damage(rng, tensors)
    else:
        length = int.from_bytes(tensors[:8], "little")
        header = json.dumps(mutate(rng, json.loads(tensors[8 : 8 + length]))).encode()
        tensors = len(header).to_bytes(8, "little") + header + tensors[8 + length :]
    return spell(rng, index), tensors, rng.random() < 0.9


def _put(case: tuple[bytes, bytes, bool], folder: Path, stem: str) -> None:
    import hashlib

    index, tensors, fits = case
    if fits:
        with contextlib.suppress(ValueError, RecursionError):
            content = json.loads(index)
            if isinstance(content, dict) and isinstance(content.get("sha256"), str):
                content["sha256"] = hashlib.sha256(tensors).hexdigest()
                index = json.dumps(content).encode()
    (folder / f"{stem}.json").write_bytes(index)
    (folder / f"{stem}.safetensors").write_bytes(tensors)


def make_shortcuts(rng: random.Random, world: World) -> Any:
    return _artifact(rng, world.shortcuts, "shortcuts")


def check_shortcuts(case: Any, world: World) -> None:
    from deepenough.shortcut.modeling import Shortcuts

    _put(case, world.bad, "shortcuts")
    found = Shortcuts.from_pretrained(world.bad)
    assert type(found.num_layers) is int and type(found.width) is int
    state = found.apply(torch.randn(found.width), 0, found.num_layers)
    assert state.shape == (found.width,) and found.targets in ("all", "last")
    for layer in found.tuned:
        found.apply(torch.randn(found.width), layer, found.num_layers, "tuned")
    found.record().to_json()
    json.dumps(found.made_for)
    if found.table is not None:
        assert found.cka().shape == (found.num_layers + 1,) * 2


# -- the command line ------------------------------------------------------------------------------


def make_command(rng: random.Random, world: World) -> Any:
    from deepenough import cli
    from deepenough.config import options

    name = rng.choice(list(world.commands))
    known = [option.name for option in options(cli._settings_class(world.commands[name], []))]
    words = name.split() if rng.random() < 0.95 else [text(rng)]
    for _ in range(rng.randrange(0, 5)):
        which = rng.random()
        word = rng.choice(
            (
                f"{scalar(rng)}",
                text(rng),
                "4",
                "true",
                "[1,2]",
                str(world.path / "mine"),
                json.dumps(value(rng, 2)),
            )
        )
        if which < 0.6:
            flag = f"--{rng.choice(known)}"
            words += [f"{flag}={word}"] if rng.random() < 0.5 else [flag, word]
        elif which < 0.7:
            flag = rng.choice(known)
            words += [f"--{flag[: rng.randrange(1, len(flag) + 1)]}", word]
        elif which < 0.8:
            words += [
                rng.choice(("--config", "--help", "-h", "--", "--=", "--config=", "-x", "---"))
            ]
        else:
            words.append(word)
    # Words of a command line are bytes without a NUL, and what is no UTF-8 among them is escaped.
    return [
        w.replace("\0", "").encode("utf-8", "surrogatepass").decode("utf-8", "surrogateescape")
        for w in words
    ]


def check_command(case: list[str], world: World) -> None:
    from deepenough import cli

    folder = world.emptied()
    shown, said = io.TextIOWrapper(io.BytesIO(), "utf-8"), io.StringIO()
    with (
        patch.object(cli, "commands", lambda: world.commands),
        contextlib.chdir(folder),
        contextlib.redirect_stdout(shown),
        contextlib.redirect_stderr(said),
    ):
        code = cli.main(case)
    assert code in (0, 2), code
    if code == 2:
        (line,) = [line for line in said.getvalue().splitlines() if "error:" in line][-1:]
        assert line.endswith((".", "?", "]")), line
        raise UserError(line)  # so that it counts as refused


# -- prompts ---------------------------------------------------------------------------------------


def make_prompts(rng: random.Random, world: World) -> Any:
    prompt = rng.choice(
        (
            text(rng),
            f"The {text(rng)} of",
            f"{text(rng)}\t{text(rng)}",
            " ".join(text(rng) for _ in range(3)),
        )
    )
    return rng.choice(list(world.readers)), prompt


def check_prompts(case: Any, world: World) -> None:
    name, prompt = case
    found = world.readers[name](prompt)
    shown = io.TextIOWrapper(io.BytesIO(), "utf-8")
    print(found, file=shown, flush=True)


# -- config.yaml -----------------------------------------------------------------------------------


LAUGHS = "\n".join(
    f"l{n}: &l{n} [{', '.join([f'*l{n - 1}' if n else 'ha'] * 9)}]" for n in range(8)
)


def make_config(rng: random.Random, world: World) -> Any:
    cls = rng.choice(list(world.settings))
    tree = mutate(rng, world.settings[cls])
    spelt = yaml.safe_dump(tree) if rng.random() < 0.5 else json.dumps(tree)
    content = spelt.encode("utf-8", "surrogatepass")
    which = rng.random()
    if which < 0.2:
        content = damage(rng, content)
    elif which < 0.3:
        bad = (
            "*a",
            "&a [*a]",
            "!!python/name:os.system",
            "!!timestamp x",
            "2020-99-99",
            "!!bool x",
            "!!int x",
            "? [a]",
            "<<: 5",
            "!!binary x",
            "[" * 3000,
            "{" * 500,
            "!!set {a, b}",
            "0o9",
            "1:2:3",
            LAUGHS,
        )
        content += f"\nextra: {rng.choice(bad)}\n".encode()
    return cls, content


def check_config(case: Any, world: World) -> None:
    from deepenough.config import dump, resolve, validate
    from deepenough.runs import read_config

    cls, content = case
    file = world.bad / "config.yaml"
    file.write_bytes(content)
    with contextlib.suppress(UserError):
        read_config(str(world.bad))
    found = validate(resolve(cls, file))
    dump(found, world.bad / "again.yaml")
    again = validate(resolve(cls, world.bad / "again.yaml"))
    assert repr(again) == repr(found)
    _assert_typed(found)


def _assert_typed(settings: Any) -> None:
    for field in dataclasses.fields(settings):
        found, hint = getattr(settings, field.name), str(field.type)
        if dataclasses.is_dataclass(found):
            _assert_typed(found)
        elif hint in ("int", "float", "bool", "str"):
            allowed = {"int": (int,), "float": (int, float), "bool": (bool,), "str": (str,)}[hint]
            assert type(found) in allowed, (field.name, found)


# -- rows of data ----------------------------------------------------------------------------------

ROWS = {
    "rows.csv": b'text,label\n"a good, long film",1\nbad film,0\nso so,1\nawful,0\n',
    "rows.tsv": b"sentence\tlabel\na good film\tpositive\nbad film\tnegative\nso so\tpositive\n",
    "rows.jsonl": b'{"text": "good", "pair": "film", "label": 1}\n'
    b'{"text": "bad", "pair": "film", "label": 0}\n',
    "pairs": b"A man rides.\nA dog.\n\nTwo men.\n",
    "qa1_story_train.txt": b"1 Mary went home.\n2 Where is Mary?\thome\t1\n"
    b"1 John left.\n2 Where is John?\tgone\t1\n",
    "text.txt": b"A first line.\nAnother one.\n\nThe last line.\n" * 4,
}


def make_rows(rng: random.Random, world: World) -> Any:
    name = rng.choice(list(ROWS))
    content = ROWS[name]
    if name.endswith("jsonl") and rng.random() < 0.7:
        rows = mutate(rng, [json.loads(line) for line in content.splitlines()])
        return name, b"".join(
            spell(rng, row) + b"\n" for row in (rows if isinstance(rows, list) else [rows])
        )
    for _ in range(rng.randrange(1, 3)):
        cells = [b"film", b"1", b"0", b"home", b"Mary", b"man", b"line", b"label", b"text"]
        if rng.random() < 0.5:
            bad = f"{scalar(rng)}".encode("utf-8", "surrogatepass")
            content = content.replace(rng.choice(cells), bad, 1)
        else:
            content = damage(rng, content)
    return name, content


def check_rows(case: Any, world: World) -> None:
    from deepenough.data.classification import open_classification
    from deepenough.data.config import ClassificationConfig
    from deepenough.data.corpus import open_corpus
    from deepenough.data.translation import read_pairs

    name, content = case
    file = world.bad / ("babi" if name.startswith("qa") else "") / name
    file.parent.mkdir(exist_ok=True)
    file.write_bytes(content)
    if name.startswith("rows"):
        found = open_classification(str(file), ClassificationConfig())
        for examples in found.splits.values():
            for example in examples:
                assert example.text.strip() and 0 <= example.label < len(found.labels)
                example.text.encode()
                (example.pair or "").encode()
    elif name == "pairs":
        (world.bad / "other").write_bytes(ROWS["pairs"])
        for pair in read_pairs(file, world.bad / "other"):
            "".join(pair).encode()
    elif name.startswith("qa"):
        with patch.dict(os.environ, DEEPENOUGH_DATA=str(world.bad)):
            examples = open_classification("babi:1", ClassificationConfig()).splits["train"]
        for example in examples:
            assert example.pair and example.pair.strip(), example
            "".join((example.text, example.pair)).encode()
    else:
        corpus = open_corpus(str(file))
        for split in corpus.splits:
            for line in corpus.lines(split):
                line.encode()


# -- calibrations, drafters, pickles ---------------------------------------------------------------


def make_drafts(rng: random.Random, world: World) -> Any:
    which = rng.choice(("calibration", "linear", "draft_model", "pickle"))
    if which == "calibration":
        return which, spell(rng, mutate(rng, _unsigned(world.drafts / "calibration.json")))
    if which == "pickle":
        matrix = rng.choice(
            (torch.eye(2), torch.ones(3, 2)[1:].T, torch.zeros(2, 3), torch.eye(2).int())
        )
        content = pickle.dumps(rng.choice((matrix, [matrix, torch.zeros(2)])))
        return which, damage(rng, content) if rng.random() < 0.9 else content
    stem = "linear_drafter" if which == "linear" else "draft_model"
    return which, _artifact(rng, world.drafts, stem)


def check_drafts(case: Any, world: World) -> None:
    from deepenough.decoding.calibration import Calibration
    from deepenough.decoding.draft_model import DraftModel
    from deepenough.decoding.drafters import LinearDrafter
    from deepenough.shortcut.source_pickles import import_source

    which, content = case
    if which == "calibration":
        file = world.bad / "calibration.json"
        file.write_bytes(content)
        calibration = Calibration.from_pretrained(file)
        calibration.verdict()
        assert calibration.threshold is None or is_number(calibration.threshold)
        assert 0 < calibration.max_disagreement < 1 and 0 < calibration.confidence < 1
        assert type(calibration.texts) is int and all(
            type(n) is int for n in calibration.exit_layers
        )
    elif which == "pickle":
        folder = world.emptied()
        (folder / "0_1.pickle").write_bytes(content)
        shortcuts = import_source(folder)
        matrix = shortcuts.matrix(0, 1)
        assert matrix.untyped_storage().nbytes() < 1000 and matrix.dtype.is_floating_point
        assert matrix.isfinite().all()
    else:
        folder = world.emptied()
        for file in world.drafts.iterdir():
            shutil.copy(file, folder)
        _put(content, folder, "linear_drafter" if which == "linear" else "draft_model")
        found = (
            LinearDrafter.from_pretrained(folder)
            if which == "linear"
            else DraftModel.from_pretrained(folder)
        )
        json.dumps(found.meta)
        linear = found if isinstance(found, LinearDrafter) else found.linear_drafter
        assert all(m.is_floating_point() and b.is_floating_point() for m, b in linear.maps)
        assert not linear.draft_vocab.dtype.is_floating_point and (linear.draft_vocab >= 0).all()
        json.dumps(linear.made_for)


KINDS = {
    kind.name: kind
    for kind in (
        Kind("derive", 240_000, make_derive, check_derive),
        Kind("frontier", 70_000, make_frontier, check_frontier),
        Kind("page", 12_000, _safe_make_page, check_page),
        Kind("counts", 100_000, make_counts, check_counts),
        Kind("metrics", 12_000, make_metrics, check_metrics),
        Kind("shortcuts", 40_000, make_shortcuts, check_shortcuts),
        Kind("command", 5_000, make_command, check_command),
        Kind("prompts", 5_000, make_prompts, check_prompts),
        Kind("config", 5_000, make_config, check_config),
        Kind("rows", 30_000, make_rows, check_rows),
        Kind("drafts", 30_000, make_drafts, check_drafts),
    )
}

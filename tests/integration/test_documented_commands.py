"""Every command and every Python block of README.md and docs/ really runs.

They run as they are written, in an empty folder, page by page; only sizes are cut down: training
steps, tokens and texts by `CAPS`, and models and corpora that a page names by tiny ones that stand
in for them. A run that a page takes for granted is made by the command, on that page or another,
whose `--out` it is. Commands for several processes run in one: tests/distributed starts real ones.
"""

import dataclasses
import io
import pickle
import re
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import datasets
import pytest
import sentencepiece
import torch

from deepenough.cli import commands, execute, parse_command
from deepenough.config import Command, RunConfig
from deepenough.hf import deferred, loading
from tests.decoding.test_export import write_gguf

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(r"^```(bash|python)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
ENDS_A_COMMAND = ("|", "||", "&", "&&", ";", ">", ">>", "<")

#: Largest values of options, by the last part of their names.
CAPS = {
    "steps": 3,
    "epochs": 1,
    "warmup": 2,
    "vocab_size": 1000,
    "batch_size": 4,
    "tokens": 3000,
    "lines": 60,
    "texts": 70,
    "sentences": 8,
    "train": 60,
    "test": 8,
    "eval_size": 20,
    "held_out": 8,
    "max_new_tokens": 8,
    "new_tokens": 8,
    "prompt_tokens": 8,
    "prompts": 2,
    "rounds": 1,
    "d_model": 32,
    "d_ff": 32,
    "scale": 0.01,
    "accumulate": 2,
}
#: Python blocks that need what no test may fetch, by a word in them.
NEEDS_A_HUB = ("lambada_openai",)
#: Runs that no documented command makes, and the commands that stand in for whatever does.
STAND_INS = {
    "runs/shortcut-real": [  # made by a benchmark
        "shortcut fit smollm2 --data mytext.txt --out runs/shortcut-real",
        "shortcut eval runs/shortcut-real --data mytext.txt",
    ],
    "runs/toy": [],  # of the method that docs/add-a-method.md invents
}


class Documented:
    """One command line of a page, from `deepenough` on."""

    def __init__(self, words: list[str]) -> None:
        table = commands()
        two = " ".join(words[:2])
        self.name = two if two in table else words[0]
        self.command: Command = table[self.name]
        self.words = words[len(self.name.split()) :]

    def settings(self) -> Any:
        return parse_command(self.command, self.name, self.words)

    def inputs(self, settings: Any) -> Iterator[str]:
        """Yield the runs that the command reads."""
        for field in dataclasses.fields(settings):
            value = getattr(settings, field.name)
            resumes = field.name == "out" and getattr(settings, "resume", False)
            if field.name != "out" or resumes:
                values = value if isinstance(value, list) else [value]
                yield from (v for v in values if isinstance(v, str) and v.startswith("runs/"))
        if "--config" in self.words:
            config = self.words[self.words.index("--config") + 1]
            yield from [config] if config.startswith("runs/") else []


def blocks(page: Path) -> list[tuple[str, str]]:
    return FENCE.findall(page.read_text("utf-8"))


def documented(body: str) -> Iterator[Documented]:
    """Yield the commands of `deepenough` in a bash block, however they are started."""
    for line in body.replace("\\\n", " ").replace("$MODELS/", "").splitlines():
        words = shlex.split(line, comments=True)
        if "deepenough" in words:
            rest = words[words.index("deepenough") + 1 :]
            end = next((i for i, word in enumerate(rest) if word in ENDS_A_COMMAND), len(rest))
            if rest[:end] and not rest[0].startswith("-"):
                yield Documented(rest[:end])


def every_command() -> list[Documented]:
    pages = (body for page in PAGES for kind, body in blocks(page) if kind == "bash")
    return [command for body in pages for command in documented(body)]


def shrink(settings: Any) -> None:
    """Cut sizes down in place, those of nested sections too."""
    for field in dataclasses.fields(settings):
        value, cap = getattr(settings, field.name), CAPS.get(field.name)
        if dataclasses.is_dataclass(value):
            shrink(value)
        elif cap is not None and isinstance(value, int | float) and value > cap:
            setattr(settings, field.name, type(value)(cap))


class World:
    """An empty folder in which the commands of one page run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.ran: list[str] = []

    def run(self, command: Documented) -> None:
        """Run a command, after those that make what it reads."""
        settings = command.settings()
        if command.name == "explore":  # serves until it is stopped: tests/explorer starts it
            self.ran.append(command.name)
            return
        for run in command.inputs(settings):
            self.provide(run)
        if isinstance(settings, RunConfig) and not settings.resume:
            shutil.rmtree(self.folder / settings.out, ignore_errors=True)
        shrink(settings)
        code = execute(command.command, settings)
        assert code == 0, f"deepenough {command.name} {shlex.join(command.words)}: exit code {code}"
        self.ran.append(command.name)

    def provide(self, run: str) -> None:
        """Make a run that is not there, by the command that documents how."""
        if (self.folder / run).exists():
            return
        if run in STAND_INS:
            for line in STAND_INS[run]:
                self.run(Documented(line.split()))
            return
        for maker in every_command():
            settings = maker.settings()
            if isinstance(settings, RunConfig) and Path(run).is_relative_to(settings.out):
                self.run(maker)
                assert (self.folder / run).exists(), f"no {run} after {maker.name}"
                return
        pytest.fail(f"no documented command makes {run}")


@pytest.fixture
def world(
    tmp_path: Path,
    text_file: Path,
    reviews: Path,
    tiny_bert: Path,
    tiny_llama: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> World:
    """A folder with what pages take for granted: texts of one's own, corpora, models."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    paragraphs = text_file.read_text("utf-8").split("\n\n")
    lines = [f"{' '.join(paragraph.split())}\n" for paragraph in paragraphs]
    (tmp_path / "mytext.txt").write_text("".join(lines * 4))
    (tmp_path / "texts" / "sub").mkdir(parents=True)
    (tmp_path / "texts" / "sub" / "one.txt").write_text(text_file.read_text("utf-8") * 20)
    (tmp_path / "reviews.txt").write_text("a good film\nso bad\n")
    (tmp_path / "passages.txt").write_text("he went to the window and opened the door.\n")
    write_gguf(tmp_path / "model.gguf")
    (tmp_path / "counts.txt").write_text("90 50 30 20 9 5 3 2 1 1")
    rows = (reviews / "train.tsv").read_text().replace("\t", ",")
    (tmp_path / "reviews.csv").write_text(rows)

    matrices = tmp_path / "linreg" / "gpt2" / "wikipedia"
    matrices.mkdir(parents=True)
    for name in ("0_1", "0_2", "1_2"):
        (matrices / f"{name}.pickle").write_bytes(pickle.dumps(torch.eye(4)))
    (tmp_path / "tags.csv").write_text("text,label\n" + 'a good film,"good, film"\nbad,bad\n' * 20)

    corpora = tmp_path / "corpora"
    monkeypatch.setenv("DEEPENOUGH_DATA", str(corpora))
    for name in ("wikitext-2", "wikitext-2-raw"):
        (corpora / name).mkdir(parents=True)
        for number, split in enumerate(("train", "valid", "test")):
            (corpora / name / f"{split}.txt").write_text("".join(lines[number::3] * 4))
    shutil.copytree(reviews, corpora / "sst2")
    write_glue(corpora / "glue")
    write_pairs(corpora / "multi30k", lines)
    train_pieces(corpora / "par" / "wiki2_12k.model", user_defined_symbols=["@-@"])
    train_pieces(
        corpora / "tokenizers" / "albert-base-v2" / "spiece.model",
        user_defined_symbols=["[CLS]", "[SEP]", "[MASK]"],
        pad_piece="<pad>",
        pad_id=3,
    )

    find = loading.find_place
    stand_ins = dict.fromkeys(("smollm2", "gpt2", "stories15M"), tiny_llama) | {"minilm": tiny_bert}
    for module in (loading, deferred):
        monkeypatch.setattr(
            module, "find_place", lambda name: str(stand_ins.get(name) or find(name))
        )
    monkeypatch.setattr(loading, "packaged_folder", stand_ins.get)
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"A dog runs on the beach.\n")))
    own = [{"text": line} for line in lines]
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: {"train": own})
    return World(tmp_path)


def write_glue(folder: Path) -> None:
    """Write two tasks in the form of GLUE's download."""
    for name, head, rows in (
        ("CoLA", "", "gj04\t1\t\ta good film\ngj04\t0\t*\tfilm good a\n"),
        ("STS-B", "sentence1\tsentence2\tscore\n", "good\tgood\t5.0\nbad\tgood\t0.5\n"),
    ):
        (folder / name).mkdir(parents=True)
        (folder / name / "train.tsv").write_text(head + rows * 10)
        (folder / name / "dev.tsv").write_text(head + rows * 4)


def write_pairs(folder: Path, lines: list[str]) -> None:
    """Write a parallel corpus of three splits, in which the other language is English reversed."""
    words = " ".join(lines).split()
    texts = [" ".join(words[start : start + 6]) for start in range(0, len(words), 6)]
    folder.mkdir(parents=True)
    for split, part in (
        ("train", texts[16:]),
        ("val", texts[:8]),
        ("test_2016_flickr", texts[8:16]),
    ):
        reverse = [" ".join(reversed(text.split())) for text in part]
        (folder / f"{split}.en").write_text("\n".join(part) + "\n")
        (folder / f"{split}.de").write_text("\n".join(reverse) + "\n")


def train_pieces(model: Path, **options: Any) -> None:
    """Train a small SentencePiece model, as a stand-in for a published one."""
    model.parent.mkdir(parents=True)
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=(line for topic in topics.values() for line in topic.split("\n")),
        model_prefix=str(model.with_suffix("")),
        vocab_size=3000,
        minloglevel=2,
        **options,
    )
    model.with_suffix(".vocab").unlink()


#: Pages that take longest: `make test-full` runs them, beside notebooks and browsers.
LONG = {"lazy", "model", "par", "prune", "results", "shortcut"}


# What torch.compile warns of in its own code.
@pytest.mark.filterwarnings("default::DeprecationWarning")
@pytest.mark.filterwarnings("default::UserWarning")
@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, id=page.stem, marks=[pytest.mark.slow] if page.stem in LONG else [])
        for page in PAGES
        if blocks(page)
    ],
)
def test_commands_and_code_run(page: Path, world: World) -> None:
    namespace: dict[str, Any] = {}
    num_found = 0
    for kind, body in blocks(page):
        if kind == "bash":
            for command in documented(body):
                world.run(command)
                num_found += 1
        elif not any(word in body for word in NEEDS_A_HUB):
            for run in re.findall(r"\bruns/[\w-]+", body):
                world.provide(run)
            exec(compile(body, f"{page.name}, a Python block", "exec"), namespace)
    assert len(world.ran) >= num_found  # and those that make what a page takes for granted


def test_every_verb_is_documented() -> None:
    # What `make demo` runs is run by tests/test_demo.py.
    assert {command.name for command in every_command()} == set(commands()) - {"demo"}

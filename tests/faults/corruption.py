"""Damage to files: what is read is what was saved, or a sentence says what is wrong.

Everything that the product saves is made once, in small, by its own commands. Then, in a copy, one
file at a time is damaged: bits flipped, the end cut off, emptied, deleted, overwritten with other
bytes, or exchanged for the file of the same name of another run. Something that reads it is run: a
loader, or a command. It must give the answer of the undamaged files, or refuse in a sentence; a
different answer counts as right only if what was said names the damage (an older checkpoint that
was used, lines of records that were skipped). Folders that may not be written to, full disks, two
commands in one folder, and `--overwrite` of what is not a run, must be refused in a sentence that
leaves everything as it was.

Outcomes: `same`, `recovered` (another answer, and said so), `refused`; `silent` and `traceback` are
failures.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import io
import json
import logging
import os
import random
import resource
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tests.faults.cases import CASES, difference, make_inputs, result_of

GOOD = ("same", "recovered", "refused")
FLIPS = 4
"""Bits flipped in every file, one at a time."""
NOBODY = 65534
"""A user without rights, for folders that root could write to nevertheless."""

Reader = Callable[[Path], Any]


@dataclass(frozen=True)
class Artifact:
    """Something saved: where it is, and what reads it."""

    name: str
    needs: tuple[str, ...]
    """Folders that the reader needs, copied for every case."""
    files: tuple[str, ...]
    """Globs of the files that are damaged."""
    read: Reader
    """Takes the folder of a case, with `inputs` beside what it needs, and returns an answer."""
    twin: tuple[str, str] = ("", "")
    """How a file's path changes to that of another run's file of the same kind."""


# -- readers ---------------------------------------------------------------------------------------


def command(words: str, folder: Path) -> Any:
    """Return a reader's answer from a command: what it leaves; a refusal is raised."""
    from deepenough.cli import main
    from deepenough.errors import UserError

    printed, errors = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(errors):
        code = main(shlex.split(words.format(inputs=(folder / "inputs").resolve())))
    said = errors.getvalue()
    if code == 0:
        logging.getLogger("deepenough").warning("%s", said) if said.strip() else None
        return printed.getvalue()
    if code == 2 and said.count("deepenough: error:") == 1 and "Traceback" not in said:
        raise UserError(said)
    raise RuntimeError(f"exit code {code}: {said}")


def weights(model: Any) -> dict[str, str]:
    """Return the hash of every weight of a model or of tensors by name."""
    state = model if isinstance(model, dict) else model.state_dict()
    return {name: digest(tensor) for name, tensor in sorted(state.items())}


def digest(tensor: Any) -> str:
    """Return a hash of a tensor's content."""
    return hashlib.sha256(tensor.detach().contiguous().numpy().tobytes()).hexdigest()[:16]


def by_class(name: str, place: str) -> Reader:
    """Return a reader that loads a model by its class, as any user of transformers does."""

    def read(folder: Path) -> Any:
        import deepenough

        if name == "ParityModel":
            from deepenough.ponder.parity import ParityModel as own
        else:
            own = getattr(deepenough, name)
        model = own.from_pretrained(folder / place)
        config = {k: v for k, v in model.config.to_dict().items() if k != "_name_or_path"}
        return [weights(model), json.loads(json.dumps(config, default=str))]

    return read


def evaluate_par(folder: Path) -> Any:
    from deepenough.config import resolve
    from deepenough.par.config import ParEvalConfig
    from deepenough.par.evaluation import evaluate

    settings = {"run": "par", "data": str(folder / "inputs/text.txt"), "dataset.cache": "cache"}
    found = evaluate(resolve(ParEvalConfig, None, settings | {"split": "valid"}))
    return {name: value for name, value in found.items() if "second" not in name}


def predict_ponder(folder: Path) -> Any:
    from deepenough.ponder.evaluation import predict

    return [asdict(found) for found in predict("ponder", ["a good film", "the plot so awful"])]


def translate(folder: Path) -> Any:
    from deepenough.lazy.config import BeamSearchConfig
    from deepenough.lazy.inference import load_translator, translate_lines

    translator, search = load_translator("translation"), BeamSearchConfig(beams=1)
    return [str(line) for line in translate_lines(translator, ["la la la"], search)]


def evaluate_language(folder: Path) -> Any:
    return command("lazy eval language --json", folder)


def load_any(folder: Path) -> Any:
    import deepenough

    model, tokenizer = deepenough.load("par")
    return [weights(model), sorted(tokenizer.get_vocab().items())]


def prepare_text(folder: Path) -> Any:
    from deepenough.config import resolve
    from deepenough.data.config import DatasetConfig
    from deepenough.data.tokens import prepare, tokenizer_fingerprint

    settings = {"cache": "cache", "vocab_size": 400, "batch_size": 4, "length": 8}
    found = prepare(str(folder / "inputs/text.txt"), resolve(DatasetConfig, None, settings))
    tokens = {
        split: [hashlib.sha256(file.ids.tobytes()).hexdigest(), file.num_words, file.num_bytes]
        for split, file in found.tokens.items()
    }
    return [tokenizer_fingerprint(found.tokenizer), tokens]


def load_maps(place: str) -> Reader:
    def read(folder: Path) -> Any:
        from deepenough import Shortcuts

        found = Shortcuts.from_pretrained(folder / place)
        maps = {str(key): digest(value) for key, value in sorted(found.maps.items())}
        biases = {str(key): digest(value) for key, value in sorted(found.biases.items())}
        tuned = {str(i): [digest(a), digest(b)] for i, (a, b) in sorted(found.tuned.items())}
        return [maps, biases, tuned, found.meta, found.targets, found.mode]

    return read


def go_on_fitting(folder: Path) -> Any:
    import deepenough

    model, tokenizer = deepenough.load(str(folder / "inputs/llama"))
    texts = (folder / "inputs/words.txt").read_text().splitlines()[:60]
    found = deepenough.Shortcuts.fit(
        model, tokenizer, texts, resume=folder / "statistics", save_every=0.0, batch_tokens=200
    )
    return {str(key): digest(value) for key, value in sorted(found.maps.items())}


def go_on_writing(folder: Path) -> Any:
    import deepenough
    from deepenough.decoding.backends import make_engine
    from deepenough.decoding.config import SelfGeneratedConfig
    from deepenough.decoding.eagle3 import layers_read
    from deepenough.decoding.self_generated import write_texts

    model, tokenizer = deepenough.load(str(folder / "inputs/llama"))
    config = SelfGeneratedConfig(tokens=600, prompt_tokens=6, new_tokens=10, min_chars=10, batch=16)
    words, place = str((folder / "inputs").resolve() / "words.txt"), Path("draft/checkpoints/text")
    layers = layers_read(model.config.num_hidden_layers)
    texts = write_texts(place, make_engine(model), tokenizer, words, config, 0, layers)
    return [[text.ids_T.tolist(), digest(text.states_TD), text.prompt] for text in texts]


def load_drafts(folder: Path) -> Any:
    from deepenough import DraftModel

    found = DraftModel.from_pretrained("draft")
    maps = [[digest(a), digest(b)] for a, b in found.linear_drafter.maps]
    vocab = digest(found.linear_drafter.draft_vocab)
    return [weights(found.head), maps, vocab, found.meta, found.linear_drafter.meta]


def load_calibration(folder: Path) -> Any:
    from deepenough.decoding.calibration import Calibration

    return asdict(Calibration.from_pretrained("guarantee"))


def report(*runs: str) -> Reader:
    def read(folder: Path) -> Any:
        command(f"report {' '.join(runs)} --out page.md", folder)
        text = Path("page.md").read_text()
        pictures = {path.name: path.stat().st_size for path in Path("page-figures").iterdir()}
        return [text, pictures]

    return read


def profile_again(folder: Path) -> Any:
    command(CASES["profile"].words, folder)
    return Path("profile/profile.json").read_text()


def derive(folder: Path) -> Any:
    return command("par derive par-search --json", folder)


def resume(name: str, words: str = "") -> Reader:
    """Return a reader that goes on with a run whose last steps and model are missing."""

    def read(folder: Path) -> Any:
        command(f"{CASES[name].words} {words} --resume", folder)
        return {place: found for place, found in result_of(folder).items() if "inputs" not in place}

    return read


KEEP = "--train.keep 3"
MODELS = ("model/*",)
STEPS = ("checkpoints/**/*",)

ARTIFACTS = [
    Artifact("par model", ("par", "cache"), ("par/model/*",), evaluate_par, ("par/", "par2/")),
    Artifact("par model, load", ("par",), ("par/model/*",), load_any, ("par/", "par2/")),
    Artifact(
        "par model, class",
        ("par",),
        ("par/model/config.json", "par/model/model.safetensors", "par/model/checksums.json"),
        by_class("ParForCausalLM", "par/model"),
        ("par/", "par2/"),
    ),
    Artifact("par settings", ("par", "cache"), ("par/config.yaml",), evaluate_par),
    Artifact(
        "par checkpoints", ("par-cut", "cache"), ("par-cut/checkpoints/*/*",),
        resume("par train", f"{KEEP} --out par-cut"), ("step-000000008", "step-000000004"),
    ),
    Artifact("par search records", ("par-search",), ("par-search/metrics.jsonl",), derive),
    Artifact(
        "ponder model", ("ponder",), ("ponder/model/*", "ponder/config.yaml"), predict_ponder,
        ("ponder/", "ponder2/"),
    ),
    Artifact(
        "ponder model, class",
        ("ponder",),
        ("ponder/model/config.json", "ponder/model/model.safetensors"),
        by_class("PonderEncoderForSequenceClassification", "ponder/model"),
        ("ponder/", "ponder2/"),
    ),
    Artifact(
        "ponder checkpoints", ("ponder-cut",), ("ponder-cut/checkpoints/*/*",),
        resume("ponder train", f"{KEEP} --out ponder-cut"), ("step-000000008", "step-000000004"),
    ),
    Artifact(
        "parity model", ("parity",), ("parity/model/*",),
        by_class("ParityModel", "parity/model"), ("parity/", "parity2/"),
    ),
    Artifact(
        "lazy model", ("translation",), ("translation/model/*",), translate,
        ("translation/", "translation2/"),
    ),
    Artifact(
        "lazy model, class",
        ("translation",),
        ("translation/model/config.json", "translation/model/model.safetensors"),
        by_class("LazyTransformerForConditionalGeneration", "translation/model"),
        ("translation/", "translation2/"),
    ),
    Artifact(
        "lazy checkpoints", ("translation-cut", "cache"), ("translation-cut/checkpoints/*/*",),
        resume("lazy train, translation", f"{KEEP} --out translation-cut"),
        ("step-000000008", "step-000000004"),
    ),
    Artifact("token cache", ("cache",), ("cache/tokens/*/*",), prepare_text),
    Artifact("tokenizer cache", ("cache",), ("cache/tokenizers/*/*",), prepare_text),
    Artifact(
        "linear maps", ("shortcut",), ("shortcut/shortcuts/*",), load_maps("shortcut/shortcuts"),
        ("shortcut/", "shortcut2/"),
    ),
    Artifact(
        "affine maps", ("shortcut",), ("shortcut/affine/*",), load_maps("shortcut/affine"),
        ("shortcut/", "shortcut2/"),
    ),
    Artifact(
        "tuned maps", ("tuned",), ("tuned/shortcuts/*",), load_maps("tuned/shortcuts"),
        ("tuned/", "shortcut2/"),
    ),
    Artifact(
        "sums of a fit", ("statistics",), ("statistics/*",), go_on_fitting,
        ("statistics/", "statistics2/"),
    ),
    Artifact(
        "texts of a model", ("draft",), ("draft/checkpoints/text/*",), go_on_writing,
        ("part-00000", "part-00001"),
    ),
    Artifact("draft model", ("draft",), ("draft/model/*",), load_drafts, ("draft/", "draft2/")),
    Artifact("calibration", ("guarantee",), ("guarantee/*.json",), load_calibration),
    Artifact("comparison", ("compared",), ("compared/frontier.json",), report("compared")),
    Artifact("profile", ("profile",), ("profile/profile.json",), profile_again),
    Artifact(
        "records", ("parity",), ("parity/metrics.jsonl", "parity/config.yaml"), report("parity")
    ),
]  # fmt: skip

#: What makes them: a case, and what is added to its words.
MADE = [
    ("par train", KEEP),
    ("par train", "--out par2 --train.seed 1"),
    ("par search", ""),
    ("ponder train", KEEP),
    ("ponder train", "--out ponder2 --train.seed 1"),
    ("ponder parity", ""),
    ("ponder parity", "--out parity2 --train.seed 1"),
    ("lazy train, translation", KEEP),
    ("lazy train, translation", "--out translation2 --train.seed 1"),
    ("shortcut fit", ""),
    ("shortcut fit", "--out shortcut2 --fit.ridge 0.1"),
    ("shortcut fit --tuned", ""),
    ("decode tune", ""),
    ("decode tune", "--out draft2 --train.seed 1"),
    ("decode calibrate", ""),
    ("compare", ""),
    ("profile", ""),
]


# -- faults ----------------------------------------------------------------------------------------


def faults(seed: int, twin: Path | None) -> dict[str, Callable[[Path], None]]:
    """Return every way to damage one file."""
    found: dict[str, Callable[[Path], None]] = {}
    for number in range(FLIPS):

        def flip(file: Path, number: int = number) -> None:
            content = bytearray(file.read_bytes())
            draw = random.Random(f"{seed} {number} {file.name}")
            place = draw.randrange(len(content))
            content[place] ^= 1 << draw.randrange(8)
            file.write_bytes(content)

        found[f"flip {number + 1}"] = flip
    found |= {
        "cut in half": lambda file: file.write_bytes(file.read_bytes()[: file.stat().st_size // 2]),
        "cut by a byte": lambda file: file.write_bytes(file.read_bytes()[:-1]),
        "emptied": lambda file: file.write_bytes(b""),
        "deleted": lambda file: file.unlink(),
        "other bytes": lambda file: file.write_bytes(
            random.Random(seed).randbytes(max(1, file.stat().st_size))
        ),
        "other kind": lambda file: foreign(file),
    }  # type: ignore[dict-item]
    if twin is not None and twin.is_file():
        found["exchanged"] = lambda file: shutil.copyfile(twin, file)  # type: ignore[dict-item]
    return found


def foreign(file: Path) -> None:
    """Put a good file of another kind in the place of one."""
    if file.suffix == ".safetensors":
        import torch
        from safetensors.torch import save_file

        save_file({"albert.embeddings.word_embeddings.weight": torch.ones(3, 4)}, file)
    elif file.suffix == ".json":
        file.write_text('{"format": "another", "version": 1, "files": {}, "step": 3}\n')
    elif file.suffix == ".yaml":
        file.write_text("- a list\n- of two\n")
    else:
        file.write_text('{"step": 1, "kind": "other", "time": 0.5}\nA line of prose.\n')


# -- running ---------------------------------------------------------------------------------------


class Said(logging.Handler):
    """Collects what the product says."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


@contextlib.contextmanager
def quietly(folder: Path) -> Iterator[list[str]]:
    """Run in a folder, nothing printed; yield the list of what is said."""
    import warnings

    before, logger, handler = Path.cwd(), logging.getLogger("deepenough"), Said()
    propagate = logger.propagate
    logger.addHandler(handler)
    logger.propagate = False
    os.chdir(folder)
    try:
        with (
            warnings.catch_warnings(),
            contextlib.redirect_stdout(io.StringIO()),
            contextlib.redirect_stderr(io.StringIO()),
        ):
            warnings.simplefilter("ignore")
            yield handler.lines
    finally:
        os.chdir(before)
        logger.removeHandler(handler)
        logger.propagate = propagate


def run_case(read: Reader, folder: Path, expected: Any, damaged: Path | None) -> tuple[str, str]:
    """Return the outcome of reading damaged files, and what was said or went wrong."""
    from deepenough.errors import UserError

    with quietly(folder) as said:
        try:
            answer = read(folder)
        except UserError as error:
            text = str(error)
            return ("refused", text) if text.strip() else ("traceback", "a refusal without words")
        except Exception:
            return "traceback", traceback.format_exc()
    where = difference(expected, answer)
    text = " ".join(said)
    if where is None:
        return "same", text
    named = damaged is None or damaged.name in text or damaged.parent.name in text
    return ("recovered" if named and said else "silent"), f"{where}; said: {text}"


class Harness:
    """Makes everything that is saved once, and copies it for every case."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.made = folder, folder / "made"
        self.number = 0
        (self.made / "inputs").mkdir(parents=True)
        make_inputs(self.made / "inputs")
        for path in (self.made, *self.made.rglob("*")):
            path.chmod(0o755)  # for the user without rights, too

    def make(self, steps: list[tuple[str, str]]) -> None:
        """Run the commands whose results are damaged."""
        with quietly(self.made):
            for name, words in steps:
                command(f"{CASES[name].words} {words}", self.made)
        for name in ("par", "ponder", "translation"):
            if (self.made / name).is_dir():
                cut_run(self.made / name, self.made / f"{name}-cut")
        if (self.made / "shortcut").is_dir():
            with quietly(self.made):
                go_on_fitting(self.made)
                shutil.copytree("statistics", "statistics2")
                other = (self.made / "inputs/words.txt").read_text()
                (self.made / "inputs/words.txt").write_text("w3 w4 w5 w6\n" + other)
                shutil.rmtree("statistics2")
                (self.made / "statistics").rename("kept")
                go_on_fitting(self.made)
                (self.made / "statistics").rename("statistics2")
                (self.made / "kept").rename("statistics")
                (self.made / "inputs/words.txt").write_text(other)

    def copy(self, needs: tuple[str, ...]) -> Path:
        """Return a new folder with copies of some of what was made."""
        self.number += 1
        folder = self.folder / f"case-{self.number}" / "runs"  # a report names the last two parts
        folder.mkdir(parents=True)
        (folder / "inputs").symlink_to(self.made / "inputs")
        for name in needs:
            shutil.copytree(self.made / name, folder / name)
        return folder

    def damage(
        self, artifact: Artifact, seed: int, only: Callable[[str, str], bool] | None = None
    ) -> Iterator[tuple[str, str, str]]:
        """Yield file and fault, outcome, and what was said, of every case of an artifact."""
        folder = self.copy(artifact.needs)
        with quietly(folder):
            expected = artifact.read(folder)
        shutil.rmtree(folder)
        again = self.copy(artifact.needs)
        outcome, text = run_case(artifact.read, again, expected, None)
        shutil.rmtree(again)
        if outcome != "same":
            raise RuntimeError(f"{artifact.name} is not read alike twice: {text}")
        paths = sorted({path for glob in artifact.files for path in self.made.glob(glob)})
        if not any(path.is_file() for path in paths):
            raise RuntimeError(f"{artifact.name} has no files {artifact.files}")
        for path in paths:
            place = path.relative_to(self.made)
            old, new = artifact.twin
            twin = self.made / str(place).replace(old, new) if old else None
            for fault, apply in faults(seed, twin if twin != path else None).items():
                if not path.is_file() or not (only is None or only(str(place), fault)):
                    continue
                if fault.startswith("flip") and not path.stat().st_size:
                    continue
                folder = self.copy(artifact.needs)
                apply(folder / place)
                outcome, text = run_case(artifact.read, folder, expected, folder / place)
                shutil.rmtree(folder)
                yield f"{place}: {fault}", outcome, text


def cut_run(source: Path, target: Path) -> None:
    """Copy a run as a kill after its last checkpoint but one leaves it."""
    shutil.copytree(source, target)
    steps = sorted((target / "checkpoints").iterdir())
    shutil.rmtree(steps[-1])
    shutil.rmtree(target / "model")
    config = target / "config.yaml"
    settings = config.read_text().partition("\n")[2]
    config.write_text(settings.replace(f"out: {source.name}", f"out: {target.name}"))


# -- places that cannot be written to, and two at once ---------------------------------------------


@contextlib.contextmanager
def read_only(folder: Path) -> Iterator[None]:
    """Take away the right to write into a folder and all below it; all beside it stays open."""
    is_root = os.geteuid() == 0
    closed = [folder, *(path for path in folder.rglob("*") if path.is_dir())]
    for path in (folder.parent, *folder.parent.rglob("*")):
        if not path.is_symlink():
            path.chmod(0o777)
    for path in closed:
        path.chmod(0o555)
    if is_root:
        os.seteuid(NOBODY)
    try:
        yield
    finally:
        if is_root:
            os.seteuid(0)
        for path in closed:
            path.chmod(0o755)


@contextlib.contextmanager
def full_disk(size: int) -> Iterator[None]:
    """Let the system refuse every file that grows beyond so many bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@contextlib.contextmanager
def small_disk(folder: Path, size: int) -> Iterator[None]:
    """Put a file system of so many bytes at a folder; where that is not allowed, limit files."""
    options = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    mounted = os.geteuid() == 0 and not subprocess.run(options, capture_output=True).returncode
    if not mounted:
        with full_disk(size // 2):
            yield
        return
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True, capture_output=True)


#: Commands that write, with the folder they write to and what they need.
WRITING: dict[str, tuple[str, str, tuple[str, ...]]] = {
    name: (case.words, case.words.partition("--out ")[2].split()[0], ())
    for name, case in CASES.items()
    if "--out" in case.words and case.resume and name != "demo"
} | {
    "par plot": ("par plot par", "par", ("par",)),
    "ponder eval": ("ponder eval ponder", "ponder", ("ponder",)),
    "lazy eval": ("lazy sweep translation --search.beams 1", "translation", ("translation",)),
    "par derive": ("par derive par-search --budget 0.9", "par-search", ("par-search",)),
    "shortcut lens": ("shortcut lens shortcut --prompt w4", "shortcut", ("shortcut",)),
    "decode calibrate": (CASES["decode calibrate"].words, "guarantee", ("shortcut",)),
    "compare": (CASES["compare"].words, "compared", ("ponder",)),
    "profile": (CASES["profile"].words, "profile", ()),
    "report": ("report parity --out pages/page.html", "pages", ("parity",)),
    "report, Markdown": ("report parity --out pages/page.md", "pages", ("parity",)),
}
TRAINING = [name for name, case in CASES.items() if case.resume]


def snapshot(folder: Path) -> dict[str, str]:
    """Return the content of every file of a folder by its path."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in files
    }


def refuses(words: str, folder: Path) -> tuple[str, str]:
    """Return the outcome of a command that has to be refused."""
    outcome, text = run_case(lambda place: command(words, place), folder, None, None)
    return ("silent", "it was done") if outcome in ("same", "recovered") else (outcome, text)


def all_written(words: str) -> Reader:
    """Return a reader that runs a command and looks whether the files it names are there."""

    def read(folder: Path) -> Any:
        printed = command(words, folder)
        for line in printed.splitlines():
            if line.endswith((".png", ".pdf", ".svg", ".html", ".md", ".json")):
                file = folder / line.split()[-1]
                if not file.stat().st_size:
                    raise RuntimeError(f"{file} is empty")
        return printed

    return read


def place_faults(harness: Harness) -> Iterator[tuple[str, str, str, str]]:
    """Yield kind, command, outcome and what was said, of every fault that is no damaged file."""
    for name, (words, out, needs) in WRITING.items():
        for kind in ("read-only", "full disk 4k", "full disk 64k", "full disk 200k"):
            folder = harness.copy(needs)
            target = folder / out
            target.mkdir(exist_ok=True)
            if kind == "read-only":
                with read_only(target):
                    outcome, text = refuses(words, folder)
                yield kind, name, outcome, text
            elif not needs or out not in needs:  # else there is something in the folder
                size = int(kind.split()[-1][:-1]) * 1024
                with small_disk(target, size):
                    # What fits into so small a place is right to succeed.
                    outcome, text = run_case(all_written(words), folder, None, None)
                if outcome != "refused":
                    outcome = "same" if outcome != "traceback" else outcome
                yield kind, name, outcome, text
            shutil.rmtree(folder)
    for name in TRAINING:
        words = CASES[name].words
        out = words.partition("--out ")[2].split()[0]
        yield "two at once", name, *two_at_once(harness, words, out)
        yield "foreign folder", name, *foreign_folder(harness, words, out)
        yield "refused early", name, *leaves_nothing(harness, words, out)
        yield "lock of the dead", name, *lock_of_the_dead(harness, words, out)


def two_at_once(harness: Harness, words: str, out: str) -> tuple[str, str]:
    """Return the outcome of a command whose folder another process is writing to."""
    folder = harness.copy(())
    (folder / out).mkdir()
    (folder / out / "training.log").write_text("")
    code = (
        "import sys, pathlib; from deepenough.artifacts import locked\n"
        "with locked(pathlib.Path(sys.argv[1])): print('held', flush=True); sys.stdin.read()"
    )
    other = subprocess.Popen(
        [sys.executable, "-c", code, str(folder / out)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert other.stdout is not None and other.stdout.readline() == "held\n"
    before = snapshot(folder / out)
    outcomes = [refuses(f"{words} {flag}", folder) for flag in ("--resume", "--overwrite")]
    left = snapshot(folder / out)
    other.communicate("")
    shutil.rmtree(folder)
    for outcome, text in outcomes:
        if outcome != "refused":
            return outcome, text
        if out not in text or "Another command" not in text or before != left:
            return "silent", f"refused for another reason, or left {list(left)}: {text}"
    return outcomes[0]


def lock_of_the_dead(harness: Harness, words: str, out: str) -> tuple[str, str]:
    """Return the outcome of a command in a folder whose writer was killed."""
    folder = harness.copy(())
    (folder / out).mkdir()
    code = (
        "import sys, os, signal, pathlib; from deepenough.artifacts import locked\n"
        "with locked(pathlib.Path(sys.argv[1])): os.kill(os.getpid(), signal.SIGKILL)"
    )
    subprocess.run([sys.executable, "-c", code, str(folder / out)])
    (folder / out / "config.yaml.tmp").write_text("half")
    (folder / out / "training.log").write_text("")
    outcome, text = run_case(lambda place: command(f"{words} --resume", place), folder, None, None)
    left = [path.name for path in (folder / out).rglob("*.tmp")] + [
        path.name for path in (folder / out).rglob(".lock")
    ]
    shutil.rmtree(folder)
    if left:
        return "silent", f"temporary files stayed: {left}"
    return ("same", text) if outcome in ("same", "recovered", "silent") else (outcome, text)


def foreign_folder(harness: Harness, words: str, out: str) -> tuple[str, str]:
    """Return the outcome of overwriting a folder of someone else's."""
    folder = harness.copy(())
    (folder / out / "model").mkdir(parents=True)
    (folder / out / "config.yaml").write_text("name: mine\nlearning_rate: 3\n")
    (folder / out / "model" / "config.json").write_text("{}")
    before = snapshot(folder / out)
    outcome, text = refuses(f"{words} --overwrite", folder)
    after = snapshot(folder / out)
    shutil.rmtree(folder)
    return (outcome, text) if before == after else ("silent", "files of someone else are gone")


def leaves_nothing(harness: Harness, words: str, out: str) -> tuple[str, str]:
    """Return the outcome of a command whose text is not there, which must leave no folder."""
    folder = harness.copy(())
    wrong = "--data nowhere/at-all.txt" if "--data " in words else "--train.lr -1"
    outcome, text = refuses(f"{words} {wrong}", folder)
    there = (folder / out).exists()
    shutil.rmtree(folder)
    return ("silent", "it left a folder") if there else (outcome, text)


# -- the whole -------------------------------------------------------------------------------------


def setup() -> Path:
    """Set what libraries read when they are imported; return a new folder."""
    os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "MPLBACKEND": "Agg"}
    os.environ |= {"TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
    folder = Path(tempfile.mkdtemp(prefix="deepenough-faults-"))
    folder.chmod(0o755)
    os.environ["XDG_CACHE_HOME"] = str(folder / "cache")
    return folder


def main(argv: list[str]) -> int:
    """Run `python -m tests.faults corruption` and return its exit code, 1 if anything failed."""
    names = [artifact.name for artifact in ARTIFACTS]
    parser = argparse.ArgumentParser(prog="python -m tests.faults corruption", description=__doc__)
    parser.add_argument("--only", action="append", choices=[*names, "places"], help="this alone")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--verbose", action="store_true", help="print every case")
    parser.add_argument("--no-record", action="store_true", help="do not write the result file")
    arguments = parser.parse_args(argv)
    folder, began = setup(), time.perf_counter()
    harness = Harness(folder)
    harness.make(MADE)
    print(f"made in {time.perf_counter() - began:.0f} s", flush=True)
    counts: dict[str, Counter[str]] = {}
    failures = 0

    def note(kind: str, what: str, outcome: str, text: str) -> None:
        nonlocal failures
        counts.setdefault(kind, Counter())[outcome] += 1
        if outcome not in GOOD:
            failures += 1
            print(f"FAILED ({outcome}): {kind}: {what}: {text}", flush=True)
        elif arguments.verbose:
            print(f"{outcome}: {kind}: {what}: {text}", flush=True)

    wanted = arguments.only or [*names, "places"]
    for artifact in ARTIFACTS:
        if artifact.name in wanted:
            for what, outcome, text in harness.damage(artifact, arguments.seed):
                note(artifact.name, what, outcome, text)
            print(f"{artifact.name}: {dict(counts[artifact.name])}", flush=True)
    if "places" in wanted:
        for kind, what, outcome, text in place_faults(harness):
            note(kind, what, outcome, text)
    total = Counter[str]()
    for kind, found in counts.items():
        total += found
        print(f"{kind:24}" + ", ".join(f"{n} {outcome}" for outcome, n in sorted(found.items())))
    print(f"{total.total()} cases, {failures} failed: {dict(total)}")
    if not (arguments.only or arguments.no_record):
        record(counts, total, arguments.seed, time.perf_counter() - began)
    shutil.rmtree(folder, ignore_errors=True)
    return 1 if failures else 0


def record(counts: dict[str, Counter[str]], total: Counter[str], seed: int, seconds: float) -> None:
    """Write the counts as a result file of the benchmarks."""
    import datetime

    from benchmarks.runner import FOLDER, RESULTS, commit, machine, versions, write_result

    figures = {"cases": total.total()} | {
        outcome: total[outcome] for outcome in (*GOOD, "silent", "traceback")
    }
    for kind, found in counts.items():
        key = kind.replace(", ", "_").replace(" ", "_").replace("-", "_")
        figures[f"by_kind.{key}.cases"] = found.total()
        figures |= {f"by_kind.{key}.{outcome}": found[outcome] for outcome in GOOD}
    content = {
        "name": "faults_corruption",
        "claim": "What is read is what was saved, or a sentence says what is wrong.",
        "command": f"python -m tests.faults corruption --seed {seed}",
        "seeds": [seed],
        "date": datetime.date.today().isoformat(),
        "seconds": round(seconds, 1),
        "commit": commit(),
        "machine": machine(),
        "versions": versions(),
        "settings": {"flips": FLIPS},
        "figures": {name: {"value": value} for name, value in figures.items()},
    }
    print(f"written: {write_result(content, FOLDER / RESULTS)}")

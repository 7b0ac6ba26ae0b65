"""A study of one model's layers, step by step in one run folder: fit, tune, evaluate, look.

The folder holds `shortcuts/` (the maps; `affine/` beside them where both kinds were asked for) and
`metrics.jsonl`, from which every picture is drawn.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, astuple, dataclass, field
from typing import Literal

import yaml
from transformers import PreTrainedModel, PreTrainedTokenizerBase

import deepenough.par.modeling  # noqa: F401 - registers our own models for loading
from deepenough.config import dump, resolve
from deepenough.data.corpus import open_corpus
from deepenough.errors import UserError
from deepenough.hf.loading import load
from deepenough.runs import Metrics, Record, RunFolder, read_records
from deepenough.shortcut.evaluation import Evaluation, evaluate, lens
from deepenough.shortcut.modeling import Shortcuts
from deepenough.shortcut.submodules import Submodules
from deepenough.shortcut.tune import TuneSettings, TuneTraining, default_training, tune
from deepenough.training.config import RunSettings, TrainingConfig
from deepenough.training.distributed import is_main_process
from deepenough.training.trainer import keep_freed_memory

Progress = Callable[[int, int | None], None]

_JOINED_CHARACTERS = 50_000
"""Of running text in one piece: many windows, so that few are short, and few enough for progress
to be seen."""


@dataclass
class ModelChoice:
    """Model"""

    name: str = "smollm2"
    """smollm2 (a real model that comes as a package), a folder, a run, or a name on the hub."""

    kind: Literal["auto", "causal", "masked", "encoder"] = "auto"
    """Which head to load; by default the one the model was saved with."""

    dtype: str = "float32"
    """Number format of the weights."""

    revision: str | None = None
    """Branch, tag or commit on the hub."""

    allow_pickle: bool = False
    """Load pickled weights too, which can run any code: only from people you trust."""

    def load(self) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
        return load(self.name, self.kind, self.dtype, self.revision, self.allow_pickle)


@dataclass
class TextChoice:
    """Text"""

    data: str = "python"
    """Text to read: python (built in), a file, folder or glob, a folder of $DEEPENOUGH_DATA, or a
    name on the hub."""

    split: str = "train"
    """Part of the corpus."""

    lines: int | None = 2000
    """How many lines to read, those without text not counted; null for all."""

    min_chars: int = 40
    """Lines shorter than this, such as headings, are passed over."""

    join: bool = False
    """Read the lines as running text, cut into windows, rather than each by itself: states then
    have a longer past, and little is padded."""

    def read(self) -> list[str]:
        corpus = open_corpus(self.data)
        if self.split not in corpus.splits:
            known = ", ".join(corpus.splits)
            raise UserError(f"The corpus {self.data} has no split {self.split!r}: it has {known}.")
        long_enough = (x for x in corpus.lines(self.split) if len(x.strip()) >= self.min_chars)
        texts = list(itertools.islice(long_enough, self.lines))
        if not texts:
            raise UserError(
                f"No line of {self.data} ({self.split}) has {self.min_chars} characters: give "
                "another text or a lower text.min_chars."
            )
        return list(_joined(texts)) if self.join else texts


@dataclass
class FitChoice:
    """Fit"""

    maps: Literal["linear", "affine", "both"] = "linear"
    """Maps without or with a bias; both adds affine maps to the last layer."""

    positions: Literal["all", "random"] = "all"
    """Use every token of a text, or one drawn at random."""

    targets: Literal["all", "last"] = "all"
    """Map every layer to every later one, or to the last only."""

    ridge: float = 0.0
    """Penalty on the maps, relative to the mean square of the states; needed for little text."""

    window: int | None = None
    """Longest piece of text; by default what the model allows, up to 1024 tokens."""

    memory: float | None = None
    """GiB for statistics; where they need more, the text is read several times. By default most of
    the memory that is free."""

    seed: int = 0
    """Seed of the positions."""


@dataclass
class ShortcutFit:
    """Fit shortcuts."""

    model: ModelChoice = field(default_factory=ModelChoice)
    run: RunSettings = field(default_factory=lambda: RunSettings(folder="runs/shortcut"))
    text: TextChoice = field(default_factory=TextChoice)
    fit: FitChoice = field(default_factory=FitChoice)
    tuned: bool = False
    """Also tune maps to the last layer so that predictions, not states, come out right."""

    tune: TuneSettings = field(default_factory=TuneSettings)
    train: TrainingConfig = field(default_factory=default_training)


@dataclass
class ShortcutEval:
    """Measure shortcuts."""

    run: str
    """Run folder that `deepenough shortcut fit` has written."""

    text: TextChoice = field(default_factory=lambda: TextChoice(split="valid", lines=500))
    positions: Literal["all", "random"] = "random"
    """Measure every token of a text, or one drawn at random, as the paper does."""

    submodules: bool = False
    """Also replace attention, feed-forward or norms by their own linear fits."""

    seed: int = 0
    """Seed of the positions."""


def fit_run(settings: ShortcutFit, progress: Progress | None = None) -> Shortcuts:
    """Fit maps into a run folder; interrupted, it goes on with `run.resume`."""
    keep_freed_memory()
    place, resume, overwrite = astuple(settings.run)
    # Refuse before long work; delete an earlier run only when all else has been found good.
    RunFolder.check(place, resume=resume, overwrite=overwrite)
    texts = settings.text.read()
    model, tokenizer = settings.model.load()
    run = RunFolder.create(place, resume=resume, overwrite=overwrite)
    if is_main_process():
        dump(settings, run.config)
    choice = settings.fit
    limit = None if choice.memory is None else choice.memory * 2**30

    def fit(affine: bool, targets: Literal["all", "last"], kept: str) -> Shortcuts:
        return Shortcuts.fit(
            model,
            tokenizer,
            texts,
            choice.positions,
            targets,
            affine,
            choice.ridge,
            choice.seed,
            memory_limit=limit,
            resume=run.checkpoints / kept,
            progress=progress,
            window=choice.window,
        )

    shortcuts = fit(choice.maps == "affine", choice.targets, "fit")
    found = {"shortcuts": shortcuts}
    if choice.maps == "both":
        found["affine"] = fit(True, "last", "affine")
    if settings.tuned:
        tuning = RunSettings(str(run.path / "tuning"), resume=resume, overwrite=not resume)
        training = TuneTraining(tuning, settings.tune, settings.train)
        found["shortcuts"] = shortcuts = tune(shortcuts, model, tokenizer, texts, training)
    if is_main_process():
        for name, each in found.items():
            each.save_pretrained(run.path / name)
        _replace(run, [shortcuts.record()], keep=())
    return shortcuts


def evaluate_run(settings: ShortcutEval, progress: Progress | None = None) -> Evaluation:
    """Measure what a run has fitted, and write it down in place of an earlier measurement."""
    keep_freed_memory()
    run, fitted = _open(settings.run)
    shortcuts = _saved(run)
    texts = settings.text.read()
    model, tokenizer = fitted.model.load()
    started = time.perf_counter()
    parts = None
    if settings.submodules:
        parts = Submodules.fit(
            model,
            tokenizer,
            fitted.text.read(),
            positions=fitted.fit.positions,
            ridge=fitted.fit.ridge,
            seed=fitted.fit.seed,
            window=fitted.fit.window,
        )
    evaluation = evaluate(
        model,
        tokenizer,
        shortcuts,
        texts,
        positions=settings.positions,
        submodules=parts,
        seed=settings.seed,
        window=fitted.fit.window,
        progress=progress,
    )
    about = {
        "settings": asdict(settings),
        "positions": evaluation.positions,
        "seconds": time.perf_counter() - started,
    }
    _replace(run, [Record(0, "evaluation", about), *evaluation.records()], keep=("fit", "lens"))
    return evaluation


def lens_run(folder: str, prompt: str, mode: str | None = None) -> Record:
    """What every layer predicts after every token of a prompt; the run keeps the last prompt."""
    run, fitted = _open(folder)
    first, *others = _saved(run)
    shortcuts = first
    if mode == "affine" and others:
        shortcuts = others[0]
    model, tokenizer = fitted.model.load()
    record = lens(model, tokenizer, shortcuts, prompt, mode)
    _replace(run, [record], drop=("lens",))
    return record


def _joined(lines: Sequence[str]) -> Iterator[str]:
    piece: list[str] = []
    length = 0
    for line in lines:
        piece.append(line.rstrip("\n"))
        length += len(line) + 1
        if length >= _JOINED_CHARACTERS:
            yield "\n".join(piece)
            piece, length = [], 0
    if piece:
        yield "\n".join(piece)


def _open(folder: str) -> tuple[RunFolder, ShortcutFit]:
    run = RunFolder.open(folder)
    try:
        given = yaml.safe_load(run.config.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        raise UserError(f"{run.config} cannot be read: fit the shortcuts again.") from error
    if not isinstance(given, dict) or "fit" not in given or "text" not in given:
        raise UserError(
            f"{folder} is not a run of deepenough shortcut fit: give the folder of one."
        )
    return run, resolve(ShortcutFit, str(run.config))


def _saved(run: RunFolder) -> list[Shortcuts]:
    folders = [run.path / name for name in ("shortcuts", "affine")]
    if not folders[0].is_dir():
        raise UserError(
            f"{run.path} has no maps yet: let deepenough shortcut fit finish (--resume goes on)."
        )
    return [Shortcuts.from_pretrained(folder) for folder in folders if folder.is_dir()]


def _replace(
    run: RunFolder,
    records: Sequence[Record],
    keep: Sequence[str] | None = None,
    drop: Sequence[str] = (),
) -> None:
    """Write records in place of those of an earlier measurement."""

    def stays(record: Record) -> bool:
        return record.kind in keep if keep is not None else record.kind not in drop

    known = read_records(run.metrics)[0] if run.metrics.exists() else []
    kept = [record for record in known if stays(record)]
    part = run.metrics.with_suffix(".part")
    part.unlink(missing_ok=True)
    metrics = Metrics(part)
    for record in [*kept, *records]:
        metrics.append(record)
    part.replace(run.metrics)

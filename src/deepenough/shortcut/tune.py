"""Tune maps to the last layer so that their predictions come out right (tuned lens, 2303.08112).

The closed-form maps of `Shortcuts` make the state right in the mean square; what is wanted is the
prediction. From there, `tune` minimises the KL divergence of what each layer predicts from what
the last one does, with all layers side by side and one final distribution for all of them. What is
minimised, and how the maps are parametrised, is in `tuned_maps.py`; how the vocabulary is
shortened while tuning, in `shortlist.py`; measuring, here as elsewhere, is on all of it.
"""

from __future__ import annotations

import copy
import hashlib
import logging
import os
import tempfile
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor
from transformers import PreTrainedModel

from deepenough.config import validate
from deepenough.errors import UserError
from deepenough.hf.adapter import Adapter, adapt
from deepenough.runs import read_records
from deepenough.shortcut.modeling import Shortcuts
from deepenough.shortcut.shortlist import Shortlist
from deepenough.shortcut.tune_states import SAMPLE_PER_WIDTH, Positions, Texts, make_source
from deepenough.shortcut.tune_task import TuneTask
from deepenough.shortcut.tuned_maps import TunedMaps, closed_form_error, whitening
from deepenough.training.config import RunSettings, TrainingConfig
from deepenough.training.distributed import make_accelerator
from deepenough.training.trainer import Trainer, check_folder, training

log = logging.getLogger("deepenough")

_GIB = 2**30


@dataclass
class TuneSettings:
    """Tuning"""

    batch: int = 256
    """Positions of text in a step, over all processes."""

    shortlist: int | None = 4096
    """Words of the vocabulary that are always in the softmax, the most probable ones; null for the
    whole vocabulary, which is several times slower."""

    drawn: int = 512
    """Words drawn anew at every step to stand for the rest of the vocabulary."""

    layers: list[int] | None = None
    """Layers whose maps are tuned; by default all below the last."""

    held_out: int = 512
    """Positions of held-out text on which progress is measured."""

    memory: float = 4.0
    """GiB in which the states of the text may be kept; if they need more, they are computed anew
    at every step."""

    def check(self) -> None:
        for name in ("batch", "held_out"):
            if getattr(self, name) < 1:
                raise UserError(f"tune.{name} must be at least 1: got {getattr(self, name)}.")
        if self.shortlist is not None and self.shortlist < 1:
            raise UserError(
                f"tune.shortlist must be at least 1, or null for all words: got {self.shortlist}."
            )
        for name in ("drawn", "memory"):
            if not getattr(self, name) >= 0:
                raise UserError(f"tune.{name} must not be negative: got {getattr(self, name)}.")


def default_training() -> TrainingConfig:
    return TrainingConfig(
        steps=300,
        lr=1e-3,
        warmup=10,
        weight_decay=0.0,
        clip=0.0,  # the layers are independent: a common limit would tie them together
        precision="fp32",
        log_every=20,
        valid_every=300,
        save_every=100,
        keep=1,
    )


@dataclass
class TuneTraining:
    """Tuning of the maps of one model."""

    run: RunSettings = field(default_factory=RunSettings)
    tune: TuneSettings = field(default_factory=TuneSettings)
    train: TrainingConfig = field(default_factory=default_training)


def tune(
    shortcuts: Shortcuts,
    model: PreTrainedModel | Adapter,
    tokenizer: Any,
    texts: Iterable[str],
    settings: TuneTraining | None = None,
    *,
    run: RunSettings | str | os.PathLike[str] | None = None,
    **changes: Any,
) -> Shortcuts:
    """The same shortcuts with tuned maps to the last layer, `tuned[i] = (A, b)`.

    `changes` are fields of `TuneSettings` (batch, shortlist, layers ...) and of `TrainSettings`
    (steps, lr, seed ...). `run` is the folder for records, checkpoints and, as `model`, the result;
    `RunSettings` say whether to resume what is there. Without one, nothing is left on disk.
    """
    settings = _merge(settings or TuneTraining(), changes)
    if run is None and settings.run == RunSettings():
        with tempfile.TemporaryDirectory(prefix="deepenough-tune-") as folder:
            return tune(shortcuts, model, tokenizer, texts, settings, run=Path(folder) / "run")
    if run is not None:
        place = run if isinstance(run, RunSettings) else RunSettings(folder=os.fspath(run))
        settings = replace(settings, run=place)
    adapter = model if isinstance(model, Adapter) else adapt(model)
    layers = _check(shortcuts, adapter, settings)
    accelerator = make_accelerator(settings.train, may_skip=False)
    check_folder(settings.run, accelerator)
    adapter.model.to(accelerator.device)
    task = _make_task(shortcuts, adapter, tokenizer, texts, layers, settings, accelerator)
    with training(settings, task, accelerator) as trainer:
        _fit(trainer, task)
    return _with_tuned(shortcuts, task, settings)


def _merge(settings: TuneTraining, changes: dict[str, Any]) -> TuneTraining:
    own = {name: changes.pop(name) for name in list(changes) if name in asdict(settings.tune)}
    return replace(
        settings, tune=replace(settings.tune, **own), train=replace(settings.train, **changes)
    )


def _check(shortcuts: Shortcuts, adapter: Adapter, settings: TuneTraining) -> list[int]:
    """Refuse what cannot be tuned; the layers that are."""
    settings.tune.check()
    validate(settings.train, "train.")
    shortcuts.check_model(adapter)
    if adapter.kind == "encoder":
        raise UserError(
            f"{type(adapter.model).__name__} predicts no words, so its maps cannot be tuned: load "
            "it with a language-model head."
        )
    if adapter.model.training:
        raise UserError("The model is in training mode, with dropout: call model.eval() first.")
    last = adapter.num_layers
    chosen = settings.tune.layers
    layers = sorted(set(range(last) if chosen is None else chosen))
    if not layers or layers[0] < 0 or layers[-1] >= last:
        raise UserError(
            f"tune.layers must be some of 0 to {last - 1}, the layers below the last: got {chosen}."
        )
    return layers


def _make_task(
    shortcuts: Shortcuts,
    adapter: Adapter,
    tokenizer: Any,
    texts: Iterable[str],
    layers: list[int],
    settings: TuneTraining,
    accelerator: Accelerator,
) -> TuneTask:
    own, seed, last = settings.tune, settings.train.seed, adapter.num_layers
    batch = max(1, own.batch // accelerator.num_processes)
    share = (accelerator.process_index, accelerator.num_processes)
    window = shortcuts.meta.get("fit", {}).get("window")  # text is read as it was for the fit
    found = Texts(adapter, tokenizer, texts, layers, batch, seed, share, window)
    sample = found.sample(SAMPLE_PER_WIDTH * adapter.width)
    matrices = torch.stack([shortcuts.matrix(i, last).float().cpu() for i in layers])
    biases = torch.zeros(len(layers), adapter.width)
    for place, layer in enumerate(layers):
        if (bias := shortcuts.bias(layer, last)) is not None:
            biases[place] = bias
    white = whitening(sample.states)
    held_out = found.held_out_positions(own.held_out)
    return TuneTask(
        model=TunedMaps(matrices, biases, white, closed_form_error(matrices, biases, *sample)),
        layers=layers,
        adapter=adapter,
        source=make_source(found, white, batch, seed, own.memory * _GIB),
        held_out=Positions(white(held_out.states), held_out.last),
        words=_shortlist(adapter, sample.last, own),
        train=settings.train,
        identity=_identity(adapter, found, matrices, layers, settings),
        save=lambda task, folder: _with_tuned(shortcuts, task, settings).save_pretrained(folder),
    )


@torch.no_grad()
def _shortlist(adapter: Adapter, last_ND: Tensor, settings: TuneSettings) -> Shortlist | None:
    """The words with the largest total probability over a sample, unless all words are wanted."""
    if settings.shortlist is None:
        return None
    parts = last_ND.to(adapter.model.device).split(256)
    mass_V = torch.stack([adapter.logits(part).float().softmax(-1).sum(0) for part in parts]).sum(0)
    if settings.shortlist >= len(mass_V):
        return None
    return Shortlist(mass_V.cpu(), settings.shortlist, settings.drawn)


def _identity(
    adapter: Adapter,
    texts: Texts,
    matrices: Tensor,
    layers: list[int],
    settings: TuneTraining,
) -> dict[str, Any]:
    """What a checkpoint must share with the run that goes on from it."""
    own = {name: getattr(settings.tune, name) for name in ("batch", "shortlist", "drawn")}
    start = hashlib.blake2b(matrices.numpy().tobytes(), digest_size=8).hexdigest()
    return {
        "model": adapter.identity()["fingerprint"],
        "texts": texts.tally.fingerprint,
        "tune": own | {"layers": layers, "start": start},
        "train": settings.train.identity(),
    }


def _fit(trainer: Trainer, task: TuneTask) -> None:
    """Train, with the closed form measured first; say which layers it did not help."""
    if trainer.first == 0:
        trainer.recorder.record(0, "valid", task.evaluate(trainer.accelerator, "valid"))
    log.info("states are %s", task.source.kind)
    trainer.fit()
    if not trainer.accelerator.is_main_process:
        return
    valid = [r.values for r in read_records(trainer.run.metrics)[0] if r.kind == "valid"]
    worse = [i for i in task.layers if not valid[-1][f"kl_{i}"] < valid[0][f"kl_{i}"]]
    if worse:
        log.warning(
            "On held-out text the tuned maps of layers %s are no better than the closed form: "
            "give more text, or a lower train.lr.",
            ", ".join(map(str, worse)),
        )


def _with_tuned(shortcuts: Shortcuts, task: TuneTask, settings: TuneTraining) -> Shortcuts:
    matrices, biases = task.model.maps()
    tuned = dict(shortcuts.tuned)
    for layer, matrix, bias in zip(task.layers, matrices, biases, strict=True):
        tuned[layer] = (matrix, bias)
    result = copy.copy(shortcuts)
    result.tuned = tuned
    texts = task.identity()["texts"]
    result.meta = shortcuts.meta | {
        "tune": asdict(settings.tune) | asdict(settings.train) | {"texts": texts}
    }
    return result

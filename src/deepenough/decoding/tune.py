"""Make a model ready for drafts, step by step in one run folder; the model itself is not changed.

1. *text*: the model writes, and its states are kept (`exit_tune_text.py`), in `checkpoints/text`;
2. *head*: carry maps are fitted to them in closed form, and a draft head that starts from those is
   trained (`exit_tune_task.py`); both go to `model`;
3. *shortcuts*, where there are some: the maps that drafts come from are tuned on the same text;
4. *choice*: all ways of drafting race on this machine (`adaptive/exit/fastest.py`); the fastest is
   what `speculate` will take.

Every step goes on where an interrupted command stopped it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, astuple, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch
from accelerate import Accelerator
from torch import Tensor
from transformers import PreTrainedModel

from deepenough.config import dump
from deepenough.decoding.carry_fit import fit_carry_to
from deepenough.decoding.drafters import INDEX, DrafterBuilder, LinearDrafter
from deepenough.decoding.engine import make_engine
from deepenough.decoding.fastest import draft_layers, find_fastest
from deepenough.decoding.head import DraftHead, HeadShape
from deepenough.decoding.own_text import Written
from deepenough.decoding.tune_task import HeadSettings, HeadTask, before_and_after
from deepenough.decoding.tune_text import OwnTexts, OwnTextSettings, write_texts
from deepenough.decoding.tuned import SHORTCUTS, Tuned
from deepenough.errors import UserError
from deepenough.hf.adapter import Adapter, adapt
from deepenough.runs import RunFolder
from deepenough.shortcut.config import PretrainedModelConfig
from deepenough.shortcut.modeling import Shortcuts
from deepenough.shortcut.training import tune
from deepenough.training.config import RunSettings, TrainingConfig
from deepenough.training.distributed import make_accelerator
from deepenough.training.trainer import keep_freed_memory, training

log = logging.getLogger("deepenough")

Progress = Callable[[int, int | None], None]

_MAPS = 2
_RACE_PROMPTS = 8
_SCALE_TEXTS = 64
"""Texts from which the deviations of states are taken."""


def default_training() -> TrainingConfig:
    return TrainingConfig(
        lr=1e-3,
        warmup=50,
        weight_decay=0.05,
        precision="fp32",
        log_every=20,
        valid_every=250,
        save_every=50,
    )


@dataclass
class ExitTune:
    """Make a model ready for drafts."""

    model: PretrainedModelConfig = field(default_factory=PretrainedModelConfig)
    run: RunSettings = field(default_factory=lambda: RunSettings(folder="runs/tuned"))
    text: OwnTextSettings = field(default_factory=OwnTextSettings)
    head: HeadSettings = field(default_factory=HeadSettings)
    shortcuts: str | None = None
    """Folder of shortcuts of the same model: their maps are tuned as well, and their drafts take
    part in the choice."""

    until: Literal["text", "head", "choice"] = "choice"
    """Last step to take."""

    train: TrainingConfig = field(default_factory=default_training)

    def check(self) -> None:
        """Refuse what cannot be done before anything is."""
        self.text.check()
        self.text.lines()
        self.head.check()
        self.train.check()


def tune_run(settings: ExitTune, progress: Progress | None = None) -> Tuned | None:
    """All steps, in a run folder; interrupted, they go on with `run.resume`.

    None if it ends before there is a head.
    """
    keep_freed_memory()
    settings.check()
    place, resume, overwrite = astuple(settings.run)
    RunFolder.check(place, resume=resume, overwrite=overwrite)
    accelerator = make_accelerator(settings.train, may_skip=False)
    if accelerator.num_processes > 1:
        raise UserError("A draft head is small and trained by one process: start one.")
    shortcuts = settings.shortcuts and Shortcuts.from_pretrained(settings.shortcuts)
    model, tokenizer = settings.model.load()
    model.to(accelerator.device)  # type: ignore[arg-type]
    adapter = adapt(model)
    run = RunFolder.create(place, resume=resume, overwrite=overwrite)
    dump(settings, run.config)
    folder = run.checkpoints / "text"
    texts = write_texts(folder, model, tokenizer, settings.text, settings.train.seed, progress)
    if settings.until == "text":
        return None
    tuned = _tune_head(adapter, texts, run, settings, accelerator)
    if settings.until == "head":
        return tuned
    if settings.until == "choice":
        if shortcuts:
            written = (str(tokenizer.decode(text.ids_T[text.prompt :])) for text in texts)
            tuned.shortcuts = _tune_shortcuts(shortcuts, model, tokenizer, written, run)
        log.info("looking for the fastest drafts on this machine")
        fastest = find_fastest(DrafterBuilder(make_engine(model), draft_model=tuned))
        tuned.choice = fastest.choice()
        tuned.save_choice(run.model)
    return tuned


def _tune_head(
    adapter: Adapter, texts: OwnTexts, run: RunFolder, settings: ExitTune, accelerator: Accelerator
) -> Tuned:
    own = settings.head
    used, held_out = _divided(texts, own)
    carry = _carry(adapter, used, run, settings)
    train = settings.train.for_epochs(own.epochs, len(used) // min(own.texts, len(used)))
    settings = replace(settings, train=train, run=replace(settings.run, resume=True))
    head = _head(adapter, carry, used, settings).to(accelerator.device)
    meta: dict[str, Any] = {"text": asdict(settings.text) | {"written": texts.num_new}}
    # For races on other machines; texts of both kinds, which the head has not seen.
    prompts = [text.ids_T[: text.prompt].tolist() for text in held_out[:_RACE_PROMPTS]]
    meta |= {"head": asdict(own), "train": asdict(train), "prompts": prompts}
    tuned = Tuned(carry, head, meta)
    task = HeadTask(
        head,
        adapter,
        carry.draft_vocab[: own.shortlist],
        used,
        held_out,
        own,
        train,
        {
            "model": adapter.identity()["fingerprint"],
            "texts": {"number": len(used), "tokens": texts.num_new},
            "head": {k: v for k, v in asdict(own).items() if k != "held_out"},
            "train": train.identity(),
        },
        save=lambda folder: _save(tuned, run, folder),
    )
    with training(settings, task, accelerator) as trainer:
        if trainer.first == 0:
            trainer.recorder.record(0, "valid", task.evaluate(accelerator, "valid"))
        trainer.fit()
    return Tuned.from_pretrained(run.path)


def _divided(texts: OwnTexts, own: HeadSettings) -> tuple[list[Written], list[Written]]:
    """Texts to train on, and those that are held out."""
    if len(texts) <= own.held_out:
        raise UserError(
            f"The model wrote {len(texts)} texts, and {own.held_out} of them are held out: raise "
            "text.tokens or lower head.held_out."
        )
    # The latest texts, so that going on with more of them would hold out others only.
    return texts[: -own.held_out], texts[-own.held_out :]


def _tune_shortcuts(
    shortcuts: Shortcuts,
    model: PreTrainedModel,
    tokenizer: Any,
    texts: Iterable[str],
    run: RunFolder,
) -> Shortcuts:
    """By KL, from the layers that drafts may come from; kept beside the head."""
    folder = run.model / SHORTCUTS
    if folder.is_dir():
        return Shortcuts.from_pretrained(folder)
    place = RunSettings(str(run.checkpoints / "shortcuts"), resume=True)
    layers = draft_layers(shortcuts.num_layers)
    tuned = tune(shortcuts, model, tokenizer, texts, run=place, layers=layers)
    tuned.save_pretrained(folder)
    return tuned


def _carry(
    adapter: Adapter, texts: Sequence[Written], run: RunFolder, settings: ExitTune
) -> LinearDrafter:
    """Fitted once; a command that goes on must start from the same maps."""
    folder = run.checkpoints / "carry"
    if (folder / INDEX).is_file():
        carry = LinearDrafter.from_pretrained(folder)
        carry.check_model(adapter)
        if carry.meta["fit"]["texts"] == len(texts):
            return carry
    log.info("fitting carry maps to %d texts", len(texts))
    carry = fit_carry_to(adapter, texts, _MAPS, settings.head.shortlist, asdict(settings.text))
    carry.save_pretrained(folder)
    return carry


def _head(
    adapter: Adapter, carry: LinearDrafter, texts: Sequence[Written], settings: ExitTune
) -> DraftHead:
    """As it is before training."""
    head = DraftHead(HeadShape.of(adapter), settings.train.seed, settings.head.dropout)
    if settings.head.start is None:
        head.start_from(*carry.maps[0], scale_D=_scale(texts))
    else:
        earlier = Tuned.from_pretrained(settings.head.start)
        earlier.check_model(adapter)
        head.load_state_dict(earlier.head.state_dict())
    return head


def _scale(texts: Sequence[Written]) -> Tensor:
    """Deviation of each coordinate of the states; none so small that noise would be blown up."""
    every = max(1, len(texts) // _SCALE_TEXTS)
    states_ND = torch.cat([text.states_TD[text.prompt - 1 :].float() for text in texts[::every]])
    deviation = states_ND.std(dim=0)
    return deviation.clamp_min(1e-3 * float(deviation.mean()))


def _save(tuned: Tuned, run: RunFolder, folder: Path) -> None:
    tuned.meta |= before_and_after(run)
    tuned.save_pretrained(folder)

"""Training of adapted early layers, as a task of the training loop, and the run it takes.

Text, targets and loss are those of the draft head (`exit_tune_task.py`): the model's own
distribution and best word, which makes this LayerSkip's early-exit loss a self-distillation. An
exit behind layer `l` counts in proportion to `l`. As in LayerSkip's rotating curriculum, not all
exits take part in each step: the deepest always does, and one of the others in turn.
"""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from torch import Tensor, nn

from deepenough.decoding.adapted import INDEX, Adapted
from deepenough.decoding.own_text import Written
from deepenough.decoding.tune_lora import EarlyLayers, LoraSettings, fit_start
from deepenough.decoding.tune_task import Batch, DraftTask, Guess, before_and_after
from deepenough.decoding.tuned import ADAPTED, Tuned
from deepenough.hf.adapter import Adapter
from deepenough.runs import RunFolder
from deepenough.training.config import RunSettings
from deepenough.training.runner import Settings, training

LORA = "lora"


class LoraTask(DraftTask):
    phase = LORA

    def __init__(self, layers: EarlyLayers, *given: Any, **more: Any) -> None:
        super().__init__(*given, **more)
        self.layers, self.deepest = layers, len(layers.matrices)

    @property
    def model(self) -> nn.Module:
        return self.layers

    def parameters(self) -> dict[str, list[dict[str, Any]]]:
        own = self.layers
        return {
            LORA: [
                {"params": [*own.down, *own.up]},
                # What was solved for already only has to follow.
                {"params": [*own.matrices], "lr_scale": 0.1, "weight_decay": 0.0},
                {"params": [*own.biases], "weight_decay": 0.0},
            ]
        }

    def exits(self, index: int) -> list[int]:
        """Those that batch number `index` trains."""
        others = self.deepest - 1
        return [self.deepest, 1 + index % others] if others else [self.deepest]

    def guesses(self, model: nn.Module, batch: Batch, index: int) -> list[Guess]:
        exits = self.exits(index)
        found: list[Guess] = []
        pairs = model(batch.ids_BT, batch.states_BTD, exits)
        for layer, (one, two) in zip(exits, pairs, strict=True):
            weight = layer / sum(exits)
            found.append(Guess(f"first_{layer}", weight, one))
            found.append(Guess(f"second_{layer}", weight, two))
        return found

    def drafts(self, batch: Batch) -> tuple[Tensor, Tensor]:
        return self.layers(batch.ids_BT, batch.states_BTD, [self.deepest])[0]


def tune_layers(
    adapter: Adapter,
    tuned: Tuned,
    used: list[Written],
    held_out: list[Written],
    run: RunFolder,
    settings: Any,
    accelerator: Accelerator,
) -> Adapted:
    """Adapt the first layers in a run of their own, within that of the head; kept beside it.

    `settings` are those of the whole command (`ExitTune`).
    """
    lora: LoraSettings = settings.lora
    head = settings.head
    own = RunFolder(run.checkpoints / LORA)
    train = settings.train.for_epochs(lora.epochs, len(used) // min(head.texts, len(used)))
    start = _start(adapter, tuned, used, own.path.with_name(f"{LORA}-start"), lora)
    layers = EarlyLayers(adapter, start, lora, train.seed)
    start.meta |= {"lora": asdict(lora), "train": asdict(train)}
    task = LoraTask(
        layers,
        start.scale,
        adapter,
        tuned.carry.shortlist[: head.shortlist],
        used,
        held_out,
        head,
        train,
        {
            "model": adapter.identity()["fingerprint"],
            "texts": {"number": len(used)},
            "lora": asdict(lora),
            "head": {name: getattr(head, name) for name in ("texts", "shortlist", "hard", "near")},
            "train": train.identity(),
        },
        save=lambda folder: _save(layers.adapted(start), own, folder),
    )
    inner: Settings = replace(settings, run=RunSettings(str(own.path), resume=True), train=train)
    with training(inner, task, accelerator) as trainer:
        if trainer.first == 0:
            trainer.recorder.record(0, "valid", task.evaluate(accelerator, "valid"))
        trainer.fit()
    adapted = Adapted.from_pretrained(own.model)
    adapted.save_pretrained(run.model / ADAPTED)
    return adapted


def _start(
    adapter: Adapter, tuned: Tuned, texts: list[Written], folder: Path, lora: LoraSettings
) -> Adapted:
    """Fitted once; a command that goes on starts from the same maps."""
    assert lora.layers is not None
    if (folder / INDEX).is_file():
        start = Adapted.from_pretrained(folder)
        start.check_model(adapter)
        if start.meta["fit"] == {"texts": len(texts), "layers": lora.layers}:
            return start
    start = fit_start(adapter, texts, tuned.head.scale, lora.layers)
    start.save_pretrained(folder)
    return start


def _save(adapted: Adapted, run: RunFolder, folder: Path) -> None:
    adapted.meta |= before_and_after(run)
    adapted.save_pretrained(folder)

"""The training loop of every method.

A `Task` brings the model, the data and the loss; the loop brings everything else: optimisers and
their schedule, accumulation, clipping, processes (through accelerate, so that `torchrun` and
`accelerate launch` run the same command), records, checkpoints, exact resumption.

Every random draw follows from (seed, step, process), never from what came before. A run that was
killed and resumed therefore repeats the uninterrupted one to the last bit.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import math
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from accelerate import Accelerator
from safetensors import SafetensorError
from torch import Tensor, nn

from deepenough.artifacts import atomic_path
from deepenough.config import dump, validate
from deepenough.errors import UserError
from deepenough.runs import RunFolder, read_records
from deepenough.training import checkpoint as checkpoints
from deepenough.training.checkpoint import Checkpoint
from deepenough.training.config import TrainingConfig, lr_factor, seed_at
from deepenough.training.distributed import all_streams, mean_over, on_main, own_streams
from deepenough.training.logging import Meter, Recorder, log_to, reading
from deepenough.training.task import Task

logger = logging.getLogger("deepenough")


class StepResult(NamedTuple):
    """Loss and gradient norm of one optimiser step."""

    loss: float
    grad_norm: float
    units: int
    """Over all processes."""


class Trainer:
    """The loop: `resume()` first, which changes nothing on disk if it refuses, then `fit()`."""

    def __init__(
        self, task: Task, settings: TrainingConfig, run: RunFolder, accelerator: Accelerator
    ) -> None:
        validate(settings, "train.")
        keep_freed_memory()
        self.task, self.settings, self.run, self.accelerator = task, settings, run, accelerator
        model = task.model.to(accelerator.device)
        self.optimizers = {
            phase: _optimizer(settings, groups) for phase, groups in task.parameters().items()
        }
        self.model = accelerator.prepare_model(model)
        self.meter = Meter()
        self.recorder = Recorder(run, accelerator.is_main_process)
        self.first = 0

    def resume(self) -> int:
        """Take up the last checkpoint in the run folder, if there is one; return the steps done."""
        found, damaged = checkpoints.load_last(self.run.checkpoints)
        step = found.step if found is not None else 0
        if step != on_main(self.accelerator, lambda: step):
            raise UserError(
                f"Not all processes see the same checkpoints in {self.run.path}: put the run on a "
                "file system that they share."
            )
        if damaged and self.accelerator.is_main_process:
            names = ", ".join(damaged)
            logger.warning("The checkpoint %s cannot be read: going on from step %d.", names, step)
        if found is not None:
            self._restore(found)
        self.first = step
        on_main(self.accelerator, lambda: self.recorder.begin(step))
        return step

    def _restore(self, found: Checkpoint) -> None:
        checkpoints.check_identity(found.values["run"], self.task.identity(), self.run)
        self.task.model.load_state_dict(found.model)
        for phase, optimizer in self.optimizers.items():
            checkpoints.restore_optimizer(phase, optimizer, found.optimizers)
        vars(self.meter).update(found.values["meter"])
        self.task.load_state(own_streams(self.accelerator, found.task))
        logger.info("going on from step %d", found.step)

    def _save(self, step: int) -> None:
        streams = all_streams(self.accelerator, self.task.state())

        def write() -> None:
            tensors: dict[str, Tensor] = {}
            for phase, optimizer in self.optimizers.items():
                tensors |= checkpoints.optimizer_tensors(phase, optimizer)
            model = dict(self.task.model.state_dict())
            values = {"run": self.task.identity(), "meter": asdict(self.meter)}
            content = Checkpoint(step, model, tensors, streams, values)
            checkpoints.save(self.run.checkpoints, content, self.settings.keep)

        on_main(self.accelerator, write)

    def fit(self) -> None:
        """Train to the last step, measure on the test split, write the model."""
        settings, task = self.settings, self.task
        task.model.train()
        is_main = self.accelerator.is_main_process
        with (
            contextlib.closing(self.recorder),
            reading("steps", "training", self.first, enabled=is_main) as show,
        ):
            for step in range(self.first, settings.steps):
                started = time.perf_counter()
                result = self._step(step)
                seconds = time.perf_counter() - started
                self.meter.add(result.loss, result.units, seconds)
                rate = f"{result.units / max(seconds, 1e-9):,.0f} {task.unit}/s"
                show(step + 1, settings.steps, f"loss {result.loss:.3f}, {rate}")
                self._after(step + 1, result)
            self._finish()

    def _after(self, done: int, result: StepResult) -> None:
        """Record, validate and save a checkpoint where it is due after `done` steps."""
        settings, last = self.settings, done == self.settings.steps
        if done % settings.log_every == 0 or last:
            values = self.meter.take()
            values["lr"] = settings.lr * lr_factor(settings, done - 1)
            values["grad_norm"] = result.grad_norm
            self.recorder.record(done, "train", values | self.task.train_values())
        if done % settings.valid_every == 0 or last:
            self._evaluate(done, "valid")
        if done % settings.save_every == 0 or last:
            self._check_weights(done)
            self._save(done)

    def _step(self, step: int) -> StepResult:
        """Return one step of every phase due; the first one's result."""
        self.task.begin_step(step)
        results = [self._phase(step, phase) for phase in self.task.phases(step)]
        self.task.end_step()
        return results[0]

    def _phase(self, step: int, phase: str) -> StepResult:
        settings, accelerator = self.settings, self.accelerator
        torch.manual_seed(seed_at(settings.seed, step, phase, accelerator.process_index))
        total = torch.zeros((), device=accelerator.device)
        units = 0
        for micro in range(settings.accumulate):
            last = micro == settings.accumulate - 1
            # Gradients travel between processes once a step, with the last batch.
            with contextlib.nullcontext() if last else accelerator.no_sync(self.model):
                with accelerator.autocast():
                    batch = self.task.loss(self.model, phase, step, micro)
                accelerator.backward(batch.objective / settings.accumulate)
            total += batch.loss.detach() / settings.accumulate
            units += batch.units
        loss = mean_over(accelerator, total)
        optimizer = self.optimizers[phase]
        norm = self._clip(optimizer)
        if not (math.isfinite(loss) and math.isfinite(norm)):
            raise self._diverged(step + 1, f"The loss became {loss} (gradient norm {norm})")
        for group in optimizer.param_groups:
            group["lr"] = settings.lr * group["lr_scale"] * lr_factor(settings, step)
        optimizer.step()
        for each in self.optimizers.values():
            each.zero_grad(set_to_none=True)
        return StepResult(loss, norm, units * accelerator.num_processes)

    def _clip(self, optimizer: torch.optim.Optimizer) -> float:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        return float(nn.utils.clip_grad_norm_(parameters, self.settings.clip or math.inf))

    def _evaluate(self, step: int, split: str) -> None:
        started = time.perf_counter()
        values = self.task.evaluate(self.accelerator, split)
        if not values:
            return
        if not math.isfinite(values["loss"]):
            raise self._diverged(step, f"The loss on the {split} split became {values['loss']}")
        values["seconds"] = time.perf_counter() - started
        self.recorder.record(step, split, values)

    def _check_weights(self, step: int) -> None:
        """Refuse weights that are not finite: no such checkpoint may replace a good one."""
        if not all(bool(p.isfinite().all()) for p in self.task.model.parameters()):
            raise self._diverged(step, "Weights became infinite")

    def _diverged(self, step: int, what: str) -> UserError:
        if checkpoints.list_names(self.run.checkpoints):
            advice = "the last checkpoint is intact: lower train.lr and go on with --resume."
        else:
            advice = "there is no checkpoint yet: lower train.lr and start anew with --overwrite."
        return UserError(f"{what} at step {step}, so training stopped; {advice}")

    def _finish(self) -> None:
        """Write the model and measure the test split, unless an earlier run has done so."""
        steps = self.settings.steps
        if not on_main(self.accelerator, lambda: self.run.model.exists()):
            on_main(self.accelerator, lambda: _write_model(self.task, self.run.model))
        if not on_main(self.accelerator, lambda: _has_record(self.run, steps, "test")):
            self._evaluate(steps, "test")


def _optimizer(settings: TrainingConfig, groups: list[dict[str, object]]) -> torch.optim.Optimizer:
    beta1, beta2 = settings.betas
    return torch.optim.AdamW(
        [{"lr_scale": 1.0} | group for group in groups],
        lr=settings.lr,
        betas=(beta1, beta2),
        weight_decay=settings.weight_decay,
        fused=True,
    )


def _has_record(run: RunFolder, step: int, kind: str) -> bool:
    records = read_records(run.metrics)[0] if run.metrics.is_file() else []
    return any(record.step == step and record.kind == kind for record in records)


def _write_model(task: Task, folder: Path) -> None:
    """Write the model's folder, whole or not at all."""
    try:
        with atomic_path(folder) as partial:
            task.save(partial)
    except (OSError, SafetensorError) as error:
        raise UserError(
            f"The model could not be written to {folder} ({error}); the last checkpoint is intact: "
            "make room and finish with --resume."
        ) from error


class TrainingRun(Protocol):
    """Settings of a command that trains: those of `RunConfig`, and `train`."""

    out: str
    resume: bool
    overwrite: bool
    train: TrainingConfig


def check_folder(config: TrainingRun, accelerator: Accelerator) -> None:
    """Refuse a run folder that is in the way before long work begins."""

    def check() -> None:
        RunFolder.check(config.out, resume=config.resume, overwrite=config.overwrite)

    on_main(accelerator, check)


@contextlib.contextmanager
def training(config: TrainingRun, task: Task, accelerator: Accelerator) -> Iterator[Trainer]:
    """Yield a trainer in its run folder, ready to begin or to go on."""
    run = RunFolder(Path(config.out))

    def begin() -> None:
        RunFolder.create(run.path, resume=config.resume, overwrite=config.overwrite)

    on_main(accelerator, begin)
    with contextlib.ExitStack() as stack:
        if accelerator.is_main_process:
            stack.enter_context(log_to(run.log))
        trainer = Trainer(task, config.train, run, accelerator)
        trainer.resume()
        if trainer.first < config.train.steps:
            on_main(accelerator, lambda: _write_config(config, run))
        else:  # what was trained stays described as it was
            logger.info("All %d steps are made already: nothing is trained.", trainer.first)
        yield trainer


def _write_config(config: Any, run: RunFolder) -> None:
    # Given again as --config, it must neither resume nor delete anything by itself.
    kept = replace(config, resume=False, overwrite=False)
    try:
        dump(kept, run.config)
    except OSError as error:
        raise UserError(f"{run.config} cannot be written: {error.strerror}.") from error


_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # malloc.h
_NEVER, _HUGE = -1, 1 << 30


def keep_freed_memory() -> bool:
    """Return whether the C library took the hint; elsewhere than on glibc nothing is changed."""
    if not sys.platform.startswith("linux"):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    taken = (mallopt(_MMAP_THRESHOLD, _HUGE), mallopt(_TRIM_THRESHOLD, _NEVER))
    return all(taken)

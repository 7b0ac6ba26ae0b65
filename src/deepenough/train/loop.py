"""The training loop of every method.

A `Task` brings the model, the data and the loss; the loop brings everything else: optimisers and
their schedule, accumulation, clipping, processes (through accelerate, so that `torchrun` and
`accelerate launch` run the same command), records, checkpoints, exact resumption.

Every random draw follows from (seed, step, process), never from what came before. A run that was
killed and resumed therefore repeats the uninterrupted one to the last bit.
"""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs
from torch import Tensor, nn
from torch.utils.tensorboard import SummaryWriter

from deepenough.errors import UserError
from deepenough.runs import Metrics, Record, RunFolder
from deepenough.train import checkpoint as checkpoints
from deepenough.train.allocator import keep_freed_memory
from deepenough.train.checkpoint import Checkpoint
from deepenough.train.progress import Progress
from deepenough.train.schedule import lr_factor
from deepenough.train.settings import TrainSettings

log = logging.getLogger("deepenough")


class Task(Protocol):
    """What a method tells the loop."""

    model: nn.Module
    unit: str
    """What is counted, for the progress bar: tokens, examples."""

    def phases(self, step: int) -> Sequence[str]:
        """The optimisers that make a step each; one for most methods."""

    def parameters(self, phase: str) -> list[dict[str, Any]]:
        """The parameter groups of that optimiser; `lr_scale` scales the learning rate."""

    def begin_step(self, step: int) -> None: ...

    def loss(self, model: nn.Module, phase: str, index: int) -> tuple[Tensor, int]:
        """Loss on the batch of number `index`, and how many units it has on this process."""

    def train_values(self) -> dict[str, Any]:
        """What to record beside the loss."""

    def evaluate(self, accelerator: Accelerator, split: str) -> dict[str, float]: ...

    def state(self) -> dict[str, Tensor]:
        """What follows the data, lane by lane (first axis), so that it can be dealt out anew."""

    def load_state(self, state: dict[str, Tensor]) -> None: ...

    def identity(self) -> dict[str, Any]:
        """What must not change between a checkpoint and the run that goes on from it."""

    def save(self, run: RunFolder) -> None:
        """Write the model in its final form."""


@dataclass
class Trainer:
    task: Task
    settings: TrainSettings
    run: RunFolder
    accelerator: Accelerator

    def __post_init__(self) -> None:
        self.settings.check()
        keep_freed_memory()
        task, settings = self.task, self.settings
        self.raw = task.model.to(self.accelerator.device)
        self.phases = list(dict.fromkeys([*task.phases(0), *task.phases(settings.steps)]))
        self.optimizers = {phase: self._optimizer(phase) for phase in self.phases}
        model = torch.compile(self.raw) if settings.compile else self.raw
        self.model = self.accelerator.prepare_model(model)
        self.is_main = self.accelerator.is_main_process
        self.metrics = Metrics(self.run.metrics) if self.is_main else None

    def fit(self) -> None:
        """Train to the last step, from the last checkpoint if there is one."""
        settings = self.settings
        first = self._resume()
        self.raw.train()
        with contextlib.ExitStack() as stack:
            writer = SummaryWriter(str(self.run.events)) if self.is_main else None
            if writer is not None:
                stack.callback(writer.close)
            progress = stack.enter_context(
                Progress(settings.steps, first, self.task.unit, enabled=self.is_main)
            )
            meter = _Meter()
            for step in range(first, settings.steps):
                done = step + 1
                loss, norm, units = self._step(step)
                meter.add(loss, units * self.accelerator.num_processes)
                progress.advance(done, units * self.accelerator.num_processes, loss)
                if done % settings.log_every == 0 or done == settings.steps:
                    values = meter.values() | {"lr": self._lr(step), "grad_norm": norm}
                    self._record(writer, done, "train", values | self.task.train_values())
                if done % settings.valid_every == 0 or done == settings.steps:
                    with progress.paused():
                        self._validate(writer, done, "valid")
                    meter.restart()
                if done % settings.save_every == 0 or done == settings.steps:
                    self._save(done)
            if first < settings.steps or not self.run.model.exists():
                self._finish(writer)

    def _step(self, step: int) -> tuple[float, float, int]:
        """One step of every phase due; the loss, gradient norm and units are the first one's."""
        settings = self.settings
        self.task.begin_step(step)
        results = []
        for order, phase in enumerate(self.task.phases(step)):
            optimizer = self.optimizers[phase]
            _seed_everything(settings.seed, step, order, self.accelerator.process_index)
            total, units = 0.0, 0
            for micro in range(settings.accumulate):
                last = micro == settings.accumulate - 1
                with contextlib.nullcontext() if last else self.accelerator.no_sync(self.model):
                    with self.accelerator.autocast():
                        index = step * settings.accumulate + micro
                        loss, count = self.task.loss(self.model, phase, index)
                    self.accelerator.backward(loss / settings.accumulate)
                total += loss.item() / settings.accumulate
                units += count
            norm = self._clip(phase)
            if not (math.isfinite(total) and math.isfinite(norm)):
                raise UserError(
                    f"The loss became {total} (gradient norm {norm}) at step {step + 1}, so training "
                    f"stopped; the last checkpoint is intact: lower train.lr and go on with --resume."
                )
            for group in optimizer.param_groups:
                group["lr"] = settings.lr * group["lr_scale"] * lr_factor(settings, step)
            optimizer.step()
            for each in self.optimizers.values():
                each.zero_grad(set_to_none=True)
            results.append((total, norm, units))
        return results[0]

    def _clip(self, phase: str) -> float:
        parameters = [p for group in self.optimizers[phase].param_groups for p in group["params"]]
        limit = self.settings.clip or math.inf
        return float(nn.utils.clip_grad_norm_(parameters, limit))

    def _optimizer(self, phase: str) -> torch.optim.Optimizer:
        settings = self.settings
        groups = [{"lr_scale": 1.0} | group for group in self.task.parameters(phase)]
        beta1, beta2 = settings.betas
        return torch.optim.AdamW(
            groups,
            lr=settings.lr,
            betas=(beta1, beta2),
            weight_decay=settings.weight_decay,
            fused=True,
        )

    def _lr(self, step: int) -> float:
        return self.settings.lr * lr_factor(self.settings, step)

    def _validate(self, writer: SummaryWriter | None, step: int, split: str) -> None:
        started = time.perf_counter()
        values = self.task.evaluate(self.accelerator, split)
        if values:
            values["seconds"] = time.perf_counter() - started
            self._record(writer, step, split, values)

    def _finish(self, writer: SummaryWriter | None) -> None:
        self._validate(writer, self.settings.steps, "test")
        if self.is_main:
            self.task.save(self.run)
        self.accelerator.wait_for_everyone()

    def _record(
        self, writer: SummaryWriter | None, step: int, kind: str, values: dict[str, Any]
    ) -> None:
        if self.metrics is None or writer is None:
            return
        self.metrics.append(Record(step, kind, values))
        for name, value in _scalars(values):
            writer.add_scalar(f"{kind}/{name}", value, step)
        shown = " ".join(f"{k} {v:.4g}" for k, v in values.items() if isinstance(v, float | int))
        log.info("step %d %s: %s", step, kind, shown)

    # -- checkpoints -------------------------------------------------------------------------

    def _save(self, step: int) -> None:
        states = _gather_states(self.accelerator, self.task.state())
        failure: list[UserError | None] = [None]
        if self.is_main:
            tensors: dict[str, Tensor] = {}
            for phase, optimizer in self.optimizers.items():
                tensors |= checkpoints.optimizer_tensors(phase, optimizer)
            content = Checkpoint(
                step, dict(self.raw.state_dict()), tensors, states, {"run": self.task.identity()}
            )
            try:
                checkpoints.save(self.run.checkpoints, content, self.settings.keep)
            except UserError as error:
                failure[0] = error
        if self.accelerator.num_processes > 1:
            torch.distributed.broadcast_object_list(failure)
        if failure[0] is not None:
            raise failure[0]

    def _resume(self) -> int:
        """Load the last checkpoint, if any; the step to go on from."""
        found, damaged = checkpoints.load_last(self.run.checkpoints)
        for name in damaged:
            log.warning("The checkpoint %s cannot be read; an earlier one is used.", name)
        if found is None:
            if self.metrics is not None:
                self.metrics.truncate_after(0)
            return 0
        _check_identity(found.values["run"], self.task.identity(), self.run)
        self.raw.load_state_dict(found.model)
        for phase, optimizer in self.optimizers.items():
            checkpoints.restore_optimizer(phase, optimizer, found.optimizers)
        self.task.load_state(_share(found.task, self.accelerator))
        if self.metrics is not None:
            self.metrics.truncate_after(found.step)
        log.info("going on from step %d", found.step)
        return found.step


def make_accelerator(settings: TrainSettings) -> Accelerator:
    """Processes, device and precision, from the environment and the settings."""
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    precision = settings.precision
    if precision == "auto":
        precision = "bf16" if torch.cuda.is_available() else "fp32"
    # A cluster of the adaptive softmax that no token of a batch hits has no gradient.
    unused = DistributedDataParallelKwargs(find_unused_parameters=True)
    mixed = "bf16" if precision == "bf16" else "no"
    return Accelerator(mixed_precision=mixed, kwargs_handlers=[unused])


def _seed_everything(seed: int, step: int, order: int, process: int) -> None:
    torch.manual_seed(((seed * 1_000_003 + step) * 16 + order) * 4096 + process)


def _gather_states(accelerator: Accelerator, state: dict[str, Tensor]) -> list[dict[str, Tensor]]:
    if accelerator.num_processes == 1:
        return [state]
    gathered: list[Any] = [None] * accelerator.num_processes
    torch.distributed.all_gather_object(gathered, {k: v.cpu() for k, v in state.items()})
    return gathered


def _share(states: list[dict[str, Tensor]], accelerator: Accelerator) -> dict[str, Tensor]:
    """This process's lanes of the state, however many processes wrote it."""
    share: dict[str, Tensor] = {}
    for name in states[0]:
        lanes = torch.cat([state[name] for state in states])
        share[name] = lanes.chunk(accelerator.num_processes)[accelerator.process_index]
    return share


def _check_identity(saved: dict[str, Any], current: dict[str, Any], run: RunFolder) -> None:
    for key in sorted(set(saved) | set(current)):
        if saved.get(key) != current.get(key):
            raise UserError(
                f"The checkpoint in {run.path} is of another configuration: {key} was "
                f"{saved.get(key)} and is now {current.get(key)}; give the same settings or another "
                "folder."
            )


def _scalars(values: dict[str, Any]) -> Iterator[tuple[str, float]]:
    for name, value in values.items():
        if isinstance(value, float | int):
            yield name, float(value)
        elif name == "pi":
            for block, row in enumerate(value, start=1):
                for branch, share in zip(("attention", "dense", "identity"), row, strict=True):
                    yield f"pi/block{block}-{branch}", float(share)


class _Meter:
    """Mean loss and rate since the last record."""

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        self.loss, self.count, self.units = 0.0, 0, 0
        self.started = time.perf_counter()

    def add(self, loss: float, units: int) -> None:
        self.loss += loss
        self.count += 1
        self.units += units

    def values(self) -> dict[str, float]:
        loss = self.loss / max(1, self.count)
        elapsed = time.perf_counter() - self.started
        values = {
            "loss": loss,
            "perplexity": math.exp(min(loss, 700.0)),
            "tokens_per_second": self.units / elapsed,
        }
        self.restart()
        return values

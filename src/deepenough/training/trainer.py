"""The training loop of every method.

A `Task` brings the model, the data and the loss; the loop brings everything else: optimisers and
their schedule, accumulation, clipping, processes (through accelerate, so that `torchrun` and
`accelerate launch` run the same command), records, checkpoints, exact resumption.

Every random draw follows from (seed, step, process), never from what came before. A run that was
killed and resumed therefore repeats the uninterrupted one to the last bit.
"""

import contextlib
import ctypes
import logging
import math
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from deepenough.artifacts import atomic_path, is_intact, restore, seal
from deepenough.config import dump, load_yaml, to_dict, validate
from deepenough.errors import UserError
from deepenough.nn.products import fast_products
from deepenough.runs import RunFolder, read_records
from deepenough.training import checkpoint as checkpoints
from deepenough.training.checkpoint import Checkpoint
from deepenough.training.config import TrainingConfig, lr_factor, seed_at
from deepenough.training.distributed import (
    SharedDropout,
    agree,
    losses_noticed,
    make_accelerator,
    on_main,
)
from deepenough.training.logging import Meter, Recorder, announce, log_to, reading, writing
from deepenough.training.sharding import (
    ShardedModel,
    clip_divided,
    gather_tensors,
    is_finite,
    share_like,
)
from deepenough.training.task import Task

logger = logging.getLogger("deepenough")

#: Settings of where weights come from.
_ORIGINS = ("start", "model.encoder", "model.revision")
#: Settings of what follows a training.
_LATER = ("search.budget", "search.retrain")
#: Settings, or sections of them, of which a finished model keeps nothing that could be ignored.
_OF_NO_MODEL = ("out", "resume", "overwrite", "device", "data", "dataset", "epochs", "train")


class StepResult(NamedTuple):
    """Loss and gradient norm of one optimiser step."""

    loss: float
    grad_norm: float
    units: int
    """Over all processes."""
    stop: bool
    """Whether a signal has asked any process to stop."""


class Trainer:
    """The loop: `resume()` first, which changes nothing on disk if it refuses, then `fit()`."""

    def __init__(
        self, task: Task, settings: TrainingConfig, run: RunFolder, accelerator: Accelerator
    ) -> None:
        validate(settings, "train.")
        keep_freed_memory()
        self.task, self.settings, self.run, self.accelerator = task, settings, run, accelerator
        model = task.model.to(accelerator.device)
        divides = settings.parallel == "fsdp"
        self.sharded = ShardedModel(task, accelerator) if divides else None
        parameters = task.parameters().items()
        self.optimizers = {phase: make_optimizer(settings, groups) for phase, groups in parameters}
        self.model = model if divides else accelerator.prepare_model(model)
        self.meter = Meter()
        self.recorder = Recorder(run, accelerator.is_main_process)
        self.first, self.planned = 0, settings.steps
        self._signals: list[int] = []

    def resume(self) -> int:
        """Take up the last checkpoint in the run folder, if there is one; return the steps done."""
        mapped = self.sharded is not None  # then each process needs but a share of it
        found, damaged = agree(lambda: checkpoints.load_last(self.run.checkpoints, mapped))
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
            agree(lambda: self._restore(found))
        self.first = step
        on_main(self.accelerator, lambda: self.recorder.begin(step))
        return step

    def _restore(self, found: Checkpoint) -> None:
        settings, saved = self.settings, found.values
        before = saved.get("steps") or saved["run"].get("train", {}).get("steps", settings.steps)
        self.planned = saved.get("planned", before)
        if settings.steps != self.planned:  # the warm-up stays as it was
            settings.warmup = replace(settings, steps=self.planned).warmup_steps
        checkpoints.check_identity(saved["run"], self.task.identity(), self.run)
        if settings.steps != before:
            self._change_length(before, found.step)
        try:
            own = self.task.model.state_dict()
            weights = {name: share_like(w, own.get(name)) for name, w in found.model.items()}
            self.task.model.load_state_dict(weights)
            for phase, optimizer in self.optimizers.items():
                checkpoints.restore_optimizer(phase, optimizer, found.optimizers)
        except (RuntimeError, ValueError, KeyError) as error:
            raise UserError(
                f"The checkpoint in {self.run.path} is of another model: give another folder."
            ) from error
        vars(self.meter).update(saved["meter"])
        # A checkpoint holds the streams of all processes, whose number may have changed.
        rank, world = self.accelerator.process_index, self.accelerator.num_processes
        own = {name: streams.chunk(world)[rank] for name, streams in found.task.items()}
        self.task.load_state(own)
        logger.info("going on from step %d", found.step)

    def _change_length(self, before: int, done: int) -> None:
        """Say what becomes of the schedule of a training that had another number of steps."""
        settings, place = self.settings, self.run.path
        if settings.steps < done:
            raise UserError(
                f"{place} has made {done} steps already: give train.steps of at least that, not "
                f"{settings.steps}, or another folder."
            )
        falls = settings.schedule in ("cosine", "linear")
        how = "stretched to that length" if falls else "held as it is"
        rate = settings.lr * lr_factor(settings, done)
        announce(
            f"The training of {before} steps in {place} becomes one of {settings.steps}: its "
            f"schedule is {how}, the learning rate goes on at {rate:.3g}."
        )

    def _save(self, step: int) -> None:
        state = self.task.state().items()
        streams = {name: self.accelerator.gather(own.contiguous()) for name, own in state}
        is_main = self.accelerator.is_main_process
        model = gather_tensors(self.task.model.state_dict(), keep=is_main)
        tensors: dict[str, Tensor] = {}
        for phase, optimizer in self.optimizers.items():
            own = checkpoints.optimizer_tensors(phase, optimizer)
            tensors |= gather_tensors(own, keep=is_main)

        def write() -> None:
            values: dict[str, Any] = {"run": self.task.identity(), "meter": asdict(self.meter)}
            values |= {"steps": self.settings.steps, "planned": self.planned}
            content = Checkpoint(step, model, tensors, streams, values)
            checkpoints.save(self.run.checkpoints, content, self.settings.keep)

        on_main(self.accelerator, write)

    def fit(self) -> None:
        """Train to the last step, measure on the test split, write the model.

        Ctrl-C and SIGTERM stop it after the step that is being made, with a checkpoint.
        """
        settings, task = self.settings, self.task
        task.model.train()
        is_main = self.accelerator.is_main_process
        if settings.warmup > settings.steps and is_main:
            logger.warning(
                "The warm-up of %d steps is longer than the training of %d, so it takes %d; give "
                "train.warmup fewer steps, or a share of the training such as 0.1.",
                settings.warmup,
                settings.steps,
                settings.warmup_steps,
            )
        with (
            contextlib.closing(self.recorder),
            reading("steps", "training", self.first, enabled=is_main) as show,
        ):
            with noted_signals() as self._signals:
                for step in range(self.first, settings.steps):
                    if step and step % settings.valid_every == 0 and task.is_converged():
                        announce(f"Training ends at step {step}: validations gain no more.")
                        self._save(step)
                        break
                    started = time.perf_counter()
                    result = self._step(step)
                    seconds = time.perf_counter() - started
                    self.meter.add(result.loss, result.units, seconds)
                    rate = f"{result.units / max(seconds, 1e-9):,.0f} {task.unit}/s"
                    show(step + 1, settings.steps, f"loss {result.loss:.3f}, {rate}")
                    self._after(step + 1, result)
                    if result.stop:
                        terminated = signal.SIGTERM in self._signals
                        raise SystemExit(128 + signal.SIGTERM) if terminated else KeyboardInterrupt
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
        if done % settings.save_every == 0 or last or result.stop:
            # No checkpoint of weights that are not finite may replace a good one.
            if not is_finite(self.task.model):
                raise self._diverged(done, "Weights became infinite")
            if last and self.accelerator.is_main_process:  # the model of a shorter training
                shutil.rmtree(restore(self.run.model), ignore_errors=True)
            self._save(done)

    def _step(self, step: int) -> StepResult:
        """Make one step of every optimiser that is due; return the first one's result."""
        self.task.begin_step(step)
        results = [self._phase(step, phase) for phase in self.task.phases(step)]
        self.task.end_step()
        return results[0]

    def _phase(self, step: int, phase: str) -> StepResult:
        settings, accelerator = self.settings, self.accelerator
        shares = self.task.deals_rows and accelerator.device.type == "cpu"
        dropout = SharedDropout(accelerator) if shares and accelerator.num_processes > 1 else None
        process = 0 if shares else accelerator.process_index
        torch.manual_seed(seed_at(settings.seed, step, phase, process))
        total = torch.zeros((), device=accelerator.device)
        units = 0
        for micro in range(settings.accumulate):
            last = micro == settings.accumulate - 1
            # Gradients travel between processes once a step, with the last batch.
            # Those of a divided model do with every batch, so that no process holds whole ones.
            travels = last or self.sharded is not None
            with contextlib.nullcontext() if travels else accelerator.no_sync(self.model):
                with accelerator.autocast(), dropout or contextlib.nullcontext():
                    batch = self.task.loss(self.model, phase, step, micro)
                accelerator.backward(batch.objective / settings.accumulate)
            total += batch.loss.detach() / settings.accumulate
            units += batch.units
        # All processes stop at the same step, whichever has heard a signal.
        asked = torch.tensor(float(bool(self._signals)), device=total.device)
        mean = accelerator.reduce(torch.stack([total, asked]), reduction="mean")
        loss, stop = float(mean[0]), bool(mean[1] > 0)
        optimizer = self.optimizers[phase]
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        if self.sharded is not None:
            self.sharded.finish_gradients()
            norm = clip_divided(parameters, settings.clip, settings.clip_value)
        else:
            if settings.clip_value:
                nn.utils.clip_grad_value_(parameters, settings.clip_value)
            norm = float(nn.utils.clip_grad_norm_(parameters, settings.clip or math.inf))
        if not (math.isfinite(loss) and math.isfinite(norm)):
            raise self._diverged(step + 1, f"The loss became {loss} (gradient norm {norm})")
        for group in optimizer.param_groups:
            group["lr"] = settings.lr * group["lr_scale"] * lr_factor(settings, step)
        optimizer.step()
        for each in self.optimizers.values():
            each.zero_grad(set_to_none=True)
        return StepResult(loss, norm, units * accelerator.num_processes, stop)

    def _evaluate(self, step: int, split: str) -> None:
        started = time.perf_counter()
        with self._whole_model():
            values = self.task.evaluate(self.accelerator, split)
        if not values:
            return
        if not math.isfinite(values["loss"]):
            raise self._diverged(step, f"The loss on the {split} split became {values['loss']}")
        values["seconds"] = time.perf_counter() - started
        self.recorder.record(step, split, values)

    @contextlib.contextmanager
    def _whole_model(self) -> Iterator[None]:
        """Within it, a task whose model is divided has a whole one in its place."""
        task, divided = self.task, self.task.model
        if self.sharded is None:
            yield
            return
        try:
            task.model = self.sharded.gather()
            with self.accelerator.autocast():
                yield
        finally:
            task.model = divided
            self.sharded.release()

    def _diverged(self, step: int, what: str) -> UserError:
        if checkpoints.list_names(self.run.checkpoints):
            advice = "the last checkpoint is intact: lower train.lr and go on with --resume."
        else:
            advice = "there is no checkpoint yet: lower train.lr and start anew with --overwrite."
        return UserError(f"{what} at step {step}, so training stopped; {advice}")

    def _finish(self) -> None:
        """Write the model and measure the test split, unless an earlier run has done so."""
        run, steps = self.run, self.settings.steps
        if self.sharded is not None:  # from here on the task has a whole model again
            self.model = self.task.model = self.sharded.gather()
            self.sharded = None

        def write_model() -> bool:
            if not is_intact(restore(run.model)):
                with writing(run.model), atomic_path(run.model) as partial:
                    self.task.save(partial)
                    seal(partial)
            records = read_records(run.metrics)[0] if run.metrics.is_file() else []
            return any(record.step == steps and record.kind == "test" for record in records)

        if not on_main(self.accelerator, write_model):
            self._evaluate(steps, "test")


def make_optimizer(settings: TrainingConfig, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """Return the optimiser that the settings name, over some groups of parameters."""
    kinds = {name.lower(): kind for name, kind in vars(torch.optim).items()}
    options: dict[str, Any] = {"lr": settings.lr, "weight_decay": settings.decay}
    if settings.optimizer in ("adamw", "adam", "adamax", "nadam"):
        options["betas"] = tuple(settings.betas)
    if settings.optimizer in ("adamw", "adam"):
        options["fused"] = True
    made: torch.optim.Optimizer = kinds[settings.optimizer](
        [{"lr_scale": 1.0} | group for group in groups], **options
    )
    return made


def begin_run(config: Any, may_skip: bool = True) -> Accelerator:
    """Check the settings and the run folder before long work begins; return the processes.

    `may_skip` is as for `make_accelerator`.
    """
    where = getattr(validate(config), "device", "auto")
    accelerator = make_accelerator(config.train, may_skip, device=where)
    check_folder(config, accelerator)
    return accelerator


def fit_run(config: Any, task: Task, accelerator: Accelerator) -> RunFolder:
    """Train from the first step, or from the last checkpoint, to the end; return the run."""
    with training(config, task, accelerator) as trainer:
        trainer.fit()
    return trainer.run


def check_folder(config: Any, accelerator: Accelerator) -> None:
    """Refuse a run folder that is in the way before long work begins."""
    options = {"resume": config.resume, "overwrite": config.overwrite}
    on_main(accelerator, lambda: RunFolder.check(config.out, **options))


@contextlib.contextmanager
def training(config: Any, task: Task, accelerator: Accelerator) -> Iterator[Trainer]:
    """Yield a trainer in its run folder, ready to begin or to go on.

    `config` is that of a command that trains: a `RunConfig` with a `TrainingConfig` as `train`.
    """
    if getattr(config, "epochs", None) is not None:  # the task has the same settings, not a copy
        config.train.steps = config.train.steps_of(config.epochs, task.batches_per_epoch())
    run = RunFolder(Path(config.out))
    options = {"resume": config.resume, "overwrite": config.overwrite}
    on_main(accelerator, lambda: RunFolder.create(run.path, **options))
    RunFolder.begun.add(run.path.resolve())  # whichever process has to say how it goes on

    def write_config() -> None:
        # Given again as --config, it must neither resume nor delete anything by itself.
        with writing(run.config):
            dump(replace(config, resume=False, overwrite=False), run.config)

    with contextlib.ExitStack() as stack:
        stack.enter_context(fast_products())
        agree(lambda: stack.enter_context(run.lock()))
        if accelerator.is_main_process:
            stack.enter_context(log_to(run.log))
        stack.enter_context(losses_noticed())
        trainer = Trainer(task, config.train, run, accelerator)
        finished = trainer.resume() >= config.train.steps
        if trainer.first:
            agree(lambda: check_changes(config, run, finished))
        if not finished:
            on_main(accelerator, write_config)
        else:  # what was trained stays described as it was
            announce(f"All {trainer.first} steps are made already: nothing is trained.")
        yield trainer


def check_changes(config: Any, run: RunFolder, finished: bool) -> None:
    """Refuse a setting that a resumed run would ignore, by its name.

    What else has changed is applied, or was compared with the checkpoint: of texts the content, of
    the loop and the model what losses depend on.
    """
    try:
        before = checkpoints.flatten(load_yaml(run.settings()))
    except UserError:  # damaged, or changed by hand
        return
    for name, now in checkpoints.flatten(to_dict(config)).items():
        was = before.get(name, now)
        if was == now or os.path.realpath(str(was)) == os.path.realpath(str(now)):
            continue
        late = finished and name.partition(".")[0] not in _OF_NO_MODEL and name not in _LATER
        if name in _ORIGINS or late:
            why = "the training is finished" if late else "the weights are the checkpoint's"
            raise UserError(
                f"{run.path} cannot be resumed with another {name}, because {why}: it was {was} "
                f"and is now {now}; give the same, or another folder."
            )


@contextlib.contextmanager
def noted_signals() -> Iterator[list[int]]:
    """Yield a list that Ctrl-C and SIGTERM are noted in; the second time they act as before."""
    noted: list[int] = []
    before: dict[int, Any] = {}

    def note(number: int, _: Any) -> None:
        noted.append(number)
        signal.signal(number, before[number])
        sys.stderr.write("stopping after this step; once more stops at once\n")

    if threading.current_thread() is threading.main_thread():
        for each in (signal.SIGINT, signal.SIGTERM):
            if signal.getsignal(each) is not signal.SIG_IGN:  # as a shell sets in the background
                before[each] = signal.signal(each, note)
    try:
        yield noted
    finally:
        for number, handler in before.items():
            if signal.getsignal(number) is not signal.SIG_IGN:  # as `losses_noticed` sets
                signal.signal(number, handler)


def keep_freed_memory() -> None:
    """Tell glibc not to give freed memory back; on other systems nothing is changed."""
    with contextlib.suppress(OSError, AttributeError, TypeError):  # there is no such function
        mallopt = ctypes.CDLL(None).mallopt
        trim_threshold, mmap_threshold = -1, -3  # as malloc.h numbers them
        mallopt(mmap_threshold, 1 << 30)
        mallopt(trim_threshold, -1)  # never

"""The loop, watched through a task that fits a line."""

import errno
import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from torch import nn

from deepenough.config import _hints, validate
from deepenough.errors import UserError
from deepenough.runs import Record, RunFolder
from deepenough.training.checkpoint import list_names, load_last
from deepenough.training.config import TrainingConfig, lr_factor
from deepenough.training.distributed import make_accelerator
from deepenough.training.task import BatchLoss
from deepenough.training.trainer import Trainer

Fit = Callable[..., Trainer]
Records = Callable[[Path], list[Record]]


class Killed(Exception):
    """Stands for a kill: nothing in the loop catches it."""


# -- records and resumption ------------------------------------------------------------------


def test_a_run_records_what_is_due(tmp_path: Path, line: Any, fit: Fit, records: Records) -> None:
    fit(line())
    found = [(record.step, record.kind) for record in records(tmp_path / "run")]
    assert found == [
        (3, "train"),
        (5, "valid"),
        (6, "train"),
        (9, "train"),
        (10, "train"),
        (10, "valid"),
        (10, "test"),
    ]
    assert list_names(tmp_path / "run" / "checkpoints") == ["step-000000008", "step-000000010"]
    assert (tmp_path / "run" / "model" / "weights.txt").is_file()


def test_a_record_is_the_mean_since_the_last(
    tmp_path: Path, line: Any, fit: Fit, records: Records
) -> None:
    """Validations and checkpoints in between take nothing away from it."""
    fit(line(), "each", log_every=1, valid_every=2, save_every=2)
    fit(line(), "three", log_every=3, valid_every=2, save_every=2)
    each = [r.values["loss"] for r in records(tmp_path / "each") if r.kind == "train"]
    three = [r.values for r in records(tmp_path / "three") if r.kind == "train"]
    assert len(each) == 10 and len(three) == 4
    for position, values in enumerate(three):
        losses = each[3 * position : 3 * position + 3]
        assert values["loss"] == pytest.approx(sum(losses) / len(losses), rel=1e-12)
        assert values["perplexity"] == pytest.approx(math.exp(values["loss"]))


@pytest.mark.parametrize("stop", [0, 3, 4, 5, 9])
def test_an_interrupted_run_goes_on_exactly(
    tmp_path: Path, line: Any, fit: Fit, records: Records, stop: int
) -> None:
    whole = fit(line(), "whole")
    task = line()
    task.begin_step = raise_at(stop)
    with pytest.raises(Killed):
        fit(task, "broken")
    resumed = fit(line(), "broken")
    assert resumed.first == stop // 4 * 4
    assert records(tmp_path / "broken") == records(tmp_path / "whole")
    assert torch.equal(resumed.task.model.weight, whole.task.model.weight)


def raise_at(stop: int) -> Callable[[int], None]:
    def begin_step(step: int) -> None:
        if step == stop:
            raise Killed

    return begin_step


def test_a_finished_run_is_left_alone(tmp_path: Path, line: Any, fit: Fit) -> None:
    fit(line())

    def content() -> dict[str, bytes]:
        files = [path for path in (tmp_path / "run").rglob("*") if path.is_file()]
        return {str(path): path.read_bytes() for path in files}

    before = content()
    assert len(before) > 8
    task = line()
    fit(task)
    assert task.seen == []
    assert content() == before


@pytest.mark.parametrize("what", ["save", "evaluate"])
def test_what_follows_the_last_step_is_made_up_for(
    tmp_path: Path, line: Any, fit: Fit, records: Records, what: str
) -> None:
    task = line()

    def fail(*arguments: Any) -> Any:
        if what == "save" or arguments[-1] == "test":
            raise Killed
        return line.evaluate(task, *arguments)

    setattr(task, what, fail)
    with pytest.raises(Killed):
        fit(task)
    fit(line())
    fit(line(), "whole")
    assert records(tmp_path / "run") == records(tmp_path / "whole")
    assert (tmp_path / "run" / "model" / "weights.txt").is_file()


def test_a_checkpoint_of_another_run_is_refused(
    tmp_path: Path, line: Any, fit: Fit, records: Records
) -> None:
    fit(line())
    before = records(tmp_path / "run")
    task = line()
    task.identity = lambda: {"task": {"name": "line", "lanes": 8}}
    with pytest.raises(UserError, match=r"task\.lanes was 4 and is now 8"):
        fit(task)
    assert records(tmp_path / "run") == before


def test_a_damaged_checkpoint_is_passed_over_with_a_warning(
    tmp_path: Path, line: Any, fit: Fit, records: Records, caplog: pytest.LogCaptureFixture
) -> None:
    fit(line())
    whole = records(tmp_path / "run")
    (tmp_path / "run" / "checkpoints" / "step-000000010" / "model.safetensors").write_bytes(b"?")
    trainer = fit(line())
    assert trainer.first == 8
    assert "step-000000010 cannot be read: going on from step 8" in caplog.text
    assert records(tmp_path / "run") == whole


def test_with_all_checkpoints_damaged_nothing_is_lost(
    tmp_path: Path, line: Any, fit: Fit, records: Records
) -> None:
    fit(line())
    whole = records(tmp_path / "run")
    for name in list_names(tmp_path / "run" / "checkpoints"):
        (tmp_path / "run" / "checkpoints" / name / "state.json").write_text("{")
    with pytest.raises(UserError, match="No checkpoint"):
        fit(line())
    assert records(tmp_path / "run") == whole


# -- what can go wrong -----------------------------------------------------------------------


def diverge_at(line: Any, stop: int, value: float) -> Any:
    task = line()

    def loss(model: nn.Module, phase: str, step: int, micro: int) -> BatchLoss:
        batch = line.loss(task, model, phase, step, micro)
        return batch._replace(loss=batch.loss * value) if step == stop else batch

    task.loss = loss
    return task


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_loss_that_is_no_number_stops_training(
    tmp_path: Path, line: Any, fit: Fit, records: Records, value: float
) -> None:
    with pytest.raises(UserError, match=r"at step 7.*checkpoint is intact.*train\.lr.*--resume"):
        fit(diverge_at(line, 6, value))
    found, damaged = load_last(tmp_path / "run" / "checkpoints")
    assert found is not None and found.step == 4 and damaged == []
    fit(line(), lr=0.05)  # as advised
    assert records(tmp_path / "run")[-1].kind == "test"


def test_without_a_checkpoint_none_is_promised(line: Any, fit: Fit) -> None:
    with pytest.raises(UserError, match=r"no checkpoint yet.*--overwrite"):
        fit(diverge_at(line, 2, math.nan))


def test_an_infinite_gradient_stops_training(line: Any, fit: Fit) -> None:
    task = line()
    task.model.weight.register_hook(lambda grad: grad * math.inf)
    with pytest.raises(UserError, match=r"gradient norm (inf|nan)"):
        fit(task)


def test_infinite_weights_are_not_saved(tmp_path: Path, line: Any, fit: Fit) -> None:
    task = line()

    @torch.no_grad()
    def end_step() -> None:
        if task.seen[-1][0] == 7:
            task.model.weight.fill_(math.inf)

    task.end_step = end_step
    with pytest.raises(UserError, match="Weights became infinite at step 8"):
        fit(task)
    assert list_names(tmp_path / "run" / "checkpoints") == ["step-000000004"]


def test_a_validation_that_is_no_number_stops_before_the_checkpoint(
    tmp_path: Path, line: Any, fit: Fit
) -> None:
    task = line()
    task.evaluate = lambda *_: {"loss": math.nan if len(task.seen) > 5 else 1.0}
    with pytest.raises(UserError, match="valid split became nan at step 8"):
        fit(task, valid_every=4)
    assert list_names(tmp_path / "run" / "checkpoints") == ["step-000000004"]


@pytest.mark.parametrize("size", [900, 1500])
def test_a_disk_full_of_records_ends_in_a_sentence(
    tmp_path: Path,
    line: Any,
    fit: Fit,
    records: Records,
    file_limit: Callable[[int], AbstractContextManager[None]],
    capfd: pytest.CaptureFixture[str],
    size: int,
) -> None:
    with file_limit(size), pytest.raises(UserError, match=r"cannot be written"):
        fit(line(), steps=20, save_every=3, log_every=1)
    found, _ = load_last(tmp_path / "run" / "checkpoints")
    assert found is not None and found.step >= 3
    assert "Traceback" not in capfd.readouterr().err
    fit(line(), steps=20, save_every=3, log_every=1)
    fit(line(), "whole", steps=20, save_every=3, log_every=1)
    assert records(tmp_path / "run") == records(tmp_path / "whole")


def test_a_disk_full_at_the_end_leaves_no_half_model(tmp_path: Path, line: Any, fit: Fit) -> None:
    task = line()

    def save(folder: Path) -> None:
        line.save(task, folder)
        raise OSError(errno.ENOSPC, "No space left on device")

    task.save = save
    with pytest.raises(UserError, match=r"model cannot be written.*No space.*--resume"):
        fit(task)
    assert not list((tmp_path / "run").glob("model*"))
    fit(line())
    assert (tmp_path / "run" / "model" / "weights.txt").is_file()


# -- the step --------------------------------------------------------------------------------


def make_trainer(task: Any, folder: Path, **settings: Any) -> Trainer:
    values = TrainingConfig(**settings)
    return Trainer(task, values, RunFolder.create(folder / "run"), make_accelerator(values))


def gradient_norms(task: Any, folder: Path, clip: float) -> tuple[list[float], list[float]]:
    """Of three steps: as recorded, and as the optimiser meets them."""
    trainer = make_trainer(task, folder, steps=3, warmup=0, clip=clip)
    met: list[float] = []

    def note(*_: Any) -> None:
        met.append(float(torch.cat([p.grad.flatten() for p in task.model.parameters()]).norm()))

    trainer.optimizers["weights"].register_step_pre_hook(note)
    return [trainer._step(step).grad_norm for step in range(3)], met


def test_the_gradient_is_clipped_to_its_bound(tmp_path: Path, line: Any) -> None:
    recorded, met = gradient_norms(line(), tmp_path / "clipped", clip=0.1)
    assert all(norm <= 0.1 * (1 + 1e-5) for norm in met)
    assert min(recorded) > 0.2  # so there was something to clip


def test_there_need_be_no_bound(tmp_path: Path, line: Any) -> None:
    recorded, met = gradient_norms(line(), tmp_path / "free", clip=0.0)
    assert met == pytest.approx(recorded)


def test_the_learning_rate_follows_schedule_and_scale(tmp_path: Path, line: Any) -> None:
    task = line()
    weight, bias = task.model.parameters()
    groups = [{"params": [weight]}, {"params": [bias], "lr_scale": 10.0}]
    task.parameters = lambda: {"weights": groups}
    trainer = make_trainer(task, tmp_path, steps=4, warmup=2, lr=0.5)
    seen = []
    for step in range(4):
        trainer._step(step)
        seen += [group["lr"] for group in trainer.optimizers["weights"].param_groups]
    assert seen == pytest.approx([0.25, 2.5, 0.5, 5.0, 0.5, 5.0, 0.25, 2.5])


def test_a_warmup_longer_than_the_training_is_shortened_and_said(
    tmp_path: Path, line: Any, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = make_trainer(line(), tmp_path, steps=20, warmup=400, lr=0.5)
    assert not caplog.text  # what may still be refused says nothing
    trainer._step(2)
    assert trainer.optimizers["weights"].param_groups[0]["lr"] == 0.5
    trainer.fit()
    assert "warm-up of 400 steps is longer than the training of 20, so it takes 2" in caplog.text


def test_accumulation_is_the_mean_over_batches(tmp_path: Path, line: Any) -> None:
    """Two batches of four lanes move the weights as one of eight does."""

    def clean(task: Any, model: nn.Module, step: int, micro: int, lanes: int) -> BatchLoss:
        inputs, targets = task.points(step, micro)
        inputs = torch.cat([inputs, torch.zeros(len(inputs), 1)], 1)
        loss = (model(inputs[:lanes]) - targets[:lanes]).square().mean()
        return BatchLoss(loss, loss, lanes)

    halves, whole = line(), line()
    both = [halves.points(0, micro) for micro in range(2)]
    whole.points = lambda step, micro: tuple(torch.cat(parts) for parts in zip(*both, strict=True))
    halves.loss = lambda model, phase, step, micro: clean(halves, model, step, micro, 4)
    whole.loss = lambda model, phase, step, micro: clean(whole, model, step, micro, 8)
    settings = {"steps": 1, "warmup": 0, "lr": 0.1, "clip": 0.0}
    in_halves = make_trainer(halves, tmp_path / "halves", **settings, accumulate=2)._step(0)
    at_once = make_trainer(whole, tmp_path / "whole", **settings)._step(0)
    assert in_halves.units == at_once.units == 8
    assert in_halves.loss == pytest.approx(at_once.loss)
    assert in_halves.grad_norm == pytest.approx(at_once.grad_norm)
    assert torch.allclose(halves.model.weight, whole.model.weight)


def test_every_step_draws_its_own_noise(tmp_path: Path, line: Any) -> None:
    task = line()
    draws = []

    def loss(model: nn.Module, phase: str, step: int, micro: int) -> BatchLoss:
        draws.append(torch.rand(1).item())
        return line.loss(task, model, phase, step, micro)

    task.loss = loss
    trainer = make_trainer(task, tmp_path, steps=4, accumulate=2)
    for step in (0, 1, 1):
        trainer._step(step)
    assert len(set(draws[:4])) == 4
    assert draws[2:4] == draws[4:6]  # the same step again


@pytest.mark.parametrize(
    "wrong",
    [
        {"steps": 0},
        {"accumulate": 0},
        {"lr": 0.0},
        {"lr": math.nan},
        {"warmup": -1},
        {"warmup": 2.5},
        {"clip": -0.5},
        {"weight_decay": -1.0},
        {"betas": [0.9]},
        {"betas": [0.9, 1.0]},
        {"keep": 0},
        {"threads": 0},
    ],
)
def test_settings_out_of_range_are_named(wrong: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=f"train.{next(iter(wrong))}"):
        validate(TrainingConfig(**wrong), "train.")


# -- optimisers and clipping -----------------------------------------------------------------


OPTIMIZERS = {
    "adamw": torch.optim.AdamW,
    "adam": torch.optim.Adam,
    "adamax": torch.optim.Adamax,
    "nadam": torch.optim.NAdam,
    "adagrad": torch.optim.Adagrad,
    "adadelta": torch.optim.Adadelta,
    "rmsprop": torch.optim.RMSprop,
    "sgd": torch.optim.SGD,
}


def test_every_optimizer_is_tried() -> None:
    assert set(get_args(_hints(TrainingConfig)["optimizer"])) == OPTIMIZERS.keys()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_by_name_moves_the_weights_as_torch_does(
    tmp_path: Path, line: Any, name: str
) -> None:
    """Its steps are those of the class called by hand; only AdamW decays weights by default."""
    task = line()
    trainer = make_trainer(
        task, tmp_path, steps=3, warmup=0, schedule="constant", lr=0.1, clip=0.0, optimizer=name
    )
    assert type(trainer.optimizers["weights"]) is OPTIMIZERS[name]
    twin = line()
    options = {"weight_decay": 0.01} if name == "adamw" else {}
    own = OPTIMIZERS[name](twin.model.parameters(), lr=0.1, **options)
    task.loss = twin.loss = lambda model, *_: squares(model)
    for step in range(3):
        trainer._step(step)
        own.zero_grad()
        squares(twin.model).loss.backward()
        own.step()
    assert torch.allclose(task.model.weight, twin.model.weight, atol=1e-6)
    assert not torch.allclose(task.model.weight, line().model.weight)


def squares(model: nn.Module) -> BatchLoss:
    loss = (model(torch.eye(3)) - 2.0).square().mean()
    return BatchLoss(loss, loss, 3)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_is_resumed_exactly(line: Any, fit: Fit, name: str) -> None:
    whole = fit(line(), "whole", optimizer=name)
    task = line()
    task.begin_step = raise_at(6)
    with pytest.raises(Killed):
        fit(task, "broken", optimizer=name)
    resumed = fit(line(), "broken", optimizer=name)
    assert resumed.first == 4
    assert torch.equal(resumed.task.model.weight, whole.task.model.weight)


def test_the_gradient_is_clipped_by_value(tmp_path: Path, line: Any) -> None:
    """Entries are cut first; the norm, of what is left, is recorded and cut after them."""
    task = line()
    trainer = make_trainer(task, tmp_path, steps=1, warmup=0, clip=0.0, clip_value=0.01)
    met: list[torch.Tensor] = []

    def note(*_: Any) -> None:
        met.extend(p.grad.clone() for p in task.model.parameters())

    trainer.optimizers["weights"].register_step_pre_hook(note)
    norm = trainer._step(0).grad_norm
    entries = torch.cat([grad.flatten() for grad in met])
    assert entries.abs().max() <= 0.01 and (entries.abs() > 0.0099).sum() >= 2
    assert norm == pytest.approx(float(entries.norm()))


# -- longer trainings ------------------------------------------------------------------------


def test_a_finished_run_is_lengthened(
    tmp_path: Path,
    line: Any,
    fit: Fit,
    records: Records,
    capsys: pytest.CaptureFixture[str],
) -> None:
    first = fit(line(), warmup=0.2)
    model = (first.run.model / "weights.txt").read_text()
    task = line()
    longer = fit(task, warmup=0.2, steps=30)
    assert [step for step, _ in task.seen] == list(range(10, 30))
    assert longer.settings.warmup_steps == 2  # as it was, not a share of the new length
    rate = longer.settings.lr * lr_factor(longer.settings, 10)
    said = capsys.readouterr().err
    assert "training of 10 steps" in said and "becomes one of 30" in said
    assert f"stretched to that length, the learning rate goes on at {rate:.3g}" in said
    rates = {r.step: r.values["lr"] for r in records(tmp_path / "run") if r.kind == "train"}
    assert rates[12] == pytest.approx(0.1 * lr_factor(TrainingConfig(steps=30, warmup=2), 11))
    assert (longer.run.model / "weights.txt").read_text() == str(task.model.weight.tolist())
    assert (longer.run.model / "weights.txt").read_text() != model
    assert [r.step for r in records(tmp_path / "run") if r.kind == "test"] == [10, 30]


def test_a_lengthened_run_is_resumed_exactly_by_the_same_command(
    tmp_path: Path, line: Any, fit: Fit, records: Records
) -> None:
    for folder in ("whole", "broken"):
        fit(line(), folder, warmup=0.2)
    whole = fit(line(), "whole", warmup=0.2, steps=30)
    task = line()
    task.begin_step = raise_at(21)
    with pytest.raises(Killed):
        fit(task, "broken", warmup=0.2, steps=30)
    resumed = fit(line(), "broken", warmup=0.2, steps=30)
    assert resumed.first == 20
    assert torch.equal(resumed.task.model.weight, whole.task.model.weight)
    assert records(tmp_path / "broken") == records(tmp_path / "whole")


def test_the_model_of_the_shorter_training_does_not_outlive_the_longer(line: Any, fit: Fit) -> None:
    """A kill between the last checkpoint and the model leaves the model to be written."""
    fit(line())
    task = line()

    def save(folder: Path) -> None:
        raise Killed

    task.save = save
    with pytest.raises(Killed):
        fit(task, steps=20)
    last = fit(line(), steps=20)
    assert last.first == 20
    assert (last.run.model / "weights.txt").read_text() == str(last.task.model.weight.tolist())


def test_a_stopped_run_may_be_shortened_but_not_below_what_is_done(line: Any, fit: Fit) -> None:
    task = line()
    task.begin_step = raise_at(9)
    with pytest.raises(Killed):
        fit(task)
    with pytest.raises(UserError, match=r"has made 8 steps already: give train.steps of at least"):
        fit(line(), steps=5)
    assert fit(line(), steps=9).first == 8

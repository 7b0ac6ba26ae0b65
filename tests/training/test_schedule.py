"""Schedules against values worked out by hand."""

import dataclasses
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepenough.cli import _settings_class, commands
from deepenough.config import Command
from deepenough.training.config import TrainingConfig, lr_factor, tau_at


def test_warmup_and_cosine_by_hand() -> None:
    settings = TrainingConfig(steps=12, warmup=4, schedule="cosine")
    factors = [lr_factor(settings, step) for step in range(13)]
    assert factors[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert factors[6] == pytest.approx((1 + math.sqrt(0.5)) / 2)  # a quarter of the way: 45 degrees
    assert factors[8] == pytest.approx(0.5)
    assert factors[10] == pytest.approx((1 - math.sqrt(0.5)) / 2)
    assert factors[12] == pytest.approx(0.0)


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("linear", [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]),
        ("constant", [0.5, 1.0, 1.0, 1.0, 1.0, 1.0]),
        ("inverse_sqrt", [0.5, 1.0, *(math.sqrt(2 / n) for n in (3, 4, 5, 6))]),
    ],
)
def test_other_schedules_by_hand(schedule: str, expected: list[float]) -> None:
    settings = TrainingConfig(steps=6, warmup=2, schedule=schedule)  # type: ignore[arg-type]
    assert [lr_factor(settings, step) for step in range(6)] == pytest.approx(expected)


@pytest.mark.parametrize("schedule", ["cosine", "linear", "constant", "inverse_sqrt"])
def test_there_need_be_no_warmup(schedule: str) -> None:
    settings = TrainingConfig(steps=3, warmup=0, schedule=schedule)  # type: ignore[arg-type]
    assert lr_factor(settings, 0) == 1.0


@given(steps=st.integers(1, 5000), warmup=st.floats(0, 1, exclude_max=True) | st.integers(1, 9000))
def test_the_warmup_is_never_longer_than_the_training(steps: int, warmup: float) -> None:
    settings = TrainingConfig(steps=steps, warmup=warmup)
    assert 0 <= settings.warmup_steps <= steps
    if warmup < 1:
        assert settings.warmup_steps == pytest.approx(warmup * steps, abs=0.5)
    elif warmup <= steps:
        assert settings.warmup_steps == warmup
    assert max(lr_factor(settings, step) for step in (0, settings.warmup_steps)) > 0.99


def test_the_default_of_every_method_is_a_share_of_the_training() -> None:
    """An explicit number of steps would be too long for a short training."""
    sections = {
        f"{name} {field.name}": getattr(settings, field.name)
        for name, command in commands().items()
        for settings in [_defaults(command)]
        for field in dataclasses.fields(settings)
    }
    found = {name: part for name, part in sections.items() if isinstance(part, TrainingConfig)}
    assert len(found) >= 6
    assert {name: part.warmup for name, part in found.items() if not 0 < part.warmup < 1} == {}


def _defaults(command: Command) -> Any:
    settings_class = _settings_class(command, [])
    required = {
        field.name: "x"
        for field in dataclasses.fields(settings_class)
        if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
    }
    return settings_class(**required)


def test_tau_by_hand() -> None:
    assert tau_at("exponential", 1.0, 0.01, 0.5) == pytest.approx(0.1)
    assert tau_at("linear", 1.0, 0.1, 0.5) == pytest.approx(0.55)
    assert tau_at("constant", 0.7, 0.1, 0.5) == 0.7


positive = st.floats(1e-3, 1e3)


@given(kind=st.sampled_from(["exponential", "linear"]), start=positive, end=positive)
def test_tau_begins_and_ends_exactly(kind: str, start: float, end: float) -> None:
    assert tau_at(kind, start, end, 0.0) == start
    assert tau_at(kind, start, end, 1.0) == end


@given(
    kind=st.sampled_from(["exponential", "linear"]),
    start=positive,
    end=positive,
    progress=st.floats(0, 1),
)
def test_tau_stays_between_its_ends(kind: str, start: float, end: float, progress: float) -> None:
    tau = tau_at(kind, start, end, progress)
    assert min(start, end) * (1 - 1e-9) <= tau <= max(start, end) * (1 + 1e-9)

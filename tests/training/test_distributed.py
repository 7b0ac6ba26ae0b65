"""What one process alone does of the things that several share."""

from types import SimpleNamespace

import pytest
import torch

from deepenough.errors import UserError
from deepenough.training import distributed
from deepenough.training.config import TrainingConfig, seed_at
from deepenough.training.distributed import (
    from_all,
    is_main_process,
    make_accelerator,
    on_main,
)


def test_alone_everything_is_ones_own() -> None:
    accelerator = make_accelerator(TrainingConfig())
    assert on_main(accelerator, lambda: {"step": 3}) == {"step": 3}
    assert from_all(accelerator, (1, "a")) == from_all(None, (1, "a")) == [(1, "a")]
    assert is_main_process()


@pytest.mark.skipif(torch.accelerator.is_available(), reason="of machines without a GPU")
def test_a_cpu_has_no_half_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    for precision in ("fp32", "auto"):
        settings = TrainingConfig(precision=precision)  # type: ignore[arg-type]
        assert make_accelerator(settings).mixed_precision == "no"
    with pytest.raises(UserError, match="bf16 needs a GPU"):
        make_accelerator(TrainingConfig(precision="bf16"))


def test_a_second_run_may_have_another_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU: accelerate would keep the precision of the first run."""
    made: list[str] = []
    monkeypatch.setattr(
        distributed,
        "Accelerator",
        lambda **options: (
            made.append(options["mixed_precision"]) or SimpleNamespace(num_processes=1)
        ),
    )
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 1)
    for precision in ("fp32", "bf16", "auto"):
        make_accelerator(TrainingConfig(precision=precision))  # type: ignore[arg-type]
    assert made == ["no", "bf16", "bf16"]
    make_accelerator(TrainingConfig(), device="cpu")
    assert made[-1] == "no"


def test_processes_that_do_not_know_of_each_other_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As on a device for which accelerate starts no process group: each would be the first."""
    make_accelerator(TrainingConfig())  # the group, or that there is none, is settled only once
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UserError, match="2 processes were started"):
        make_accelerator(TrainingConfig())


def test_the_number_of_threads_can_be_set() -> None:
    before = torch.get_num_threads()
    make_accelerator(TrainingConfig(threads=2))
    assert torch.get_num_threads() == 2
    torch.set_num_threads(before)


def test_seeds_differ_wherever_places_do() -> None:
    places = [(s, t, p, r) for s in (0, 1) for t in range(50) for p in "ab" for r in range(3)]
    seeds = {seed_at(*place) for place in places}
    assert len(seeds) == len(places)
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert seed_at(1, 23) != seed_at(12, 3)
    assert seed_at(3, 4, "weights", 0) == seed_at(3, 4, "weights", 0)

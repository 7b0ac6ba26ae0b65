"""What one process alone does of the things that several share."""

import subprocess

import pytest
import torch

from deepenough.errors import UserError
from deepenough.training import distributed
from deepenough.training.config import TrainingConfig, seed_at
from deepenough.training.distributed import (
    all_streams,
    is_main_process,
    make_accelerator,
    mean_over,
    on_main,
    own_streams,
)


def test_alone_everything_is_ones_own() -> None:
    accelerator = make_accelerator(TrainingConfig())
    lanes = {"memory": torch.arange(6).view(3, 2)}
    assert on_main(accelerator, lambda: {"step": 3}) == {"step": 3}
    assert mean_over(accelerator, torch.tensor(2.5)) == 2.5
    assert all_streams(accelerator, lanes) == lanes
    assert torch.equal(own_streams(accelerator, lanes)["memory"], lanes["memory"])
    assert is_main_process()


def test_a_second_run_may_have_another_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distributed, "_check_bf16", lambda: None)
    for precision in ("fp32", "bf16", "auto"):
        settings = TrainingConfig(precision=precision)  # type: ignore[arg-type]
        accelerator = make_accelerator(settings)
        assert accelerator.mixed_precision == ("bf16" if precision == "bf16" else "no")


@pytest.mark.parametrize(("code", "output"), [(0, "64.0\n"), (-4, "")])
def test_bf16_is_tried_where_it_could_kill_the_process(
    monkeypatch: pytest.MonkeyPatch, code: int, output: str
) -> None:
    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(command, code, output)

    monkeypatch.setattr(distributed.subprocess, "run", run)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    settings = TrainingConfig(precision="bf16")
    if code == 0:
        assert make_accelerator(settings).mixed_precision == "bf16"
    else:
        with pytest.raises(UserError, match=r"cannot run: leave train\.precision at auto"):
            make_accelerator(settings)


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

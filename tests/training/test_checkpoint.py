"""Checkpoints survive kills, full disks and damage; nothing in them can run code."""

import errno
import json
import re
import shutil
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
import torch
from torch import nn

import deepenough
from deepenough.errors import UserError
from deepenough.training import checkpoint as checkpoints
from deepenough.training.checkpoint import Checkpoint, list_names, load_last, save


def make(step: int, size: int = 10) -> Checkpoint:
    weight = torch.full((size, 3), float(step))
    return Checkpoint(
        step=step,
        model={"embedding": weight, "tied": weight, "scalar": torch.tensor(step)},
        optimizers={"weights.0.exp_avg": weight / 3},
        task={"lanes": torch.zeros(4, 0, 3)},
        values={"run": {"seed": 1}, "meter": {"loss": 1 / 3}},
    )


def damage(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-5])


def load(folder: Path) -> Checkpoint:
    found, _ = load_last(folder)
    assert found is not None
    return found


def test_what_is_saved_is_loaded(tmp_path: Path) -> None:
    saved = make(7)
    save(tmp_path, saved, keep=1)
    found, damaged = load_last(tmp_path)
    assert found is not None and damaged == []
    assert found.step == 7 and found.values == saved.values
    for part in ("model", "optimizers", "task"):
        before, after = getattr(saved, part), getattr(found, part)
        assert before.keys() == after.keys()
        assert all(torch.equal(before[name], after[name]) for name in before)


def test_no_checkpoint_is_no_error(tmp_path: Path) -> None:
    assert load_last(tmp_path / "nowhere") == (None, [])


def test_only_the_last_are_kept(tmp_path: Path) -> None:
    for step in (5, 10, 100, 1000):
        save(tmp_path, make(step), keep=3)
    assert list_names(tmp_path) == ["step-000000010", "step-000000100", "step-000001000"]


def test_a_past_that_was_left_is_deleted(tmp_path: Path) -> None:
    """After going on from step 10, what lies beyond it belongs to another run."""
    for step in (10, 20, 30):
        save(tmp_path, make(step), keep=3)
    damage(tmp_path / "step-000000030" / "model.safetensors")
    save(tmp_path, make(25), keep=3)
    assert list_names(tmp_path) == ["step-000000010", "step-000000020", "step-000000025"]


@pytest.mark.parametrize(
    "file", ["model.safetensors", "optimizers.safetensors", "task.safetensors", "state.json"]
)
def test_a_truncated_checkpoint_is_passed_over(tmp_path: Path, file: str) -> None:
    save(tmp_path, make(1), keep=2)
    save(tmp_path, make(2), keep=2)
    damage(tmp_path / "step-000000002" / file)
    found, damaged = load_last(tmp_path)
    assert found is not None and found.step == 1
    assert damaged == ["step-000000002"]


@pytest.mark.parametrize("content", [b"", b"[1]", b"{}", b"\xff\xfe", None])
def test_a_state_that_is_none_is_passed_over(tmp_path: Path, content: bytes | None) -> None:
    save(tmp_path, make(1), keep=2)
    last = save(tmp_path, make(2), keep=2) / "state.json"
    last.unlink() if content is None else last.write_bytes(content)
    assert load(tmp_path).step == 1


def test_all_damaged_is_said(tmp_path: Path) -> None:
    for step in (1, 2):
        damage(save(tmp_path, make(step), keep=2) / "model.safetensors")
    with pytest.raises(UserError, match=r"No checkpoint .* can be read .*--overwrite"):
        load_last(tmp_path)


def test_a_full_disk_leaves_the_previous_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, make(1), keep=1)

    def half(tensors: object, path: Path) -> None:
        path.write_bytes(b"half")
        if path.name.startswith("optimizers"):
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(checkpoints, "save_file", half)
    with pytest.raises(UserError, match=r"No space left on device.*make room"):
        save(tmp_path, make(2), keep=1)
    assert [entry.name for entry in tmp_path.iterdir()] == ["step-000000001"]
    assert load(tmp_path).step == 1


def test_a_write_that_the_system_refuses_leaves_the_previous_one(
    tmp_path: Path, file_limit: Callable[[int], AbstractContextManager[None]]
) -> None:
    save(tmp_path, make(1), keep=1)
    with file_limit(20_000), pytest.raises(UserError, match="cannot be written"):
        save(tmp_path, make(2, size=20_000), keep=1)
    assert [entry.name for entry in tmp_path.iterdir()] == ["step-000000001"]
    assert load(tmp_path).step == 1


def test_what_a_kill_left_half_written_is_no_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "step-000000003.tmp").mkdir(parents=True)
    assert load_last(tmp_path) == (None, [])


def test_a_checkpoint_that_was_being_replaced_is_taken_back(tmp_path: Path) -> None:
    path = save(tmp_path, make(5), keep=1)
    path.rename(path.with_name(f"{path.name}.old.tmp"))  # as a kill leaves it
    assert load(tmp_path).step == 5
    assert [entry.name for entry in tmp_path.iterdir()] == ["step-000000005"]


@pytest.mark.parametrize("part", ["model", "optimizers", "task"])
def test_a_part_of_another_checkpoint_is_refused(tmp_path: Path, part: str) -> None:
    """Each is a good file by itself, and gives other weights than were trained."""
    older, newer = (save(tmp_path, make(step), keep=2) for step in (1, 2))
    file = f"{part}.safetensors"
    same = (newer / file).read_bytes() == (older / file).read_bytes()
    shutil.copyfile(older / file, newer / file)
    found, damaged = load_last(tmp_path)
    assert found is not None
    assert (found.step, damaged) == ((2, []) if same else (1, ["step-000000002"]))


def test_a_checkpoint_under_the_name_of_another_is_refused(tmp_path: Path) -> None:
    older, newer = (save(tmp_path, make(step), keep=2) for step in (1, 2))
    shutil.rmtree(newer)
    shutil.copytree(older, newer)
    found, damaged = load_last(tmp_path)
    assert found is not None and found.step == 1 and damaged == ["step-000000002"]


def test_one_flipped_bit_is_noticed(tmp_path: Path) -> None:
    save(tmp_path, make(1), keep=2)
    file = save(tmp_path, make(2), keep=2) / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-2] ^= 1
    file.write_bytes(content)
    assert load_last(tmp_path)[1] == ["step-000000002"]


def test_optimizers_come_back_to_the_last_bit() -> None:
    def trained(steps: int, model: nn.Linear, optimizer: torch.optim.Optimizer) -> None:
        for _ in range(steps):
            optimizer.zero_grad()
            model(torch.ones(2, 3)).square().sum().backward()
            optimizer.step()

    def fresh() -> tuple[nn.Linear, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = nn.Linear(3, 2)
        return model, torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)

    whole, optimizer = fresh()
    trained(5, whole, optimizer)
    first, optimizer = fresh()
    trained(2, first, optimizer)
    state = checkpoints.optimizer_tensors("weights", optimizer)
    second, optimizer = fresh()
    second.load_state_dict(first.state_dict())
    checkpoints.restore_optimizer("weights", optimizer, state | {"other.0.exp_avg": torch.ones(1)})
    trained(3, second, optimizer)
    assert torch.equal(whole.weight, second.weight)


def test_nothing_is_pickled(tmp_path: Path) -> None:
    path = save(tmp_path, make(1), keep=1)
    assert {file.suffix for file in path.iterdir()} == {".safetensors", ".json"}
    json.loads((path / "state.json").read_text())
    sources = list(Path(deepenough.__file__).parent.rglob("*.py"))
    pickles = re.compile(r"import pickle\b|\btorch\.(save|load)\(")
    assert len(sources) > 50
    # Maps that others published as pickles are read by an unpickler that admits tensors alone.
    found = [file.name for file in sources if pickles.search(file.read_text())]
    assert found == ["source_pickles.py"]

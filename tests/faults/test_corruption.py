"""A few cases of `python -m tests.faults corruption`, on what takes a second to make."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.faults import corruption
from tests.faults.corruption import ARTIFACTS, Artifact, Harness

CHOSEN = {
    "par model": ("flip 1", "deleted", "exchanged"),
    "par settings": ("flip 1", "other kind"),
    "par checkpoints": ("exchanged",),
    "token cache": ("flip 1", "emptied"),
}


@pytest.fixture(scope="module")
def harness(tmp_path_factory: pytest.TempPathFactory) -> Harness:
    made = Harness(tmp_path_factory.mktemp("faults"))
    made.make([("par train", corruption.KEEP), ("par train", "--out par2 --train.seed 1")])
    return made


@pytest.mark.parametrize("name", CHOSEN)
def test_what_is_damaged_is_refused_or_read_as_it_was(harness: Harness, name: str) -> None:
    artifact = next(each for each in ARTIFACTS if each.name == name)
    left_out = ("step-000000004", "tokenizer", "task")

    def chosen(file: str, fault: str) -> bool:
        return fault in CHOSEN[name] and not any(part in file for part in left_out)

    cases = list(harness.damage(artifact, 0, chosen))
    assert len(cases) >= len(CHOSEN[name])
    assert {outcome for _, outcome, _ in cases} <= set(corruption.GOOD), cases


def test_the_harness_notices(harness: Harness) -> None:
    """A reader that believes everything, and one that fails, are found out."""

    def believes(folder: Path) -> int:
        return sum((folder / "par/model/model.safetensors").read_bytes())

    def fails(folder: Path) -> int:
        content = (folder / "par/model/model.safetensors").read_bytes()
        return {sum(content): 1}[believes(harness.made)]

    for read, outcome in ((believes, "silent"), (fails, "traceback")):
        naive = Artifact("naive", ("par",), ("par/model/model.safetensors",), read)
        found = {each for _, each, _ in harness.damage(naive, 0, lambda _, f: f == "flip 1")}
        assert found == {outcome}

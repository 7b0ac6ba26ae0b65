"""Every hostile file costs a sentence and nothing more."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.faults import hostile


def test_hostile_files_do_no_more_than_end_in_a_sentence(
    capsys: pytest.CaptureFixture[str],
) -> None:
    counts = hostile.run()
    assert counts["bad"] == 0, capsys.readouterr().out
    assert counts["cases"] >= 60 and counts["refused"] > 5 * counts["harmless"]


def test_a_file_that_does_more_is_noticed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hostile, "CASES", {
        "runs": lambda folder: (folder / hostile.RAN).touch(),
        "raises": lambda folder: {}["x"],
    })  # fmt: skip
    assert hostile.run()["bad"] == 2
    said = capsys.readouterr().out
    assert "runs: code of the file ran" in said and "raises: KeyError" in said

"""Messages of a run: in its file with their time, warnings on the terminal too."""

import logging
import re
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
from transformers.utils import logging as transformers_logging

from deepenough.errors import UserError
from deepenough.training.logging import log_to, without_bars

log = logging.getLogger("deepenough")


def test_messages_go_to_the_file_behind_what_is_there(tmp_path: Path) -> None:
    path = tmp_path / "training.log"
    for word in ("first", "second"):
        with log_to(path):
            log.info("%s run", word)
            logging.getLogger("deepenough.data").warning("of a part")
    log.warning("after the run")
    lines = path.read_text().splitlines()
    assert [line[24:] for line in lines] == [
        "INFO first run",
        "WARNING of a part",
        "INFO second run",
        "WARNING of a part",
    ]
    assert all(re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} ", line) for line in lines)


def test_nothing_is_left_behind(tmp_path: Path) -> None:
    handlers, level = list(log.handlers), log.level
    with pytest.raises(ZeroDivisionError), log_to(tmp_path / "training.log"):
        assert len(log.handlers) > len(handlers)
        raise ZeroDivisionError
    assert log.handlers == handlers and log.level == level


def test_warnings_are_seen_on_the_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    with log_to(tmp_path / "training.log"):
        log.info("quiet")
        log.warning("a checkpoint cannot be read")
    assert capsys.readouterr().err == "a checkpoint cannot be read\n"


def test_a_run_within_a_run_has_its_own_file(tmp_path: Path) -> None:
    with log_to(tmp_path / "outer.log"):
        log.info("one")
    with log_to(tmp_path / "inner.log"):
        log.info("two")
    assert "two" not in (tmp_path / "outer.log").read_text()
    assert "one" not in (tmp_path / "inner.log").read_text()


def test_a_full_disk_is_not_the_logs_to_report(
    tmp_path: Path,
    file_limit: Callable[[int], AbstractContextManager[None]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    with file_limit(100), log_to(tmp_path / "training.log"):
        for _ in range(10):
            log.info("a line of some length")
    assert capsys.readouterr().err == ""


def test_a_log_that_cannot_be_made_is_said(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be written"), log_to(tmp_path):
        pass


def test_bars_of_transformers_are_silenced_and_come_back() -> None:
    before = transformers_logging.is_progress_bar_enabled()
    transformers_logging.enable_progress_bar()
    with without_bars():
        assert not transformers_logging.is_progress_bar_enabled()
    assert transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    with without_bars():
        pass
    assert not transformers_logging.is_progress_bar_enabled()
    if before:
        transformers_logging.enable_progress_bar()

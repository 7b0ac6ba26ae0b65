"""A cache entry is there whole or not at all, also when processes race for it."""

import threading
from pathlib import Path

import pytest

from deepenough.artifacts import cache_folder, entry, key_of
from deepenough.errors import UserError


def test_where_it_is(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "deepenough"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folder() == Path.home() / ".cache" / "deepenough"
    assert cache_folder("here") == Path("here")


def test_keys_tell_boundaries():
    assert key_of("ab", "c") != key_of("a", "bc") != key_of("abc")
    assert key_of("a", "b") == key_of("a", "b")


def test_filled_once(tmp_path):
    calls = []

    def fill(folder):
        calls.append(folder)
        (folder / "x").write_text("1")

    for _ in range(2):
        assert (entry(tmp_path / "a" / "b", fill) / "x").read_text() == "1"
    assert len(calls) == 1


def test_failure_leaves_nothing(tmp_path):
    def fill(folder):
        (folder / "x").write_text("half")
        raise ValueError

    with pytest.raises(ValueError):
        entry(tmp_path / "a", fill)
    assert list(tmp_path.iterdir()) == []


def test_full_disk_is_said(tmp_path):
    def fill(folder):
        raise OSError(28, "No space left on device")

    with pytest.raises(UserError, match="No space left on device"):
        entry(tmp_path / "a", fill)
    assert list(tmp_path.iterdir()) == []


def test_two_at_once_agree(tmp_path):
    meet = threading.Barrier(2)

    def fill(folder):
        meet.wait(timeout=10)  # both have found the entry missing
        (folder / "x").write_text("same")

    threads = [threading.Thread(target=entry, args=(tmp_path / "a", fill)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
    assert (tmp_path / "a" / "x").read_text() == "same"

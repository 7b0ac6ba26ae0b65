"""What is saved is there whole or not at all and checked when read; a folder has one writer."""

import contextlib
import os
import shutil
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from deepenough import artifacts
from deepenough.artifacts import (
    DamagedError,
    FinishedParts,
    atomic_path,
    cache_folder,
    entry,
    key_of,
    load_artifact,
    load_tensors,
    locked,
    read_json,
    remove_partial,
    restore,
    save_artifact,
    save_tensors,
    seal,
    verify,
    write_json,
)
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


def test_parts_are_kept_until_all_is_done(tmp_path):
    made = []

    def make():
        made.append(1)
        return {"values": [1.5, float("inf")], "number": len(made)}

    first = FinishedParts(tmp_path, "work", {"seed": 0})
    assert first.get("a", make) == FinishedParts(tmp_path, "work", {"seed": 0}).get("a", make)
    assert FinishedParts(tmp_path, "work", {"seed": 1}).get("a", make)["number"] == 2
    for path in (tmp_path / "checkpoints").rglob("a.json"):
        path.write_text("{")  # damaged
    assert first.get("a", make)["number"] == 3
    first.close()
    assert list(tmp_path.iterdir()) == []
    assert FinishedParts(None, "work").get("a", make)["number"] == 4


def test_work_in_parts_has_its_folder_alone_and_leaves_nothing_where_nothing_came_of_it(tmp_path):
    folder = tmp_path / "new"
    with pytest.raises(ValueError, match="no luck"), FinishedParts(folder, "work") as parts:
        with ThreadPoolExecutor() as pool:
            other = pool.submit(FinishedParts(folder, "other").__enter__)
            assert "another" in str(other.exception()).lower()
        raise ValueError("no luck")
    assert not folder.exists()
    with pytest.raises(ValueError, match="later"), FinishedParts(folder, "work") as parts:
        parts.get("a", dict)
        raise ValueError("later")
    assert list(folder.rglob("a.json"))
    with FinishedParts(folder, "work") as parts:
        assert parts.get("a", lambda: {"made": "anew"}) == {}
    assert not folder.exists()


# -- replacing, checksums and locks ----------------------------------------------------------------


def fill_folder(folder: Path, text: str) -> None:
    folder.mkdir()
    (folder / "a").write_text(text)


def test_a_folder_is_there_at_every_moment_of_its_replacement(tmp_path, monkeypatch):
    """Killed between any two renamings, the old or the new one is read."""
    place = tmp_path / "model"
    replace = os.replace
    for kill_at in (1, 2, 3):
        shutil.rmtree(place, ignore_errors=True)
        fill_folder(place, "old")
        calls = []

        def killed(source, target, kill_at=kill_at, calls=calls):
            calls.append(source)
            if len(calls) == kill_at:
                raise SystemExit
            replace(source, target)

        with monkeypatch.context() as patch:
            patch.setattr(os, "replace", killed)
            # What a process that is killed does not do any more.
            patch.setattr(artifacts, "_remove", lambda path: None)
            patch.setattr(artifacts, "restore", lambda path: path)
            with contextlib.suppress(SystemExit), atomic_path(place) as partial:
                shutil.rmtree(partial, ignore_errors=True)
                fill_folder(partial, "new")
        assert (restore(place) / "a").read_text() in ("old", "new")
        remove_partial(tmp_path)
        assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_an_artifact_is_readable_at_every_moment_of_its_replacement(tmp_path, monkeypatch):
    path = tmp_path / "maps.safetensors"
    replace = os.replace
    seen = set()
    for kill_at in range(1, 5):
        save_artifact(path, {"a": torch.zeros(2)}, {"format": "f", "version": 1})
        calls = []

        def killed(source, target, kill_at=kill_at, calls=calls):
            calls.append(source)
            if len(calls) == kill_at:
                raise SystemExit
            replace(source, target)

        with monkeypatch.context() as patch:
            patch.setattr(os, "replace", killed)
            patch.setattr(artifacts, "_remove", lambda path: None)
            with contextlib.suppress(SystemExit):
                save_artifact(path, {"a": torch.ones(2)}, {"format": "f", "version": 1})
        seen.add(load_artifact(path, "f", 1)[0]["a"].sum().item())
    assert seen == {0.0, 2.0}


def test_json_comes_back_or_is_refused(tmp_path):
    path = tmp_path / "x.json"
    content = {"a": [1, 2.5, None], "b": {"c": "é"}, "3": True}
    write_json(path, {**content, "t": (1, 2)})
    assert read_json(path) == {**content, "t": [1, 2]}
    path.write_text(path.read_text().replace("2.5", "2.4"))
    with pytest.raises(ValueError, match="checksum"):
        read_json(path)
    path.write_text("[1]")
    with pytest.raises(ValueError, match="no JSON object"):
        read_json(path)


def test_tensors_are_checked_with_their_metadata(tmp_path):
    path = tmp_path / "x.safetensors"
    tensors = {"a": torch.arange(6.0).view(2, 3), "b": torch.zeros(0, 2), "c": torch.tensor(True)}
    save_tensors(path, tensors, {"batches": "7"})
    found, metadata = load_tensors(path)
    assert metadata == {"batches": "7"}
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())
    whole = path.read_bytes()
    for old, new in ((b'"7"', b'"8"'), (whole[-6:], b"\0" * 6)):
        path.write_bytes(whole.replace(old, new))
        with pytest.raises(DamagedError, match="checksum"):
            load_tensors(path)


def test_tensors_are_readable_as_the_umask_says(tmp_path):
    before = os.umask(0o027)
    try:
        save_tensors(tmp_path / "a.safetensors", {"a": torch.ones(2)})
    finally:
        os.umask(before)
    assert (tmp_path / "a.safetensors").stat().st_mode & 0o777 == 0o640


def test_a_sealed_folder_tells_what_was_changed(tmp_path):
    assert not verify(tmp_path)
    fill_folder(tmp_path / "x", "1")
    (tmp_path / "x" / "w.safetensors").write_text("2")
    seal(tmp_path / "x")
    assert verify(tmp_path / "x")
    (tmp_path / "x" / "beside").write_text("is nobody's concern")
    assert verify(tmp_path / "x")
    (tmp_path / "x" / "w.safetensors").write_text("3")
    assert verify(tmp_path / "x", without=".safetensors")
    with pytest.raises(DamagedError, match=r"w\.safetensors is not the file that was saved"):
        verify(tmp_path / "x")
    (tmp_path / "checkpoints").mkdir()
    with pytest.raises(DamagedError, match="--resume"):
        verify(tmp_path / "x")
    (tmp_path / "x" / "a").unlink()
    with pytest.raises(DamagedError, match="a is missing"):
        verify(tmp_path / "x")


def test_one_writer_and_the_dead_keep_nothing(tmp_path):
    with locked(tmp_path):
        with locked(tmp_path):  # a command within a command
            pass
        with ThreadPoolExecutor(1) as pool, pytest.raises(UserError, match="Another command"):
            pool.submit(lambda: locked(tmp_path).__enter__()).result()
        held = subprocess.run([sys.executable, "-c", HOLD, str(tmp_path)], capture_output=True)
        assert b"Another command is writing into" in held.stderr
    assert list(tmp_path.iterdir()) == []
    subprocess.run([sys.executable, "-c", HOLD, str(tmp_path)])
    assert [path.name for path in tmp_path.iterdir()] == [".lock"]  # it was killed
    with locked(tmp_path):
        pass
    assert list(tmp_path.iterdir()) == []


HOLD = """
import os, pathlib, signal, sys
from deepenough.artifacts import locked
with locked(pathlib.Path(sys.argv[1])):
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_damaged_entry_is_made_anew(tmp_path, caplog):
    def fill(folder):
        (folder / "x").write_text("good")

    place = entry(tmp_path / "a", fill)
    (place / "x").write_text("evil")
    assert (entry(tmp_path / "a", fill) / "x").read_text() == "good"
    assert "is damaged and made anew" in caplog.text
    (place / "checksums.json").unlink()  # as entries were before they had checksums
    caplog.clear()
    assert (entry(tmp_path / "a", fill) / "x").read_text() == "good"
    assert (place / "checksums.json").is_file() and not caplog.text


def test_what_killed_processes_left_is_deleted_by_the_next(tmp_path):
    dead, alive = tmp_path / ".a-dead", tmp_path / ".b-alive"
    for folder in (dead, alive):
        fill_folder(folder, "half")
        os.utime(folder, (0, 0))
    with ThreadPoolExecutor(1) as pool:
        guard = locked(alive)
        pool.submit(guard.__enter__).result()
        os.utime(alive, (0, 0))
        entry(tmp_path / "c", lambda folder: (folder / "x").write_text("1"))
        assert not dead.exists() and alive.exists()
        pool.submit(guard.__exit__, None, None, None).result()

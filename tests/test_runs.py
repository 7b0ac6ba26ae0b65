"""Records survive kills and corruption; run folders never cost anyone a file."""

import json
import math
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepenough.config import RunConfig, dump
from deepenough.errors import UserError
from deepenough.runs import (
    Metrics,
    Record,
    RunFolder,
    append_record,
    read_config,
    read_records,
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "metrics.jsonl"


def write(path: Path, *steps: int) -> None:
    metrics = Metrics(path)
    for step in steps:
        metrics.append(Record(step, "train", {"loss": 1.0 / step}, time=float(step)))


def steps(path: Path) -> list[int]:
    return [record.step for record in read_records(path)[0]]


class TestRecord:
    def test_a_line_is_a_flat_json_object(self) -> None:
        record = Record(10, "train", {"loss": 2.5, "pi": [[0.2, 0.3, 0.5]]}, time=1.5e9)
        content = json.loads(record.to_json())
        assert content.pop("crc") == "4fb249bc"
        assert content == {
            "step": 10,
            "kind": "train",
            "time": 1.5e9,
            "loss": 2.5,
            "pi": [[0.2, 0.3, 0.5]],
        }

    @given(
        st.dictionaries(
            st.text(max_size=5).filter(lambda key: key not in ("step", "kind", "time", "crc")),
            st.none() | st.booleans() | st.floats(allow_nan=False) | st.text(max_size=20),
            max_size=4,
        )
    )
    def test_any_values_come_back_from_one_line(self, values: dict[str, object]) -> None:
        record = Record(3, "valid", values)
        line = record.to_json()
        assert "\n" not in line
        assert Record.from_json(line) == record

    def test_arrays_become_lists(self) -> None:
        record = Record(1, "train", {"pi": np.eye(2), "loss": np.float32(0.5)})
        assert Record.from_json(record.to_json()).values == {"pi": [[1, 0], [0, 1]], "loss": 0.5}

    def test_a_diverged_loss_stays_one(self) -> None:
        record = Record.from_json(Record(1, "train", {"loss": math.nan, "ppl": math.inf}).to_json())
        assert math.isnan(record.values["loss"])
        assert record.values["ppl"] == math.inf

    def test_values_cannot_hide_the_step(self) -> None:
        with pytest.raises(ValueError, match="'step'"):
            Record(1, "train", {"step": 2})

    def test_what_json_cannot_hold_is_refused(self) -> None:
        with pytest.raises(TypeError, match=r"cannot hold a \w*Path"):
            Record(1, "train", {"place": Path()}).to_json()

    @pytest.mark.parametrize(
        "line",
        [
            "3",
            "{}",
            '{"step": 1, "kind": "train"}',
            '{"step": 1.5, "kind": "train", "time": 0}',
            '{"step": true, "kind": "train", "time": 0}',
            '{"step": 1, "kind": 2, "time": 0}',
        ],
    )
    def test_other_json_is_no_record(self, line: str) -> None:
        with pytest.raises(ValueError):
            Record.from_json(line)


class TestMetrics:
    def test_records_come_back_in_order(self, path: Path) -> None:
        write(path, 1, 2, 3)
        append_record(path, Record(3, "valid", {}))
        records, num_corrupted = read_records(path)
        assert [(record.step, record.kind) for record in records] == [
            (1, "train"),
            (2, "train"),
            (3, "train"),
            (3, "valid"),
        ]
        assert num_corrupted == 0

    def test_corrupted_lines_are_skipped_and_counted(self, path: Path) -> None:
        write(path, 1)
        with open(path, "ab") as file:
            file.write(b'{"step": 2, "kind"\n\xff\xfe\n\n[1]\n')
        write(path, 3)
        assert steps(path) == [1, 3]
        assert read_records(path)[1] == 3

    @pytest.mark.parametrize("size", [20, 200_000])
    def test_a_torn_last_line_does_not_spoil_the_next(self, path: Path, size: int) -> None:
        write(path, 1, 2)
        with open(path, "ab") as file:
            file.write(b'{"step": 3, "text": "' + b"x" * size)
        assert read_records(path)[1] == 1
        write(path, 3)
        assert steps(path) == [1, 2, 3]
        assert read_records(path)[1] == 0

    @pytest.mark.parametrize("torn", [b'{"step"', b"\xf0"])
    def test_a_file_that_is_only_a_torn_line(self, path: Path, torn: bytes) -> None:
        path.write_bytes(torn)
        write(path, 1)
        assert steps(path) == [1]

    def test_every_possible_tear_is_mended(self, path: Path) -> None:
        write(path, 1, 2)
        whole = path.read_bytes()
        first_line_end = whole.index(b"\n") + 1
        for size in range(first_line_end, len(whole)):
            path.write_bytes(whole[:size])
            write(path, 5)
            complete = size == len(whole) - 1  # only the line end is missing
            assert steps(path) == ([1, 2, 5] if complete else [1, 5])
            assert read_records(path)[1] == 0

    def test_truncate_after_drops_what_a_resumed_run_says_again(self, path: Path) -> None:
        write(path, 1, 2, 3, 4)
        metrics = Metrics(path)
        metrics.append(Record(2, "valid", {}))
        metrics.truncate_after(2)
        assert steps(path) == [1, 2, 2]
        metrics.truncate_after(2)
        assert steps(path) == [1, 2, 2]
        assert list(path.parent.iterdir()) == [path]

    def test_truncate_after_keeps_lines_it_cannot_read(self, path: Path) -> None:
        write(path, 1)
        with open(path, "ab") as file:
            file.write(b"noise\n")
        write(path, 2)
        Metrics(path).truncate_after(1)
        assert steps(path) == [1]
        assert read_records(path)[1] == 1

    def test_truncate_without_a_file(self, path: Path) -> None:
        Metrics(path).truncate_after(3)
        assert not path.exists()

    def test_a_full_disk_is_said_in_a_sentence(self) -> None:
        full = Path("/dev/full")
        if not full.exists():
            pytest.skip("this system has no /dev/full")
        with pytest.raises(UserError, match="No space left on device; make room"):
            Metrics(full).append(Record(1, "train", {}))

    def test_reading_a_missing_file_is_the_users_error(self, path: Path) -> None:
        with pytest.raises(UserError, match=r"no metrics file .*metrics\.jsonl"):
            read_records(path)


class TestRunFolder:
    @pytest.fixture
    def run(self, tmp_path: Path) -> RunFolder:
        """A run that has written a little."""
        folder = RunFolder.create(tmp_path / "runs" / "first")
        folder.config.write_text("method: par\nsteps: 3\nprovenance: {}\n")
        write(folder.metrics, 1)
        for name in ("checkpoints/step-000000001/state.json", "model/config.json", "plots/a.png"):
            (folder.path / name).parent.mkdir(parents=True)
            (folder.path / name).write_text("content")
        return folder

    def test_names_are_those_people_know(self) -> None:
        folder = RunFolder(Path("run"))
        names = ["config", "metrics", "log", "checkpoints", "model", "plots", "events"]
        assert [getattr(folder, name).name for name in names] == [
            "config.yaml",
            "metrics.jsonl",
            "training.log",
            "checkpoints",
            "model",
            "plots",
            "events",
        ]

    def test_an_empty_folder_is_free(self, tmp_path: Path) -> None:
        assert RunFolder.create(tmp_path).path == tmp_path

    def test_an_existing_run_is_refused(self, run: RunFolder) -> None:
        with pytest.raises(UserError, match="exists already"):
            RunFolder.create(run.path)
        assert steps(run.metrics) == [1]

    def test_resume_keeps_everything(self, run: RunFolder) -> None:
        assert RunFolder.create(run.path, resume=True).path == run.path
        assert steps(run.metrics) == [1]

    def test_resume_may_be_the_first_start(self, tmp_path: Path) -> None:
        assert RunFolder.create(tmp_path / "new", resume=True).path.is_dir()

    def test_resume_of_something_else_is_refused(self, tmp_path: Path) -> None:
        (tmp_path / "thesis.tex").write_text("...")
        with pytest.raises(UserError, match="no run"):
            RunFolder.create(tmp_path, resume=True)

    def test_overwrite_empties_a_run(self, run: RunFolder) -> None:
        (run.path / "config.yaml.tmp").write_text("left by a kill")
        RunFolder.create(run.path, overwrite=True)
        assert list(run.path.iterdir()) == []

    @pytest.mark.parametrize("name", ["thesis.tex", ".git", "data"])
    def test_overwrite_never_deletes_what_is_not_a_run(self, tmp_path: Path, name: str) -> None:
        (tmp_path / name).mkdir()
        with pytest.raises(UserError, match="not overwritten"):
            RunFolder.create(tmp_path, overwrite=True)
        assert (tmp_path / name).is_dir()

    def test_overwrite_refuses_a_run_with_foreign_files(self, run: RunFolder) -> None:
        (run.path / "notes.md").write_text("by hand")
        with pytest.raises(UserError, match=r"notes\.md"):
            RunFolder.create(run.path, overwrite=True)
        assert steps(run.metrics) == [1]

    def test_overwrite_refuses_folders_that_only_share_a_name(self, tmp_path: Path) -> None:
        (tmp_path / "model").mkdir()
        with pytest.raises(UserError, match="no run has written there"):
            RunFolder.create(tmp_path, overwrite=True)
        assert (tmp_path / "model").is_dir()

    def test_overwrite_does_not_follow_links(self, run: RunFolder, tmp_path: Path) -> None:
        elsewhere = tmp_path / "precious"
        elsewhere.mkdir()
        (elsewhere / "file").write_text("kept")
        (run.plots / "a.png").unlink()
        run.plots.rmdir()
        run.plots.symlink_to(elsewhere)
        RunFolder.create(run.path, overwrite=True)
        assert (elsewhere / "file").read_text() == "kept"

    def test_overwrite_refuses_the_current_folder(
        self, run: RunFolder, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(run.plots)
        with pytest.raises(UserError, match="current folder"):
            RunFolder.create(run.path, overwrite=True)
        assert run.is_run()

    def test_resume_and_overwrite_exclude_each_other(self, run: RunFolder) -> None:
        with pytest.raises(UserError, match="only one"):
            RunFolder.create(run.path, resume=True, overwrite=True)

    def test_a_file_in_the_way(self, tmp_path: Path) -> None:
        (tmp_path / "run").write_text("")
        with pytest.raises(UserError, match="is a file"):
            RunFolder.create(tmp_path / "run")
        with pytest.raises(UserError, match="cannot be made"):
            RunFolder.create(tmp_path / "run" / "below")

    def test_open(self, run: RunFolder, tmp_path: Path) -> None:
        assert RunFolder.open(str(run.path)).path == run.path
        with pytest.raises(UserError, match="no run folder"):
            RunFolder.open(tmp_path / "missing")
        with pytest.raises(UserError, match="not a run folder"):
            RunFolder.open(tmp_path)

    @pytest.mark.parametrize("content", ["a: 1\n", "method: mine\n", ""])
    def test_overwrite_refuses_what_another_program_wrote(
        self, tmp_path: Path, content: str
    ) -> None:
        """Also where its files have our names."""
        (tmp_path / "config.yaml").write_text(content)
        (tmp_path / "model").mkdir()
        (tmp_path / "model" / "config.json").write_text("{}")
        with pytest.raises(UserError, match="no run has written there"):
            RunFolder.create(tmp_path, overwrite=True)
        assert (tmp_path / "model" / "config.json").is_file()

    @pytest.mark.parametrize(
        "name", ["model/thesis.tex", "plots/data.csv", "checkpoints/x.py", "derived/my.txt", "tune"]
    )
    def test_overwrite_refuses_foreign_files_at_any_depth(self, run: RunFolder, name: str) -> None:
        (run.path / name).parent.mkdir(exist_ok=True)
        (run.path / name).write_text("by hand")
        with pytest.raises(UserError, match=name):
            RunFolder.create(run.path, overwrite=True)
        assert steps(run.metrics) == [1]

    def test_a_run_that_was_killed_at_once_is_overwritten(self, tmp_path: Path) -> None:
        for text in ("", "2026-01-01 00:00:00,000 INFO going on from step 3\n"):
            (tmp_path / "training.log").write_text(text)
            RunFolder.create(tmp_path, overwrite=True)
        assert list(tmp_path.iterdir()) == []

    def test_what_a_kill_left_half_written_is_deleted(self, run: RunFolder) -> None:
        (run.checkpoints / "step-000000003.tmp").mkdir()
        (run.path / "model.old.tmp").mkdir()
        (run.path / "metrics.jsonl.tmp").write_text("half")
        RunFolder.create(run.path, resume=True)
        assert not list(run.path.rglob("*.tmp"))
        assert steps(run.metrics) == [1]

    def test_a_folder_that_another_writes_is_refused(self, run: RunFolder) -> None:
        def begin(**options: bool) -> None:
            RunFolder.create(run.path, **options)

        with run.lock(), ThreadPoolExecutor(1) as pool:
            for options in ({"resume": True}, {"overwrite": True}):
                with pytest.raises(UserError, match="Another command is writing into"):
                    pool.submit(begin, **options).result()
        assert steps(run.metrics) == [1]
        RunFolder.create(run.path, resume=True)

    @pytest.mark.parametrize("content", ["- a\n- b\n", "", "3\n", "a: [\n"])
    def test_settings_that_are_none_are_refused(self, run: RunFolder, content: str) -> None:
        run.config.write_text(content)
        with pytest.raises(UserError, match="is not as the run wrote it"):
            read_config(str(run.path))

    def test_settings_that_were_changed_are_refused(self, run: RunFolder) -> None:
        dump(RunConfig(out="here"), run.config)
        assert read_config(str(run.path))["out"] == "here"
        run.config.write_text(run.config.read_text().replace("here", "gone"))
        with pytest.raises(UserError, match="delete its first line"):
            read_config(str(run.path))
        run.config.write_text(run.config.read_text().partition("\n")[2])
        assert read_config(str(run.path))["out"] == "gone"


def test_a_flipped_bit_in_a_record_is_noticed(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write(path, 1, 2, 4)
    path.write_bytes(path.read_bytes().replace(b'"loss": 0.5', b'"loss": 0.4'))
    assert steps(path) == [1, 4]
    assert "1 line(s)" in caplog.text and "are damaged and skipped" in caplog.text

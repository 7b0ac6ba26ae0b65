"""Pictures of lazy runs: what is drawn together, and what is left out."""

import shutil

import pytest

from deepenough.errors import UserError
from deepenough.report.lazy import write_lazy_figures
from deepenough.report.lazy_source import epsilon_points, last_look, last_rest, step_grid
from deepenough.report.source import read_run
from deepenough.runs import Record, append_record


def test_a_damaged_look_is_left_out_of_the_pictures(programs_run, tmp_path):
    broken = tmp_path / "broken"
    shutil.copytree(programs_run, broken)
    values = {"source": "a", "target": "b", "encoder": {"tokens": ["a"], "similarity": [[1], [2]]}}
    append_record(broken / "metrics.jsonl", Record(2, "lazy_tokens", values))
    append_record(broken / "metrics.jsonl", Record(2, "lazy_rest", {"sentences": 3}))
    append_record(broken / "metrics.jsonl", Record(2, "epsilon", {"epsilon": "all"}))
    run = read_run(broken)
    assert last_look(run) is None and last_rest(run) is None and epsilon_points(run) == []
    with pytest.raises(UserError, match="nothing of a Lazy Transformer"):
        write_lazy_figures(run, tmp_path)


def test_sweeps_that_do_not_compare_are_not_drawn_together(lazy, make_run):
    run = make_run()
    words = ["--beams", "1", "--decoder_steps", "[2]"]
    few, more = ["--sentences", "2"], ["--sentences", "4"]
    lazy("sweep", run, *words, *more, "--encoder_steps", "[2,4]", "--epsilons", "[0,1]")
    lazy("sweep", run, *words, *few, "--encoder_steps", "[3]", "--epsilons", "[0.5]")
    assert set(step_grid(read_run(run))) == {(3, 2)}
    assert [point["epsilon"] for point in epsilon_points(read_run(run))] == [0.5]
    lazy("sweep", run, *words, *more, "--encoder_steps", "[3]", "--epsilons", "[0.5]")
    assert set(step_grid(read_run(run))) == {(2, 2), (3, 2), (4, 2)}
    points = epsilon_points(read_run(run))
    assert [point["epsilon"] for point in points] == [0.0, 0.5, 1.0]
    flops = [point["encoder_flops"] for point in points]
    assert flops == sorted(flops, reverse=True)

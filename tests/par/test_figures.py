"""Figures of a search: what was recorded is what is shown, and only that."""

import math
from typing import Any

import numpy as np
import pytest

from deepenough.errors import UserError
from deepenough.figure import Run
from deepenough.par.figures import (
    architecture_figure,
    block_states,
    blocks_figure,
    pattern_figure,
    section,
)
from deepenough.runs import Record

PI = [[0.2, 0.3, 0.5], [0.9, 0.06, 0.04], [0.1, 0.8, 0.1]]


def search(num: int = 4, derived: bool = True, **config: Any) -> Run:
    records = [
        Record(10 * n, "train", {"loss": 5.0, "pi": PI, "tau": 1 - n / 10}, 0.0)
        for n in range(1, num + 1)
    ]
    if derived:
        values = {"pattern": "-ad", "pi": PI, "relative_cost": 0.654}
        records.append(Record(10 * num, "derive", values, 0.0))
    return Run("first", records, {"search": {}} | config, path="runs/first")


def test_the_leading_value_of_every_block_is_written_in() -> None:
    figure = blocks_figure(search())
    assert figure is not None
    (heat,) = figure.panels
    np.testing.assert_allclose(heat.values, np.transpose(PI))
    assert heat.texts == [["", "0.90", ""], ["", "", "0.80"], ["0.50", "", ""]]
    assert len(heat.frames) == 4
    assert heat.frames[-1].name == "step 40, temperature 0.60: -ad"
    assert figure.command == "deepenough par search --config runs/first/config.yaml"


def test_a_run_without_a_search_has_no_heat_map() -> None:
    run = Run("r", [Record(1, "train", {"loss": 1.0}, 0.0)])
    assert blocks_figure(run) is None
    assert architecture_figure(run) is None
    assert section(run) is None


def test_only_distributions_count_as_block_states() -> None:
    bad = [
        None, 3, [], [[]], "pi", [[0.5, 0.5]], [0.2, 0.3, 0.5], [[0.2, 0.3, 0.6]], [[-1, 1, 1]],
        [[math.nan, 0, 1]], [[0.2, 0.3, "x"]], [[1, 0, 0], [1, 0]],
    ]  # fmt: skip
    records = [Record(i, "train", {"pi": pi}, 0.0) for i, pi in enumerate(bad)]
    assert block_states(Run("r", records)) == []
    # Another number of blocks than at the end belongs to another model.
    records += [Record(50, "train", {"pi": [[1.0, 0.0, 0.0]]}, 0.0)]
    records += [Record(60, "train", {"pi": PI, "tau": 0.5}, 0.0)]
    records += [Record(60, "derive", {"pi": PI, "pattern": "-ad"}, 0.0)]
    (state,) = block_states(Run("r", records))
    assert state.step == 60
    assert state.tau == 0.5
    assert state.pattern == "-ad"


def test_the_architecture_says_only_what_is_known() -> None:
    figure = architecture_figure(search())
    assert figure is not None
    (diagram,) = figure.panels
    assert diagram.blocks == ["identity", "attention", "dense"]
    assert diagram.facts == ("-ad · 1 attention · 1 dense · 1 identity · relative cost 0.65")
    assert figure.subject == "first, derived"
    assert pattern_figure("aad").panels[0].facts == "aad · 2 attention · 1 dense"


def test_before_the_derivation_it_shows_what_is_most_probable() -> None:
    figure = architecture_figure(search(derived=False))
    assert figure is not None and figure.subject == "first, most probable at step 40"


def test_a_training_shows_the_pattern_it_was_given() -> None:
    config = {"model": {"pattern": "adad"}}
    run = Run("given", [Record(1, "train", {"loss": 1.0}, 0.0)], config)
    figure = architecture_figure(run)
    assert figure is not None and figure.subject == "given, as given"
    found = section(run)
    assert found is not None and found.heading == "PAR model"


def test_a_search_that_prefers_identities_so_far_has_no_drawing() -> None:
    run = Run("r", [Record(1, "train", {"pi": [[0.1, 0.1, 0.8]] * 2}, 0.0)], {"search": {}})
    assert architecture_figure(run) is None
    found = section(run)
    assert found is not None and found.findings == [] and len(found.figures) == 1


@pytest.mark.parametrize("pattern", [None, "", 7, "a?d"])
def test_a_run_without_a_pattern_has_no_drawing(pattern: object) -> None:
    record = Record(1, "derive", {"pattern": pattern}, 0.0)
    assert architecture_figure(Run("r", [record], {"model": {"pattern": pattern}})) is None


@pytest.mark.parametrize(
    ("pattern", "message"), [("", "no block"), ("aaxd", "'x'"), ("a d", "' '"), ("AD", "'A'")]
)
def test_bad_patterns_are_one_sentence(pattern: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        pattern_figure(pattern)


def test_findings_follow_the_data() -> None:
    run = search()
    tested = [*run.records, Record(40, "test", {"perplexity": 42.0}, 0.0)]
    found = section(Run("first", tested, run.config))
    assert found is not None and found.heading == "PAR search"
    assert found.findings == [
        "The search chose -ad (1 attention, 1 dense, 1 identity); its least certain block has "
        "probability 0.50.",
        "Perplexity of the mixture of all blocks on the test text: 42.",
    ]
    found = section(search(derived=False))
    assert found is not None and found.findings[0].startswith("So far the most probable pattern")

"""Patterns and settings: letters, ranges, and the sentences for wrong ones."""

import subprocess
import sys

import pytest

from deepenough.config import validate
from deepenough.errors import UserError
from deepenough.par.config import SearchConfig, check_pattern, interleaved


@pytest.mark.parametrize("pattern", ["a", "d", "aadad-", "-d", "ad" * 20])
def test_good_patterns_pass(pattern):
    assert check_pattern(pattern) == pattern


def test_open_blocks_pass_where_they_may_stand():
    assert check_pattern("a*-", allow_open=True) == "a*-"
    assert check_pattern("**", allow_open=True) == "**"
    with pytest.raises(UserError, match=r"'a\*-' has the unknown letter '\*'"):
        check_pattern("a*-")


@pytest.mark.parametrize("allow_open", [False, True])
def test_unknown_letters(allow_open):
    with pytest.raises(UserError, match="'axd' has the unknown letter 'x': use a for attention"):
        check_pattern("axd", allow_open)
    with pytest.raises(UserError, match="unknown letter 'A'"):
        check_pattern("Ad", allow_open)


@pytest.mark.parametrize("pattern", ["", "-", "---"])
def test_no_block(pattern):
    with pytest.raises(UserError, match="has no block: give at least one a"):
        check_pattern(pattern)
    with pytest.raises(UserError, match="has no block"):
        check_pattern(pattern, allow_open=True)


def test_interleaved():
    assert [interleaved(n) for n in (1, 2, 5)] == ["a", "ad", "adada"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tau_start": 0.0}, "tau_start must be above 0"),
        ({"budget": 0.0}, "budget must be above 0"),
        ({"budget_weight": -1.0}, "budget_weight must be at least 0"),
        ({"budget_weight": 1.0}, "budget_weight needs a search.budget"),
        ({"cost_length": 0}, "cost_length must be at least 1"),
        ({"held_out": 1.0}, "held_out must be above 0 and below 1"),
        ({"choose_after": 1.0}, "choose_after must be at least 0 and below 1"),
    ],
)
def test_a_search_that_cannot_be_is_refused(changes, message):
    with pytest.raises(UserError, match=message):
        validate(SearchConfig(**changes))


def test_settings_are_read_without_torch():
    """Figures read patterns, and `--help` settings: neither must wait for torch."""
    modules = "deepenough.par.config, deepenough.par.commands"
    code = f"import sys, {modules}; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)

"""Patterns: letters, and the sentences for wrong ones."""

import pytest

from deepenough.errors import UserError
from deepenough.par.pattern import check_pattern, interleaved


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

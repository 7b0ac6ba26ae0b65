"""The config: what it refuses and in which words, what it works out, and that it keeps."""

import pytest

from deepenough import ParConfig, UserError
from deepenough.par.config import with_pattern


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_heads": 3}, "3 heads do not divide the width 16: choose num_heads so that"),
        ({"pattern": "axd"}, "'axd' has the unknown letter 'x'"),
        ({"pattern": "--"}, "'--' has no block"),
        ({"pattern": ""}, "has no block"),
        ({"num_blocks": 0}, "has no block"),
        ({"cutoffs": [20, 10]}, r"\[20, 10\] are not sorted and distinct: give them in rising"),
        ({"cutoffs": [10, 10]}, "not sorted and distinct"),
        ({"cutoffs": [0, 10]}, "must lie between 1 and 39"),
        ({"cutoffs": [-3]}, "must lie between 1 and 39"),
        ({"cutoffs": [10, 41]}, "must lie between 1 and 39"),
        ({"cutoffs": [10, 40]}, "the vocabulary size, 40, is not one of them"),
        ({"adaptive_input": True}, "Adaptive input embeddings need cutoffs: give cutoffs as well"),
        ({"cutoffs": [10, 20], "div_value": 5.0}, "2 cutoffs with a div_value of 5 do not fit the"),
        ({"cutoffs": [10], "div_value": 0.0}, "div_value must be at least 1"),
        ({"mem_len": -1}, "mem_len must not be negative: got -1"),
        ({"length": 0}, "length must be at least 1: got 0"),
        ({"d_model": 0}, "d_model must be at least 1: got 0"),
        ({"num_heads": 0}, "num_heads must be at least 1: got 0"),
        ({"vocab_size": 0}, "vocab_size must be at least 1"),
        ({"d_ff": 0}, "d_ff must be at least 1"),
        ({"dropout": 1.0}, r"dropout must be in \[0, 1\): got 1.0"),
        ({"attention_dropout": -0.1}, r"attention_dropout must be in \[0, 1\)"),
    ],
)
def test_bad_values_get_one_sentence(make_config, changes, message):
    with pytest.raises(UserError, match=message) as caught:
        make_config(**changes)
    assert "\n" not in str(caught.value)
    assert str(caught.value).endswith(".")


def test_a_search_is_a_pattern_of_stars(make_config):
    assert make_config(num_blocks=3).pattern == "***"
    fixed = make_config(num_blocks=3, pattern="ad-d")
    assert (fixed.pattern, fixed.num_blocks, fixed.num_hidden_layers) == ("ad-d", 4, 4)


def test_what_follows_from_the_sizes(make_config):
    config = make_config()
    assert config.sliding_window == 9
    assert config.initializer_range == 0.25
    assert config.tie_word_embeddings
    assert not make_config(cutoffs=[10]).tie_word_embeddings


def test_other_blocks_and_nothing_else(make_config):
    config = make_config(num_blocks=3, cutoffs=[10, 20], adaptive_input=True, learn_tau=True)
    other = with_pattern(config, "ad--")
    assert other.pattern == "ad--"
    same, changed = config.to_dict(), other.to_dict()
    for values in (same, changed):
        del values["pattern"], values["num_blocks"]
    assert same == changed


def test_round_trip(make_config, tmp_path):
    config = make_config(pattern="a*-", cutoffs=[10, 20], straight_through=True)
    config.save_pretrained(tmp_path)
    assert ParConfig.from_pretrained(tmp_path).to_dict() == config.to_dict()

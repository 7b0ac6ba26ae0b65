"""The figures of a language model, worked by hand."""

import math

import pytest

from deepenough.training.language import TextSize, language_values


def test_figures_by_hand():
    # 8 of 10 tokens were predicted at 2 bits each; the text has 5 words and 40 bytes.
    values = language_values(8 * 2 * math.log(2), 8, TextSize(tokens=10, words=5, bytes=40))
    assert values["loss"] == pytest.approx(2 * math.log(2))
    assert values["perplexity"] == pytest.approx(4.0)
    assert values["word_perplexity"] == pytest.approx(4.0 ** (10 / 5))
    assert values["bits_per_byte"] == pytest.approx(2 * 10 / 40)
    assert values["tokens"] == 8


def test_perplexity_is_of_the_total_loss():
    """Batches of losses 0 and 2 give e, not the mean of 1 and e^2."""
    values = language_values(0.0 * 4 + 2.0 * 4, 8, TextSize(8, 8, 8))
    assert values["perplexity"] == pytest.approx(math.e)


def test_tokenizers_compare_by_words_and_bytes():
    """The same total loss over twice as many tokens: other perplexity, same text, same figures."""
    coarse = language_values(60.0, 10, TextSize(tokens=10, words=6, bytes=50))
    fine = language_values(60.0, 20, TextSize(tokens=20, words=6, bytes=50))
    assert coarse["perplexity"] > fine["perplexity"]
    for name in ("word_perplexity", "bits_per_byte"):
        assert coarse[name] == pytest.approx(fine[name])


def test_a_hopeless_model_has_infinite_perplexity_and_no_traceback():
    values = language_values(8000.0, 10, TextSize(10, 5, 40))
    assert values["perplexity"] == values["word_perplexity"] == math.inf
    assert values["loss"] == 800.0

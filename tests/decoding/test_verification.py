"""Sampled tokens have the model's own distribution, whatever was drafted."""

import itertools
from collections import Counter

import pytest
import torch
from scipy.stats import chisquare

from deepenough.decoding import verification
from deepenough.decoding.api import speculate
from deepenough.decoding.drafters import Drafter, Proposal


class Guess(Drafter):
    """Two fixed words, likely or not."""

    def __init__(self) -> None:
        super().__init__(2)

    def propose(self, rows, state_BD, engine) -> Proposal:
        return Proposal([[(row.context[-1] + 1) % 4, 2] for row in rows])


@pytest.fixture
def four_words(make_model):
    """A model of four words, none of which ends the text."""
    return make_model(
        vocab_size=4, initializer_range=0.15, eos_token_id=None, pad_token_id=None, bos_token_id=0
    )


class Fork(Exception):
    """All outcomes of the next draw."""


def distribution(monkeypatch, fast, given, options) -> dict[tuple[int, ...], float]:
    """Every text that can be generated and its exact probability."""

    def explore(script: tuple[int, ...]) -> dict[tuple[int, ...], float]:
        left = list(script)

        def draw(probabilities, num_samples, generator):
            if left:
                return torch.tensor([[left.pop(0)]])
            raise Fork(dict(enumerate(probabilities[0].tolist())))

        monkeypatch.setattr(verification.torch, "multinomial", draw)
        try:
            return {tuple(fast.generate(**given, **options)[0].tolist()): 1.0}
        except Fork as fork:
            result: Counter = Counter()
            for token, chance in fork.args[0].items():
                for text, rest in explore((*script, token)).items():
                    result[text] += chance * rest
            return result

    return explore(())


@torch.no_grad()
def exact(model, ids, new_tokens: int) -> dict[tuple[int, ...], float]:
    result = {}
    for tail in itertools.product(range(4), repeat=new_tokens):
        text = torch.tensor([[*ids[0].tolist(), *tail]])
        chances = model(text).logits.softmax(-1)[0]
        start = ids.shape[1]
        places = range(start, start + new_tokens)
        result[tuple(text[0].tolist())] = float(
            torch.stack([chances[place - 1, text[0, place]] for place in places]).prod()
        )
    return result


def test_sampled_distribution_is_exact(four_words, monkeypatch) -> None:
    ids = torch.tensor([[1, 3]])
    given = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    options = {"do_sample": True, "max_new_tokens": 3, "top_k": 0}
    fast = speculate(four_words, drafter=[Guess()])
    found = distribution(monkeypatch, fast, given, options)
    expected = exact(four_words, ids, 3)
    assert found.keys() == expected.keys()
    assert max(abs(found[text] - expected[text]) for text in expected) < 1e-5
    assert sum(found.values()) == pytest.approx(1.0, abs=1e-5)


@pytest.mark.parametrize(("backend", "num_texts"), [(None, 1500), ("general", 500)])
def test_sampled_texts_pass_a_chi_square_test(four_words, backend, num_texts) -> None:
    ids = torch.tensor([[1, 3]])
    given = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    fast = speculate(four_words, drafter=[Guess()], backend=backend)
    torch.manual_seed(0)
    samples = fast.generate(
        **given, do_sample=True, max_new_tokens=3, top_k=0, num_return_sequences=num_texts
    )
    counts = Counter(map(tuple, samples.tolist()))
    expected = exact(four_words, ids, 3)
    total = sum(expected.values())
    test = chisquare(
        [counts[text] for text in expected],
        [num_texts * chance / total for chance in expected.values()],
    )
    assert test.pvalue > 0.001

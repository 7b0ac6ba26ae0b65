"""The suffix automaton finds what a search through the whole text finds."""

from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deepenough import UserError
from deepenough.decoding import lookup
from deepenough.decoding.api import speculate
from deepenough.decoding.drafters import LookupDrafter
from deepenough.decoding.lookup import LookupTable, SuffixAutomaton

TEXTS = st.lists(st.integers(0, 3), max_size=28)


def ends(text: list[int], part: list[int]) -> list[int]:
    """Where a part of a text ends."""
    sizes = range(len(part), len(text) + 1)
    return [end for end in sizes if text[end - len(part) : end] == part]


def contexts_ref(text: list[int], end: list[int]) -> list[Counter]:
    """What followed each context at the end of a text, the longest first.

    Contexts that stand at the same places are one, and so are none.
    """
    found, places = [], None
    for size in range(len(end), -1, -1):
        here = ends(text, end[len(end) - size :])
        if here and here != places:
            found.append(Counter(text[place] for place in here if place < len(text)))
        places = here or places
    return found


def probability_ref(contexts: list[Counter], token: int) -> float:
    """`p(w | s) = (c(s, w) + p(w | s')) / (n(s) + 1)`, from the shortest context to the longest."""
    share = 0.0
    for counts in reversed(contexts):
        share = (counts[token] + share) / (counts.total() + 1)
    return share


def longest_match(text: list[int], other: list[int]) -> int:
    return next(n for n in range(len(other), -1, -1) if ends(text, other[len(other) - n :]))


@settings(max_examples=150, deadline=None)
@given(TEXTS)
def test_counts_of_all_suffixes(text) -> None:
    automaton = SuffixAutomaton()
    for token in text:
        automaton.extend(token)
    assert len(automaton.length) <= max(2, 2 * len(text))
    state, found = automaton.last, []
    while True:
        found.append(Counter(automaton.counts[state]))
        assert automaton.total[state] == found[-1].total()
        if state == 0:
            break
        state = automaton.link[state]
    assert found == contexts_ref(text, text)
    if text:
        # The link of the whole text is the longest suffix that stands elsewhere too.
        sizes = [n for n in range(len(text)) if len(ends(text, text[len(text) - n :])) > 1]
        assert automaton.length[automaton.link[automaton.last]] == max(sizes, default=0)


@settings(max_examples=150, deadline=None)
@given(TEXTS, TEXTS)
def test_matches_of_another_text_and_their_probabilities(text, other) -> None:
    automaton, match = SuffixAutomaton(), (0, 0)
    for token in text:
        automaton.extend(token)
    for end, token in enumerate(other, start=1):
        match = automaton.advance(*match, token)
        assert match[1] == longest_match(text, other[:end])
    contexts = contexts_ref(text, other[len(other) - match[1] :])
    for token in range(4):
        expected = probability_ref(contexts, token)
        assert automaton.probability(match[0], token) == pytest.approx(expected, abs=2e-3)


@settings(max_examples=100, deadline=None)
@given(TEXTS)
def test_drafts_are_most_frequent_continuations(text) -> None:
    drafter = LookupDrafter(3)
    for end in range(1, len(text) + 1):
        tokens, probs = drafter.find(0, text[:end])
        past, end_of_text = text[:end], text[:end]
        for token, prob in zip(tokens, probs, strict=True):
            size = next(
                n
                for n in range(len(end_of_text), -1, -1)
                if any(
                    place < len(past) for place in ends(past, end_of_text[len(end_of_text) - n :])
                )
            )
            contexts = contexts_ref(past, end_of_text[len(end_of_text) - size :])
            assert size >= lookup.MIN_MATCH
            assert contexts[0][token] == max(contexts[0].values())
            assert prob == pytest.approx(probability_ref(contexts, token), abs=2e-3)
            end_of_text = [*end_of_text, token]


def test_a_long_text_takes_time_in_proportion() -> None:
    """A text that repeats itself has as many contexts as tokens, of which few are counted."""
    automaton = SuffixAutomaton()
    for _ in range(5000):
        automaton.extend(7)
    assert sum(automaton.total) <= lookup.MAX_CONTEXTS * 5000
    state = automaton.link[automaton.last]
    assert automaton.draft(state, automaton.length[state], 4)[0] == [7] * 4


def test_a_table_is_shared_saved_and_bounded(small, make_model, prompts, tmp_path) -> None:
    table = LookupTable()
    fast = speculate(small, "lookup", table=table, num_draft_tokens=4)
    options = {"do_sample": False, "max_new_tokens": 16, "return_dict_in_generate": True}
    first = fast.generate(**prompts(1), **options)
    assert not table.texts
    again = fast.generate(**prompts(1), **options)
    # The second time the whole text is known.
    assert table.texts == [first.sequences[0].tolist()]
    assert torch.equal(again.sequences, first.sequences) and again.passes < first.passes
    table.save_pretrained(tmp_path)
    loaded = speculate(small, table=tmp_path, num_draft_tokens=4)
    assert loaded.generate(**prompts(1), **options).passes <= again.passes
    with pytest.raises(UserError, match="vocabulary of 40, and the model has 41"):
        speculate(make_model(vocab_size=41), table=tmp_path)
    with pytest.raises(UserError, match="no lookup table"):
        LookupTable.from_pretrained(tmp_path / "elsewhere")
    (tmp_path / lookup.TENSORS).write_bytes(b"")
    with pytest.raises(UserError, match="make the table anew"):
        LookupTable.from_pretrained(tmp_path)
    small_table = LookupTable([[1, 2, 3]] * 5, max_tokens=7)
    assert len(small_table.texts) < 3 and len(small_table.automaton.length) < 20


def test_texts_of_a_table_do_not_run_into_each_other() -> None:
    table = LookupTable([[1, 2, 3], [4, 5, 6]])
    drafter = LookupDrafter(4, table)
    assert drafter.find(0, [9, 1, 2])[0] == [3]
    assert drafter.find(1, [2, 3])[0] == []
    # Its own text counts where as many of its tokens match.
    assert drafter.find(2, [1, 2, 8, 9, 1, 2])[0][0] == 8


def test_tokens_outside_of_the_vocabulary_are_refused(tmp_path) -> None:
    LookupTable([[1, 50]], vocab_size=40).save_pretrained(tmp_path)
    with pytest.raises(UserError, match="outside of the vocabulary"):
        LookupTable.from_pretrained(tmp_path)


def test_rows_are_apart_and_long_matches_count() -> None:
    drafter = LookupDrafter(2)
    assert drafter.find(0, [1, 2, 3, 4])[0] == []
    assert drafter.find(0, [1, 2, 3, 4, 9, 2, 3])[0] == [4, 9]
    # The longer match counts, and of equal ones the last.
    assert drafter.find(1, [7, 1, 2, 5, 8, 1, 2, 6, 7, 1, 2])[0] == [5, 8]
    assert drafter.find(2, [1, 2, 5, 8, 1, 2, 6, 9, 1, 2])[0] == [6]
    assert drafter.find(3, [2, 3])[0] == []
    assert drafter.find(4, [5, 5, 5])[0] == [5, 5]
    drafter.begin(SimpleNamespace())  # type: ignore[arg-type]
    assert drafter.find(0, [2, 3])[0] == []

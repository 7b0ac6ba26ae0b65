"""Texts to states: the same positions and the same states, however texts are batched."""

import logging
import math
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from transformers import GPT2LMHeadModel

from deepenough.errors import UserError
from deepenough.hf.adapter import adapt
from deepenough.hf.intercept import patched_forward
from deepenough.shortcut import reading as module
from deepenough.shortcut.reading import (
    ReadingConfig,
    Tally,
    TokenBatch,
    batches,
    make_reading,
    run_batch,
)


def gathered(
    found: Iterable[tuple[TokenBatch, list[torch.Tensor]]],
) -> dict[tuple[int, int], torch.Tensor]:
    """States of the last layer by text and position."""
    return {
        (batch.windows[row].text, position): state
        for batch, states in found
        for state, row, position in zip(
            states[-1], *(places.tolist() for places in batch.wanted()), strict=True
        )
    }


def test_all_positions_of_a_causal_model(
    gpt2: Any, plain: Any, texts: list[str], iterate_states: Any
) -> None:
    tally = Tally()
    found = list(iterate_states(adapt(gpt2), plain, texts, batch_tokens=100, tally=tally))
    short = [text for text in texts if len(text.split()) < 2]
    long = [text for text in texts if len(text.split()) > 32]
    assert (tally.texts, tally.skipped, tally.windowed) == (150, len(short), len(long))
    assert short and long, "this would test less than it says"
    counts = sum(len(text.split()) for text in texts) - sum(len(text.split()) for text in short)
    assert sum(len(states[0]) for _, states in found) == counts
    by_place = gathered(found)
    for index in (3, 40, 99):
        ids = torch.tensor([plain(texts[index])["input_ids"][:32]])
        with torch.no_grad():
            alone = adapt(gpt2).states(ids)[-1][0]
        if len(texts[index].split()) <= 32:
            for position, state in enumerate(alone):
                torch.testing.assert_close(by_place[index, position], state, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["gpt2", "bert"])
def test_random_positions_depend_on_the_seed_and_the_text_alone(
    name: str, request: pytest.FixtureRequest, texts: list[str], iterate_states: Any
) -> None:
    adapter = adapt(request.getfixturevalue(name))
    tokenizer = request.getfixturevalue("plain" if name == "gpt2" else "wrapped")

    def states(**options: Any) -> dict[tuple[int, int], torch.Tensor]:
        return gathered(iterate_states(adapter, tokenizer, texts, positions="random", **options))

    small, large, other = states(batch_tokens=40), states(batch_tokens=900), states(seed=1)
    assert small.keys() == large.keys() != other.keys()
    assert len({text for text, _ in small}) == len(small) == len(other)
    for place, state in small.items():
        torch.testing.assert_close(state, large[place], rtol=1e-4, atol=1e-5)


def test_a_causal_text_is_cut_where_nothing_later_matters(
    gpt2: Any, plain: Any, texts: list[str], iterate_states: Any
) -> None:
    reading = ReadingConfig("causal", "random", window=32)
    everything = gathered(list(iterate_states(adapt(gpt2), plain, texts)))
    num = 0
    for batch in batches(plain, texts, reading):
        found = run_batch(adapt(gpt2), batch)
        for row, window in enumerate(batch.windows):
            assert len(window.ids) == window.position + 1 <= window.length
            place = window.text, window.position
            if len(texts[window.text].split()) <= 32:
                torch.testing.assert_close(found[-1][row], everything[place], rtol=1e-4, atol=1e-5)
                num += 1
    assert num > 50


def test_masked_models_see_one_mask_in_every_window(wrapped: Any, texts: list[str]) -> None:
    for positions in ("all", "random"):
        places = set()
        for batch in batches(wrapped, texts, ReadingConfig("masked", positions, window=20)):
            for window in batch.windows:
                assert window.ids.count(wrapped.mask_token_id) == 1
                assert (window.ids[0], window.ids[-1]) == (2, 3) and len(window.ids) <= 20
                place = window.ids.index(wrapped.mask_token_id)
                assert window.position == (place if positions == "random" else None)
                places.add(place)
        assert len(places) > 10
    encoder = batches(wrapped, texts, ReadingConfig("encoder", "all", window=20))
    assert all(wrapped.mask_token_id not in w.ids for batch in encoder for w in batch.windows)


def test_windows_hold_the_whole_text(plain: Any, wrapped: Any) -> None:
    text = " ".join(f"w{number}" for number in range(50))
    (batch,) = batches(plain, [text], ReadingConfig("causal", "all", window=20))
    assert [len(window.ids) for window in batch.windows] == [10, 20, 20]
    (batch,) = batches(wrapped, [text], ReadingConfig("encoder", "all", window=20))
    assert sum(len(window.ids) - 2 for window in batch.windows) == 50
    assert batch.mask is not None and batch.mask.sum(1).tolist() == [16, 20, 20]
    chosen = {
        (window.ids[-1], window.position)
        for seed in range(300)
        for batch in batches(plain, [text], ReadingConfig("causal", "random", seed, window=20))
        for window in batch.windows
    }
    assert len(chosen) == 50  # every token of the text has its chance


def test_long_texts_are_windowed_and_it_is_said_once(
    gpt2: Any, plain: Any, texts: list[str], caplog: pytest.LogCaptureFixture, iterate_states: Any
) -> None:
    with caplog.at_level(logging.WARNING, "deepenough"):
        list(iterate_states(adapt(gpt2), plain, texts * 6))
    assert caplog.messages == ["Texts of more than 32 tokens are read in windows of that length."]


def test_padding_is_small_and_batches_keep_their_size(plain: Any, texts: list[str]) -> None:
    found = list(batches(plain, texts, ReadingConfig("causal", batch_tokens=200)))
    assert all(batch.ids.numel() <= 200 for batch in found)
    tokens = sum(len(window.ids) for batch in found for window in batch.windows)
    assert sum(batch.ids.numel() for batch in found) < 1.1 * tokens


def test_pools_change_the_batches_but_not_the_windows(
    plain: Any, texts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def windows() -> list[Any]:
        reading = ReadingConfig("causal", "random")
        found = batches(plain, texts, reading)
        return sorted((w.text, w.ids, w.position) for batch in found for w in batch.windows)

    whole = windows()
    monkeypatch.setattr(module, "_POOL_TEXTS", 7)
    assert windows() == whole


def test_dropout_is_off_and_training_goes_on(
    gpt2: Any, plain: Any, texts: list[str], iterate_states: Any
) -> None:
    quiet = gathered(list(iterate_states(adapt(gpt2), plain, texts)))
    gpt2.train()
    noisy = gathered(list(iterate_states(adapt(gpt2), plain, texts)))
    assert gpt2.training and all(module.training for module in gpt2.modules())
    assert all(torch.equal(noisy[place], state) for place, state in quiet.items())


def test_bad_input(gpt2: Any, bert: Any, plain: Any, texts: list[str], iterate_states: Any) -> None:
    for text, said in (
        ("one string", "a single string"),
        ([b"bytes"], "A text is a bytes"),
    ):
        with pytest.raises(UserError, match=said):
            list(iterate_states(adapt(gpt2), plain, text))  # type: ignore[arg-type]
    with pytest.raises(UserError, match="no mask token"):
        list(iterate_states(adapt(bert), plain, texts))
    assert list(iterate_states(adapt(gpt2), plain, ["", "w1", " "])) == []
    for window, said in ((1, "at least 2 and at most 32"), (33, "at most 32")):
        with pytest.raises(UserError, match=said):
            list(iterate_states(adapt(gpt2), plain, texts, window=window))
    assert make_reading(adapt(gpt2)).window == 32  # what the model can read
    with pytest.raises(UserError, match="positions must be one of all, random"):
        list(iterate_states(adapt(gpt2), plain, texts, positions="some"))  # type: ignore[arg-type]
    with pytest.raises(UserError, match="batch_tokens must be at least 1"):
        list(iterate_states(adapt(gpt2), plain, texts, batch_tokens=0))
    with pytest.raises(UserError, match="no room"):
        list(batches(plain_with_ends(), ["w1 w2 w3"], ReadingConfig("encoder", window=2)))


def plain_with_ends() -> Any:
    """A tokenizer whose special tokens alone fill a window of two."""

    def tokenizer(texts: list[str], **_: Any) -> dict[str, list[list[int]]]:
        ids = [[2, *range(5, 5 + len(text.split())), 3] for text in texts]
        return {
            "input_ids": ids,
            "special_tokens_mask": [[1, *[0] * (len(row) - 2), 1] for row in ids],
        }

    return tokenizer


@pytest.mark.parametrize(("value", "said"), [(math.nan, "hold NaN"), (math.inf, "layer 2 hold")])
def test_the_layer_that_breaks_is_named(
    gpt2: Any, plain: Any, texts: list[str], value: float, said: str, iterate_states: Any
) -> None:
    with torch.no_grad():
        gpt2.transformer.h[1].mlp.c_proj.bias[3] = value
    with pytest.raises(UserError, match=said):
        list(iterate_states(adapt(gpt2), plain, texts))


@pytest.mark.parametrize("positions", ["random", "all"])
def test_the_last_feed_forward_runs_for_wanted_tokens_alone(
    positions: Any, gpt2: GPT2LMHeadModel, plain: Any, texts: list[str]
) -> None:
    """And the states at these are those of the whole pass."""
    adapter = adapt(gpt2)
    seen: list[int] = []
    run = gpt2.transformer.h[-1].mlp.forward

    def counted(hidden: torch.Tensor) -> torch.Tensor:
        seen.append(hidden[..., 0].numel())
        return run(hidden)

    for batch in batches(plain, texts, make_reading(adapter, positions, batch_tokens=200)):
        expected = adapter.states(batch.ids)
        with patched_forward({gpt2.transformer.h[-1].mlp: counted}):
            found = run_batch(adapter, batch)
        row, position = batch.wanted()
        assert seen.pop() == (len(row) if positions == "random" else batch.ids.numel())
        for ours, whole in zip(found, expected, strict=True):
            torch.testing.assert_close(ours, whole[row, position])

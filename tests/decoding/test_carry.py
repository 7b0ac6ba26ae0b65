"""Carry maps: fitted as by least squares, saved, and found again."""

import pytest
import torch

from deepenough import UserError
from deepenough.decoding.api import speculate
from deepenough.decoding.carry_fit import Sums, fit_carry, inputs_of
from deepenough.decoding.drafters import LinearDrafter
from deepenough.decoding.own_text import WritingSettings, write
from deepenough.hf.adapter import adapt


def tokenizer(text: str) -> dict[str, list[int]]:
    return {"input_ids": [int(word) for word in text.split()]}


@pytest.fixture(scope="module")
def texts() -> list[str]:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, 40, (60, 9), generator=generator).tolist()
    return [" ".join(map(str, line[: 3 + number % 7])) for number, line in enumerate(ids)]


@pytest.fixture
def carry(small, texts) -> LinearDrafter:
    return fit_carry(
        small, tokenizer, texts, tokens=900, prompt_tokens=8, new_tokens=24, batch=8, shortlist=30
    )


def test_what_is_written_is_the_models_own(small, texts) -> None:
    adapter = adapt(small)
    settings = WritingSettings(tokens=100, prompt_tokens=6, new_tokens=10, batch=5)
    written = list(write(small, tokenizer, texts, settings))
    assert sum(len(text.ids_T) - text.prompt for text in written) >= 100
    for text in written[:6]:
        prompt = text.ids_T[None, : text.prompt]
        mask = torch.ones_like(prompt)
        expected = small.generate(prompt, attention_mask=mask, do_sample=False, max_new_tokens=10)
        assert torch.equal(expected[0], text.ids_T)
        # From each token's state the next one follows; the last has not been through the model.
        best = adapter.head(text.states_TD).argmax(-1)
        assert torch.equal(best[text.prompt - 1 :], text.ids_T[text.prompt :])
        whole = adapter.final_norm(adapter.states(text.ids_T[None, :-1])[-1])[0]
        torch.testing.assert_close(text.states_TD, whole, rtol=1e-4, atol=1e-4)


def test_inputs_stand_where_decoding_has_them(small, texts) -> None:
    """By hand: the second map at `t` reads `e_(t+1)`, `e_t` and the state of `t - 1`."""
    adapter = adapt(small)
    text = next(write(small, tokenizer, texts[4:], WritingSettings(10, 8, 6, 1)))
    inputs, following = inputs_of(adapter, text, 2)
    table = small.get_input_embeddings().weight

    def rms(token: int):
        return table[token] / table[token].pow(2).mean().sqrt()

    ids, first = text.ids_T.tolist(), text.prompt
    expected = torch.cat(
        [rms(ids[first + 1]), rms(ids[first]), text.states_TD[first - 1], torch.ones(1)]
    )
    torch.testing.assert_close(inputs[0], expected, rtol=1e-4, atol=1e-4)
    assert int(following[0]) == ids[first + 2]
    assert len(inputs) == len(ids) - first - 2 == len(following)


def test_sums_give_the_least_squares_solution() -> None:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(200, 9, generator=generator)
    inputs[:, -1] = 1.0
    states = torch.randn(200, 4, generator=generator)
    sums = Sums.of(1, 4, torch.device("cpu"))
    for part in (slice(0, 70), slice(70, 200)):
        sums.update(inputs[part], states[part])
    matrix, bias = sums.solve(0.0)
    expected = torch.linalg.lstsq(inputs.double(), states.double()).solution
    torch.testing.assert_close(matrix, expected[:-1].T.float(), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(bias, expected[-1].float(), rtol=1e-4, atol=1e-5)


def test_fitted_maps_draft_and_change_nothing(small, prompts, carry) -> None:
    assert [matrix.shape for matrix, _ in carry.maps] == [(32, 64), (32, 96)]
    assert len(carry.draft_vocab) == 30
    assert all(0.0 <= share <= 1.0 for share in carry.meta["fit"]["agreements"])
    fast = speculate(small, linear_drafter=carry)
    options = {"do_sample": False, "max_new_tokens": 20}
    expected = small.generate(**prompts(3), **options)
    found = fast.generate(**prompts(3), **options, return_dict_in_generate=True)
    assert torch.equal(found.sequences, expected)
    assert found.drafted > 0


def test_maps_are_saved_and_loaded(small, carry, tmp_path) -> None:
    carry.save_pretrained(tmp_path / "maps")
    again = LinearDrafter.from_pretrained(tmp_path / "maps")
    assert torch.equal(again.draft_vocab, carry.draft_vocab)
    for own, other in zip(again.maps, carry.maps, strict=True):
        assert torch.equal(own[0], other[0]) and torch.equal(own[1], other[1])
    assert again.meta == carry.meta
    speculate(small, linear_drafter=again)


def test_damaged_or_foreign_maps_are_refused(small, make_model, carry, tmp_path) -> None:
    with pytest.raises(UserError, match="holds no linear drafter"):
        LinearDrafter.from_pretrained(tmp_path)
    carry.save_pretrained(tmp_path)
    with torch.no_grad():
        small.model.layers[0].mlp.up_proj.weight.add_(1.0)
    with pytest.raises(UserError, match="drafter was fitted"):
        speculate(small, linear_drafter=carry)
    tensors = tmp_path / "linear_drafter.safetensors"
    tensors.write_bytes(tensors.read_bytes()[:-4])
    with pytest.raises(UserError, match="fit the maps again"):
        LinearDrafter.from_pretrained(tmp_path)


def test_too_little_text_is_refused(small, texts) -> None:
    with pytest.raises(UserError, match="need 97"):
        fit_carry(small, tokenizer, texts[:3], new_tokens=5)

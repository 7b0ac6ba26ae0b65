"""The linear drafter: fitted as by least squares, saved, and found again."""

import pytest
import torch

from deepenough import UserError
from deepenough.decoding.api import speculate
from deepenough.decoding.backends import make_engine
from deepenough.decoding.drafters import LinearDrafter
from deepenough.decoding.self_generated import SelfGenerated, continue_prompts, prompts_from
from deepenough.decoding.training import choose_draft_vocab, fit_linear_drafter, linear_inputs
from deepenough.hf.adapter import adapt


def tokenizer(text: str) -> dict[str, list[int]]:
    return {"input_ids": [int(word) for word in text.split()]}


@pytest.fixture(scope="module")
def texts() -> list[str]:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, 40, (60, 9), generator=generator).tolist()
    return [" ".join(map(str, line[: 3 + number % 7])) for number, line in enumerate(ids)]


@pytest.fixture
def linear(small, texts) -> LinearDrafter:
    return fit_linear_drafter(adapt(small), write(small, texts), draft_vocab=30)


def write(model, texts, prompt_tokens: int = 8, new_tokens: int = 24) -> list[SelfGenerated]:
    prompts = list(prompts_from(tokenizer, texts, prompt_tokens))
    return continue_prompts(make_engine(model), prompts, new_tokens)


def test_what_is_written_is_the_models_own(small, texts) -> None:
    adapter = adapt(small)
    written = write(small, texts, prompt_tokens=6, new_tokens=10)
    assert len(written) == 51  # the others have fewer than four tokens
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
    text = write(small, texts[4:], new_tokens=6)[0]
    inputs, following = linear_inputs(adapter, text, 2)
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


def test_maps_are_the_least_squares_solution(small, texts) -> None:
    """Of the nine texts in ten that are not held out, with the ridge that the fit has chosen."""
    adapter = adapt(small)
    written = write(small, texts)
    fitted = fit_linear_drafter(adapter, written, 30)
    used = [text for number, text in enumerate(written) if number % 10]
    inputs = torch.cat([linear_inputs(adapter, text, 1)[0] for text in used]).double()
    states = torch.cat([text.states_TD[text.prompt :] for text in used]).double()
    ridge = fitted.meta["fit"]["ridges"][0] ** 0.5 * inputs.square().sum(0).sqrt().diag()
    wide = torch.cat([inputs, ridge]), torch.cat([states, states.new_zeros(len(ridge), 32)])
    expected = torch.linalg.lstsq(*wide).solution.float()
    torch.testing.assert_close(fitted.maps[0][0], expected[:-1].T, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(fitted.maps[0][1], expected[-1], rtol=1e-3, atol=1e-4)


def test_tokens_that_were_written_come_first_in_the_vocabulary(small) -> None:
    ids = torch.tensor([3, *[7] * 5, *[9] * 8, 30])
    states = torch.randn(14, 32, generator=torch.Generator().manual_seed(0))
    texts = [SelfGenerated(ids, states, prompt=1)]
    found = choose_draft_vocab(adapt(small), texts, texts, 10).tolist()
    assert found[:3] == [9, 7, 30] and len(set(found)) == 10


def test_fitted_maps_draft_and_change_nothing(small, prompts, linear) -> None:
    assert [matrix.shape for matrix, _ in linear.maps] == [(32, 64), (32, 96)]
    assert len(linear.draft_vocab) == 30
    assert all(0.0 <= share <= 1.0 for share in linear.meta["fit"]["agreements"])
    fast = speculate(small, linear_drafter=linear)
    options = {"do_sample": False, "max_new_tokens": 20}
    expected = small.generate(**prompts(3), **options)
    found = fast.generate(**prompts(3), **options, return_dict_in_generate=True)
    assert torch.equal(found.sequences, expected)
    assert found.drafted > 0


def test_maps_are_saved_and_loaded(small, linear, tmp_path) -> None:
    linear.save_pretrained(tmp_path / "maps")
    again = LinearDrafter.from_pretrained(tmp_path / "maps")
    assert torch.equal(again.draft_vocab, linear.draft_vocab)
    for own, other in zip(again.maps, linear.maps, strict=True):
        assert torch.equal(own[0], other[0]) and torch.equal(own[1], other[1])
    assert again.meta == linear.meta
    speculate(small, linear_drafter=again)


def test_damaged_or_foreign_maps_are_refused(small, make_model, linear, tmp_path) -> None:
    with pytest.raises(UserError, match="holds no linear drafter"):
        LinearDrafter.from_pretrained(tmp_path)
    linear.save_pretrained(tmp_path)
    with torch.no_grad():
        small.model.layers[0].mlp.up_proj.weight.add_(1.0)
    with pytest.raises(UserError, match="drafts are made with were made for"):
        speculate(small, linear_drafter=linear)
    tensors = tmp_path / "linear_drafter.safetensors"
    tensors.write_bytes(tensors.read_bytes()[:-4])
    with pytest.raises(UserError, match="fit the maps again"):
        LinearDrafter.from_pretrained(tmp_path)


def test_too_little_text_is_refused(small, texts) -> None:
    with pytest.raises(UserError, match="needs 65"):
        fit_linear_drafter(adapt(small), write(small, texts[:5]))
    with pytest.raises(UserError, match="at least 2 tokens"):
        fit_linear_drafter(adapt(small), write(small, texts[:5]), draft_vocab=1)

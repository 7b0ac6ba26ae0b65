"""Exit thresholds calibrated on what a model writes: losses, the choice, and what is kept of it."""

import copy
import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from deepenough import Shortcuts, UserError
from deepenough.decoding import calibration
from deepenough.decoding.api import early_exit, speculate
from deepenough.decoding.calibration import (
    INDEX,
    Calibration,
    calibrate,
    exit_tokens,
    full_tokens,
    threshold_losses,
)
from deepenough.decoding.early_exit import ConfidenceGap, FixedLayer, TopProbability
from deepenough.decoding.self_generated import continue_prompts
from deepenough.hf.adapter import adapt

VOCABULARY = 30
LIMITS = {"max_disagreement": 0.1, "confidence": 0.9, "new_tokens": 10, "prompt_tokens": 6}


def make_model(seed: int = 0) -> LlamaForCausalLM:
    """A model whose later layers change little, so that exits are mostly right."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=16, num_hidden_layers=3, num_attention_heads=2,
        intermediate_size=24, max_position_embeddings=64, initializer_range=0.4,
        pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval().requires_grad_(False)
    for layer in model.model.layers[1:]:
        layer.self_attn.o_proj.weight *= 0.15
        layer.mlp.down_proj.weight *= 0.15
    return model


def tokens(text: str) -> dict[str, list[int]]:
    """Letters, as a tokenizer."""
    return {"input_ids": [3 + ord(letter) % 27 for letter in text]}


def make_texts(count: int, seed: int = 0) -> list[str]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(97, 123, (count, 8), generator=generator)
    return ["".join(map(chr, row)) for row in ids.tolist()]


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    return make_model()


@pytest.fixture(scope="module")
def shortcuts(model) -> Shortcuts:
    ids = torch.randint(3, VOCABULARY, (40, 20), generator=torch.Generator().manual_seed(1))
    states = [state.flatten(0, 1) for state in adapt(model).states(ids)]
    found = Shortcuts.fit_states(states, ridge=1e-3)
    found.meta["model"] = adapt(model).identity()
    return found


def exiting(model, shortcuts, fill="deferred", policy=None, **more: Any):
    policy = policy or TopProbability(0.5)
    return early_exit(
        model, shortcuts, policy=policy, exit_layers=[1, 2], kv_propagation=fill, **more
    )


@pytest.fixture(scope="module")
def written(model, shortcuts):
    fast = exiting(model, shortcuts)
    prompts = [tokens(text)["input_ids"][: 4 + n % 4] for n, text in enumerate(make_texts(24))]
    return continue_prompts(fast.decoding_engine, prompts, 10)


def test_full_tokens_are_what_was_written(model, shortcuts, written) -> None:
    engine = exiting(model, shortcuts).decoding_engine
    for text in written:
        assert torch.equal(full_tokens(engine, text), text.ids_T[text.prompt :])


@pytest.mark.parametrize("words", [None, torch.arange(3, 15)])
@pytest.mark.parametrize("policy", [TopProbability(0.5), ConfidenceGap(0.5, 8.0)])
def test_one_table_serves_all_thresholds(model, shortcuts, written, policy, words) -> None:
    """With an exact cache it gives what a run for each threshold gives."""
    fast = exiting(model, shortcuts, policy=policy, exit_vocab=words)
    engine, early = fast.decoding_engine, fast.exit_rule
    measure = threshold_losses(engine, early, written)
    seen = set()
    for threshold in (0.9, 0.6, 0.3, 0.0):
        losses, layers = measure(threshold)
        rule = replace(early, policy=replace(policy, threshold=threshold))
        for loss, mean, text in zip(losses, layers, written, strict=True):
            words_T, depth_T = exit_tokens(engine, rule, text)
            wrong_T = words_T != text.ids_T[text.prompt :]
            assert float(loss) == pytest.approx(float(wrong_T.double().mean()))
            assert float(mean) == pytest.approx(float(depth_T.double().mean()))
            seen |= set(depth_T.tolist())
    assert seen == {1, 2, 3}


@pytest.mark.parametrize("fill", ["shortcut", "copy", "deferred"])
def test_losses_are_those_of_decoding(model, shortcuts, written, fill) -> None:
    """The exiting model, made to write what the full model wrote, would say these words."""
    fast = exiting(model, shortcuts, fill, TopProbability(0.4))
    for text in written[:6]:
        said, depth = exit_tokens(fast.decoding_engine, fast.exit_rule, text)
        new = text.ids_T[text.prompt :].tolist()

        def force(_: int, ids: torch.Tensor, new=new, text=text) -> list[int]:
            return [new[len(ids) - text.prompt]]

        prompt = text.ids_T[None, : text.prompt]
        output = fast.generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=len(new),
            do_sample=False, prefix_allowed_tokens_fn=force, return_dict_in_generate=True,
            output_logits=True,
        )  # fmt: skip
        assert torch.cat(output.logits).argmax(-1).tolist() == said.tolist()
        assert output.trace.depth[0].tolist() == depth.tolist()


def test_texts_that_never_leave_lose_nothing(model, shortcuts, written) -> None:
    for fill in ("shortcut", "copy", "deferred"):
        fast = exiting(model, shortcuts, fill)
        losses, layers = threshold_losses(fast.decoding_engine, fast.exit_rule, written)(1.0)
        assert losses.sum() == 0 and layers.mean() == 3


@pytest.mark.parametrize("fill", ["shortcut", "deferred"])
def test_a_calibrated_model(model, shortcuts, tmp_path, fill) -> None:
    fast = exiting(model, shortcuts, fill)
    told = []
    found = calibrate(
        fast, tokens, make_texts(100), **LIMITS, thresholds=[0.9, 0.7, 0.5, 0.2],
        progress=lambda *what: told.append(what),
    )  # fmt: skip
    assert found.threshold is not None
    assert found.threshold in found.thresholds
    assert found.p_values[found.thresholds.index(found.threshold)] <= 0.1
    assert found.texts == 100 and found.tokens <= 1000 and found.layers < 3
    assert told[-1] == (100, 100)
    assert f"Threshold {found.threshold:g}" in found.verdict()

    found.save_pretrained(tmp_path)
    assert Calibration.from_pretrained(tmp_path) == found
    for guarantee in (found, str(tmp_path), tmp_path / INDEX):
        again = early_exit(model, shortcuts, guarantee=guarantee)
        assert again.exit_rule.policy == TopProbability(found.threshold)
        assert again.exit_rule.kv_propagation == fill
        assert list(again.exit_rule.layers) == [1, 2]
    with pytest.raises(UserError, match="it was made with"):
        early_exit(model, shortcuts, guarantee=found, kv_propagation="copy")
    with pytest.raises(UserError, match="with other weights"):
        other = make_model(seed=1)
        free = Shortcuts(3, 16, shortcuts.maps)
        early_exit(other, free, guarantee=found)
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.base_model.norm.weight.mul_(2)  # the states are the same, the tokens are not
    with pytest.raises(UserError, match="with other weights"):
        early_exit(other, shortcuts, guarantee=found)
    # With kv_propagation shortcut the map between exits is used as well.
    for changed in [(1, 3)] + [(1, 2)] * (fill == "shortcut"):
        maps = {**shortcuts.maps, changed: 2 * shortcuts.maps[changed]}
        with pytest.raises(UserError, match="other shortcuts"):
            early_exit(model, Shortcuts(3, 16, maps), guarantee=found)


def test_that_none_holds_is_said(model, shortcuts) -> None:
    """Where every token leaves at once."""
    fast = exiting(model, shortcuts)
    found = calibrate(fast, tokens, make_texts(30), **LIMITS, thresholds=[0.0])
    assert (found.threshold, found.layers) == (None, None)
    assert len(found.p_values) == 1 and "No threshold holds" in found.verdict()
    with pytest.raises(UserError, match="No threshold holds"):
        early_exit(model, shortcuts, guarantee=found)


def test_the_guarantee_holds_over_random_splits(model, shortcuts, failures) -> None:
    """Halves of 240 texts, 40 times: the other half's disagreement is seldom too high."""
    fast = exiting(model, shortcuts)
    engine, early = fast.decoding_engine, fast.exit_rule
    prompts = [tokens(text)["input_ids"] for text in make_texts(240, seed=5)]
    measure = threshold_losses(engine, early, continue_prompts(engine, prompts, 10))
    thresholds = [step / 25 for step in range(24, -1, -1)]
    losses = torch.stack([measure(each)[0] for each in thresholds], dim=1)
    assert losses[:, 0].mean() < 0.05 < losses[:, -1].mean()
    for risk in (0.05, 0.1):
        assert failures(losses, thresholds, risk, splits=40) <= 0.05


def test_bad_input(model, shortcuts, tmp_path) -> None:
    fast = exiting(model, shortcuts)
    with pytest.raises(UserError, match="which are 590 new tokens"):
        calibrate(fast, tokens, make_texts(20), new_tokens=10)
    with pytest.raises(UserError, match="Only an exiting model"):
        calibrate(speculate(model, "none"), tokens, make_texts(20))
    with pytest.raises(UserError, match="no threshold to calibrate"):
        calibrate(exiting(model, shortcuts, policy=FixedLayer(1)), tokens, make_texts(60))
    with pytest.raises(UserError, match="from the highest"):
        calibrate(fast, tokens, make_texts(60), thresholds=[0.1, 0.9])
    for name in ("max_disagreement", "confidence"):
        with pytest.raises(UserError, match=f"{name} must be between 0 and 1"):
            calibrate(fast, tokens, make_texts(60), **{name: 1.5})
    with pytest.raises(UserError, match="no guarantee at"):
        early_exit(model, shortcuts, guarantee=tmp_path)
    (tmp_path / INDEX).write_text(json.dumps({"format": "something"}))
    with pytest.raises(UserError, match="cannot be read"):
        early_exit(model, shortcuts, guarantee=tmp_path)


@pytest.mark.parametrize("fill", ["copy", "deferred"])
def test_an_interrupted_calibration_goes_on(model, shortcuts, tmp_path, monkeypatch, fill) -> None:
    """Nothing is promised before all texts are written and measured."""
    fast, texts = exiting(model, shortcuts, fill), make_texts(40)
    whole = calibrate(fast, tokens, texts, **LIMITS)
    written = 0

    def interrupted(*arguments: Any) -> Any:
        nonlocal written
        written += 1
        if written == 3:
            raise KeyboardInterrupt
        return continue_prompts(*arguments)

    monkeypatch.setattr(calibration, "continue_prompts", interrupted)
    with pytest.raises(KeyboardInterrupt):
        calibrate(fast, tokens, texts, **LIMITS, resume=tmp_path)
    assert not (tmp_path / INDEX).exists()
    assert calibrate(fast, tokens, texts, **LIMITS, resume=tmp_path) == whole
    assert written == 3 + 3  # of five batches, two were written before
    assert [path.name for path in tmp_path.iterdir()] == [INDEX]
    assert Calibration.from_pretrained(tmp_path) == whole

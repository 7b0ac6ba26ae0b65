"""The language model behind the explorer: three ways to write, a lens, shortcuts made later."""

import threading
import time
from pathlib import Path

import pytest
import torch

from deepenough import speculate
from deepenough.errors import UserError
from deepenough.explorer.language_model import LanguageModel, ModelShortcuts

PROMPT = "The capital of"


def written(model: LanguageModel, way: str, tokens: int = 24, threshold: float = 0.3):
    ids = model.encode(PROMPT, tokens, 256)
    return list(model.stream(model.writer(way, threshold), ids, tokens))


def test_three_ways_write_what_generate_does(writer):
    ids = torch.tensor([writer.encode(PROMPT, 24, 256)])
    expected = writer.model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, do_sample=False
    )[0, ids.shape[1] :].tolist()
    writer.fast = speculate(writer.model, num_draft_tokens=3)  # else as many as pay here
    plain, lossless, early = (written(writer, way)[-1] for way in ("plain", "lossless", "exit"))
    assert plain.tokens == lossless.tokens == expected and plain.ended
    assert plain.depths == [] and plain.rate > 0
    assert lossless.depths == [4] * len(expected)
    assert any(lossless.drafted) and not all(lossless.drafted)  # it writes in circles
    assert set(early.depths) <= {1, 2, 3, 4} and len(early.depths) == len(early.tokens)


def test_tokens_come_one_after_the_other(writer, monkeypatch):
    monkeypatch.setattr("deepenough.explorer.language_model.PAUSE", -1.0)
    lengths = [len(each.tokens) for each in written(writer, "plain")]
    assert lengths == sorted(lengths) and len(set(lengths)) > 2


def test_who_leaves_frees_the_model(writer):
    written(writer, "plain", 1)  # the model's own thread is there now, and stays
    before = threading.active_count()
    ids = writer.encode(PROMPT, 400, 64)
    for way in ("plain", "lossless", "exit"):
        stream = writer.stream(writer.writer(way, 0.3), ids, 400)
        first = next(stream)
        stream.close()
        assert threading.active_count() == before, way
        assert writer._thread.submit(int).result(timeout=1) == 0, way  # nothing runs any more
        assert len(first.tokens) < 400
    assert written(writer, "lossless")[-1].ended


def test_closing_ends_what_is_being_written(tiny_writer):
    model = LanguageModel(str(tiny_writer))
    stream = model.stream(model.model, model.encode(PROMPT, 400, 64), 400)
    next(stream)
    model.close()
    assert len(list(stream)[-1].tokens) < 400


def test_an_error_of_the_model_is_raised(writer):
    with pytest.raises(UserError, match="do not fit"):
        list(writer.stream(writer.fast, [1] * 500, 100))


def test_agreement_is_that_of_one_token_after_the_other(writer):
    ids, plain = writer.encode(PROMPT, 24, 256), written(writer, "plain")[-1].tokens
    for threshold in (0.05, 0.3, 1.0):
        exiting = writer.writer("exit", threshold)
        chosen = [
            int(exiting(torch.tensor([[*ids, *plain[:n]]])).logits[0, -1].argmax())
            for n in range(len(plain))
        ]
        expected = sum(a == b for a, b in zip(chosen, plain, strict=True)) / len(plain)
        assert writer.agreement(ids, plain, threshold) == pytest.approx(expected)
    assert expected == 1.0  # nothing is sure beyond doubt, so nothing leaves


def test_a_lens_without_maps_is_the_head_at_every_layer(writer):
    values = writer.lens(PROMPT, "id", 64)
    ids = torch.tensor([writer.encode(PROMPT, 1, 64)])
    model, states = writer.model, []
    hooks = [
        layer.register_forward_hook(lambda _, __, output: states.append(output))
        for layer in model.model.layers
    ]
    final = model(ids).logits[0].log_softmax(-1)
    for hook in hooks:
        hook.remove()
    for layer, state in enumerate(states, start=1):
        log_q = model.lm_head(model.model.norm(state))[0].log_softmax(-1)
        kl = (final.exp() * (final - log_q)).sum(-1)
        torch.testing.assert_close(
            torch.tensor(values["kl"][layer]).float(), kl, rtol=1e-3, atol=1e-4
        )
        best = log_q.exp().topk(10)
        for place, row in enumerate(values["top_probability"][layer]):
            expected = pytest.approx(best.values[place].tolist(), rel=1e-3, abs=1e-5)
            assert row == expected
            assert values["top"][layer][place][0] == values["words"][layer][place]
    assert values["target_rank"][0][-1] is None  # nobody knows what comes next


def test_linear_and_tuned_wait_for_their_maps(writer):
    assert writer.lens(PROMPT, "linear", 64)["mode"] == "mat"
    with pytest.raises(UserError, match=r"Tuned maps are being fitted.*another map"):
        writer.lens(PROMPT, "tuned", 64)
    writer.shortcuts.found = None
    with pytest.raises(UserError, match="Shortcuts between the layers are being fitted"):
        writer.lens(PROMPT, "linear", 64)
    with pytest.raises(UserError, match="are being fitted"):
        writer.writer("exit", 0.5)


def test_prompts_are_limited(writer):
    with pytest.raises(UserError, match="empty"):
        writer.encode("  ", 8, 64)
    with pytest.raises(UserError, match="100 tokens: shorten it to at most 64"):
        writer.encode("x" * 100, 8, 64)
    with pytest.raises(UserError, match="at most 112"):
        writer.encode("x" * 500, 400, 1000)


def wait_for(shortcuts: ModelShortcuts) -> str:
    until = time.monotonic() + 60
    while not (found := shortcuts.status)[1] and time.monotonic() < until:
        time.sleep(0.02)
    return found[0]


@pytest.mark.filterwarnings("default")
def test_shortcuts_are_fitted_once_and_kept(tiny_writer: Path, fits, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    first = LanguageModel(str(tiny_writer))
    assert first.shortcuts.found is None
    first.shortcuts.start()
    assert "are being fitted" in first.shortcuts.status[0]
    assert wait_for(first.shortcuts) == ""
    assert [words[-1] for words in fits] == ["false", "true"]
    assert first.lens(PROMPT, "tuned", 64)["mode"] == "tuned"
    again = LanguageModel(str(tiny_writer))
    again.shortcuts.start()
    assert again.shortcuts.found.tuned and len(fits) == 2
    own = LanguageModel(str(again.shortcuts.folder), is_run=True)  # a run of one's own
    own.shortcuts.start()
    assert own.name == str(tiny_writer) and own.shortcuts.found.tuned and len(fits) == 2


def test_a_fit_that_fails_says_why(fits, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    shortcuts = ModelShortcuts(str(tmp_path / "nothing"), "0123")
    shortcuts.start()
    assert wait_for(shortcuts) == "Shortcuts could not be fitted: the reason."


def test_what_does_not_write_is_refused(tiny_bert: Path):
    with pytest.raises(UserError, match="does not write text"):
        LanguageModel(str(tiny_bert))

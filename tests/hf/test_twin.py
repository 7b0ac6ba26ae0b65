"""Small models of the same config: they go past every switch point, and every part shows."""

from typing import Any

import pytest
import torch
import transformers as tf

from deepenough.hf.twin import SWITCH, make_twin

ROPE: dict[str, Any] = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def large(config: tf.PreTrainedConfig) -> Any:
    """Return a model of its true size that takes no memory."""
    with torch.device("meta"):
        return tf.AutoModelForCausalLM.from_config(config)


def test_a_twin_is_small_and_of_the_same_kind() -> None:
    model = large(tf.LlamaConfig(num_key_value_heads=8, rope_parameters=ROPE))
    twin, switches = make_twin(model)
    assert switches == [8192] and type(twin) is type(model)
    assert sum(p.numel() for p in twin.parameters()) < 5_000_000
    assert twin.config.head_dim == 128 and twin.config.num_key_value_heads == 2
    assert twin.config.rope_parameters["original_max_position_embeddings"] == SWITCH
    assert twin.config.rope_parameters["factor"] == 8.0


def test_a_layer_of_each_kind_is_kept() -> None:
    twin, switches = make_twin(large(tf.Gemma2Config()))
    assert set(twin.config.layer_types) == {"sliding_attention", "full_attention"}
    assert switches == [4096] and twin.config.sliding_window == SWITCH


@pytest.mark.parametrize("kind", ["gpt2", "gpt_neox", "opt", "phi3", "qwen3_moe", "bloom", "bart"])
def test_twins_of_configs_as_they_are_by_default_are_built(kind: str) -> None:
    config = tf.AutoConfig.for_model(kind)
    config.is_decoder, config.is_encoder_decoder = True, False
    twin, _ = make_twin(large(config))
    ids = torch.arange(1, 20)[None]
    assert twin is not None and twin(input_ids=ids).logits.isfinite().all()


def test_norms_are_not_the_identity_and_random_numbers_are_left_alone() -> None:
    torch.manual_seed(0)
    expected = torch.rand(1)
    torch.manual_seed(0)
    twin, _ = make_twin(large(tf.LlamaConfig()))
    assert torch.equal(torch.rand(1), expected)
    assert float(twin.model.norm.weight.std()) > 0.1


def test_what_cannot_be_made_small_has_no_twin() -> None:
    config = tf.LlamaConfig(num_attention_heads=1, head_dim=128, hidden_size=40_000)
    assert make_twin(large(config)) == (None, [])

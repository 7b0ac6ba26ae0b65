"""Models whose layers are not found: what they are told, and layouts that a user registers."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import transformers as tf
from torch import Tensor, nn

from deepenough.errors import UserError
from deepenough.hf.adapter import adapt
from deepenough.hf.layouts import LAYOUTS, Layout, register


@pytest.fixture(autouse=True)
def known_layouts() -> Iterator[None]:
    """What a test registers is forgotten after it."""
    known = dict(LAYOUTS)
    yield
    LAYOUTS.clear()
    LAYOUTS.update(known)


def test_an_encoder_decoder_is_refused_by_name() -> None:
    config = tf.T5Config(vocab_size=50, d_model=8, d_ff=8, num_layers=2, num_heads=2, d_kv=4)
    with pytest.raises(UserError, match=r"T5ForConditionalGeneration is an encoder-decoder \(t5\)"):
        adapt(tf.T5ForConditionalGeneration(config))


class OddConfig(tf.PreTrainedConfig):
    model_type = "odd"

    def __init__(self, hidden_size: int = 8, num_hidden_layers: int = 2, **kwargs: Any) -> None:
        self.hidden_size, self.num_hidden_layers = hidden_size, num_hidden_layers
        super().__init__(**kwargs)


class OddModel(tf.PreTrainedModel):
    """Its layers stand in no list, and it multiplies the last one's output."""

    config_class = OddConfig
    between, factor = 1.0, 2.0

    def __init__(self, config: OddConfig, in_list: bool = False) -> None:
        super().__init__(config)
        self.words = nn.Embedding(20, config.hidden_size)
        self.one = nn.Linear(config.hidden_size, config.hidden_size)
        self.two = nn.Linear(config.hidden_size, config.hidden_size)
        if in_list:
            self.steps = nn.ModuleList([self.one, self.two])
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.words

    def forward(self, input_ids: Tensor, **_: Any) -> tuple[Tensor]:
        return (self.factor * self.two(self.between * self.one(self.words(input_ids))),)


def test_a_model_without_recognisable_layers_is_told_how_to_register() -> None:
    with pytest.raises(UserError) as error:
        adapt(OddModel(OddConfig()))
    assert "no torch.nn.ModuleList of config.num_hidden_layers = 2 modules" in str(error.value)
    assert "register('odd', Layout(layers=" in str(error.value)


def test_a_model_that_does_not_run_on_tokens_alone() -> None:
    model = OddModel(OddConfig(), in_list=True)
    model.forward = lambda pixels: pixels
    with pytest.raises(UserError, match=r"does not run on tokens alone.*register\('odd'"):
        adapt(model)


def test_layers_whose_output_leads_nowhere_are_refused() -> None:
    with pytest.raises(UserError, match="has layers, but no norm or head after them was found"):
        adapt(OddModel(OddConfig(), in_list=True))


def test_a_registered_layout_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(LAYOUTS, "odd", Layout(layers=lambda trunk: [trunk.one, trunk.two]))
    with pytest.raises(UserError, match="its last state gives another output"):
        adapt(OddModel(OddConfig()))
    monkeypatch.setattr(OddModel, "factor", 1.0)
    adapter = adapt(OddModel(OddConfig()))
    assert adapter.num_layers == 2
    assert len(adapter.states(torch.tensor([[5, 7, 11]]))) == 3
    monkeypatch.setitem(LAYOUTS, "odd", Layout(layers="stack.layers"))
    with pytest.raises(UserError, match=r"no 'stack.layers' in its OddModel.*register\('odd'"):
        adapt(OddModel(OddConfig()))


def test_a_row_whose_layers_are_not_one_after_the_other_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(OddModel, "between", 3.0)
    monkeypatch.setitem(LAYOUTS, "odd", Layout(layers=lambda trunk: [trunk.one, trunk.two]))
    with pytest.raises(UserError, match="layer 2 does not read what layer 1 returned"):
        adapt(OddModel(OddConfig()))


def test_register_replaces_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(LAYOUTS, "odd", raising=False)
    row = Layout(layers="steps")
    register("odd", row)
    assert LAYOUTS["odd"] is row
    monkeypatch.delitem(LAYOUTS, "odd")


@pytest.mark.parametrize("kind", ["xlm", "flaubert"])
@pytest.mark.parametrize("load", [tf.AutoModel, tf.AutoModelForMaskedLM])
def test_a_list_of_norms_is_no_list_of_layers(kind: str, load: Any) -> None:
    """XLM keeps attention, norms and feed-forward in lists of their own, and has no layers."""
    config = tf.AutoConfig.for_model(kind, vocab_size=50, emb_dim=8, n_layers=2, n_heads=2)
    with pytest.raises(UserError, match="has layers, but no norm or head after them was found"):
        adapt(load.from_config(config).eval())


def test_a_norm_beside_the_layers_may_be_of_something_else() -> None:
    """DeBERTa-v3 norms its relative positions where others have their final norm."""
    config = tf.AutoConfig.for_model(
        "deberta-v2",
        vocab_size=50,
        hidden_size=8,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=8,
        relative_attention=True,
        pos_att_type=["p2c", "c2p"],
        norm_rel_ebd="layer_norm",
    )
    for load in (tf.AutoModel, tf.AutoModelForMaskedLM):
        adapter = adapt(load.from_config(config).eval())
        assert adapter.num_layers == 2 and adapter.layout.final_norm is None

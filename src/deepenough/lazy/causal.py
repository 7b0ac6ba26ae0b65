"""The Lazy Transformer as a language model: the decoder alone, of shared blocks.

`generate()` keeps keys and values for every step; the number of steps is `decoder_steps`, and
`decoder_epsilon` lets tokens stop in equilibrium.
"""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from transformers import Cache, DynamicCache

from deepenough.hf.generation import CheckedGenerationMixin
from deepenough.lazy.base import IGNORED, LazyPreTrainedModel
from deepenough.lazy.config import LazyTransformerConfig
from deepenough.lazy.decoder import LazyDecoder
from deepenough.lazy.output import LazyOutput
from deepenough.nn.layers import Linear


class LazyTransformerForCausalLM(LazyPreTrainedModel, CheckedGenerationMixin):
    _tied_weights_keys = {  # noqa: RUF012 - the form transformers asks for
        "output.weight": "embedding.weight",
        "decoder.embedding.weight": "embedding.weight",
    }

    def __init__(self, config: LazyTransformerConfig) -> None:
        config.is_encoder_decoder = False  # one config serves both models
        super().__init__(config)
        self.embedding = nn.Embedding(config.vocab_size, config.d_model)
        self.decoder = LazyDecoder(config, self.embedding, with_source=False)
        self.output = Linear(config.d_model, config.vocab_size, bias=False)
        self.post_init()

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        targets: Tensor | None = None,
        past_key_values: Cache | None = None,
        use_cache: bool | None = None,
        decoder_steps: int | None = None,
        decoder_epsilon: float | None = None,
        patience: int | None = None,
        output_hidden_states: bool | None = None,
        logits_to_keep: int = 0,
        return_dict: bool | None = None,
        **_: Any,
    ) -> LazyOutput | tuple[Any, ...]:
        """`labels` are shifted here, as everywhere in transformers, and come with logits; `targets`
        are the next tokens themselves (-100 where there is none) and give the loss alone."""
        cache = past_key_values
        if cache is None and use_cache:
            cache = DynamicCache()
        config = self.config
        decoded = self.decoder(
            input_ids,
            attention_mask,
            None,
            cache,
            decoder_steps,
            config.decoder_epsilon if decoder_epsilon is None else decoder_epsilon,
            patience,
            bool(output_hidden_states),
        )
        hidden = decoded.steps.state
        logits = self.output(hidden[:, -logits_to_keep:]) if targets is None else None
        loss = plain = None
        wanted = targets
        if labels is not None:
            wanted = F.pad(labels[:, 1:], (0, 1), value=IGNORED)[:, -logits_to_keep:]
        if wanted is not None:
            loss, plain = self._losses(hidden, wanted, logits)
            loss = self._with_ponder_cost(loss, decoded.steps.ponder_cost, decoded.real_BT)
        trace = None
        if not self.training:
            trace = self.decoder.trace(
                decoded, input_ids.shape[1] if logits is None else logits.shape[1]
            )
        output = LazyOutput(
            loss=loss,
            logits=logits,
            plain_loss=plain,
            past_key_values=cache,
            decoder_hidden_states=decoded.steps.states,
            decoder_gates=decoded.steps.gates,
            trace=trace,
        )
        return output if return_dict is not False else output.to_tuple()

    def get_decoder(self) -> LazyDecoder:
        return self.decoder

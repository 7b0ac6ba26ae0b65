"""The Lazy Transformer as a translator: an encoder and a decoder of shared blocks.

A Hugging Face encoder-decoder: `generate()` searches with beams and keeps, for every step, the keys
and values of the tokens written so far. How many steps are made, and whether tokens stop in
equilibrium, can be said anew at every call, `generate()` included: `encoder_steps`,
`decoder_steps`, `epsilon`, `decoder_epsilon`, `patience`.

Shapes: B sentences, S source tokens, T target tokens, D width, V words.
"""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from transformers import Cache, DynamicCache
from transformers.cache_utils import EncoderDecoderCache

from deepenough.hf.generation import CheckedGenerationMixin
from deepenough.lazy.base import IGNORED, LazyPreTrainedModel
from deepenough.lazy.config import LazyTransformerConfig
from deepenough.lazy.decoder import LazyDecoder
from deepenough.lazy.encoder import LazyEncoder
from deepenough.lazy.output import LazyEncoderOutput, LazyOutput
from deepenough.lazy.sight import Source, padding_mask
from deepenough.nn.layers import Linear


class LazyTransformerForConditionalGeneration(LazyPreTrainedModel, CheckedGenerationMixin):
    _tied_weights_keys = {  # noqa: RUF012 - the form transformers asks for
        "output.weight": "embedding.weight",
        "encoder.embedding.weight": "embedding.weight",
        "decoder.embedding.weight": "embedding.weight",
    }

    def __init__(self, config: LazyTransformerConfig) -> None:
        super().__init__(config)
        self.embedding = nn.Embedding(config.vocab_size, config.d_model)
        self.encoder = LazyEncoder(config, self.embedding)
        self.decoder = LazyDecoder(config, self.embedding, with_source=True)
        self.output = Linear(config.d_model, config.vocab_size, bias=False)
        self.post_init()

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        decoder_input_ids: Tensor | None = None,
        decoder_attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        targets: Tensor | None = None,
        encoder_outputs: LazyEncoderOutput | None = None,
        past_key_values: Cache | None = None,
        use_cache: bool | None = None,
        encoder_steps: int | None = None,
        decoder_steps: int | None = None,
        epsilon: float | None = None,
        decoder_epsilon: float | None = None,
        patience: int | None = None,
        output_hidden_states: bool | None = None,
        logits_to_keep: int = 0,
        return_dict: bool | None = None,
        **_: Any,
    ) -> LazyOutput | tuple[Any, ...]:
        """`labels` (-100 where there is none) give the loss beside all logits; `targets`, which are
        the same, the loss alone, whose logits are computed only where there is a target."""
        wanted = labels if targets is None else targets
        if decoder_input_ids is None:
            if wanted is None:
                raise ValueError("decoder_input_ids, labels or targets must be given")
            decoder_input_ids = self.prepare_decoder_input_ids_from_labels(wanted)
        if encoder_outputs is None:
            encoder_outputs = self.encoder(
                input_ids,
                attention_mask,
                encoder_steps=encoder_steps,
                epsilon=epsilon,
                patience=patience,
                output_hidden_states=output_hidden_states,
            )
        states = encoder_outputs[0]
        cache = past_key_values
        if cache is None and use_cache:
            cache = EncoderDecoderCache(DynamicCache(), DynamicCache())
        config = self.config
        decoded = self.decoder(
            decoder_input_ids,
            decoder_attention_mask,
            Source(states, padding_mask(attention_mask, states), config.num_heads, cache),
            cache,
            decoder_steps,
            config.decoder_epsilon if decoder_epsilon is None else decoder_epsilon,
            patience,
            bool(output_hidden_states),
        )
        hidden = decoded.steps.state
        logits = self.output(hidden[:, -logits_to_keep:]) if targets is None else None
        loss = plain = None
        if wanted is not None:
            loss, plain = self._losses(hidden, wanted, logits)
            real = wanted != IGNORED
            loss = self._with_ponder_cost(loss, decoded.steps.ponder_cost, real)
            cost = getattr(encoder_outputs, "ponder_cost", None)
            loss = self._with_ponder_cost(loss, cost, attention_mask)
        trace = None
        if not self.training:
            num_scored = decoder_input_ids.shape[1] if logits is None else logits.shape[1]
            trace = self.decoder.trace(decoded, num_scored)
        output = LazyOutput(
            loss=loss,
            logits=logits,
            plain_loss=plain,
            past_key_values=cache,
            decoder_hidden_states=decoded.steps.states,
            decoder_gates=decoded.steps.gates,
            encoder_last_hidden_state=states,
            encoder_hidden_states=getattr(encoder_outputs, "hidden_states", None),
            encoder_gates=getattr(encoder_outputs, "gates", None),
            encoder_trace=getattr(encoder_outputs, "trace", None),
            trace=trace,
        )
        return output if return_dict is not False else output.to_tuple()

    # -- what transformers asks of a model ---------------------------------------------------

    def get_encoder(self, modality: str | None = None) -> LazyEncoder:
        return self.encoder

    def get_decoder(self) -> LazyDecoder:
        return self.decoder

    def prepare_decoder_input_ids_from_labels(self, labels: Tensor) -> Tensor:
        """What the decoder reads to predict them: the same one later, behind the start token."""
        start = self.config.decoder_start_token_id
        shifted = F.pad(labels[:, :-1], (1, 0), value=start)
        return shifted.masked_fill(shifted == IGNORED, self.config.pad_token_id)

    @staticmethod
    def _reorder_cache(cache: Cache, beam_idx: Any) -> Cache:
        """Beams of a sentence change places; what they see of its source is the same for all."""
        assert isinstance(cache, EncoderDecoderCache)
        cache.self_attention_cache.reorder_cache(beam_idx)
        return cache

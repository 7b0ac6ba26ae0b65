"""Lazy Transformers as Hugging Face models: an encoder-decoder and a causal language model.

`generate()` supports beam search and keeps a key-value cache layer for every step. How many steps
are made, and whether tokens halt in equilibrium, can be chosen anew in every call, `generate()`
included: `encoder_steps`, `decoder_steps`, `epsilon`, `decoder_epsilon`, `patience`, `halt_on`.

FLOPs in traces are those of torch's `FlopCounterMode` in closed form (multiply-adds count as two,
matrix products only), so a trace costs nothing to produce. Padding costs nothing and has depth 0 in
a trace, however a batch was computed.

Shapes: B sentences, S source tokens, T target tokens, K tokens including cached ones, D width, N
steps, V vocabulary, R predicted tokens.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    Cache,
    DynamicCache,
)
from transformers import initialization as init
from transformers.cache_utils import EncoderDecoderCache
from transformers.utils.generic import ModelOutput

from deepenough.devices import exact
from deepenough.hf.generation import CheckedGenerationMixin
from deepenough.lazy.config import TRANSFORMER
from deepenough.lazy.config import LazyTransformerConfig as LazyTransformerConfig
from deepenough.lazy.equilibrium import run_in_full, run_with_halting
from deepenough.lazy.layers import (
    EncoderMemory,
    PaddedContext,
    StackOutput,
    StepOptions,
    StepStack,
    causal_mask,
    padding_mask,
    smoothed_cross_entropy,
)
from deepenough.nn.layers import Dropout
from deepenough.trace import DepthTrace
from deepenough.training.checkpoint import SealedPreTrainedModel

IGNORE_INDEX = -100
"""Target of a position that is not to be predicted."""
HALTING_BIAS = -1.0
"""Initial bias with which ACT begins with about four steps per token."""


@dataclass
class LazyEncoderOutput(ModelOutput):
    """Output of the encoder."""

    last_hidden_state: Tensor | None = None
    """`[B, S, D]`."""
    hidden_states: tuple[Tensor, ...] | None = None
    """`[B, S, D]` before the first and after every step, before the final norm."""
    gates: Tensor | None = None
    """`[B, S, N]`: share of each step's update that was applied, 0 where a token had halted."""
    ponder_cost: Tensor | None = None
    """`[B, S]`: cost of ACT's steps."""
    trace: DepthTrace | None = None
    """One unit per source token; in evaluation only."""


@dataclass
class LazyOutput(ModelOutput):
    """Output of both models."""

    loss: Tensor | None = None
    """Mean over target tokens in nats; in training with label smoothing, if the config says so."""
    logits: Tensor | None = None
    """`[B, T, V]`; None where only the loss was asked for."""
    plain_loss: Tensor | None = None
    """The loss without label smoothing and other terms."""
    past_key_values: Cache | None = None
    memories: None = None
    """Always None: nothing is carried from one segment of a text to the next. Language models with
    memory return it under this name."""
    decoder_hidden_states: tuple[Tensor, ...] | None = None
    decoder_gates: Tensor | None = None
    """`[B, T, N]`."""
    encoder_last_hidden_state: Tensor | None = None
    encoder_hidden_states: tuple[Tensor, ...] | None = None
    encoder_gates: Tensor | None = None
    """`[B, S, N]`."""
    encoder_trace: DepthTrace | None = None
    """One unit per source token."""
    trace: DepthTrace | None = None
    """One unit per target token, the output layer included; in evaluation only."""

    @property
    def hidden_states(self) -> tuple[Tensor, ...] | None:
        """The decoder's hidden states, under the name that causal language models use."""
        return self.decoder_hidden_states


# -- encoder and decoder ---------------------------------------------------------------------------


class _Side(nn.Module):
    """What encoder and decoder share: embeddings and a stack of steps."""

    steps_option: str
    """Option of the config that says how many steps are made."""
    epsilon_option: str

    def __init__(
        self, config: LazyTransformerConfig, embedding: nn.Embedding, cross_attention: bool = False
    ) -> None:
        super().__init__()
        self.config = config
        self.embedding = embedding
        self.dropout = Dropout(config.dropout)
        self.stack = StepStack(config, getattr(config, self.steps_option), cross_attention)

    def embed(self, ids: Tensor) -> Tensor:
        """Return embeddings of unit variance `[B, T, D]`: the tied table's variance is 1 / D."""
        vectors = self.embedding(ids)
        state: Tensor = self.dropout(vectors * vectors.shape[-1] ** 0.5)
        return state

    def run(
        self,
        state: Tensor,
        positions: Tensor,
        context: PaddedContext,
        options: StepOptions,
        real_BT: Tensor | None,
    ) -> StackOutput:
        """Apply the steps; tokens halt in equilibrium if `epsilon` is above 0.

        In training they do only where the call gives an epsilon, whatever the config says.
        """
        config = self.config
        usual_epsilon = 0.0 if self.training else getattr(config, self.epsilon_option)
        usual = (getattr(config, self.steps_option), usual_epsilon, config.patience, config.halt_on)
        given = zip(options, (*usual, False), strict=True)
        options = StepOptions(*(other if own is None else own for own, other in given))
        config.check_epsilon(options.epsilon, self.epsilon_option)
        config.check_halt_on(options.halt_on)
        steps = (self.stack, state, positions, context, options)
        if options.epsilon == 0.0:
            output: StackOutput = self.stack(*steps[1:4], options.num_steps, options.keep_states)
            return output
        return run_in_full(*steps) if self.training else run_with_halting(*steps, real_BT)


class LazyEncoder(_Side):
    """Update source tokens, which all attend to one another, step by step."""

    main_input_name = "input_ids"
    steps_option, epsilon_option = "encoder_steps", "epsilon"

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        encoder_steps: int | None = None,
        epsilon: float | None = None,
        patience: int | None = None,
        halt_on: str | None = None,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
        return_dict: bool | None = None,
    ) -> LazyEncoderOutput | tuple[Any, ...]:
        """Encode a batch; steps and what decides halting are the config's unless given."""
        state = self.embed(input_ids)
        positions = self.stack.encoding.positions(0, state, attention_mask)
        context = PaddedContext(self.config.num_heads, padding_mask(attention_mask))
        options = StepOptions(encoder_steps, epsilon, patience, halt_on, bool(output_hidden_states))
        steps = self.run(state, positions, context, options, attention_mask)
        trace = None
        if not self.training:
            each = step_flops(self.config, state.shape[1])
            trace = _trace(steps, each, torch.zeros(()), attention_mask)
        output = LazyEncoderOutput(steps.state, steps.states, steps.gates, steps.ponder_cost, trace)
        return output if return_dict is not False else output.to_tuple()


class LazyDecoder(_Side):
    """Update target tokens, which attend to earlier ones and, if there is one, to the source."""

    steps_option, epsilon_option = "decoder_steps", "decoder_epsilon"

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None,
        memory: EncoderMemory | None,
        cache: Cache | None,
        options: StepOptions,
        logits_to_keep: int,
    ) -> tuple[StackOutput, DepthTrace | None]:
        """Decode new tokens; `attention_mask` covers cached tokens too, `[B, K]`.

        The trace has one unit per new token; it is made in evaluation only.
        """
        config = self.config
        num_past = cache.get_seq_length() if cache is not None else 0
        num_new = input_ids.shape[1]
        num_keys = num_past + num_new
        state = self.embed(input_ids)
        positions = self.stack.encoding.positions(num_past, state, attention_mask)
        mask = causal_mask(attention_mask, num_new, num_keys, state.device)
        context = PaddedContext(config.num_heads, mask, cache, memory)
        real = None if attention_mask is None else attention_mask[:, -num_new:]
        output = self.run(state, positions, context, options, real)
        trace = None
        if not self.training:
            num_scored = min(logits_to_keep or num_new, num_new)
            is_scored = torch.arange(num_new) >= num_new - num_scored
            extra = exact(is_scored) * (2 * config.d_model * config.vocab_size)
            if memory is not None and not memory.is_cached:
                # The cost of cross-attention keys and values is shared by the target tokens.
                num_blocks = output.ran.shape[-1] if config.mechanism == TRANSFORMER else 1
                num_values = num_blocks * memory.states.shape[1] * config.d_model
                extra = extra + 4 * num_values * config.d_model / num_new
            num_source = None if memory is None else memory.states.shape[1]
            each = step_flops(config, num_keys, num_source)
            trace = _trace(output, each, extra, real)
        return output, trace


def step_flops(config: LazyTransformerConfig, num_keys: int, num_source: int | None = None) -> int:
    """Return the FLOPs of one token in one step, attending to so many tokens (of the source)."""
    d = config.d_model
    products = 4 * d * d + 2 * d * config.d_ff + 2 * d * num_keys
    if num_source is not None:
        products += 2 * d * d + 2 * d * num_source
    return 2 * products


def _trace(
    steps: StackOutput, flops_per_step: int, extra: Tensor, real_BT: Tensor | None
) -> DepthTrace:
    ran, depth = steps.ran, steps.depth
    flops = exact(ran.sum(-1))
    flops = flops * flops_per_step + extra.to(flops.device)
    if real_BT is not None:
        real = real_BT.bool()
        ran, depth, flops = ran & real[..., None], depth * real, flops * real.to(flops.device)
    return DepthTrace(depth=depth, ran=ran, flops=flops)


# -- models ----------------------------------------------------------------------------------------


class LazyPreTrainedModel(SealedPreTrainedModel):
    """Base of both models: weights, embeddings, losses."""

    config_class = LazyTransformerConfig
    config: LazyTransformerConfig
    base_model_prefix = ""
    main_input_name = "input_ids"
    _input_embed_layer = "embedding"
    _supports_sdpa = True
    accepts_loss_kwargs = False  # the loss is a mean, which a trainer divides when it accumulates

    def __init__(self, config: LazyTransformerConfig) -> None:
        super().__init__(config)
        self.embedding = nn.Embedding(config.vocab_size, config.d_model)
        if config.is_encoder_decoder:
            self.encoder = LazyEncoder(config, self.embedding)
        self.decoder = LazyDecoder(config, self.embedding, config.is_encoder_decoder)
        self.output = nn.Linear(config.d_model, config.vocab_size, bias=False)
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Embedding):
            init.normal_(module.weight, std=module.embedding_dim**-0.5)
        elif module is self.output:  # unless it is tied to the embeddings
            init.normal_(module.weight, std=self.config.d_model**-0.5)
        elif isinstance(module, nn.Linear):
            init.normal_(module.weight, std=module.in_features**-0.5)
            if module.bias is not None:
                init.constant_(module.bias, HALTING_BIAS if module.out_features == 1 else 0.0)
        elif isinstance(module, nn.LayerNorm):
            init.ones_(module.weight)
            init.zeros_(module.bias)

    def set_input_embeddings(self, value: nn.Module) -> None:
        """Replace the embedding table in every part that reads tokens."""
        for part in self.modules():
            if isinstance(getattr(part, "embedding", None), nn.Embedding):
                part.embedding = value

    def get_output_embeddings(self) -> nn.Module:
        """Return the output layer."""
        return self.output

    def set_output_embeddings(self, value: nn.Linear) -> None:
        """Replace the output layer."""
        self.output = value

    def _output(
        self,
        steps: StackOutput,
        trace: DepthTrace | None,
        targets: Tensor | None,
        with_logits: bool,
        logits_to_keep: int,
        cache: Cache | None,
    ) -> LazyOutput:
        """Return logits, losses and trace of what the decoder made.

        Without logits, scores are computed only for tokens that have a target.
        """
        state_BTD = steps.state
        logits = self.output(state_BTD[:, -logits_to_keep:]) if with_logits else None
        loss = plain = None
        if targets is not None:
            flat = targets.flatten()
            kept = (flat != IGNORE_INDEX).nonzero().squeeze(1)
            if logits is None:
                scores = self.output(state_BTD.flatten(0, 1).index_select(0, kept))
            else:
                scores = logits.flatten(0, 1).index_select(0, kept)
            smoothing = self.config.label_smoothing if self.training else 0.0
            loss, plain = smoothed_cross_entropy(scores, flat[kept], smoothing)
        return LazyOutput(
            loss=loss,
            logits=logits,
            plain_loss=plain,
            past_key_values=cache,
            decoder_hidden_states=steps.states,
            decoder_gates=steps.gates,
            trace=trace,
        )

    def _add_ponder_cost(
        self, output: LazyOutput, cost: Tensor | None, real: Tensor | None
    ) -> None:
        """Add ACT's cost of steps, `tau * mean(N + R)` over real tokens, to the training loss."""
        if cost is None or output.loss is None or not self.training:
            return
        weights = cost.new_ones(cost.shape) if real is None else real.to(cost.dtype)
        mean = (cost * weights).sum() / weights.sum()
        output.loss = output.loss + self.config.act_cost * mean


class LazyTransformerForConditionalGeneration(LazyPreTrainedModel, CheckedGenerationMixin):
    """An encoder-decoder of shared blocks, for translation and other text-to-text tasks."""

    _tied_weights_keys = {  # noqa: RUF012 - the form transformers asks for
        "output.weight": "embedding.weight",
        "encoder.embedding.weight": "embedding.weight",
        "decoder.embedding.weight": "embedding.weight",
    }

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        decoder_input_ids: Tensor | None = None,
        decoder_attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        targets: Tensor | None = None,
        encoder_outputs: LazyEncoderOutput | None = None,
        past_key_values: EncoderDecoderCache | None = None,
        use_cache: bool | None = None,
        encoder_steps: int | None = None,
        decoder_steps: int | None = None,
        epsilon: float | None = None,
        decoder_epsilon: float | None = None,
        patience: int | None = None,
        halt_on: str | None = None,
        output_hidden_states: bool | None = None,
        logits_to_keep: int = 0,
        return_dict: bool | None = None,
        **_: Any,
    ) -> LazyOutput | tuple[Any, ...]:
        """Return logits, or the loss of given targets.

        `labels` (-100 where there is none) give the loss and all logits; `targets`, in the same
        form, give the loss alone, which is cheaper: logits are computed only where there is a
        target. Steps, epsilons, `patience` and `halt_on` are the config's unless given.
        """
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
                halt_on=halt_on,
                output_hidden_states=output_hidden_states,
            )
        states = encoder_outputs[0]
        cache = past_key_values
        if cache is None and use_cache:
            cache = EncoderDecoderCache(DynamicCache(), DynamicCache())
        own, cross = None, None
        if cache is not None:
            own, cross = cache.self_attention_cache, cache.cross_attention_cache
        memory = EncoderMemory(states, padding_mask(attention_mask), self.config.num_heads, cross)
        keep_states = bool(output_hidden_states)
        options = StepOptions(decoder_steps, decoder_epsilon, patience, halt_on, keep_states)
        steps, trace = self.decoder(
            decoder_input_ids, decoder_attention_mask, memory, own, options, logits_to_keep
        )
        output = self._output(steps, trace, wanted, targets is None, logits_to_keep, cache)
        if wanted is not None:
            self._add_ponder_cost(output, steps.ponder_cost, wanted != IGNORE_INDEX)
            cost = getattr(encoder_outputs, "ponder_cost", None)
            self._add_ponder_cost(output, cost, attention_mask)
        output.encoder_last_hidden_state = states
        output.encoder_hidden_states = getattr(encoder_outputs, "hidden_states", None)
        output.encoder_gates = getattr(encoder_outputs, "gates", None)
        output.encoder_trace = getattr(encoder_outputs, "trace", None)
        return output if return_dict is not False else output.to_tuple()

    def prepare_decoder_input_ids_from_labels(self, labels: Tensor) -> Tensor:
        """Return the decoder's input for given labels: shifted right, after the start token."""
        start = self.config.decoder_start_token_id
        shifted = F.pad(labels[:, :-1], (1, 0), value=start)
        return shifted.masked_fill(shifted == IGNORE_INDEX, self.config.pad_token_id)

    @staticmethod
    def _reorder_cache(cache: EncoderDecoderCache, beam_idx: Any) -> Cache:
        """Reorder beams; cross-attention is the same for all beams of a sentence."""
        cache.self_attention_cache.reorder_cache(beam_idx)
        return cache


class LazyTransformerForCausalLM(LazyPreTrainedModel, CheckedGenerationMixin):
    """The decoder alone, for language modelling; its options are those named `decoder_*`."""

    _tied_weights_keys = {  # noqa: RUF012 - the form transformers asks for
        "output.weight": "embedding.weight",
        "decoder.embedding.weight": "embedding.weight",
    }

    def __init__(self, config: LazyTransformerConfig) -> None:
        config.is_encoder_decoder = False  # one config serves both models
        super().__init__(config)

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
        halt_on: str | None = None,
        output_hidden_states: bool | None = None,
        logits_to_keep: int = 0,
        return_dict: bool | None = None,
        **_: Any,
    ) -> LazyOutput | tuple[Any, ...]:
        """Return logits, or the loss of given targets.

        `labels` are shifted here, as everywhere in transformers, and come with logits; `targets`
        are the next tokens themselves (-100 where there is none) and give the loss alone.
        """
        cache = past_key_values
        if cache is None and use_cache:
            cache = DynamicCache()
        keep_states = bool(output_hidden_states)
        options = StepOptions(decoder_steps, decoder_epsilon, patience, halt_on, keep_states)
        steps, trace = self.decoder(input_ids, attention_mask, None, cache, options, logits_to_keep)
        wanted = targets
        if labels is not None:
            wanted = F.pad(labels[:, 1:], (0, 1), value=IGNORE_INDEX)[:, -logits_to_keep:]
        output = self._output(steps, trace, wanted, targets is None, logits_to_keep, cache)
        real = None if attention_mask is None else attention_mask[:, -input_ids.shape[1] :]
        self._add_ponder_cost(output, steps.ponder_cost, real)
        return output if return_dict is not False else output.to_tuple()


AutoConfig.register(LazyTransformerConfig.model_type, LazyTransformerConfig)
AutoModelForSeq2SeqLM.register(LazyTransformerConfig, LazyTransformerForConditionalGeneration)
AutoModelForCausalLM.register(LazyTransformerConfig, LazyTransformerForCausalLM)

"""PAR Transformer-XL (arXiv 2009.04534) as a Hugging Face model.

The same blocks serve the SuperNet, any fixed pattern, and everything between: those marked `*` in
the config's pattern compute both branches and mix them, the others only their own.

`ParForCausalLM` predicts the next token. Its memory is Transformer-XL's: pass `memories` back in to
continue a stream. `generate()` keeps keys and values instead, which is the same computation, and
sees as far back as training did (`config.sliding_window`). `ParForMaskedLM` fills in masked tokens
(PAR-BERT): attention looks both ways, and nothing is remembered. `ParModel` is either of them
without its output layer, for a classifier to be put on.

Shapes: B streams, S new tokens, K keys, D width, N blocks.
"""

import copy
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    Cache,
    DynamicCache,
    PreTrainedConfig,
)
from transformers import initialization as init
from transformers.utils.generic import ModelOutput, can_return_tuple

from deepenough.config import validate
from deepenough.errors import UserError
from deepenough.hf.generation import CheckedGenerationMixin
from deepenough.nn.layers import Dropout
from deepenough.nn.relative_attention import RelativeAttention
from deepenough.par.config import IDENTITY, OPEN, ParModelConfig, check_pattern
from deepenough.par.layers import (
    BranchChoice,
    ParBlock,
    branch_flops,
    head_flops,
    hide_padding,
    relative_context,
)
from deepenough.trace import DepthTrace
from deepenough.training.checkpoint import SealedPreTrainedModel

#: Positions of memory where none are asked for.
MEM_LEN = 32
#: Tokens of a prompt that pass through the blocks at once.
READ_AT_ONCE = 512

Memories = tuple[Tensor | None, ...]
"""Normalised states of earlier tokens, one entry a block; None for a block without attention."""


class ParConfig(PreTrainedConfig, ParModelConfig):
    """A Transformer-XL whose blocks are given by `pattern`, or still searched (`*`).

    `length` is that of a segment in training. A search may use one branch at a time in the forward
    pass (`straight_through`) and train its temperature (`learn_tau`). Further options are those of
    `ParModelConfig` and of every `PreTrainedConfig`.
    """

    model_type = "par"
    attribute_map = {  # noqa: RUF012 - the form transformers asks for
        "hidden_size": "d_model",
        "num_hidden_layers": "num_blocks",
        "num_attention_heads": "num_heads",
        "intermediate_size": "d_ff",
    }
    keys_to_ignore_at_inference = ["memories", "past_key_values", "trace"]  # noqa: RUF012
    pattern: str
    mem_len: int
    cutoffs: list[int]
    initializer_range: float

    def __init__(
        self,
        vocab_size: int = 8000,
        length: int = 32,
        straight_through: bool = False,
        learn_tau: bool = False,
        **kwargs: Any,
    ) -> None:
        names = {option.name for option in fields(ParModelConfig)}
        model = ParModelConfig(**{name: kwargs.pop(name) for name in names & kwargs.keys()})
        validate(model)
        if model.pattern is None:
            model.pattern = OPEN * model.num_blocks
        model.num_blocks = len(model.pattern)
        model.initializer_range = model.initializer_range or model.d_model**-0.5
        if model.mem_len is None:
            model.mem_len = MEM_LEN if model.objective == "causal" else 0
        for name, value in (("vocab_size", vocab_size), ("length", length)):
            if value < 1:
                raise UserError(f"{name} must be at least 1: got {value}.")
        if isinstance(model.cutoffs, str) or max(model.cutoffs, default=0) >= vocab_size:
            raise UserError(
                f"The cutoffs {model.cutoffs} must lie between 1 and {vocab_size - 1}: "
                f"the vocabulary size, {vocab_size}, is not one of them."
            )
        search = {"straight_through": straight_through, "learn_tau": learn_tau}
        vars(self).update(vars(model), vocab_size=vocab_size, length=length, **search)
        # Without an adaptive softmax the output shares the input's embeddings.
        kwargs.setdefault("tie_word_embeddings", not model.cutoffs)
        super().__init__(**kwargs)

    def with_pattern(self, pattern: str) -> Self:
        """Return the same config with other blocks."""
        other = copy.deepcopy(self)
        other.pattern = check_pattern(pattern, allow_open=True)
        other.num_blocks = len(pattern)
        return other

    @property
    def bidirectional(self) -> bool:
        """Whether attention looks both ways."""
        return self.objective == "masked"

    @property
    def is_decoder(self) -> bool:
        """Whether tokens see only what is before them, as transformers calls it."""
        return not self.bidirectional

    @property
    def sliding_window(self) -> int:
        """How far back a token sees: the longest reach that training has, memory and segment."""
        return self.mem_len + self.length


@dataclass
class ParOutput(ModelOutput):
    """What a forward pass returns."""

    loss: Tensor | None = None
    """Mean negative log-likelihood in nats."""
    logits: Tensor | None = None
    """`[B, S, V]`; left out where only the loss is asked for. Of a masked model that is evaluated
    on targets, those of the tokens to be filled in, `[M, V]`."""
    last_hidden_state: Tensor | None = None
    """`[B, S, D]`, of a model without an output layer."""
    memories: Memories | None = None
    """To be passed with the next segment of the same streams."""
    past_key_values: Cache | None = None
    hidden_states: tuple[Tensor, ...] | None = None
    """`[B, S, D]` before the first and after every block, the last one normed."""
    trace: DepthTrace | None = None


class ParPreTrainedModel(SealedPreTrainedModel):
    """Embeddings, blocks (attention, dense, identity and open ones), norm and output layer."""

    config_class = ParConfig
    config: ParConfig
    base_model_prefix = ""
    _input_embed_layer = "embedding"
    _supports_sdpa = True
    accepts_loss_kwargs = False  # the loss is a mean, which a trainer divides when it accumulates
    objective: ClassVar[str | None] = None
    """What the class is trained for; without one it has no output layer."""

    def __init__(self, config: ParConfig) -> None:
        if self.objective not in (None, config.objective):
            other = {"causal": "ParForCausalLM", "masked": "ParForMaskedLM"}[config.objective]
            raise UserError(
                f"This is a PAR model with the objective {config.objective!r}, and "
                f"{type(self).__name__} is for {self.objective!r}: load it as {other}."
            )
        super().__init__(config)
        self.embedding = nn.Embedding(config.vocab_size, config.d_model)
        self.dropout = Dropout(config.dropout)
        self.blocks = nn.ModuleList(ParBlock(config, kind) for kind in config.pattern)
        self.norm = nn.LayerNorm(config.d_model)
        self.output: nn.Module
        if self.objective is not None and config.cutoffs:
            self.output = nn.AdaptiveLogSoftmaxWithLoss(
                config.d_model, config.vocab_size, config.cutoffs, div_value=config.div_value
            )
        elif self.objective is not None:
            self.output = nn.Linear(config.d_model, config.vocab_size, bias=False)
        self.choice = None
        if OPEN in config.pattern:
            self.choice = BranchChoice(config.pattern, config.straight_through, config.learn_tau)
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Embedding):
            init.normal_(module.weight, std=module.embedding_dim**-0.5)
        elif isinstance(module, RelativeAttention):
            init.zeros_(module.v_minus_u)
        elif isinstance(module, BranchChoice):
            init.zeros_(module.alpha)
            init.ones_(module.tau)
            if module.log_tau is not None:
                init.zeros_(module.log_tau)
        else:
            super()._init_weights(module)

    def get_output_embeddings(self) -> nn.Module | None:
        """Return the output layer; None where it is an adaptive softmax, or where there is none."""
        return None if self.config.cutoffs else getattr(self, "output", None)

    def _run_blocks(
        self,
        input_ids: Tensor,
        num_keys: int,
        attention_mask: Tensor | None,
        memories: Memories | None,
        cache: Cache | None,
        noise: Tensor | None,
    ) -> tuple[list[Tensor], Memories | None]:
        """Return the states before and after every block, the last one normed, and memories."""
        num_streams, num_new = input_ids.shape
        states = [self.dropout(self.embedding(input_ids) * self.config.d_model**0.5)]
        window = None if self.config.bidirectional else self.config.sliding_window
        shape = (num_new, num_keys, window, self.config.d_model)
        context = relative_context(*shape, states[0].dtype, states[0].device)
        context = hide_padding(context, attention_mask)
        weights = self.choice(num_streams, noise) if self.choice is not None else None
        kept: list[Tensor | None] = []
        cache_index = 0
        for index, block in enumerate(self.blocks):
            assert isinstance(block, ParBlock)
            memory = memories[index] if memories is not None else None
            own_weights = weights[index] if weights is not None and block.kind == OPEN else None
            hidden, normed = block(states[-1], context, memory, cache, cache_index, own_weights)
            cache_index += block.attends
            keeps = block.attends and not self.config.bidirectional
            kept.append(self._remember(memory, normed) if keeps else None)
            states.append(hidden)
        states[-1] = self.norm(states[-1])
        return states, tuple(kept) if cache is None else None

    def _read(
        self, input_ids: Tensor, attention_mask: Tensor | None, noise: Tensor | None
    ) -> tuple[list[Tensor], DepthTrace | None]:
        """Return what `_run_blocks` and `_trace` do for texts that are read whole."""
        length = input_ids.shape[1]
        states, _ = self._run_blocks(input_ids, length, attention_mask, None, None, noise)
        return states, self._trace(input_ids, [(length, length, length)])

    def _remember(self, memory: Tensor | None, normed: Tensor) -> Tensor:
        """Return the last `mem_len` states, cut off from the graph."""
        length = self.config.mem_len
        if memory is not None and normed.shape[1] < length:
            normed = torch.cat([memory, normed], 1)
        return normed[:, max(0, normed.shape[1] - length) :].detach()

    def _loss(self, hidden: Tensor, targets: Tensor) -> Tensor:
        hidden, targets = hidden.flatten(0, 1), targets.flatten()
        # Where looking would make a device wait, the loss passes over what is ignored by itself.
        if self.config.cutoffs or hidden.device.type == "cpu":
            kept = targets != -100
            if not bool(kept.all()):
                hidden, targets = hidden[kept], targets[kept]
        if not self.config.cutoffs:
            return F.cross_entropy(self.output(hidden), targets)
        # Under a CPU's autocast torch's adaptive softmax stops at the mixture of dtypes it gets.
        with torch.autocast("cpu", enabled=False):
            loss: Tensor = self.output(hidden, targets).loss
        return loss

    def _logits(self, hidden: Tensor) -> Tensor:
        if isinstance(self.output, nn.AdaptiveLogSoftmaxWithLoss):
            return self.output.log_prob(hidden.flatten(0, -2)).unflatten(0, hidden.shape[:-1])
        logits: Tensor = self.output(hidden)
        return logits

    def layer_flops(self, index: int, num_texts: int, length: int) -> int:
        """Return the FLOPs of one block for texts that are read whole."""
        return branch_flops(self.config, self.pattern[index], num_texts, length, length)

    def _trace(self, input_ids: Tensor, sizes: list[tuple[int, int, int]]) -> DepthTrace | None:
        """Return the trace of the blocks alone, or None in training.

        `sizes` are the new tokens, keys and projected keys of each part of the text.
        """
        if self.training:
            return None
        kinds, units = self.pattern, input_ids.shape
        in_blocks = sum(
            branch_flops(self.config, kind, len(input_ids), *part)
            for kind in kinds
            for part in sizes
        )
        return DepthTrace(
            depth=torch.full(units, len(kinds)),
            ran=torch.tensor([kind != IDENTITY for kind in kinds]).expand(*units, -1),
            flops=torch.full(units, in_blocks / input_ids.numel(), dtype=torch.float64),
        )

    @property
    def pattern(self) -> str:
        """The blocks; stars are open."""
        return self.config.pattern

    def with_pattern(self, pattern: str) -> Self:
        """Return a model of the given pattern with this one's weights, which must have them all."""
        other = type(self)(self.config.with_pattern(pattern))
        missing, _ = other.load_state_dict(self.state_dict(), strict=False)
        if missing:
            raise UserError(
                f"The pattern {pattern} cannot be taken out of {self.pattern}: there are no "
                f"weights {missing[0]}."
            )
        return other.to(device=self.device, dtype=self.dtype).train(self.training)  # type: ignore[call-arg]


class ParModel(ParPreTrainedModel):
    """The blocks alone, as `AutoModel` loads them, for a classifier to be put on."""

    _keys_to_ignore_on_load_unexpected = [r"^output\."]  # noqa: RUF012

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        noise: Tensor | None = None,
        output_hidden_states: bool | None = None,
        **_: Any,
    ) -> ParOutput:
        """Return the last states of texts that are read whole and, in evaluation, a trace."""
        states, trace = self._read(input_ids, attention_mask, noise)
        kept = tuple(states) if output_hidden_states else None
        return ParOutput(last_hidden_state=states[-1], hidden_states=kept, trace=trace)


class ParForCausalLM(ParPreTrainedModel, CheckedGenerationMixin):
    """A causal language model."""

    objective = "causal"
    takes_tokens_back = False  # blocks without attention leave layers of a cache empty
    _tied_weights_keys = {"output.weight": "embedding.weight"}  # noqa: RUF012

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        targets: Tensor | None = None,
        memories: Memories | None = None,
        past_key_values: Cache | None = None,
        use_cache: bool | None = None,
        noise: Tensor | None = None,
        output_hidden_states: bool | None = None,
        logits_to_keep: int = 0,
        **_: Any,
    ) -> ParOutput:
        """Return loss or logits, new memories, the cache and, in evaluation, a trace.

        Labels are shifted here, as everywhere in transformers, and come with logits. `targets` are
        the next tokens themselves, for streams in which the last token's successor is known too;
        they give the loss alone. `memories` are what the last pass over the same streams returned:
        a cache that is still empty takes them in, a filled one has them. `noise` is Gumbel noise
        for the SuperNet, instead of its own draw.
        """
        cache = past_key_values
        if cache is None and use_cache:
            cache = DynamicCache(config=self.config)
        # What a cache takes in is read in parts: attention to all of it at once takes memory that
        # grows with its square.
        size = READ_AT_ONCE if cache is not None and not self.training else input_ids.shape[1]
        parts, sizes = [], []
        for start in range(0, max(1, input_ids.shape[1]), max(1, size)):
            part = input_ids[:, start : start + size]
            num_later = input_ids.shape[1] - start - part.shape[1]
            seen = attention_mask
            if seen is not None and num_later:
                seen = seen[:, :-num_later]
            num_cached = cache.get_seq_length() if cache is not None else 0
            if num_cached:
                memories = None
            num_remembered = next((m.shape[1] for m in memories or () if m is not None), 0)
            num_projected = num_remembered + part.shape[1]
            num_keys = min(num_cached, self.config.sliding_window - 1) + num_projected
            sizes.append((part.shape[1], num_keys, num_projected))
            own, new_memories = self._run_blocks(part, num_keys, seen, memories, cache, noise)
            parts.append(own if output_hidden_states else own[-1:])
        states = parts[0]
        if len(parts) > 1:
            states = [torch.cat(own, 1) for own in zip(*parts, strict=True)]
        hidden = states[-1]
        loss = logits = None
        if targets is not None:
            loss = self._loss(hidden, targets)
        else:
            logits = self._logits(hidden[:, -logits_to_keep:])
        trace = self._trace(input_ids, sizes)
        if trace is not None:
            with_head = trace.flops[:, -logits_to_keep:] if targets is None else trace.flops
            with_head += head_flops(self.config, with_head.numel(), targets).view_as(with_head)
        if labels is not None and logits is not None:
            following = F.pad(labels[:, 1:], (0, 1), value=-100)[:, -logits_to_keep:]
            # Also where the logits are log-probabilities: they are their own log-softmax.
            loss = F.cross_entropy(logits.flatten(0, 1), following.flatten())
        kept = tuple(states) if output_hidden_states else None
        return ParOutput(loss, logits, None, new_memories, cache, kept, trace)


class ParForMaskedLM(ParPreTrainedModel):
    """A masked language model: an encoder that is trained to fill in tokens."""

    objective = "masked"
    _tied_weights_keys = {"output.weight": "embedding.weight"}  # noqa: RUF012

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        targets: Tensor | None = None,
        memories: Memories | None = None,
        past_key_values: Cache | None = None,
        noise: Tensor | None = None,
        output_hidden_states: bool | None = None,
        **_: Any,
    ) -> ParOutput:
        """Return loss or logits and, in evaluation, a trace.

        Labels are the tokens that the mask token has replaced, -100 elsewhere, and come with logits
        of all tokens. `targets` are the same; in training they give the loss alone, in evaluation
        also the logits of the tokens that were replaced.
        """
        if memories is not None or past_key_values is not None:
            raise UserError(
                "A masked model reads every text by itself: give neither memories nor "
                "past_key_values, or use a ParForCausalLM."
            )
        states, trace = self._read(input_ids, attention_mask, noise)
        hidden, loss, logits = states[-1], None, None
        if targets is not None and self.training:
            loss = self._loss(hidden, targets)
        else:
            chosen = torch.ones_like(input_ids).bool() if targets is None else targets != -100
            logits = self._logits(hidden if targets is None else hidden[chosen])
            answers = labels if targets is None else targets[chosen]
            if answers is not None:
                loss = F.cross_entropy(logits.flatten(0, -2), answers.flatten())
            if trace is not None:
                trace.flops[chosen.cpu()] += head_flops(self.config, int(chosen.sum()))
        kept = tuple(states) if output_hidden_states else None
        return ParOutput(loss, logits, hidden_states=kept, trace=trace)

    def generate(self, *_: Any, **__: Any) -> Any:
        """Refuse to write: the tokens after a text are not what this model was trained for."""
        raise UserError(
            "A masked model fills in tokens and does not continue a text: use a ParForCausalLM."
        )


def new_model(config: ParConfig) -> ParForCausalLM | ParForMaskedLM:
    """Return a model with new weights, of the class that its objective needs."""
    return ParForMaskedLM(config) if config.bidirectional else ParForCausalLM(config)


AutoConfig.register("par", ParConfig)
AutoModel.register(ParConfig, ParModel)
AutoModelForCausalLM.register(ParConfig, ParForCausalLM)
AutoModelForMaskedLM.register(ParConfig, ParForMaskedLM)

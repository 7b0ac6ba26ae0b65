"""What a call of `generate` asks for, and the sequences that it generates.

transformers itself reads the arguments (`GenerationMixin.generate` makes the configuration, the
logits processors and the stopping criteria). `Request` holds what its loop would be given; what our
loop (`verification.py`) does not do is refused by name before anything runs.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList
from transformers.generation import logits_process
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria

from deepenough.decoding.engine import Engine
from deepenough.errors import UserError

#: Logits processors that read the scores alone, so that rows of any length go together.
SCORES_ONLY = tuple(
    getattr(logits_process, name)
    for name in (
        "TemperatureLogitsWarper",
        "TopKLogitsWarper",
        "TopPLogitsWarper",
        "MinPLogitsWarper",
        "TypicalLogitsWarper",
        "EpsilonLogitsWarper",
        "EtaLogitsWarper",
        "SuppressTokensLogitsProcessor",
        "InfNanRemoveLogitsProcessor",
        "LogitNormalization",
    )
)
#: Settings that transformers makes logits processors and stopping criteria of, or that the loop
#: reads; `get_generation_mode` tells of those that choose another kind of search.
_HONOURED = {
    *("max_length", "max_new_tokens", "min_length", "min_new_tokens", "max_time", "stop_strings"),
    *("do_sample", "temperature", "top_k", "top_p", "min_p", "top_h", "typical_p", "num_beams"),
    *("epsilon_cutoff", "eta_cutoff", "renormalize_logits", "remove_invalid_values"),
    *("repetition_penalty", "encoder_repetition_penalty", "no_repeat_ngram_size"),
    *("encoder_no_repeat_ngram_size", "bad_words_ids", "sequence_bias", "suppress_tokens"),
    *("begin_suppress_tokens", "forced_bos_token_id", "forced_eos_token_id", "guidance_scale"),
    *("exponential_decay_length_penalty", "watermarking_config", "num_return_sequences"),
    *("output_scores", "output_logits", "return_dict_in_generate"),
    *("pad_token_id", "bos_token_id", "eos_token_id"),
}
#: Settings of other kinds of search, of encoders, of speed and of how they were saved.
_WITHOUT_EFFECT = {
    *("early_stopping", "length_penalty", "num_beam_groups", "diversity_penalty", "low_memory"),
    *("use_cache", "cache_config", "max_cache_len", "compile_config", "disable_compile"),
    *("num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_confidence_threshold"),
    *("assistant_lookbehind", "target_lookbehind", "max_matching_ngram_size"),
    *("decoder_start_token_id", "_from_model_config", "transformers_version"),
}
#: Arguments that the model itself would get; a cache that is empty is nobody's.
_UNDERSTOOD = {
    *("attention_mask", "position_ids", "use_cache", "logits_to_keep", "past_key_values"),
    *("output_attentions", "output_hidden_states", "return_dict"),
}
#: Further ones that a model gets where it is run as a whole.
_WHOLE_UNDERSTOOD = {"encoder_outputs", "cache_params"}
_NOT_HANDED_ON = (
    *("custom_generate", "inputs_embeds", "position_ids", "past_key_values", "cache_params"),
    *("assistant_model", "assistant_tokenizer", "synced_gpus"),
)


@dataclass
class Request:
    """One generation. Shapes: B sequences, T tokens of the padded prompts."""

    ids_BT: Tensor
    mask_BT: Tensor | None
    processors: LogitsProcessorList
    criteria: StoppingCriteriaList
    config: GenerationConfig
    max_length: int
    """Tokens at which a sequence ends, its prompt and padding included."""
    streamer: Any = None
    generator: torch.Generator | None = None
    """Draws the samples, on the CPU; None for torch's global generator."""
    inputs: dict[str, Any] = field(default_factory=dict)
    """What else transformers would call the model with, where it is run as a whole."""

    @property
    def sampled(self) -> bool:
        """Whether tokens are sampled rather than chosen greedily."""
        return bool(self.config.do_sample)

    @property
    def pad(self) -> int:
        """The token that follows the end of a sequence."""
        token = getattr(self.config, "_pad_token_tensor", None)
        return 0 if token is None else int(token)

    @property
    def in_lockstep(self) -> bool:
        """Whether all sequences must advance together, one token at a time, as in transformers.

        They must if something reads the whole batch: a streamer, scores that are returned, or a
        logits processor or stopping criterion that reads the tokens.
        """
        return len(self.ids_BT) > 1 and (
            self.streamer is not None
            or self.keeps_scores
            or not self.reads_scores_only
            or len(self.other_criteria) > 0
        )

    @property
    def reads_scores_only(self) -> bool:
        """Whether no logits processor reads the tokens."""
        return all(type(each) in SCORES_ONLY for each in self.processors)

    @property
    def ends(self) -> set[int]:
        """The tokens that end a sequence."""
        found = [each.eos_token_id for each in self.criteria if type(each) is EosTokenCriteria]
        return {token for ids in found for token in ids.flatten().tolist()}

    @property
    def other_criteria(self) -> StoppingCriteriaList:
        """The stopping criteria beside length and end tokens."""
        own = (MaxLengthCriteria, EosTokenCriteria)
        return StoppingCriteriaList([each for each in self.criteria if type(each) not in own])

    @property
    def keeps_scores(self) -> bool:
        """Whether scores or logits are returned."""
        config = self.config
        return bool(
            config.return_dict_in_generate and (config.output_scores or config.output_logits)
        )


def make_request(
    ids_BT: Tensor,
    processors: LogitsProcessorList,
    criteria: StoppingCriteriaList,
    config: GenerationConfig,
    streamer: Any,
    engine: Engine,
    model_kwargs: dict[str, Any],
) -> Request:
    """Check what transformers prepared of the arguments of `generate`, and make a request of it.

    `model_kwargs` is what transformers would call the model with.
    """
    mode = config.get_generation_mode().value
    if mode not in ("greedy_search", "sample"):
        raise UserError(
            f"This model generates greedily or by sampling, not by {mode}: leave out its "
            "options, or use the model's own generate()."
        )
    cache = model_kwargs.get("past_key_values")
    # Whatever else has a value, an option of a newer transformers too, would not be done.
    usual = GenerationConfig().to_dict() | {"cache_implementation": "dynamic"}
    others = usual.keys() - _HONOURED - _WITHOUT_EFFECT
    refused = {
        name: getattr(config, name, None) not in (None, False, usual[name])
        for name in sorted(others)
    }
    refused["past_key_values"] = cache is not None and cache.get_seq_length() > 0
    understood = _UNDERSTOOD | (set() if engine.layered else _WHOLE_UNDERSTOOD)
    given = {name for name, value in model_kwargs.items() if value is not None and value != {}}
    _refuse(refused | dict.fromkeys(sorted(given - understood), True))
    # That of an encoder-decoder is of the text that its encoder has read.
    is_pair = "encoder_outputs" in model_kwargs
    mask_BT = None if is_pair else model_kwargs.get("attention_mask")
    if mask_BT is not None and mask_BT.shape != ids_BT.shape:
        raise UserError(
            f"The attention mask has the shape {tuple(mask_BT.shape)}, and the prompts have "
            f"{tuple(ids_BT.shape)}: give one of the same shape."
        )
    length = min(each.max_length for each in criteria if isinstance(each, MaxLengthCriteria))
    _check_fits(ids_BT, mask_BT, length - ids_BT.shape[1], engine.max_length)
    inputs = {} if engine.layered else model_kwargs
    return Request(ids_BT, mask_BT, processors, criteria, config, length, streamer, inputs=inputs)


def plain_request(
    model: Any,
    ids_BT: Tensor,
    mask_BT: Tensor | None,
    new_tokens: int,
    max_context: int | None,
    *,
    generator: torch.Generator | None = None,
    stop_at_eos: bool = True,
) -> Request:
    """Return a request without the penalties of the model's own generation config.

    Tokens are sampled if there is a `generator`, else chosen greedily.
    """
    _check_fits(ids_BT, mask_BT, new_tokens, max_context)
    length = ids_BT.shape[1] + new_tokens
    criteria = StoppingCriteriaList([MaxLengthCriteria(length)])
    if stop_at_eos and model.generation_config.eos_token_id is not None:
        criteria.append(EosTokenCriteria(model.generation_config.eos_token_id))
    config = GenerationConfig(do_sample=generator is not None)
    return Request(
        ids_BT, mask_BT, LogitsProcessorList(), criteria, config, length, generator=generator
    )


def _check_fits(ids_BT: Tensor, mask_BT: Tensor | None, new: int, limit: int | None) -> None:
    tokens = ids_BT.shape[1] if mask_BT is None else int(mask_BT.sum(1).max())
    if limit is not None and tokens + new > limit:
        raise UserError(
            f"A prompt of {tokens} tokens and {new} new ones do not fit the model's {limit}: "
            f"shorten the prompt, or ask for at most {max(limit - tokens, 0)} new tokens."
        )


def _refuse(arguments: dict[str, Any]) -> None:
    """Refuse the first argument whose value is true."""
    for name, given in arguments.items():
        if given:
            raise UserError(
                f"This generate() does not take {name}: leave it out, or use the model's own "
                "generate()."
            )


def check_prompt(ids: Any, given: dict[str, Any], is_read: bool) -> None:
    """Refuse what transformers would not hand on, and a call without a prompt, which it begins.

    What an encoder reads instead of continuing it (`is_read`) may be anything.
    """
    off = (None, False)
    refused = {name: all(given.get(name) is not each for each in off) for name in _NOT_HANDED_ON}
    # transformers has a loop of its own for this one.
    _refuse(refused | {"cache_implementation": given.get("cache_implementation") == "paged"})
    if is_read:
        return
    if ids is not None and not isinstance(ids, Tensor):
        raise UserError(
            f"input_ids must be a tensor, not a {type(ids).__name__}: give "
            '**tokenizer(text, return_tensors="pt").'
        )
    if ids is None or ids.numel() == 0:
        raise UserError("The prompt is empty: give input_ids with at least one token a row.")
    if ids.ndim != 2 or ids.dtype not in (torch.long, torch.int):
        raise UserError(
            f"input_ids must be integers of shape (rows, tokens): got {ids.dtype} of shape "
            f"{tuple(ids.shape)}."
        )


# -- sequences -----------------------------------------------------------------------------------


@dataclass
class SequenceState:
    """One sequence that is being generated."""

    index: int
    """Its place among the prompts."""
    prompt: list[int]
    """As it was given, with padding."""
    context: list[int]
    """All tokens so far, without padding; the last has not been through the model yet."""
    tokens: list[int] = field(default_factory=list)
    """The new tokens."""
    depths: list[int] = field(default_factory=list)
    """How many layers ran for each new token."""
    flops: list[float] = field(default_factory=list)
    """What each new token cost."""
    from_draft: list[bool] = field(default_factory=list)
    """Whether each new token was drafted."""
    done: bool = False

    def append(self, token: int) -> None:
        """Add a new token."""
        self.tokens.append(token)
        self.context.append(token)

    @property
    def ids(self) -> list[int]:
        """What transformers would call `input_ids` by now."""
        return self.prompt + self.tokens


def make_sequences(request: Request) -> list[SequenceState]:
    """Return one sequence for each prompt of a request."""
    prompts = request.ids_BT.tolist()
    mask_BT = torch.ones_like(request.ids_BT) if request.mask_BT is None else request.mask_BT
    return [
        SequenceState(n, prompt, [token for token, seen in zip(prompt, mask, strict=True) if seen])
        for n, (prompt, mask) in enumerate(zip(prompts, mask_BT.tolist(), strict=True))
    ]

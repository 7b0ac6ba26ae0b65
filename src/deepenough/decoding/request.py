"""What a call of `generate` asks for, checked before anything runs.

transformers itself reads the arguments (`GenerationMixin.generate` makes the configuration, the
logits processors and the stopping criteria); here is what its loop would be given, in the form that
the loop of `decode.py` wants it, and what that loop does not do is refused by name.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList
from transformers.generation import logits_process as processors_of_transformers
from transformers.generation.stopping_criteria import (
    EosTokenCriteria,
    MaxLengthCriteria,
    MaxTimeCriteria,
    StopStringCriteria,
)

from deepenough.errors import UserError

#: Processors that look at the scores alone: rows of any length can be processed together.
SCORES_ONLY = (
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
#: Processors that are functions of one row's tokens and scores.
ROW_BY_ROW = (
    *SCORES_ONLY,
    "RepetitionPenaltyLogitsProcessor",
    "NoRepeatNGramLogitsProcessor",
    "SequenceBiasLogitsProcessor",
    "NoBadWordsLogitsProcessor",
    "MinLengthLogitsProcessor",
    "MinNewTokensLengthLogitsProcessor",
    "ExponentialDecayLengthPenalty",
    "ForcedBOSTokenLogitsProcessor",
    "ForcedEOSTokenLogitsProcessor",
    "SuppressTokensAtBeginLogitsProcessor",
)
#: Arguments that the model itself would get; a cache that is empty is nobody's.
_UNDERSTOOD = {
    *("attention_mask", "position_ids", "use_cache", "logits_to_keep", "past_key_values"),
    *("output_attentions", "output_hidden_states", "return_dict"),
}


@dataclass
class Request:
    """One generation. Shapes: B rows, T tokens of the padded prompts."""

    ids_BT: Tensor
    mask_BT: Tensor | None
    processors: LogitsProcessorList
    criteria: StoppingCriteriaList
    config: GenerationConfig
    streamer: Any
    max_length: int
    """Tokens at which a row ends, its prompt and padding included."""

    @property
    def sampled(self) -> bool:
        return bool(self.config.do_sample)

    @property
    def pad(self) -> int:
        token = getattr(self.config, "_pad_token_tensor", None)
        return 0 if token is None else int(token)

    @property
    def in_step(self) -> bool:
        """Whether all rows must go on side by side, a token at a time, as transformers has them.

        So it is where something looks at the whole batch: a streamer, scores that are kept, or a
        processor or criterion that nothing is known about.
        """
        if len(self.ids_BT) == 1:
            return False
        known = {getattr(processors_of_transformers, name, None) for name in ROW_BY_ROW}
        criteria = (MaxLengthCriteria, EosTokenCriteria, MaxTimeCriteria, StopStringCriteria)
        return (
            self.streamer is not None
            or self.keeps_scores
            or any(type(each) not in known for each in self.processors)
            or any(type(each) not in criteria for each in self.criteria)
        )

    @property
    def keeps_scores(self) -> bool:
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
    context: int | None,
    model_kwargs: dict[str, Any],
) -> Request:
    """Check what transformers prepared; `context` is the longest text the model takes."""
    _check(config, model_kwargs)
    lengths = [each.max_length for each in criteria if isinstance(each, MaxLengthCriteria)]
    if not lengths:
        raise UserError("The generation has no end: give max_new_tokens or max_length.")
    mask_BT = model_kwargs.get("attention_mask")
    width = ids_BT.shape[1]
    tokens = width if mask_BT is None else int(mask_BT.sum(1).max())
    new = min(lengths) - width
    if context is not None and tokens + new > context:
        if tokens >= context:
            fault = f"The prompt has {tokens} tokens: shorten it below the model's {context}."
        else:
            fault = (
                f"The prompt has {tokens} tokens and {new} new ones are asked for, but the model "
                f"takes {context}: ask for at most {context - tokens} new tokens."
            )
        raise UserError(fault)
    return Request(ids_BT, mask_BT, processors, criteria, config, streamer, min(lengths))


def greedy_request(
    model: Any, ids_BT: Tensor, mask_BT: Tensor | None, new_tokens: int, context: int | None
) -> Request:
    """The likeliest words and nothing else, whatever penalties the model's own config has."""
    length = ids_BT.shape[1] + new_tokens
    length = length if context is None else min(length, context)
    criteria = StoppingCriteriaList([MaxLengthCriteria(length)])
    if model.generation_config.eos_token_id is not None:
        criteria.append(EosTokenCriteria(model.generation_config.eos_token_id))
    config = GenerationConfig(do_sample=False)
    return Request(ids_BT, mask_BT, LogitsProcessorList(), criteria, config, None, length)


def _check(config: GenerationConfig, model_kwargs: dict[str, Any]) -> None:
    mode = config.get_generation_mode().value
    if mode not in ("greedy_search", "sample"):
        raise UserError(
            f"Accelerated models generate greedily or by sampling, not by {mode}: leave out its "
            "options, or use the model's own generate()."
        )
    refused = {
        "output_attentions": config.output_attentions,
        "output_hidden_states": config.output_hidden_states,
        "cache_implementation": config.cache_implementation not in (None, "dynamic"),
        "prefill_chunk_size": config.prefill_chunk_size,
        "token_healing": config.token_healing,
    }
    cache = model_kwargs.get("past_key_values")
    refused["past_key_values"] = cache is not None and cache.get_seq_length() > 0
    refused |= {name: True for name in model_kwargs if name not in _UNDERSTOOD}
    for name, given in refused.items():
        if given:
            raise UserError(
                f"Accelerated models do not take {name}: leave it out, or use the model's own "
                "generate()."
            )


def check_prompt(ids: Tensor | None, given: dict[str, Any]) -> None:
    """Refuse a call without a prompt, which transformers would begin by itself."""
    if given.get("inputs_embeds") is not None:
        raise UserError("Accelerated models take input_ids, not inputs_embeds.")
    if given.get("position_ids") is not None:
        raise UserError(
            "Accelerated models count positions themselves: leave out position_ids, or use the "
            "model's own generate()."
        )
    if ids is None or ids.numel() == 0:
        raise UserError("The prompt is empty: give input_ids with at least one token a row.")
    if ids.ndim != 2 or ids.dtype not in (torch.long, torch.int):
        raise UserError(
            f"input_ids must be integers of shape (rows, tokens): got {ids.dtype} of shape "
            f"{tuple(ids.shape)}."
        )

"""`generate()` of transformers: what it calls a model with, refusals, prompts continued."""

from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers import GenerationConfig, GenerationMixin
from transformers.generation.configuration_utils import ALL_STATIC_CACHE_IMPLEMENTATIONS
from transformers.modeling_outputs import BaseModelOutputWithPast

from deepenough.data.tokenizer import check_text
from deepenough.errors import UserError


class AnyOutput(BaseModelOutputWithPast):
    """The output of a part of a model, None in whatever else is read from it."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


#: Below this temperature sampling is taking the likeliest.
COLDEST = 1e-6


class CheckedGenerationMixin(GenerationMixin):
    """Refuse options of `generate()` that the model cannot honour."""

    takes_tokens_back: ClassVar[bool] = True
    """Whether keys and values of rejected draft tokens can be dropped from the cache again."""

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Generate as transformers does; UserError for attentions and caches that are not kept."""
        # The second positional argument of transformers' own.
        given = kwargs.get("generation_config") or (args[1] if len(args) > 1 else None)
        asked = (given or self.generation_config).to_dict() | kwargs
        if asked.get("output_attentions"):
            raise UserError(
                f"{type(self).__name__} does not keep attention weights: generate without "
                "output_attentions."
            )
        kind = asked.get("cache_implementation")
        if kind in ALL_STATIC_CACHE_IMPLEMENTATIONS:
            raise UserError(
                f"{type(self).__name__} keeps its keys and values in a cache that grows: generate "
                f'without cache_implementation="{kind}".'
            )
        for name in ("prompt_lookup_num_tokens", "assistant_model"):
            if asked.get(name) is not None and not self.takes_tokens_back:
                raise UserError(
                    f"{type(self).__name__} cannot drop rejected draft tokens from its cache: "
                    f"generate without {name}."
                )
        return super().generate(*args, **kwargs)  # type: ignore[misc]


class GnmtLengthPenalty(float):
    """A `length_penalty` for `generate()` with which beams are ranked as GNMT ranks them.

    transformers divides a log probability by `length ** length_penalty`; with this exponent the
    divisor is `((5 + length) / 6) ** alpha` (arXiv 1609.08144, equation 14, without coverage).
    """

    def __rpow__(self, length: Any, modulo: Any = None) -> Any:
        return ((5 + length) / 6) ** float(self)


def continue_text(
    model: Any,
    tokenizer: Any,
    prompt: str,
    ends_lines: bool,
    *,
    tokens: int,
    temperature: float = 0.0,
    top_k: int = 0,
    seed: int = 0,
    **options: Any,
) -> str:
    """Return a prompt and what a causal model writes after it.

    Where `ends_lines`, the model has learned line ends as end tokens, so prompts have them too.
    `options` are further arguments of `generate()`.
    """
    if not check_text(prompt).strip():
        raise UserError("The prompt is empty: give at least one word to go on from.")
    end = tokenizer.eos_token_id if ends_lines else None
    lines = [prompt] if end is None else prompt.split("\n")
    first, *others = [tokenizer.encode(line, add_special_tokens=False) for line in lines]
    ids = [*first, *(token for line in others for token in (end, *line))]
    torch.manual_seed(seed)
    sampling = {"do_sample": True, "temperature": temperature, "top_k": top_k}
    written = model.generate(
        torch.tensor([ids], device=model.device),
        attention_mask=torch.ones(1, len(ids), dtype=torch.long, device=model.device),
        max_new_tokens=tokens,
        **(sampling if temperature > COLDEST else {"do_sample": False}),
        **options,
    )
    written_lines: list[list[int]] = [[]]
    for token in written[0].tolist():
        if token == end:
            written_lines.append([])
        else:
            written_lines[-1].append(token)
    return "\n".join(tokenizer.batch_decode(written_lines, skip_special_tokens=True))


# -- what a model is called with -------------------------------------------------------------------


def has_usual_generate(model: Any) -> bool:
    """Return whether the loop of a model's `generate` is that of transformers, or a given one."""
    known = ("transformers.generation.", "transformers.models.whisper.", __name__)
    return type(model).generate.__module__.startswith(known)


def random_states(model: Any, rows: int) -> AnyOutput:
    """Return what an encoder that does not read text might give, five states for each row."""
    width = model.get_encoder().config.hidden_size
    drawn = torch.randn(rows, 5, width, generator=torch.Generator().manual_seed(0))
    states: Any = drawn.to(model.device, model.dtype)
    return AnyOutput(last_hidden_state=states)


def inputs_of_generate(model: Any, **given: Any) -> tuple[Tensor, dict[str, Any]]:
    """Return the prompts, and what else `generate` calls a model with, for these arguments."""

    def loop(
        model: Any,
        input_ids: Tensor,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        **inputs: Any,
    ) -> tuple[Tensor, dict[str, Any]]:
        return input_ids, inputs

    config = GenerationConfig(max_new_tokens=1, use_cache=True)
    found: Any = GenerationMixin.generate(
        model, generation_config=config, custom_generate=loop, **given
    )
    return found

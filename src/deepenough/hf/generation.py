"""`generate()` of transformers, with what our models do not do refused in a sentence."""

from __future__ import annotations

from typing import Any, ClassVar

from transformers import GenerationMixin
from transformers.generation.configuration_utils import ALL_STATIC_CACHE_IMPLEMENTATIONS

from deepenough.errors import UserError


class CheckedGenerationMixin(GenerationMixin):
    takes_tokens_back: ClassVar[bool] = True
    """Whether keys and values of tokens that were guessed wrongly can be dropped again."""

    def generate(self, *args: Any, **kwargs: Any) -> Any:
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
                    f"{type(self).__name__} cannot take back a token that was guessed wrongly: "
                    f"generate without {name}."
                )
        return super().generate(*args, **kwargs)  # type: ignore[misc]

"""`generate()` of transformers, with a clear refusal of what deepenough's own models do not do."""

from __future__ import annotations

from typing import Any, ClassVar

from transformers import GenerationMixin
from transformers.generation.configuration_utils import ALL_STATIC_CACHE_IMPLEMENTATIONS

from deepenough.errors import UserError


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

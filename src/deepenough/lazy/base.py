"""What the two Lazy Transformers share as Hugging Face models: weights, embeddings, losses."""

from __future__ import annotations

from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers import initialization as init

from deepenough.lazy.config import LazyTransformerConfig
from deepenough.lazy.loss import smoothed_cross_entropy

IGNORED = -100
"""Target of a position that is not to be predicted."""
HALTING_BIAS = -1.0
"""So that ACT begins with about four steps a token."""


class LazyPreTrainedModel(PreTrainedModel):
    config_class = LazyTransformerConfig
    config: LazyTransformerConfig
    base_model_prefix = ""
    main_input_name = "input_ids"
    _supports_sdpa = True
    accepts_loss_kwargs = False  # the loss is a mean, which a trainer divides when it accumulates

    embedding: nn.Embedding
    output: nn.Linear

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Embedding):
            init.normal_(module.weight, std=module.embedding_dim**-0.5)
        elif module is self.output:  # where it is not the embeddings' own table
            init.normal_(module.weight, std=self.config.d_model**-0.5)
        elif isinstance(module, nn.Linear):
            init.normal_(module.weight, std=module.in_features**-0.5)
            if module.bias is not None:
                is_halting = module.out_features == 1
                init.constant_(module.bias, HALTING_BIAS if is_halting else 0.0)
        elif isinstance(module, nn.LayerNorm):
            init.ones_(module.weight)
            init.zeros_(module.bias)

    def get_input_embeddings(self) -> nn.Module:
        return self.embedding

    def set_input_embeddings(self, value: nn.Module) -> None:
        """In every part that reads tokens."""
        for part in self.modules():
            if isinstance(getattr(part, "embedding", None), nn.Embedding):
                part.embedding = value

    def get_output_embeddings(self) -> nn.Module:
        return self.output

    def set_output_embeddings(self, value: nn.Module) -> None:
        self.output = value  # type: ignore[assignment]

    def _losses(
        self, hidden_BTD: Tensor, targets_BT: Tensor, logits_BTV: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """The loss and the plain one; scores only of tokens that are to be predicted."""
        targets = targets_BT.flatten()
        kept = (targets != IGNORED).nonzero().squeeze(1)
        if logits_BTV is None:
            logits = self.output(hidden_BTD.flatten(0, 1).index_select(0, kept))
        else:
            logits = logits_BTV.flatten(0, 1).index_select(0, kept)
        smoothing = self.config.label_smoothing if self.training else 0.0
        return smoothed_cross_entropy(logits, targets[kept], smoothing)

    def _with_ponder_cost(self, loss: Tensor, cost: Tensor | None, real: Tensor | None) -> Tensor:
        """ACT's price of steps, `tau * mean(N + R)` over real tokens, added in training."""
        if cost is None or not self.training:
            return loss
        weights = cost.new_ones(cost.shape) if real is None else real.to(cost.dtype)
        return loss + self.config.act_cost * (cost * weights).sum() / weights.sum()

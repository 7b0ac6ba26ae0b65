"""What all tasks of an encoder-decoder have in common: pairs of sequences, one loss, one optimiser.

A task says where the pairs of a step come from and how answers are judged. The loss that is
minimised has smoothed labels where the config says so; the plain one is recorded.
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn

from deepenough.data.tokenizer import save_tokenizer
from deepenough.data.translation_batches import cut_by_tokens
from deepenough.data.translation_pairs import IGNORED, EncodedPairs
from deepenough.lazy import LazyTransformerConfig, LazyTransformerForConditionalGeneration
from deepenough.training.config import TrainingConfig, seed_at
from deepenough.training.distributed import from_all, place_among
from deepenough.training.logging import without_bars
from deepenough.training.task import WEIGHTS, BatchLoss, Task

# What decides the weights of a model; the rest of its config can be changed at any time.
MODEL_IDENTITY = (
    "vocab_size", "d_model", "num_heads", "d_ff", "encoder_steps", "decoder_steps", "mechanism",
    "compare", "norm", "step_signal", "max_steps", "dropout", "ff_dropout", "clean_gates",
    "label_smoothing", "act_cost",
)  # fmt: skip


class PairsTask(Task, ABC):
    unit = "tokens"

    def __init__(
        self,
        model: LazyTransformerForConditionalGeneration,
        tokenizer: Any,
        train: TrainingConfig,
        accelerator: Accelerator,
        fewest_steps: int | None = None,
    ) -> None:
        """`fewest_steps`: each batch draws its encoder steps from these to the model's own."""
        self.model, self.tokenizer, self.train = model, tokenizer, train
        self.fewest_steps = fewest_steps
        self.rank, self.world_size = accelerator.process_index, accelerator.num_processes

    @abstractmethod
    def pairs_of(self, index: int) -> tuple[EncodedPairs, list[int]]:
        """The pairs of batch `index`, counted over the whole training: rows of some."""

    def parameters(self) -> dict[str, list[dict[str, Any]]]:
        """Matrices decay, vectors do not."""
        own = list(self.model.parameters())
        return {
            WEIGHTS: [
                {"params": [p for p in own if p.dim() > 1]},
                {"params": [p for p in own if p.dim() <= 1], "weight_decay": 0.0},
            ]
        }

    def loss(self, model: nn.Module, phase: str, step: int, micro: int) -> BatchLoss:
        index = step * self.train.accumulate + micro
        pairs, rows = self.pairs_of(index)
        # Every other one: neighbours are of a length, so processes get like work.
        own = rows[self.rank :: self.world_size]
        batch = pairs.batch(own or rows[:1], self.model.device)
        output = model(**batch, encoder_steps=self._encoder_steps(index))
        # The mean over processes is to be the mean over tokens, of which they have more or fewer;
        # one that has no pair of its own lends its hand to another's, for nothing.
        num_own, num_all = (int(pairs.target.lengths[part].sum()) for part in (own, rows))
        weight = num_own * self.world_size / num_all
        return BatchLoss(output.loss * weight, output.plain_loss * weight, num_own)

    def _encoder_steps(self, index: int) -> int | None:
        """The same on all processes, which would otherwise wait for the longest."""
        if self.fewest_steps is None:
            return None
        draw = random.Random(seed_at(self.train.seed, "encoder steps", index))
        return draw.randint(self.fewest_steps, self.model.config.encoder_steps)

    def save(self, folder: Path) -> None:
        with without_bars():
            self.model.save_pretrained(folder)
        save_tokenizer(self.tokenizer, folder)


def model_identity(config: LazyTransformerConfig) -> dict[str, Any]:
    return {name: getattr(config, name) for name in MODEL_IDENTITY}


@torch.inference_mode()
def plain_loss(
    model: LazyTransformerForConditionalGeneration,
    pairs: EncodedPairs,
    batch_tokens: int,
    accelerator: Accelerator | None = None,
) -> dict[str, float]:
    """Mean over the target tokens of all pairs, each process reading its share of the batches."""
    rank, world = place_among(accelerator)
    total = 0.0
    num_tokens = 0
    order = pairs.target.lengths.argsort(kind="stable")
    lengths = torch.maximum(
        torch.from_numpy(pairs.source.lengths), torch.from_numpy(pairs.target.lengths)
    ).numpy()
    for rows in cut_by_tokens(order, lengths, batch_tokens)[rank::world]:
        batch = pairs.batch(rows.tolist(), model.device)
        tokens = int((batch["targets"] != IGNORED).sum())
        total += float(model(**batch).plain_loss) * tokens
        num_tokens += tokens
    losses, counts = zip(*from_all(accelerator, (total, num_tokens)), strict=True)
    return {"loss": sum(losses) / sum(counts), "tokens": float(sum(counts))}

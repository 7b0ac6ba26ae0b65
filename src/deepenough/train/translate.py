"""Translation as a task of the training loop.

The loss that is minimised has smoothed labels; the plain one is recorded. Validation measures the
plain loss and BLEU of greedy translations, the test BLEU with beams.
"""

from __future__ import annotations

import hashlib
import logging
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from deepenough.adaptive.lazy import LazyTransformerForConditionalGeneration
from deepenough.data.encoding import save_tokenizer
from deepenough.data.translation import TranslationData
from deepenough.data.translation_batches import TokenBatches, cut_by_tokens
from deepenough.data.translation_pairs import IGNORED, EncodedPairs
from deepenough.errors import UserError
from deepenough.train.log import without_bars
from deepenough.train.seeds import seed_at
from deepenough.train.settings import TrainSettings
from deepenough.train.task import BatchLoss
from deepenough.train.translate_score import SearchSettings, bleu, translate_pairs

logger = logging.getLogger("deepenough")

WEIGHTS = "weights"
# What decides the weights of a model; the rest of its config can be changed at any time.
MODEL_IDENTITY = (
    "vocab_size", "d_model", "num_heads", "d_ff", "encoder_steps", "decoder_steps", "mechanism",
    "compare", "norm", "step_signal", "dropout", "ff_dropout", "label_smoothing", "act_cost",
)  # fmt: skip


class TranslationTask:
    unit = "tokens"

    def __init__(
        self,
        model: LazyTransformerForConditionalGeneration,
        tokenizer: Any,
        pairs: Mapping[str, EncodedPairs],
        data: TranslationData,
        train: TrainSettings,
        search: SearchSettings,
        accelerator: Accelerator,
        fewest_steps: int | None = None,
    ) -> None:
        """`fewest_steps`: each batch draws its encoder steps from these to the model's own."""
        self.model, self.tokenizer, self.pairs = model, tokenizer, pairs
        self.data, self.train, self.search = data, train, search
        self.fewest_steps = fewest_steps
        self.rank, self.world_size = accelerator.process_index, accelerator.num_processes
        training = pairs["train"]
        self.batches = TokenBatches(
            training.source.lengths, training.target.lengths, data.batch_tokens, train.seed
        )
        if len(training) < self.world_size:
            raise UserError(
                f"{len(training)} training pairs cannot be dealt to {self.world_size} processes."
            )

    def parameters(self) -> dict[str, list[dict[str, Any]]]:
        """Matrices decay, vectors do not."""
        own = list(self.model.parameters())
        return {
            WEIGHTS: [
                {"params": [p for p in own if p.dim() > 1]},
                {"params": [p for p in own if p.dim() <= 1], "weight_decay": 0.0},
            ]
        }

    def begin_step(self, step: int) -> None:
        pass

    def phases(self, step: int) -> Sequence[str]:
        return (WEIGHTS,)

    def loss(self, model: nn.Module, phase: str, step: int, micro: int) -> BatchLoss:
        index = step * self.train.accumulate + micro
        rows = self.batches.rows(index)
        # Every other one: neighbours are of a length, so processes get like work.
        own = rows[self.rank :: self.world_size] or rows[:1]
        batch = self.pairs["train"].batch(own, self.model.device)
        output = model(**batch, encoder_steps=self._encoder_steps(index))
        units = int((batch["targets"] != IGNORED).sum())
        return BatchLoss(output.loss, output.plain_loss, units)

    def _encoder_steps(self, index: int) -> int | None:
        """The same on all processes, which would otherwise wait for the longest."""
        if self.fewest_steps is None:
            return None
        draw = random.Random(seed_at(self.train.seed, "encoder steps", index))
        return draw.randint(self.fewest_steps, self.model.config.encoder_steps)

    def end_step(self) -> None:
        pass

    def train_values(self) -> dict[str, Any]:
        return {}

    # -- measuring ---------------------------------------------------------------------------

    def evaluate(self, accelerator: Accelerator, split: str) -> dict[str, float]:
        """Plain loss and BLEU; greedy on the valid split, with the search settings on others."""
        pairs = self.pairs.get(split)
        if pairs is None:
            return {}
        was_training = self.model.training
        self.model.eval()
        values = self._loss_on(pairs)
        search = SearchSettings(beams=1) if split == "valid" else self.search
        translations = translate_pairs(self.model, self.tokenizer, pairs, search)
        self.model.train(was_training)
        measured = bleu(translations, [pair.target for pair in pairs.pairs])
        logger.info("BLEU %.2f on the %s split (%s)", measured.score, split, measured.signature)
        return values | {"bleu": measured.score}

    @torch.inference_mode()
    def _loss_on(self, pairs: EncodedPairs) -> dict[str, float]:
        total = 0.0
        num_tokens = 0
        order = pairs.target.lengths.argsort(kind="stable")
        lengths = torch.maximum(
            torch.from_numpy(pairs.source.lengths), torch.from_numpy(pairs.target.lengths)
        ).numpy()
        for rows in cut_by_tokens(order, lengths, self.data.batch_tokens):
            batch = pairs.batch(rows.tolist(), self.model.device)
            tokens = int((batch["targets"] != IGNORED).sum())
            total += float(self.model(**batch).plain_loss) * tokens
            num_tokens += tokens
        return {"loss": total / num_tokens, "tokens": float(num_tokens)}

    # -- state -------------------------------------------------------------------------------

    def state(self) -> dict[str, Tensor]:
        return {}

    def load_state(self, state: dict[str, Tensor]) -> None:
        pass

    def identity(self) -> dict[str, Any]:
        config = self.model.config
        return {
            "model": {name: getattr(config, name) for name in MODEL_IDENTITY}
            | {"fewest_encoder_steps": self.fewest_steps},
            "data": {"batch_tokens": self.data.batch_tokens, "max_length": self.data.max_length}
            | {split: _content(pairs) for split, pairs in self.pairs.items()},
            "train": self.train.identity(),
        }

    def save(self, folder: Path) -> None:
        with without_bars():
            self.model.save_pretrained(folder)
        save_tokenizer(self.tokenizer, folder)


def _content(pairs: EncodedPairs) -> str:
    """What tells one set of pairs from another."""
    digest = hashlib.blake2b(digest_size=8)
    for side in (pairs.source, pairs.target):
        digest.update(side.starts.tobytes())
        digest.update(side.ids.tobytes())
    return f"{len(pairs)} pairs ({digest.hexdigest()})"

"""Translation as a task of the training loop.

Validation measures the plain loss and BLEU of greedy translations, the test BLEU with beams.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping
from typing import Any

from accelerate import Accelerator

from deepenough.data.tokenizer import lowers_case
from deepenough.data.translation import TranslationData
from deepenough.data.translation_batches import TokenBatches
from deepenough.data.translation_pairs import EncodedPairs
from deepenough.errors import UserError
from deepenough.lazy import LazyTransformerForConditionalGeneration
from deepenough.lazy.task import PairsTask, model_identity, plain_loss
from deepenough.lazy.translate_score import SearchSettings, bleu, translate_pairs
from deepenough.training.config import TrainingConfig

logger = logging.getLogger("deepenough")


class TranslationTask(PairsTask):
    def __init__(
        self,
        model: LazyTransformerForConditionalGeneration,
        tokenizer: Any,
        pairs: Mapping[str, EncodedPairs],
        data: TranslationData,
        train: TrainingConfig,
        search: SearchSettings,
        accelerator: Accelerator,
        fewest_steps: int | None = None,
    ) -> None:
        super().__init__(model, tokenizer, train, accelerator, fewest_steps)
        self.pairs, self.data, self.search = pairs, data, search
        training = pairs["train"]
        self.batches = TokenBatches(
            training.source.lengths, training.target.lengths, data.batch_tokens, train.seed
        )
        if len(training) < self.world_size:
            raise UserError(
                f"{len(training)} training pairs cannot be dealt to {self.world_size} processes."
            )

    def pairs_of(self, index: int) -> tuple[EncodedPairs, list[int]]:
        return self.pairs["train"], self.batches.rows(index)

    def evaluate(self, accelerator: Accelerator, split: str) -> dict[str, float]:
        """Plain loss and BLEU; greedy on the valid split, with the search settings on others."""
        pairs = self.pairs.get(split)
        if pairs is None:
            return {}
        was_training = self.model.training
        self.model.eval()
        values = plain_loss(self.model, pairs, self.data.batch_tokens, accelerator)
        search = SearchSettings(beams=1) if split == "valid" else self.search
        translations = translate_pairs(
            self.model, self.tokenizer, pairs, search, accelerator=accelerator
        )
        self.model.train(was_training)
        references = [pair.target for pair in pairs.pairs]
        measured = bleu(translations, references, lowers_case(self.tokenizer))
        logger.info("BLEU %.2f on the %s split (%s)", measured.score, split, measured.signature)
        return values | {"bleu": measured.score}

    def identity(self) -> dict[str, Any]:
        steps = {"fewest_encoder_steps": self.fewest_steps}
        limits = {"batch_tokens": self.data.batch_tokens, "max_length": self.data.max_length}
        return {
            "model": model_identity(self.model.config) | steps,
            "data": limits | {split: _content(pairs) for split, pairs in self.pairs.items()},
            "train": self.train.identity(),
        }


def _content(pairs: EncodedPairs) -> str:
    """What tells one set of pairs from another."""
    digest = hashlib.blake2b(digest_size=8)
    for side in (pairs.source, pairs.target):
        digest.update(side.starts.tobytes())
        digest.update(side.ids.tobytes())
    return f"{len(pairs)} pairs ({digest.hexdigest()})"

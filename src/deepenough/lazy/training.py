"""Train a Lazy Transformer, or one of its baselines, to translate or to model language.

A training may begin with the weights of another run (`start`), such as a translator's with those of
a language model: what both models have under one name is taken, and so is the tokenizer.

The loss that is minimised has smoothed labels where the config says so; what is recorded is the
plain one, since a smoothed loss has no meaning as a measure. Validation measures the plain loss and
BLEU of greedy translations, the test BLEU with beams. Training on programs is in `programs.py`.

A language model carries nothing from one batch to the next, so it predicts within segments of
`dataset.length` tokens; its steps are `model.decoder_steps`.
"""

import dataclasses
import hashlib
import logging
import random
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import Any, TypeVar

import torch
from accelerate import Accelerator
from torch import nn

from deepenough.data.batches import TokenBatches
from deepenough.data.tokenizer import lowers_case
from deepenough.data.tokens import Prepared, prepare
from deepenough.data.translation import EncodedPairs, encode_split, joint_tokenizer, open_parallel
from deepenough.errors import UserError
from deepenough.hf.intercept import eval_mode
from deepenough.lazy.config import (
    BeamSearchConfig,
    LanguageTrainConfig,
    LazyModelConfig,
    LazyTrainConfig,
    LazyTransformerConfig,
    TranslationTrainConfig,
)
from deepenough.lazy.inference import bleu, load_model, plain_loss, trained_with, translate_pairs
from deepenough.lazy.modeling import (
    LazyPreTrainedModel,
    LazyTransformerForCausalLM,
    LazyTransformerForConditionalGeneration,
)
from deepenough.runs import RunFolder, model_folder, read_config
from deepenough.training.config import seed_at
from deepenough.training.distributed import on_main
from deepenough.training.language import LanguageTask
from deepenough.training.logging import announce
from deepenough.training.task import BatchLoss, Task
from deepenough.training.trainer import begin_run, fit_run

logger = logging.getLogger("deepenough")

T = TypeVar("T", TranslationTrainConfig, LanguageTrainConfig)

HALTING_OPTIONS = {"epsilon", "decoder_epsilon", "patience", "halt_on"}
"""Options that do not affect the weights of a model and can be changed at any time."""


def train_translation(config: TranslationTrainConfig) -> RunFolder:
    """Train a translator and return its run folder."""
    accelerator = begin_run(config, may_skip=False)
    config = with_tokenizer_of_start(config)
    text = open_parallel(config.data, config.dataset)
    tokenizer = joint_tokenizer(text, config.dataset)
    max_length = config.dataset.max_length
    pairs = {
        split: encode_split(text, split, tokenizer, max_length, truncate=split != "train")
        for split in text.splits
    }
    torch.manual_seed(config.train.seed)
    model = new_translator(config.model, tokenizer, max_length)
    start_from(model, config.start)
    config.search.check_for(model)
    task = TranslationTask(config, model, tokenizer, pairs, accelerator)
    return fit_run(config, task, accelerator)


def new_translator(
    model: LazyModelConfig, tokenizer: Any, max_length: int
) -> LazyTransformerForConditionalGeneration:
    """Return a new model; its weights are drawn from torch's generator."""
    # Translations may be twice as long as their sources.
    config = _model_config(model, tokenizer, max_positions=2 * max_length + 16)
    return LazyTransformerForConditionalGeneration(config)


def _model_config(
    model: LazyModelConfig, tokenizer: Any, max_positions: int
) -> LazyTransformerConfig:
    names = ("bos_token_id", "eos_token_id", "pad_token_id")
    special = {name: getattr(tokenizer, name) for name in names}
    return LazyTransformerConfig(len(tokenizer), max_positions, **special, **asdict(model))


def with_tokenizer_of_start(config: T) -> T:
    """Return the settings with the tokenizer of the run to start from, if there is one."""
    if config.start is None:
        return config
    own = str(model_folder(config.start))
    if config.dataset.tokenizer not in (None, own):
        raise UserError(
            f"The weights of {config.start} are for its own tokenizer: leave out dataset.tokenizer "
            "or start."
        )
    changes: dict[str, Any] = {"tokenizer": own}
    if isinstance(config, LanguageTrainConfig) and config.dataset.end_of_line is None:
        settings = read_config(str(model_folder(config.start).parent))
        is_language = settings.get("task") == config.task
        before = trained_with(LanguageTrainConfig, config.start).dataset if is_language else None
        changes["end_of_line"] = before is None or before.ends_lines
    dataset: Any = dataclasses.replace(config.dataset, **changes)
    return dataclasses.replace(config, dataset=dataset)


def start_from(model: LazyPreTrainedModel, run: str | None) -> None:
    """Give a new model the weights of a run's, those that both have under one name; say so.

    A model of another shape or with another vocabulary is refused.
    """
    if run is None:
        return
    start, _ = load_model(run)
    for name in ("d_model", "num_heads", "d_ff", "norm", "step_encoding"):
        old, new = getattr(start.config, name), getattr(model.config, name)
        if old != new:
            raise UserError(
                f"The model in {run} has {name} {old}, but {new} is asked for: give "
                f"--model.{name} {old}."
            )
    if start.config.vocab_size != model.config.vocab_size:
        raise UserError(
            f"The model in {run} knows {start.config.vocab_size} tokens, but the tokenizer here "
            f"has {model.config.vocab_size}: start from a run of the same task."
        )
    own, found = dict(model.named_parameters()), dict(start.named_parameters())
    taken = {name: weight for name, weight in found.items() if name in own}
    if wrong := [name for name, weight in taken.items() if weight.shape != own[name].shape]:
        raise UserError(f"{wrong[0]} has another shape in {run}: give the options of its model.")
    model.load_state_dict(taken, strict=False)
    announce(f"{len(taken)} of {len(own)} weights start as in {run}; any others are new.")


def model_identity(config: LazyTransformerConfig) -> dict[str, Any]:
    """Return what a model must share with the checkpoint that it continues from."""
    names = {option.name for option in fields(LazyModelConfig)} - HALTING_OPTIONS
    return {name: getattr(config, name) for name in ("vocab_size", *sorted(names))}


class PairsTask(Task, ABC):
    """Text-to-text training: pairs of sequences, one loss, one optimiser.

    With `drawn_steps`, each batch draws its encoder steps from this range; with `most_epsilon`,
    half of the batches draw an epsilon up to it, below which tokens halt.
    """

    unit = "tokens"
    model: LazyTransformerForConditionalGeneration
    drawn_steps: tuple[int, int] | None = None
    most_epsilon: float = 0.0

    def __init__(
        self,
        config: LazyTrainConfig,
        model: LazyTransformerForConditionalGeneration,
        tokenizer: Any,
        accelerator: Accelerator,
    ) -> None:
        super().__init__(model, config.train, accelerator)
        self.tokenizer, self.is_warm = tokenizer, config.start is not None

    @abstractmethod
    def pairs_of(self, index: int) -> tuple[EncodedPairs, list[int]]:
        """Return the pairs of batch `index`, counted over the whole training: pairs and rows."""

    def loss(self, model: nn.Module, phase: str, step: int, micro: int) -> BatchLoss:
        """Return the loss of this process's share of a batch, weighted by its tokens."""
        index = step * self.train.accumulate + micro
        pairs, rows = self.pairs_of(index)
        # Every other one: neighbours have similar lengths, so processes get similar work.
        own = rows[self.rank :: self.world_size]
        batch = pairs.batch(own or rows[:1], self.model.device)
        # The same on all processes, so that none waits.
        draw = random.Random(seed_at(self.train.seed, "encoder steps", index))
        steps = None if self.drawn_steps is None else draw.randint(*self.drawn_steps)
        epsilon = max(0.0, draw.uniform(-self.most_epsilon, self.most_epsilon))
        output = model(**batch, encoder_steps=steps, epsilon=epsilon)
        # The mean over processes must be the mean over tokens, of which they have more or fewer; a
        # process without a pair of its own computes another's with weight 0.
        num_own, num_all = (int(pairs.target.lengths[part].sum()) for part in (own, rows))
        weight = num_own * self.world_size / num_all
        return BatchLoss(output.loss * weight, output.plain_loss * weight, num_own)


class TranslationTask(PairsTask):
    """Translation as a task of the training loop."""

    def __init__(
        self,
        config: TranslationTrainConfig,
        model: LazyTransformerForConditionalGeneration,
        tokenizer: Any,
        pairs: Mapping[str, EncodedPairs],
        accelerator: Accelerator,
    ) -> None:
        super().__init__(config, model, tokenizer, accelerator)
        fewest, most = config.fewest_encoder_steps, config.most_encoder_steps
        if fewest is not None:
            self.drawn_steps = fewest, most or config.model.encoder_steps
        self.most_epsilon = config.most_epsilon
        self.pairs, self.dataset, self.search = pairs, config.dataset, config.search
        training_pairs = pairs["train"]
        lengths = training_pairs.source.lengths, training_pairs.target.lengths
        self.batches = TokenBatches(*lengths, self.dataset.batch_tokens, config.train.seed)
        if len(training_pairs) < self.world_size:
            raise UserError(
                f"{len(training_pairs)} training pairs cannot be dealt to {self.world_size} "
                "processes."
            )

    def batches_per_epoch(self) -> int:
        """Return how many batches make one round over the training pairs."""
        return len(self.batches)

    def pairs_of(self, index: int) -> tuple[EncodedPairs, list[int]]:
        """Return the training pairs and the rows of batch `index`."""
        return self.pairs["train"], self.batches.rows(index)

    def evaluate(self, accelerator: Accelerator, split: str) -> dict[str, float]:
        """Return plain loss and BLEU; greedy on the valid split, beam search on others."""
        pairs = self.pairs.get(split)
        if pairs is None:
            return {}
        search = BeamSearchConfig(beams=1) if split == "valid" else self.search
        with eval_mode(self.model):
            values = plain_loss(self.model, pairs, self.dataset.batch_tokens, accelerator)
            translations = translate_pairs(self.model, self.tokenizer, pairs, search, accelerator)
        references = [pair.target for pair in pairs.pairs]
        measured = bleu(translations, references, lowers_case(self.tokenizer))
        logger.info("BLEU %.2f on the %s split (%s)", measured.score, split, measured.signature)
        return values | {"bleu": measured.score}

    def identity(self) -> dict[str, Any]:
        """Return what a run must share with the checkpoint that it continues from."""
        steps = {"drawn_steps": list(self.drawn_steps or ()), "most_epsilon": self.most_epsilon}
        limits = {"batch_tokens": self.dataset.batch_tokens, "max_length": self.dataset.max_length}
        return super().identity() | {
            "model": model_identity(self.model.config) | steps,
            "data": limits | {split: _fingerprint(pairs) for split, pairs in self.pairs.items()},
        }


def _fingerprint(pairs: EncodedPairs) -> str:
    """Return a string that tells one set of pairs from another."""
    digest = hashlib.blake2b(digest_size=8)
    for side in (pairs.source, pairs.target):
        digest.update(side.starts.tobytes())
        digest.update(side.ids.tobytes())
    return f"{len(pairs)} pairs ({digest.hexdigest()})"


# -- language modelling ----------------------------------------------------------------------------


def train_language(config: LanguageTrainConfig) -> RunFolder:
    """Train a causal language model and return its run folder."""
    accelerator = begin_run(config, may_skip=False)
    config = with_tokenizer_of_start(config)
    found: list[Prepared] = []
    # The main process fills the cache for all.
    on_main(accelerator, lambda: found.append(prepare(config.data, config.dataset)))
    prepared = found[0] if found else prepare(config.data, config.dataset)
    torch.manual_seed(config.train.seed)
    max_positions = max(1024, config.dataset.length)
    model_config = _model_config(config.model, prepared.tokenizer, max_positions)
    model = LazyTransformerForCausalLM(model_config)
    start_from(model, config.start)
    task = LazyLanguageTask(model, prepared, config.dataset, config.train, accelerator)
    task.is_warm = config.start is not None
    return fit_run(config, task, accelerator)


class LazyLanguageTask(LanguageTask):
    """Language modelling in which options that only decide halting may change."""

    model: LazyTransformerForCausalLM

    def identity(self) -> dict[str, Any]:
        """Return what a run must share with the checkpoint that it continues from."""
        return super().identity() | {"model": model_identity(self.model.config)}

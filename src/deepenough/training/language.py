"""Language modelling as a task of the training loop, for causal and for masked models.

The text is read as parallel streams. A model with a memory (Transformer-XL, arXiv 1901.02860) gets
back with each batch what it returned with the one before; one without returns None.

Perplexity is `exp(total loss / total tokens)`, never a mean over batches of exponentials. Since a
token is whatever the tokenizer makes it, two figures compare across tokenizers: perplexity per
word, `exp(total loss / words)`, and bits per byte, `total loss / (bytes ln 2)`. Both scale the mean
loss to the whole text, because the last few tokens fill no batch.

A masked model (one whose config is `bidirectional`) fills in tokens of the same batches instead.
Its perplexity is of these tokens alone, each seen from both sides: it compares with other masked
models that have the same tokenizer, not with causal ones.
"""

import math
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from accelerate import Accelerator
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from deepenough.data.config import DatasetConfig
from deepenough.data.tokens import ContextBatches, Prepared, TokenFile
from deepenough.devices import to_device
from deepenough.errors import UserError
from deepenough.measurement import Interval, intervals_of, perplexity_interval
from deepenough.training.config import TrainingConfig, seed_at
from deepenough.training.distributed import from_all, place_among
from deepenough.training.logging import perplexity
from deepenough.training.task import WEIGHTS, BatchLoss, Task

Memories = tuple[Tensor | None, ...]
"""What each layer keeps of the text so far, streams first; None for a layer that keeps nothing."""

#: Fewer segments than these tell nothing of how far another text's perplexity may lie.
FEWEST_SEGMENTS = 6

#: Of the tokens of a text, how many are to be filled in.
MASKED_SHARE = 0.15


class Masking:
    """Draws the tokens that a masked model is to fill in (BERT, arXiv 1810.04805, section 3.1).

    They are 15 % of every text. Of these 80 % become the mask token, 10 % another token at random,
    and 10 % stay as they are. Special tokens are drawn only where a text has too few others, so
    that all texts have equally many, and a mean over batches or processes is one over tokens.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.mask_id, self.vocab_size = tokenizer.mask_token_id, len(tokenizer)
        self.special_ids = torch.tensor(tokenizer.all_special_ids)

    def __call__(self, ids: Tensor, seed: int, rank: int = 0, world: int = 1) -> dict[str, Tensor]:
        """Return inputs, and labels that are -100 where nothing is to be filled in, `[b, S]` each.

        All streams are drawn and this process's taken, so that any number of processes agree.
        """
        generator = torch.Generator().manual_seed(seed)
        shape = (world * len(ids), ids.shape[1])
        order, change = torch.rand(2, *shape, generator=generator).chunk(world, 1)[rank]
        others = torch.randint(self.vocab_size, shape, generator=generator).chunk(world)[rank]
        order = order - torch.isin(ids, self.special_ids).float()
        drawn = order.topk(max(1, round(MASKED_SHARE * shape[1]))).indices
        labels = torch.full_like(ids, -100).scatter(1, drawn, ids.gather(1, drawn))
        is_drawn = labels != -100
        inputs = ids.masked_fill(is_drawn & (change < 0.8), self.mask_id)
        inputs = torch.where(is_drawn & (change >= 0.9), others, inputs)
        return {"input_ids": inputs, "labels": labels}


def masking_for(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> Masking | None:
    """Return how the tokens are drawn that a masked model fills in; None for a causal model."""
    return Masking(tokenizer) if getattr(model.config, "bidirectional", False) else None


class LanguageTask(Task):
    """Next-token prediction over streams of text, memory carried from batch to batch.

    `model(input_ids, targets=..., memories=...)` returns the mean negative `loss` of the targets in
    nats, the `memories` for the next batch of the same streams and, in evaluation mode, a `trace`.
    A masked model has no memories, and its targets are the tokens to be filled in.
    """

    model: PreTrainedModel
    unit = "tokens"

    def __init__(
        self,
        model: PreTrainedModel,
        prepared: Prepared,
        data: DatasetConfig,
        train: TrainingConfig,
        accelerator: Accelerator,
    ) -> None:
        super().__init__(model, train, accelerator)
        self.prepared, self.data, self.tokenizer = prepared, data, prepared.tokenizer
        self.batches = {WEIGHTS: self._streams(prepared.tokens["train"].ids)}
        self.memories: dict[str, Memories | None] = {WEIGHTS: None}
        self.masking = masking_for(model, prepared.tokenizer)
        for split, tokens in prepared.tokens.items():
            if split != "train":  # a text too short is refused now, not at the first validation
                num_evaluation_streams(tokens, data, split)

    def _streams(self, ids: npt.NDArray[np.integer[Any]]) -> ContextBatches:
        """Return the batches of this process over some training text."""
        size, length = self.data.batch_size, self.data.length
        return ContextBatches(ids, size, length, rank=self.rank, world_size=self.world_size)

    def batches_per_epoch(self) -> int:
        """Return how many batches make one round over the training text."""
        return len(self.batches[WEIGHTS])

    def loss(self, model: nn.Module, phase: str, step: int, micro: int) -> BatchLoss:
        """Return the loss of the next segment of every stream; the memory moves on."""
        index = self._turn(phase, step) * self.train.accumulate + micro
        batches = self.batches[phase]
        position = index % len(batches)
        if position == 0:
            self.memories[phase] = None  # the text begins anew
        batch = batches[position]
        if self.masking is not None:
            seed = seed_at(self.train.seed, "masked", phase, index)
            batch = self.masking(batch["input_ids"], seed, self.rank, self.world_size)
        device = self.model.device
        targets = to_device(batch["labels"], device)
        output = model(
            to_device(batch["input_ids"], device),
            targets=targets,
            memories=self.memories[phase],
            **self._model_arguments(phase, index),
        )
        self.memories[phase] = output.memories
        plain = getattr(output, "plain_loss", output.loss)  # where labels may be smoothed
        return BatchLoss(output.loss, plain, targets.numel())

    def gathered_layers(self) -> list[nn.Module]:
        """Return the blocks of a model that runs each of them once."""
        return list(getattr(self.model, "blocks", ()))

    def _turn(self, phase: str, step: int) -> int:
        """Return how many steps of this phase came before: its batches follow one another."""
        return step

    def _model_arguments(self, phase: str, index: int) -> dict[str, Any]:
        """Return what else the model is called with for batch number `index` of a phase."""
        return {}

    def evaluate(self, accelerator: Accelerator, split: str) -> dict[str, float]:
        """Return loss, perplexity and FLOPs on a split, nothing where there is no such split."""
        tokens = self.prepared.tokens.get(split)
        if tokens is None:
            return {}
        was_training = self.model.training
        values = evaluate_language(self.model, tokens, self.data, accelerator, masking=self.masking)
        self.model.train(was_training)
        return values

    def state(self) -> dict[str, Tensor]:
        """Return the memories by phase and layer."""
        return {
            f"{phase}.{layer}": memory
            for phase, memories in self.memories.items()
            for layer, memory in enumerate(memories or ())
            if memory is not None
        }

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Take up the memories that `state` returned."""
        for phase in self.memories:
            found = {
                int(name.removeprefix(f"{phase}.")): memory.to(self.model.device)
                for name, memory in state.items()
                if name.startswith(f"{phase}.")
            }
            if found:
                layers = range(self.model.config.num_hidden_layers)
                self.memories[phase] = tuple(found.get(layer) for layer in layers)

    def identity(self) -> dict[str, Any]:
        """Return what must be the same in a run that goes on from a checkpoint."""
        own = vars(self.model.config)
        names = sorted(own.keys() - vars(PreTrainedConfig()).keys())
        tokens = self.prepared.tokens.items()
        return super().identity() | {
            "model": {name: own[name] for name in names},
            "dataset": {"batch_size": self.data.batch_size, "length": self.data.length}
            # The folder's name is a hash of the text and its tokenizer.
            | {split: f"{len(file)} tokens ({file.folder.name})" for split, file in tokens},
        }

    def save(self, folder: Path) -> None:
        """Write the model and its tokenizer as transformers loads them."""
        model, tokenizer = self.model, self.tokenizer
        # Of several prompts the shorter ones are padded in front of the text, not behind it.
        side = "left" if self.masking is None else "right"
        tokenizer.padding_side = tokenizer.init_kwargs["padding_side"] = side
        if model.can_generate() and model.generation_config is not None:
            model.generation_config.pad_token_id = tokenizer.pad_token_id
        super().save(folder)


@torch.no_grad()
def evaluate_language(
    model: PreTrainedModel,
    tokens: TokenFile,
    data: DatasetConfig,
    accelerator: Accelerator | None = None,
    masking: Masking | None = None,
) -> dict[str, Any]:
    """Return loss, perplexity and FLOPs per token over a whole text, alone also their intervals.

    The text is read in streams as in training; each process reads its share of them. With a
    `masking`, tokens that are the same in every evaluation of the text are filled in.
    """
    rank, world = place_among(accelerator)
    num_streams = num_evaluation_streams(tokens, data)
    if num_streams < data.batch_size:  # so short that every process may read it all
        rank, world = 0, 1
    batches = ContextBatches(tokens.ids, num_streams, data.length, rank=rank, world_size=world)
    model.eval()
    memories: Memories | None = None
    losses, counts, flops, right, num_read = [], [], 0.0, 0.0, 0
    for index in range(len(batches)):
        batch = batches[index]
        if masking is not None:
            batch = masking(batch["input_ids"], seed_at("evaluation", index), rank, world)
        ids, targets = (to_device(batch[name], model.device) for name in ("input_ids", "labels"))
        output = model(ids, targets=targets, memories=memories)
        memories = output.memories
        counts.append(int((targets != -100).sum()))
        losses.append(float(output.loss) * counts[-1])
        flops += output.trace.total_flops
        num_read += targets.numel()
        if masking is not None:
            right += float((output.logits.argmax(-1) == targets[targets != -100]).sum())
    total, count = sum(losses), sum(counts)
    per_token = flops / num_read
    if world > 1:
        total, right = sum(from_all(accelerator, total)), sum(from_all(accelerator, right))
        count, num_read = count * world, num_read * world
    values = language_values(total, count, tokens)
    if masking is not None:  # words and bytes have tokens that were not asked for
        values = {name: values[name] for name in ("loss", "perplexity")}
        values |= {"accuracy": right / count, "masked_tokens": count, "tokens": num_read}
    values["flops_per_token"] = per_token
    return values if accelerator else values | _intervals(values, losses, counts)


def _intervals(values: dict[str, Any], losses: list[float], counts: list[int]) -> dict[str, Any]:
    """Return the intervals of the figures of a text that was read in these segments."""
    proportional = [name for name in values if name in ("loss", "bits_per_byte")]
    exponential = [name for name in values if name in ("perplexity", "word_perplexity")]
    if len(losses) < FEWEST_SEGMENTS or not values["loss"]:
        return intervals_of(**dict.fromkeys((*proportional, *exponential)))
    scales = [math.log(end) / values["loss"] for end in perplexity_interval(losses, counts)]
    found = {name: Interval(*(values[name] * scale for scale in scales)) for name in proportional}
    for name in exponential:
        found[name] = Interval(*(values[name] ** scale for scale in scales))
    return intervals_of(**found)


def num_evaluation_streams(tokens: TokenFile, data: DatasetConfig, split: str = "given") -> int:
    """Return how many streams a text is read in: as in training, or what a short text fills."""
    num_streams = min(data.batch_size, (len(tokens) - 1) // data.length)
    if num_streams < 1:
        raise UserError(
            f"The {split} text has {len(tokens)} tokens, too few to be measured in segments of "
            f"{data.length}: give a longer text or a lower dataset.length."
        )
    return num_streams


def language_values(loss_sum: float, num_tokens: int, text: TokenFile) -> dict[str, float]:
    """Return the figures of an evaluation, given the loss in nats, summed over all its tokens."""
    loss = loss_sum / num_tokens
    return {
        "loss": loss,
        "perplexity": perplexity(loss),
        "word_perplexity": perplexity(loss * len(text) / text.num_words),
        "bits_per_byte": loss * len(text) / text.num_bytes / math.log(2.0),
        "tokens": num_tokens,
    }

"""Language modelling with memory, as a task of the training loop: the model's blocks are fixed."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from deepenough.data import ContextBatches, DataSettings, Prepared, TokenFile, save_tokenizer
from deepenough.errors import UserError
from deepenough.par import ParConfig, ParForCausalLM
from deepenough.par.model import Memories
from deepenough.training.config import TrainingConfig
from deepenough.training.distributed import place_among
from deepenough.training.log import without_bars
from deepenough.training.quality import TextSize, language_values
from deepenough.training.task import WEIGHTS, BatchLoss, PlainTask


class LanguageTask(PlainTask):
    """Next-token prediction over lanes of text, memory carried from batch to batch."""

    unit = "tokens"
    is_warm = False
    """Whether the model began with the weights of another."""

    def __init__(
        self,
        model: ParForCausalLM,
        prepared: Prepared,
        data: DataSettings,
        train: TrainingConfig,
        accelerator: Accelerator,
    ) -> None:
        self.model, self.prepared, self.data, self.train = model, prepared, data, train
        self.rank, self.world_size = accelerator.process_index, accelerator.num_processes
        self.batches = {WEIGHTS: self._lanes(prepared.tokens["train"].ids)}
        self.memories: dict[str, Memories | None] = {WEIGHTS: None}
        for split, tokens in prepared.tokens.items():
            if split != "train":  # a text too short is refused now, not at the first validation
                evaluation_lanes(tokens, data, split)

    def _lanes(self, ids: Any) -> ContextBatches:
        return ContextBatches(
            ids,
            self.data.batch_size,
            self.data.length,
            rank=self.rank,
            world_size=self.world_size,
        )

    def parameters(self) -> dict[str, list[dict[str, Any]]]:
        named = [(n, p) for n, p in self.model.named_parameters() if not n.startswith("choice.")]
        matrices = {"params": [p for _, p in named if p.dim() > 1]}
        vectors = {"params": [p for _, p in named if p.dim() <= 1], "weight_decay": 0.0}
        return {WEIGHTS: [matrices, vectors]}

    def loss(self, model: nn.Module, phase: str, step: int, micro: int) -> BatchLoss:
        index = self._turn(phase, step) * self.train.accumulate + micro
        batches = self.batches[phase]
        position = index % len(batches)
        if position == 0:
            self.memories[phase] = None  # the text begins anew
        batch = batches[position]
        device = self.model.device
        targets = batch["labels"].to(device)
        output = model(
            batch["input_ids"].to(device),
            targets=targets,
            memories=self.memories[phase],
            **self._model_arguments(phase, index),
        )
        self.memories[phase] = output.memories
        return BatchLoss(output.loss, output.loss, targets.numel())

    def _turn(self, phase: str, step: int) -> int:
        """How many steps of this phase there were before: its batches follow one another."""
        return step

    def _model_arguments(self, phase: str, index: int) -> dict[str, Any]:
        return {}

    def evaluate(self, accelerator: Accelerator, split: str) -> dict[str, float]:
        tokens = self.prepared.tokens.get(split)
        if tokens is None:
            return {}
        was_training = self.model.training
        values = evaluate_language(self.model, tokens, self.data, accelerator)
        self.model.train(was_training)
        return values

    def state(self) -> dict[str, Tensor]:
        return {
            f"{phase}.{block}": memory
            for phase, memories in self.memories.items()
            for block, memory in enumerate(memories or ())
            if memory is not None
        }

    def load_state(self, state: dict[str, Tensor]) -> None:
        for phase in self.memories:
            found = [state.get(f"{phase}.{block}") for block in range(len(self.model.blocks))]
            if any(memory is not None for memory in found):
                device = self.model.device
                self.memories[phase] = tuple(m.to(device) if m is not None else m for m in found)

    def identity(self) -> dict[str, Any]:
        names = [n for n in inspect.signature(ParConfig).parameters if n != "kwargs"]
        tokens = self.prepared.tokens.items()
        return {
            "model": {name: getattr(self.model.config, name) for name in names},
            "data": {"batch_size": self.data.batch_size, "length": self.data.length}
            # The folder's name is a hash of the text and its tokenizer.
            | {split: f"{len(file)} tokens ({file.folder.name})" for split, file in tokens},
            "train": self.train.identity(),
            "start": {"warm": self.is_warm},
        }

    def save(self, folder: Path) -> None:
        save_model(self.model, self.prepared, folder)


def save_model(model: ParForCausalLM, prepared: Prepared, folder: Path) -> None:
    """The model and its tokenizer, as transformers loads them."""
    # Of several prompts the shorter ones are padded before their first word, not behind the last.
    prepared.tokenizer.padding_side = prepared.tokenizer.init_kwargs["padding_side"] = "left"
    if model.generation_config is not None:
        model.generation_config.pad_token_id = prepared.tokenizer.pad_token_id
    with without_bars():
        model.save_pretrained(folder)
    save_tokenizer(prepared.tokenizer, folder)


@torch.no_grad()
def evaluate_language(
    model: ParForCausalLM,
    tokens: TokenFile,
    data: DataSettings,
    accelerator: Accelerator | None = None,
) -> dict[str, float]:
    """Loss over a whole text, lanes as in training, each process its own share of them."""
    rank, world = place_among(accelerator)
    lanes = evaluation_lanes(tokens, data)
    if lanes < data.batch_size:  # so short that every process may read it all
        rank, world = 0, 1
    batches = ContextBatches(tokens.ids, lanes, data.length, rank=rank, world_size=world)
    model.eval()
    memories: Memories | None = None
    total = torch.zeros((), dtype=torch.float64)
    flops = 0.0
    count = 0
    for batch in batches:
        targets = batch["labels"].to(model.device)
        output = model(batch["input_ids"].to(model.device), targets=targets, memories=memories)
        memories = output.memories
        total += output.loss.double().cpu() * targets.numel()
        flops += output.trace.total_flops
        count += targets.numel()
    per_token = flops / count
    if accelerator is not None and world > 1:
        total = accelerator.reduce(total.to(accelerator.device), reduction="sum")
        count *= world
    size = TextSize(len(tokens), tokens.num_words, tokens.num_bytes)
    return language_values(float(total), count, size) | {"flops_per_token": per_token}


def evaluation_lanes(tokens: TokenFile, data: DataSettings, split: str = "given") -> int:
    """As many lanes as in training, or as many as a short text fills."""
    for name in ("length", "batch_size"):
        if getattr(data, name) < 1:
            raise UserError(f"data.{name} must be at least 1: got {getattr(data, name)}.")
    lanes = min(data.batch_size, (len(tokens) - 1) // data.length)
    if lanes < 1:
        raise UserError(
            f"The {split} text has {len(tokens)} tokens, too few to be measured in segments of "
            f"{data.length}: give a longer text or a lower data.length."
        )
    return lanes

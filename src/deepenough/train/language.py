"""Language modelling with memory, as a task of the training loop: fixed patterns and searches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from deepenough.adaptive.par import ParForCausalLM
from deepenough.adaptive.par.choice import entropy, gumbel_noise
from deepenough.adaptive.par.derive import BlockCosts
from deepenough.adaptive.par.model import Memories
from deepenough.adaptive.par.pattern import BRANCHES, OPEN, interleaved
from deepenough.adaptive.par.settings import SearchSettings
from deepenough.data import ContextBatches, DataSettings, Prepared, TokenFile, save_tokenizer
from deepenough.measure.quality import TextSize, language_values
from deepenough.runs import RunFolder
from deepenough.train.schedule import tau_at
from deepenough.train.settings import TrainSettings

WEIGHTS, CHOICES = "weights", "choices"


class LanguageTask:
    """Next-token prediction over lanes of text, memory carried from batch to batch."""

    unit = "tokens"

    def __init__(
        self,
        model: ParForCausalLM,
        prepared: Prepared,
        data: DataSettings,
        train: TrainSettings,
        accelerator: Accelerator,
    ) -> None:
        self.model, self.prepared, self.data, self.train = model, prepared, data, train
        self.rank, self.world_size = accelerator.process_index, accelerator.num_processes
        self.batches = {WEIGHTS: self._lanes(prepared.tokens["train"].ids)}
        self.memories: dict[str, Memories | None] = {WEIGHTS: None}

    def _lanes(self, ids: Any) -> ContextBatches:
        return ContextBatches(
            ids,
            self.data.batch_size,
            self.data.length,
            rank=self.rank,
            world_size=self.world_size,
        )

    def phases(self, step: int) -> Sequence[str]:
        return (WEIGHTS,)

    def parameters(self, phase: str) -> list[dict[str, Any]]:
        named = [(n, p) for n, p in self.model.named_parameters() if not n.startswith("choice.")]
        return [
            {"params": [p for _, p in named if p.dim() > 1]},
            {"params": [p for _, p in named if p.dim() <= 1], "weight_decay": 0.0},
        ]

    def begin_step(self, step: int) -> None:
        pass

    def loss(self, model: nn.Module, phase: str, index: int) -> tuple[Tensor, int]:
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
            **self._model_arguments(index),
        )
        self.memories[phase] = output.memories
        return output.loss, targets.numel()

    def _model_arguments(self, index: int) -> dict[str, Any]:
        return {}

    def train_values(self) -> dict[str, Any]:
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
        config = self.model.config.to_diff_dict()
        model = {k: v for k, v in config.items() if k not in ("transformers_version", "pattern")}
        return {
            "model": model,
            "pattern": self.model.config.pattern,
            "tokens": {split: len(file.ids) for split, file in self.prepared.tokens.items()},
            "batch_size": self.data.batch_size,
            "length": self.data.length,
            "seed": self.train.seed,
            "steps": self.train.steps,
            "accumulate": self.train.accumulate,
        }

    def save(self, run: RunFolder) -> None:
        self.model.save_pretrained(run.model)
        save_tokenizer(self.prepared.tokenizer, run.model)


class SearchTask(LanguageTask):
    """The same for a SuperNet, whose choices are trained beside the weights or in turn with them."""

    def __init__(
        self,
        model: ParForCausalLM,
        prepared: Prepared,
        data: DataSettings,
        train: TrainSettings,
        accelerator: Accelerator,
        search: SearchSettings,
        costs: BlockCosts | None = None,
    ) -> None:
        super().__init__(model, prepared, data, train, accelerator)
        self.search = search
        self.costs = costs
        self.progress = 0.0
        if search.optimise == "alternating":
            ids = prepared.tokens["train"].ids
            border = int(len(ids) * (1.0 - search.held_out))
            self.batches = {WEIGHTS: self._lanes(ids[:border]), CHOICES: self._lanes(ids[border:])}
            self.memories = {WEIGHTS: None, CHOICES: None}

    @property
    def _choice_parameters(self) -> list[nn.Parameter]:
        assert self.model.choice is not None
        return list(self.model.choice.parameters())

    def phases(self, step: int) -> Sequence[str]:
        if self.search.optimise == "simultaneous":
            return (WEIGHTS,)
        due = (step + 1) % self.search.alternate_every == 0 or step == self.train.steps
        return (WEIGHTS, CHOICES) if due else (WEIGHTS,)

    def parameters(self, phase: str) -> list[dict[str, Any]]:
        choices = {
            "params": self._choice_parameters,
            "lr_scale": self.search.alpha_lr,
            "weight_decay": 0.0,
        }
        if phase == CHOICES:
            return [choices]
        groups = super().parameters(phase)
        return groups if self.search.optimise == "alternating" else [*groups, choices]

    def begin_step(self, step: int) -> None:
        assert self.model.choice is not None
        self.progress = step / max(1, self.train.steps - 1)
        settings = self.search
        if settings.tau != "learned":
            tau = tau_at(settings.tau, settings.tau_start, settings.tau_end, self.progress)
            self.model.choice.set_tau(tau)
        if settings.decide_at < 1.0:
            self._decide()

    def _decide(self) -> None:
        """Close the blocks that have made up their mind."""
        if self.progress < self.search.decide_after:
            return
        rows = self.model.probabilities()
        for block, kind in enumerate(self.model.pattern):
            if kind == OPEN and float(rows[block].max()) >= self.search.decide_at:
                self.model.decide(block, BRANCHES[int(rows[block].argmax())])

    def loss(self, model: nn.Module, phase: str, index: int) -> tuple[Tensor, int]:
        loss, count = super().loss(model, phase, index)
        if self.search.cost_weight and self.costs is not None:
            loss = loss + self.search.cost_weight * self.expected_cost()
        return loss, count

    def expected_cost(self) -> Tensor:
        """`sum_b pi_b . cost`, as a share of the interleaved baseline's whole cost."""
        assert self.model.choice is not None and self.costs is not None
        kinds = torch.tensor([self.costs.of_block(kind) for kind in BRANCHES])
        total = (self.model.choice.probabilities() @ kinds.to(self.model.device)).sum()
        return total / self.costs.of(interleaved(len(self.model.blocks)))

    def _model_arguments(self, index: int) -> dict[str, Any]:
        # All lanes are drawn and this process's taken, so that any number of processes agree.
        generator = torch.Generator().manual_seed(self.train.seed * 1_000_003 + index)
        noise = gumbel_noise(len(self.model.blocks), self.data.batch_size, generator)
        return {"noise": noise.chunk(self.world_size, 1)[self.rank]}

    def save(self, run: RunFolder) -> None:
        # Branches of closed blocks are not computed any more, so they are not kept either.
        self.model.with_pattern(self.model.pattern).save_pretrained(run.model)
        save_tokenizer(self.prepared.tokenizer, run.model)

    def train_values(self) -> dict[str, Any]:
        assert self.model.choice is not None
        rows = self.model.probabilities()
        return {
            "tau": float(self.model.choice.temperature),
            "entropy": entropy(rows),
            "pi": [[round(value, 6) for value in row] for row in rows.tolist()],
        }

    def load_state(self, state: dict[str, Tensor]) -> None:
        super().load_state(state)
        self.model.apply_decisions()


@torch.no_grad()
def evaluate_language(
    model: ParForCausalLM,
    tokens: TokenFile,
    data: DataSettings,
    accelerator: Accelerator | None = None,
) -> dict[str, float]:
    """Loss over a whole text, lanes as in training, each process its own share of them."""
    rank, world = (accelerator.process_index, accelerator.num_processes) if accelerator else (0, 1)
    batches = ContextBatches(tokens.ids, data.batch_size, data.length, rank=rank, world_size=world)
    model.eval()
    memories: Memories | None = None
    total = torch.zeros((), dtype=torch.float64)
    count = 0
    for batch in batches:
        targets = batch["labels"].to(model.device)
        output = model(batch["input_ids"].to(model.device), targets=targets, memories=memories)
        memories = output.memories
        total += output.loss.double().cpu() * targets.numel()
        count += targets.numel()
    if accelerator is not None and world > 1:
        total = accelerator.reduce(total, reduction="sum")
        count *= world
    size = TextSize(len(tokens.ids), tokens.num_words, tokens.num_bytes)
    return language_values(float(total), count, size)

"""The search as a task of the training loop: a SuperNet's choices beside its weights.

Simultaneous: one optimiser for both. Alternating, as the paper does it: the weights on one part of
the training text, and every few steps the choices on a part that is held out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from deepenough.data import DatasetConfig, Prepared
from deepenough.par import ParForCausalLM
from deepenough.par.choice import BranchChoice, entropy, gumbel_noise
from deepenough.par.derive import BlockCosts
from deepenough.par.pattern import BRANCHES, IDENTITY, OPEN, interleaved
from deepenough.par.settings import SearchSettings
from deepenough.training.config import TrainingConfig, seed_at, tau_at
from deepenough.training.language import LanguageTask, save_model
from deepenough.training.task import WEIGHTS, BatchLoss

CHOICES = "choices"


class SearchTask(LanguageTask):
    model: ParForCausalLM
    costs: BlockCosts | None = None
    """What the blocks cost, for the term that makes dear ones unlikely."""

    def __init__(
        self,
        model: ParForCausalLM,
        prepared: Prepared,
        data: DatasetConfig,
        train: TrainingConfig,
        accelerator: Accelerator,
        search: SearchSettings,
    ) -> None:
        super().__init__(model, prepared, data, train, accelerator)
        assert model.choice is not None
        self.search = search
        self.choice: BranchChoice = model.choice
        self.choice.set_tau(search.tau_start)
        self.progress = 0.0
        self._closed: dict[int, Tensor] = {}
        """Scores of the closed blocks, as they were when each one was closed."""
        for block, kind in enumerate(model.config.pattern):
            if kind != OPEN:
                self._fix(block, kind)
        for parameter in self.choice.parameters():
            parameter.register_hook(self._hold)
        if search.optimise == "alternating":
            ids = prepared.tokens["train"].ids
            border = int(len(ids) * (1.0 - search.held_out))
            self.batches = {
                WEIGHTS: self._streams(ids[:border]),
                CHOICES: self._streams(ids[border:]),
            }
            self.memories = {WEIGHTS: None, CHOICES: None}

    def _weights(self) -> list[nn.Parameter]:
        named = self.model.named_parameters()
        return [parameter for name, parameter in named if not name.startswith("choice.")]

    def parameters(self) -> dict[str, list[dict[str, Any]]]:
        choices = {
            "params": list(self.choice.parameters()),
            "lr_scale": self.search.alpha_lr,
            "weight_decay": 0.0,
        }
        weights = super().parameters()[WEIGHTS]
        if self.search.optimise == "alternating":
            return {WEIGHTS: weights, CHOICES: [choices]}
        return {WEIGHTS: [*weights, choices]}

    # -- one step ----------------------------------------------------------------------------

    def _hold(self, gradient: Tensor) -> Tensor:
        """Of the choices: none while only the weights are trained."""
        choosing = self.progress >= self.search.choose_after
        return gradient if choosing else torch.zeros_like(gradient)

    def begin_step(self, step: int) -> None:
        self.progress = step / max(1, self.train.steps - 1)
        settings = self.search
        if settings.tau != "learned":
            tau = tau_at(settings.tau, settings.tau_start, settings.tau_end, self.progress)
            self.choice.set_tau(tau)
        if settings.decide_at < 1.0 and self.progress >= settings.decide_after:
            self._decide()

    def phases(self, step: int) -> Sequence[str]:
        due = (
            self.search.optimise == "alternating"
            and (step + 1) % self.search.alternate_every == 0
            and self.progress >= self.search.choose_after
            and OPEN in self.model.pattern
        )
        return (WEIGHTS, CHOICES) if due else (WEIGHTS,)

    def _turn(self, phase: str, step: int) -> int:
        return step if phase == WEIGHTS else step // self.search.alternate_every

    def _model_arguments(self, phase: str, index: int) -> dict[str, Any]:
        # All lanes are drawn and this process's taken, so that any number of processes agree.
        generator = torch.Generator().manual_seed(seed_at(self.train.seed, "noise", phase, index))
        noise = gumbel_noise(len(self.model.blocks), self.data.batch_size, generator)
        return {"noise": noise.chunk(self.world_size, 1)[self.rank]}

    def loss(self, model: nn.Module, phase: str, step: int, micro: int) -> BatchLoss:
        batch = super().loss(model, phase, step, micro)
        search = self.search
        if self.costs is None or not (search.cost_weight or search.budget_weight):
            return batch
        cost = self.expected_cost()
        objective = batch.objective + search.cost_weight * cost
        if search.budget is not None:
            rest = self.costs.rest / self.costs.of(interleaved(len(self.model.blocks)))
            excess = (cost + rest - search.budget).relu()
            objective = objective + search.budget_weight * excess.square()
        return batch._replace(objective=objective)

    def expected_cost(self) -> Tensor:
        """`sum_b pi_b . cost`, as a share of the interleaved baseline's whole cost."""
        assert self.costs is not None
        kinds = torch.tensor([self.costs.of_block(kind) for kind in BRANCHES])
        total = (self.choice.probabilities() @ kinds.to(self.model.device)).sum()
        if OPEN not in self.model.pattern:  # and nothing else gives the choices a gradient
            total = total.detach()
        return total / self.costs.of(interleaved(len(self.model.blocks)))

    @torch.no_grad()
    def end_step(self) -> None:
        # Momentum would carry the scores of a closed block on, even to another kind.
        for block, scores in self._closed.items():
            self.choice.alpha[block] = scores

    # -- closing blocks ----------------------------------------------------------------------

    def _decide(self) -> None:
        """Close the blocks that have made up their mind."""
        rows = self.model.probabilities()
        for block, kind in enumerate(self.model.pattern):
            if kind != OPEN or float(rows[block].max()) < self.search.decide_at:
                continue
            chosen = BRANCHES[int(rows[block].argmax())]
            others = self.model.pattern[:block] + self.model.pattern[block + 1 :]
            if chosen == IDENTITY and not set(others) - {IDENTITY}:
                continue  # a model needs one block at least
            self.model.decide(block, chosen)
            self._closed[block] = self.choice.alpha[block].detach().clone()

    @torch.no_grad()
    def _fix(self, block: int, kind: str) -> None:
        """A block that the given pattern leaves no choice."""
        self.model.decide(block, kind)
        scores = torch.full((len(BRANCHES),), -30.0)
        scores[BRANCHES.index(kind)] = 0.0
        self.choice.alpha[block] = scores
        self._closed[block] = self.choice.alpha[block].clone()

    # -- records and state -------------------------------------------------------------------

    @torch.no_grad()
    def train_values(self) -> dict[str, Any]:
        rows = self.model.probabilities()
        still_open = (self.choice.decided < 0)[:, None]  # a closed block is decided: no entropy
        values = {
            "tau": float(self.choice.temperature),
            "entropy": entropy(rows * still_open),
            # So many digits, not places: how unlikely a choice is matters where a budget cuts.
            "pi": [[float(f"{value:.6g}") for value in row] for row in rows.tolist()],
        }
        if self.costs is not None:
            values["expected_cost"] = float(self.expected_cost())
        return values

    def load_state(self, state: dict[str, Tensor]) -> None:
        super().load_state(state)
        self.model.apply_decisions()
        alpha = self.choice.alpha.detach()
        decided = self.choice.decided.tolist()
        self._closed = {b: alpha[b].clone() for b, branch in enumerate(decided) if branch >= 0}

    def identity(self) -> dict[str, Any]:
        # What happens after the search may change its mind.
        later = ("spend", "retrain", *(() if self.search.budget_weight else ("budget",)))
        search = {k: v for k, v in asdict(self.search).items() if k not in later}
        return super().identity() | {"search": search}

    def save(self, folder: Path) -> None:
        # Branches of closed blocks are not computed any more, so they are not kept either.
        save_model(self.model.with_pattern(self.model.pattern), self.prepared, folder)

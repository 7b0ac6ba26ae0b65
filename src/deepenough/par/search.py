"""The search: a SuperNet's choices trained beside its weights, and the pattern derived from them.

Training is simultaneous (one optimiser for both) or alternating, as the paper does it: the weights
on one part of the training text, and every few steps the choices on a part that is held out.

The pattern is the likeliest one, within a budget if one is given:

    maximise  sum_b log pi_b(kind_b)
    subject to  cost(pattern) <= budget * cost(interleaved)

All blocks have one shape, so a pattern's cost depends only on how many blocks of each kind it has.
That makes the constrained optimum exact and cheap: the best patterns for every pair of counts
(attention, dense) are found block by block, and the best pair that fits the budget is taken.

Costs are FLOPs in closed form, or seconds on this machine at the shape the model will really have.
Timings of a shared machine are noisy upwards only, so the best of several rounds is taken.
"""

import logging
import math
import time
from collections.abc import Sequence
from dataclasses import asdict, astuple, dataclass
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from deepenough.config import bounded
from deepenough.data.config import DatasetConfig
from deepenough.data.tokens import Prepared
from deepenough.devices import exact
from deepenough.errors import UserError
from deepenough.figure import number
from deepenough.par.config import (
    ATTENTION,
    BRANCHES,
    DENSE,
    IDENTITY,
    OPEN,
    SearchConfig,
    check_pattern,
    check_probabilities,
    interleaved,
)
from deepenough.par.layers import BranchChoice, branch_flops, gumbel_noise, head_flops
from deepenough.par.modeling import Memories, ParConfig, ParPreTrainedModel, new_model
from deepenough.training.config import TrainingConfig, seed_at, tau_at
from deepenough.training.language import MASKED_SHARE, LanguageTask
from deepenough.training.task import WEIGHTS, BatchLoss

log = logging.getLogger("deepenough")

CHOICES = "choices"
"""Name of the phase that trains the choices, when alternating."""

_BUSY = 1.3
"""By how much the best whole pass may exceed the sum of the best of its parts."""


@dataclass(frozen=True)
class BlockCosts:
    """Cost of one block of each kind, in the order of `BRANCHES`, and of all around the blocks."""

    attention: float = bounded(ge=0, lt=1e30)
    dense: float = bounded(ge=0, lt=1e30)
    identity: float = bounded(ge=0, lt=1e30)
    rest: float = bounded(gt=0, lt=1e30)

    def of(self, pattern: str) -> float:
        """Return the cost of a whole forward pass."""
        # By counts, so that patterns with equal counts cost the same to the last bit.
        each = zip(BRANCHES, astuple(self), strict=False)
        return self.rest + sum(pattern.count(kind) * cost for kind, cost in each)

    def relative(self, pattern: str) -> float:
        """Return the cost as a share of the interleaved baseline's with as many blocks."""
        return self.of(pattern) / self.of(interleaved(len(pattern)))


def derive(
    probabilities: Sequence[Sequence[float]],
    costs: BlockCosts | None = None,
    budget: float | None = None,
    fixed: str | None = None,
) -> str:
    """Return the likeliest pattern; with a budget, the likeliest that keeps it.

    A budget is the largest cost, as a share of the interleaved baseline's, and needs the costs; one
    that no pattern keeps is refused. `fixed` is the pattern that the search began with: what it
    leaves no choice stays as it is.
    """
    if budget is not None and (costs is None or not number(budget) or budget <= 0):
        raise UserError(f"A budget is a number above 0 and needs the costs: got {budget!r:.40}.")
    try:
        rows = check_probabilities(probabilities)
    except ValueError as error:
        raise UserError(f"The search's probabilities are damaged: {error}.") from error
    num_blocks = len(rows)
    pattern = check_pattern(OPEN * num_blocks if fixed is None else fixed, allow_open=True)
    if len(pattern) != num_blocks:
        raise UserError(f"The pattern {pattern} is not one of {num_blocks} blocks.")
    best = {(0, 0): (0.0, "")}
    for row, given in zip(rows, pattern, strict=True):
        longer: dict[tuple[int, int], tuple[float, str]] = {}
        for score, begun in best.values():
            for kind, probability in zip(BRANCHES, row, strict=True):
                if given not in (OPEN, kind):
                    continue
                likelihood = math.log(max(probability, 1e-300))  # of one that has underflowed, too
                found = (score + likelihood, begun + kind)
                counts = (found[1].count(ATTENTION), found[1].count(DENSE))
                if counts not in longer or found[0] > longer[counts][0]:
                    longer[counts] = found
        best = longer
    patterns = [found for counts, found in best.items() if counts != (0, 0)]
    if budget is not None:
        assert costs is not None
        cheapest = min((pattern for _, pattern in patterns), key=costs.relative)
        patterns = [found for found in patterns if costs.relative(found[1]) <= budget]
        if not patterns:
            share = math.ceil(1000 * costs.relative(cheapest)) / 1000
            raise UserError(
                f"No pattern of {num_blocks} blocks costs at most {budget:g} of the interleaved "
                f"baseline: the cheapest, {cheapest}, needs a budget of {share:g}."
            )
    return max(patterns)[1]


# -- what blocks cost ----------------------------------------------------------------------------


def _tokens(config: ParConfig, streams: int) -> Tensor:
    """Return a batch of ids by Zipf's law, frequent ones first, as the adaptive softmax expects."""
    zipf = 1.0 / torch.arange(1, config.vocab_size + 1)
    generator = torch.Generator().manual_seed(0)
    draws = torch.multinomial(zipf, streams * config.length, True, generator=generator)
    return draws.view(streams, config.length)


def _targets(config: ParConfig, ids: Tensor) -> Tensor:
    """Return what the output layer is asked for: every token, or those that a mask would hide."""
    if not config.bidirectional:
        return ids
    targets, step = torch.full_like(ids, -100), round(1 / MASKED_SHARE)
    targets[:, ::step] = ids[:, ::step]
    return targets


def sample_segment(model: ParPreTrainedModel, streams: int) -> tuple[Tensor, Memories | None]:
    """Return a segment of every stream and the memory it would meet in the middle of a text."""
    ids = _tokens(model.config, streams).to(model.device)
    if model.config.bidirectional:
        return ids, None
    shape = (streams, model.config.mem_len, model.config.d_model)
    memory = torch.zeros(shape, device=model.device, dtype=model.dtype)
    memories = tuple(memory if block.attends else None for block in model.blocks)  # type: ignore[union-attr]
    return ids, memories


def _seconds_now(device: torch.device) -> float:
    """Return the time, once all that was asked of the device is done."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    return time.perf_counter()


def measure_block_costs(config: ParConfig, streams: int, rounds: int = 15) -> BlockCosts:
    """Return the seconds of each kind of block and of the rest, at the real shape.

    Blocks are timed within whole passes, where they find caches as in use, and the best round of
    each counts. A best whole pass that takes much longer than these together tells a busy machine.
    """
    pattern = interleaved(max(2, config.num_blocks)) + IDENTITY
    model = new_model(config.with_pattern(pattern)).eval()
    times = _time_blocks(model, streams, rounds)
    in_blocks = times[:, 1::2].min(0).values
    rest = float(times[:, ::2].sum(1).min())
    busy = float(times.sum(1).min()) / (float(in_blocks.sum()) + rest)
    if busy > _BUSY:
        log.warning(
            "The costs of blocks were measured while the machine was busy (whole passes took %.2f "
            "times the sum of their parts): a budget rests on them, so measure when it is quiet.",
            busy,
        )
    kinds = torch.tensor([BRANCHES.index(kind) for kind in pattern])
    attention, dense, identity = (float(in_blocks[kinds == branch].mean()) for branch in range(3))
    return BlockCosts(attention, dense, identity, rest)


@torch.inference_mode()
def _time_blocks(model: ParPreTrainedModel, streams: int, rounds: int) -> Tensor:
    """Return seconds before, in and between the blocks of every pass, `[rounds, 2 N + 1]`."""
    ids, memories = sample_segment(model, streams)
    targets = _targets(model.config, ids)
    readings: list[float] = []

    def read_clock(*_: object) -> None:
        readings.append(_seconds_now(model.device))

    for block in model.blocks:
        block.register_forward_pre_hook(read_clock)
        block.register_forward_hook(read_clock)
    for _ in range(1 + rounds):  # the first one warms up
        read_clock()
        model(ids, targets=targets, memories=memories)
        read_clock()
    return torch.tensor(readings, dtype=torch.float64).view(1 + rounds, -1).diff()[1:]


def count_block_costs(config: ParConfig, streams: int) -> BlockCosts:
    """Return the FLOPs of each kind of block and of the rest; tokens follow Zipf's law."""
    ids = _tokens(config, streams)
    sizes = (streams, config.length, config.mem_len + config.length)
    attention, dense, identity = (float(branch_flops(config, k, *sizes)) for k in BRANCHES)
    costs = head_flops(config, ids.numel(), None if config.bidirectional else ids)
    rest = float(costs[_targets(config, ids).flatten() != -100].sum())
    return BlockCosts(attention, dense, identity, rest)


# -- the task --------------------------------------------------------------------------------------


class SearchTask(LanguageTask):
    """Language modelling with a SuperNet: its weights, and the choices between branches."""

    model: ParPreTrainedModel

    def __init__(
        self,
        model: ParPreTrainedModel,
        prepared: Prepared,
        data: DatasetConfig,
        train: TrainingConfig,
        accelerator: Accelerator,
        search: SearchConfig,
        costs: BlockCosts,
    ) -> None:
        super().__init__(model, prepared, data, train, accelerator)
        assert model.choice is not None
        self.search, self.costs = search, costs
        self.choice: BranchChoice = model.choice
        self.choice.set_tau(search.tau_start)
        self.progress, self.choice_steps = 0.0, 0
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

    def weights(self) -> list[nn.Parameter]:
        """Return the parameters that are not choices."""
        named = self.model.named_parameters()
        return [parameter for name, parameter in named if not name.startswith("choice.")]

    def undivided(self) -> list[nn.Parameter]:
        """Return the choices, from which costs and probabilities are computed between steps."""
        return list(self.choice.parameters())

    def parameters(self) -> dict[str, list[dict[str, Any]]]:
        """Return the groups of one optimiser, or of two when alternating."""
        choices = {
            "params": list(self.choice.parameters()),
            "lr_scale": self.search.alpha_lr,
            "weight_decay": 0.0,
        }
        weights = super().parameters()[WEIGHTS]
        if self.search.optimise == "alternating":
            return {WEIGHTS: weights, CHOICES: [choices]}
        return {WEIGHTS: [*weights, choices]}

    def _hold(self, gradient: Tensor) -> Tensor:
        """Return the gradient of the choices: zero while only the weights are trained."""
        choosing = self.progress >= self.search.choose_after
        return gradient if choosing else torch.zeros_like(gradient)

    def begin_step(self, step: int) -> None:
        """Anneal the temperature."""
        self.progress = step / max(1, self.train.steps - 1)
        search = self.search
        num_held = math.ceil(search.choose_after * (self.train.steps - 1))
        self.choice_steps = max(0, step + 1 - num_held)
        if search.tau != "learned":
            self.choice.set_tau(tau_at(search.tau, search.tau_start, search.tau_end, self.progress))

    def phases(self, step: int) -> Sequence[str]:
        """Return the optimisers of this step: the weights', and when due the choices'."""
        due = (
            self.search.optimise == "alternating"
            and (step + 1) % self.search.alternate_every == 0
            and self.progress >= self.search.choose_after
        )
        return (WEIGHTS, CHOICES) if due else (WEIGHTS,)

    def _turn(self, phase: str, step: int) -> int:
        return step if phase == WEIGHTS else step // self.search.alternate_every

    def _model_arguments(self, phase: str, index: int) -> dict[str, Any]:
        # All streams are drawn and this process's taken, so that any number of processes agree.
        generator = torch.Generator().manual_seed(seed_at(self.train.seed, "noise", phase, index))
        noise = gumbel_noise(len(self.model.blocks), self.data.batch_size, generator)
        return {"noise": noise.chunk(self.world_size, 1)[self.rank]}

    def loss(self, model: nn.Module, phase: str, step: int, micro: int) -> BatchLoss:
        """Return the loss, with the expected cost and the budget in the objective."""
        batch = super().loss(model, phase, step, micro)
        search = self.search
        if not (search.cost_weight or search.budget_weight):
            return batch
        cost = self.expected_cost()
        objective = batch.objective + search.cost_weight * cost
        if search.budget is not None:
            rest = self.costs.rest / self.costs.of(interleaved(len(self.model.blocks)))
            excess = (cost + rest - search.budget).relu()
            objective = objective + search.budget_weight * excess.square()
        return batch._replace(objective=objective)

    def expected_cost(self) -> Tensor:
        """Return `sum_b pi_b . cost` as a share of the interleaved baseline's whole cost."""
        kinds = torch.tensor(astuple(self.costs)[: len(BRANCHES)], device=self.model.device)
        total = (self.choice.probabilities() @ kinds).sum()
        return total / self.costs.of(interleaved(len(self.model.blocks)))

    @torch.no_grad()
    def train_values(self) -> dict[str, Any]:
        """Return temperature, entropy, probabilities and expected cost, for the record."""
        rows = self.choice.probabilities()
        return {
            "tau": float(self.choice.temperature),
            "entropy": entropy(rows),
            "choice_steps": self.choice_steps,
            # So many digits, not places: how unlikely a choice is matters where a budget cuts.
            "pi": [[float(f"{value:.6g}") for value in row] for row in rows.tolist()],
            "expected_cost": float(self.expected_cost()),
        }

    def identity(self) -> dict[str, Any]:
        """Return what must be the same in a run that goes on from a checkpoint."""
        # What happens after the search may change its mind.
        later = ("retrain", *(() if self.search.budget_weight else ("budget",)))
        search = {k: v for k, v in asdict(self.search).items() if k not in later}
        return super().identity() | {"search": search}


def entropy(probabilities: Tensor) -> float:
    """Return how undecided the search is: mean entropy over its maximum, from 1 to 0."""
    entropies = torch.special.entr(exact(probabilities)).sum(-1)
    return float(entropies.mean()) / math.log(probabilities.shape[-1])

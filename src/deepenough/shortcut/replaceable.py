"""A model whose parts can be replaced by linear maps, and the maps that can stand there.

`ReplaceableModel` runs a model with a `Choice` of its parts replaced and says how far its output is
from that of the full model. Of every block the attention and the feed-forward can be replaced by
the linear map that best predicts what they return from what they read (`submodules.py`), or by
nothing; and a run of consecutive blocks by one map of the states. All maps come from one pass over
a text, in closed form (`fit`); `refitting.py` fits those of a choice once more, in order.

Left out of a fit are the first token of a text and tokens of massive activations, which would
outweigh all others.

Shapes: B texts, T tokens, N chosen tokens, D width, V vocabulary or classes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from deepenough.devices import exact
from deepenough.errors import UserError
from deepenough.hf.adapter import Adapter, adapt, kind_of
from deepenough.hf.intercept import (
    OneDnnProducts,
    eval_mode,
    patched_forward,
    start_at,
)
from deepenough.shortcut.normal_equations import AffineMap, NormalEquations
from deepenough.shortcut.pruned_model import pruned_class
from deepenough.shortcut.reading import TokenBatch, batches, make_reading
from deepenough.shortcut.submodules import (
    Function,
    Place,
    Replacement,
    SubmoduleStatistics,
    parts_of,
)

PARTS = ("attention", "feed_forward")
Mode = Literal["linear", "removed"]

_LONGEST_RUN = 4
"""Blocks that one map may stand for."""
_RUNS_PER_LENGTH = 2
_RIDGES = (1e-4, 1e-3, 1e-2, 1e-1)
"""Penalties, relative to each input's own sum of squares."""
_MASSIVE = 8.0
"""A token is left out of a fit where what it reads or returns is so many times the median."""
_WINDOW, _BATCH_TOKENS = 512, 512
_SPREAD = 8
"""Of so many times the text that is needed, batches are drawn at random."""


class Block(NamedTuple):
    """Consecutive layers, from `first` to before `end`, counted from 0."""

    first: int
    end: int


@dataclass(frozen=True)
class Choice:
    """What is replaced: parts by mode, and runs of blocks by one map."""

    parts: Mapping[Place, Mode] = field(default_factory=dict)
    runs: tuple[Block, ...] = ()

    def with_part(self, place: Place, mode: Mode) -> Choice:
        """Return a choice with one part replaced."""
        return replace(self, parts={**self.parts, place: mode})

    def with_run(self, run: Block) -> Choice:
        """Return a choice with a run of blocks replaced, whatever it was of their parts."""
        parts = {p: mode for p, mode in self.parts.items() if not run.first <= p[1] < run.end}
        return Choice(parts, (*self.runs, run))

    def in_run(self, layer: int) -> bool:
        """Return whether a layer is among those that a map of states stands for."""
        return any(run.first <= layer < run.end for run in self.runs)

    def is_dropped(self, layer: int) -> bool:
        """Return whether nothing is left of a layer."""
        inside = any(run.first < layer < run.end for run in self.runs)
        return inside or all(self.parts.get((kind, layer, 0)) == "removed" for kind in PARTS)


class ReplaceableModel:
    """A model, the maps that could stand for its parts, and text to judge by."""

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: Any,
        texts: Iterable[str],
        fit_tokens: int = 40_000,
        choose_tokens: int = 3_072,
    ) -> None:
        self.adapter = prunable(model)
        self.replacement = Replacement(None, self.adapter)
        self.chains = parts_of(self.adapter)
        how = make_reading(self.adapter, "all", 0, _BATCH_TOKENS, window(self.adapter))
        self.fitted, self.held_out = _split(
            batches(tokenizer, texts, how), fit_tokens, choose_tokens, self.adapter.width
        )
        with eval_mode(model):
            self._reference = [_Reference.of(self.run(batch)) for batch in self.held_out]
            self._states = [self._all_states(batch) for batch in self.held_out]
        self.maps: dict[Place | Block, AffineMap] = {}
        self.corrected: dict[Place, AffineMap] = {}
        """What the last product of a part that is kept becomes in the pruned model."""
        self.singles: dict[tuple[Place | Block, Mode], float] = {}
        """What single replacements do to the KL, on a little text."""
        self.read = 0
        """Tokens of held-out text that were run to measure choices."""

    # -- running the model with replacements -----------------------------------------------------

    @contextmanager
    def replaced(self, choice: Choice) -> Iterator[None]:
        """Run the model as it would be after a choice."""
        zeros = torch.zeros_like
        parts: dict[Place, Function] = {
            place: self.maps[place] if mode == "linear" else zeros
            for place, mode in choice.parts.items()
        }
        layers: dict[int, Function] = {}
        for run in choice.runs:
            layers |= dict.fromkeys(range(*run), unchanged) | {run.first: self.maps[run]}
        products = {
            product: found
            for place, found in self.corrected.items()
            if choice != Choice() and place not in parts and place[1] not in layers
            if (product := last_product(self.chains[place])) is not None
        }
        with (
            eval_mode(self.adapter.model),
            self.replacement.placed(parts, layers),
            patched_forward(products),
        ):
            yield

    def run(self, batch: TokenBatch) -> Tensor:
        """Return the output `[N, V]` of a batch, one row for each prediction."""
        return run_rows(self.adapter.model, *batch.inputs(self.adapter), batch)

    def _all_states(self, batch: TokenBatch) -> list[Tensor]:
        ids, mask = batch.inputs(self.adapter)
        return self.adapter.states(ids, attention_mask=mask)

    def divergence(self, choice: Choice, first: int = 0, tokens: int | None = None) -> float:
        """Return the mean KL, in nats, of the full model's output from that after a choice.

        `first` is the first layer that differs from the choice that was last settled; `tokens`
        limits how much text is read.
        """
        total, count = 0.0, 0
        for number, batch in enumerate(self.held_out):
            if tokens is not None and count >= tokens:
                break
            with self.replaced(choice), self._starting(number, first):
                kl = self._reference[number].divergence(self.run(batch))
            total += float(exact(kl).sum())
            count += len(kl)
            self.read += int(batch.mask.sum())
        return total / count

    def settle(self, choice: Choice, first: int = 0) -> None:
        """Keep the states of a choice, from which those that follow are measured.

        Those before layer `first` are kept already.
        """
        with self.replaced(choice):
            for number, batch in enumerate(self.held_out):
                with self._starting(number, first):
                    self._states[number][first + 1 :] = self._all_states(batch)[first + 1 :]

    def settle_at(self, layer: int, states: Sequence[Tensor]) -> None:
        """Keep the states before one layer, of every batch of held-out text."""
        for own, state in zip(self._states, states, strict=True):
            own[layer] = state

    def _starting(self, number: int, first: int) -> AbstractContextManager[None]:
        states = self._states[number][first]
        return start_at(self.replacement.counter, self.replacement.forms, first, states)

    # -- maps ------------------------------------------------------------------------------------

    @torch.no_grad()
    def fit(self, progress: Callable[[int, int], None] | None = None, every: int = 1) -> None:
        """Fit the maps of all parts and of runs of blocks, on one in `every` batches of text."""
        sums = [
            SubmoduleStatistics(self.adapter, PARTS, _MASSIVE, in_single=True) for _ in range(2)
        ]
        runs = [_RunSums(self.adapter) for _ in range(2)]
        for kind, batches_ in enumerate((self.fitted[::every], self.held_out)):
            for number, batch in enumerate(batches_):
                with eval_mode(self.adapter.model), OneDnnProducts(in_half=True):
                    row, position = behind_first(batch)
                    with sums[kind].observing(row, position):
                        states = self._all_states(batch)
                runs[kind].add([state[row, position] for state in states])
                if progress is not None and kind == 0:
                    progress(number + 1, len(batches_))
        for place, equations in sums[0].equations.items():
            self.maps[place] = best_ridge(equations, sums[1].equations[place])
        self.maps |= runs[0].best(runs[1], self.usual_states())
        self.maps = {key: self.as_model(found) for key, found in self.maps.items()}

    def usual_states(self) -> list[Tensor]:
        """Return states of held-out tokens, `[N, D]` of every layer."""
        chosen = [behind_first(batch) for batch in self.held_out]
        by_layer = zip(*self._states, strict=True)
        return usual(
            [torch.cat([s[at] for s, at in zip(own, chosen, strict=True)]) for own in by_layer]
        )

    def as_model(self, found: AffineMap) -> AffineMap:
        """Return a map in the model's number format and on its device."""
        parameter = next(self.adapter.model.parameters())
        bias = None if found.bias is None else found.bias.to(parameter)
        return AffineMap(found.weight.to(parameter), bias)


class _Reference(NamedTuple):
    """Output distributions of the full model, `[N, V]` in half precision, and their entropies."""

    probabilities: Tensor
    entropy: Tensor

    @classmethod
    def of(cls, logits: Tensor) -> _Reference:
        """Take the full model's logits."""
        halves = logits.float().softmax(-1).half()
        p = halves.float()
        p /= p.sum(-1, keepdim=True)
        return cls(halves, -torch.special.xlogy(p, p).sum(-1))

    def divergence(self, logits: Tensor) -> Tensor:
        """Return `KL(p || q) = log sum exp z - p.z - H(p)` of logits `z`, `[N]`."""
        p, z = self.probabilities.float(), logits.float()
        inner = torch.linalg.vecdot(p, z) / p.sum(-1)
        return z.logsumexp(-1) - inner - self.entropy


def last_product(chain: Sequence[nn.Module]) -> nn.Module | None:
    """Return the last linear module of a part, whose output may be what the part returns."""
    found = [each for each in chain[-1].modules() if type(each) in (nn.Linear, Conv1D)]
    return found[-1] if found else None


@torch.no_grad()
def run_rows(model: Any, ids: Tensor, mask: Tensor | None, batch: TokenBatch) -> Tensor:
    """Return the logits `[N, V]` of a model on a batch, one row for each prediction."""
    more = {"use_cache": False} if kind_of(model) == "causal" else {}
    with OneDnnProducts():
        logits: Tensor = model(input_ids=ids, attention_mask=mask, **more).logits
    return logits if logits.ndim == 2 else logits[batch.wanted()]


def unchanged(hidden: Tensor) -> Tensor:
    """Return what is given, as a layer that is left out does."""
    return hidden


def prunable(model: PreTrainedModel) -> Adapter:
    """Return the adapter of a model that can be pruned; UserError for others."""
    pruned_class(model)
    adapter = adapt(model)
    chains = [chain for place, chain in parts_of(adapter).items() if place[0] in PARTS]
    # A module around the last one of its part holds the residual connection as well.
    is_own = [len(c) == 1 or all(c[-1] is not module for module in c[0].modules()) for c in chains]
    what = ""
    if len(set(adapter.layers)) < adapter.num_layers:
        what = "layers that share weights"
    elif sum(is_own) < 2 * adapter.num_layers:
        what = "layers in which these two are not modules of their own"
    if what:
        raise UserError(
            f"{type(model).__name__} has {what}: only models whose layers each have an attention "
            "and a feed-forward of their own can be pruned."
        )
    return adapter


def first_of_each_kind(adapter: Adapter) -> set[int]:
    """Return the layers whose attention tells how long a text is: the first of every kind."""
    kinds = [getattr(layer, "attention_type", None) for layer in adapter.layers]
    return {kinds.index(kind) for kind in kinds}


def window(adapter: Adapter) -> int:
    """Return how many tokens of a text are read at once."""
    longest = adapter.max_length
    return _WINDOW if longest is None else min(_WINDOW, longest)


def _split(
    found: Iterable[TokenBatch], fit_tokens: int, choose_tokens: int, width: int
) -> tuple[list[TokenBatch], list[TokenBatch]]:
    """Return batches to fit maps on and batches to choose by, spread over those of the text.

    Batches come in pools sorted by length, so those that follow one another are alike; the ones to
    choose by are in random order, so that the first few stand for all.
    """
    wanted, total = fit_tokens + choose_tokens, 0
    pool: list[TokenBatch] = []
    for batch in found:
        if total >= _SPREAD * wanted:
            break
        pool.append(batch)
        total += int(batch.mask.sum())
    mean = max(1.0, total / max(1, len(pool)))
    order = torch.randperm(len(pool), generator=torch.Generator().manual_seed(0)).tolist()
    num_held_out = min(max(1, round(choose_tokens / mean)), max(1, len(pool) // 5))
    num_fitted = max(1, round(fit_tokens / mean))
    held_out = [pool[number] for number in order[:num_held_out]]
    fitted = [pool[number] for number in sorted(order[num_held_out : num_held_out + num_fitted])]
    if sum(int(batch.mask.sum()) for batch in fitted) < 4 * width:
        raise UserError(
            f"The text has {total:,} tokens, too few to fit maps of width {width} and to choose "
            f"among them: give at least {5 * width:,}."
        )
    return fitted, held_out


def behind_first(batch: TokenBatch) -> tuple[Tensor, Tensor]:
    """Return row and position of all tokens but the first of each text."""
    row, position = batch.mask.nonzero(as_tuple=True)
    return row[position > 0], position[position > 0]


def best_ridge(
    equations: NormalEquations,
    held_out: NormalEquations,
    ridges: Sequence[float] = _RIDGES,
    affine: bool = True,
) -> AffineMap:
    """Return the map whose ridge leaves the smallest error on other rows."""
    maps = [equations.solve(affine, ridge, relative=True) for ridge in ridges]
    return min(maps, key=held_out.excess_error)


def usual(states: Sequence[Tensor]) -> list[Tensor]:
    """Return states `[N, D]` without the tokens of massive activations."""
    size = torch.stack([state.norm(dim=-1) for state in states])
    is_usual = (size <= _MASSIVE * size.median(dim=1, keepdim=True).values).all(0)
    return [state[is_usual] for state in states]


class _RunSums:
    """Sums for the maps of runs of two to four blocks."""

    def __init__(self, adapter: Adapter) -> None:
        self.last, self.width = adapter.num_layers, adapter.width
        self.equations: dict[int, NormalEquations] = {}

    def ends(self, first: int) -> range:
        """Return the ends of the runs that begin at a layer."""
        return range(first + 2, min(first + _LONGEST_RUN, self.last) + 1)

    def add(self, states: Sequence[Tensor]) -> None:
        """Add positions, `[N, D]` of every layer."""
        states = usual(states)
        for first in range(1, self.last - 1):
            ends = self.ends(first)
            if first not in self.equations:
                sizes = self.width, len(ends) * self.width
                self.equations[first] = NormalEquations(*sizes, states[0].device, in_single=True)
            self.equations[first].update(states[first], torch.cat([states[e] for e in ends], -1))

    def best(self, other: _RunSums, states: Sequence[Tensor]) -> dict[Place | Block, AffineMap]:
        """Return the maps of the runs of each length that predict states of other text best."""
        found: dict[int, list[tuple[float, Block, AffineMap]]] = {}
        for first, equations in self.equations.items():
            joint = best_ridge(equations, other.equations[first])
            assert joint.bias is not None
            ends = self.ends(first)
            weights, biases = joint.weight.chunk(len(ends)), joint.bias.chunk(len(ends))
            for end, weight, bias in zip(ends, weights, biases, strict=True):
                own = AffineMap(weight.to(states[0]), bias.to(states[0]))
                error = (own(states[first]) - states[end]).square().sum()
                share = float(error / (states[end] - states[end].mean(0)).square().sum())
                found.setdefault(end - first, []).append((share, Block(first, end), own))
        chosen = (sorted(each, key=lambda x: x[0])[:_RUNS_PER_LENGTH] for each in found.values())
        return {run: own for each in chosen for _, run, own in each}

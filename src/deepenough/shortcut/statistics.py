"""Sums over the states of all layers of a model, and what follows: maps, linear CKA and r^2.

`LayerStatistics` keeps normal equations for every source layer of a model, with the states of all
its target layers side by side as outputs.
"""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from deepenough.devices import exact, has_float64, sums_device
from deepenough.errors import UserError
from deepenough.shortcut.normal_equations import WAITING_ROWS, NormalEquations

logger = logging.getLogger("deepenough")

Targets = Literal["all", "last"]
Maps = dict[tuple[int, int], Tensor]

_BUFFER_SHARE = 0.15
"""Size of the buffer of `LayerStatistics` as a share of the statistics."""
_MIN_ROWS, _MAX_ROWS, _MAX_FILE_ROWS = 32, 384, 16_384
_REDUCED_AT_ONCE = 1 << 24
"""Sums that processes exchange at once: what they take on the way is memory, too."""


def layer_targets(num_layers: int, targets: Targets = "all") -> dict[int, range]:
    """Return the target layers of every source of a model of `num_layers` layers (one state more).

    The last layer has none, but its Gram matrix is needed to compare it with the others.
    """
    if num_layers < 1:
        raise UserError("Shortcuts need the states of at least two layers, h_0 and h_1.")
    if targets not in ("all", "last"):
        raise UserError(f"The targets {targets!r} are not known: choose 'all' or 'last'.")
    last = num_layers
    return {
        source: range(source + 1 if targets == "all" else max(source + 1, last), last + 1)
        for source in range(last + 1)
    }


def layer_pairs(num_layers: int, targets: Targets = "all") -> set[tuple[int, int]]:
    """Return the pairs `(source, target)` of layers that have a map."""
    every = layer_targets(num_layers, targets)
    return {(source, target) for source, own in every.items() for target in own}


def statistics_bytes(num_layers: int, width: int, targets: Targets = "all") -> int:
    """Return the size of the products of `LayerStatistics`."""
    every = layer_targets(num_layers, targets).values()
    return sum(1 + len(own) for own in every) * width * width * torch.float64.itemsize


def waiting_rows(num_layers: int, width: int, targets: Targets, memory: float | None = None) -> int:
    """Return how many positions wait until they are multiplied into the sums.

    `memory` are the bytes that they may take where sums are in files.
    """
    row_bytes = (num_layers + 1) * width * torch.float64.itemsize
    if memory is not None:
        return min(max(int(memory / row_bytes), _MIN_ROWS), _MAX_FILE_ROWS)
    num_rows = int(_BUFFER_SHARE * statistics_bytes(num_layers, width, targets) / row_bytes)
    return min(max(num_rows, _MIN_ROWS), _MAX_ROWS)


class LayerStatistics:
    """Sums over positions of text for all layers of a model and their targets.

    Rows are gathered in a buffer of bounded size, where they become float64, and multiplied into
    the sums when it is full: small batches then cost no more than large ones.
    """

    def __init__(
        self,
        num_layers: int,
        width: int,
        targets: Targets = "all",
        device: torch.device | str = "cpu",
        folder: Path | None = None,
        memory: float = 0.0,
    ) -> None:
        """Start from nothing; with a `folder`, sums are in files there.

        Each flush then reads and writes all of them, so that rows fill `memory` bytes before it.
        """
        device, self.in_files = sums_device(torch.device(device)), folder is not None
        self.num_layers, self.width, self.targets = num_layers, width, targets
        self.target_layers = layer_targets(num_layers, targets)
        self.equations = {
            source: NormalEquations(width, len(own) * width, device, folder=folder)
            for source, own in self.target_layers.items()
        }
        num_rows = waiting_rows(num_layers, width, targets, None if folder is None else memory)
        shape = (num_rows, num_layers + 1, width)
        self._buffer = torch.empty(shape, dtype=torch.float64, device=device)
        self._filled = 0

    @property
    def count(self) -> int:
        """Number of positions."""
        return self.equations[self.num_layers].count + self._filled

    def update(self, states: Sequence[Tensor]) -> None:
        """Add `n` positions: `L + 1` tensors `[n, d]`, row `r` of each the same position."""
        check_states(states)
        if len(states) != self.num_layers + 1 or states[0].shape[1] != self.width:
            raise UserError(
                f"{len(states)} states of width {states[0].shape[1]} do not fit: these are "
                f"statistics of {self.num_layers + 1} states of width {self.width}."
            )
        num, start = len(states[0]), 0
        while start < num:
            taken = min(num - start, len(self._buffer) - self._filled)
            rows = self._buffer[self._filled : self._filled + taken]
            for layer, state in enumerate(states):
                rows[:, layer].copy_(state[start : start + taken].to(rows.device))
            self._filled += taken
            start += taken
            if self._filled == len(self._buffer):
                self.flush()

    def flush(self) -> None:
        """Bring the rows of the buffer into the sums."""
        rows = self._buffer[: self._filled]
        for source, targets in self.target_layers.items():
            self.equations[source].add(rows[:, source], rows[:, targets.start :].flatten(1))
        self._filled = 0

    def all_reduce(self) -> None:
        """Sum over all processes, for all of them."""
        self.flush()
        count = torch.tensor(self.count, device=self._buffer.device)
        torch.distributed.all_reduce(count)
        for equations in self.equations.values():
            for sums in (equations.products, equations.sums):
                for part in sums.flatten().split(_REDUCED_AT_ONCE):
                    torch.distributed.all_reduce(part)
            equations.count = int(count)

    def state_dict(self) -> dict[str, Tensor]:
        """Return all there is, rows still in the buffer too, so that going on gives the same."""
        count = self.equations[self.num_layers].count
        state = {"count": torch.tensor(count), "rows": self._buffer[: self._filled]}
        for source, equations in self.equations.items():
            state |= {f"products.{source}": equations.products, f"sums.{source}": equations.sums}
        return state

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Go on from what `state_dict` returned; ValueError if it is of other pairs or widths."""
        self._filled = len(state["rows"])
        for name, tensor in self.state_dict().items():
            if name not in state or state[name].shape != tensor.shape:
                raise ValueError(f"{name} is missing or of another shape")
            tensor.copy_(state[name])
        for equations in self.equations.values():
            equations.count = int(state["count"])

    def solve(
        self, affine: bool = False, ridge: float = 0.0, dtype: torch.dtype = torch.float64
    ) -> tuple[Maps, Maps, list[int]]:
        """Solve for all maps; one factor of each source's Gram matrix serves all its targets.

        The statistics are used up: each source's are given back when it is done, so that all this
        needs little more memory than they did. Returned are maps, biases (none if linear), and the
        sources whose states lie in a subspace; maps have the dtype of the states, or float32.
        """
        self.flush()
        del self._buffer
        maps: Maps = {}
        biases: Maps = {}
        dependent = []
        own = torch.promote_types(dtype, torch.float32)
        for source, targets in self.target_layers.items():
            equations = self.equations.pop(source)
            if not targets:
                continue
            parts = equations.solve_parts(self.width, affine, ridge, False, dtype)
            for target, solved in zip(targets, parts, strict=True):
                maps[source, target] = solved.weight.to(own)
                if solved.bias is not None:
                    biases[source, target] = solved.bias.to(own)
            if solved.is_dependent:
                dependent.append(source)
        if dependent:
            logger.warning(
                "The states of layers %s lie in a subspace, as behind a norm without a bias: of "
                "the maps that fit equally well, the smallest were taken.",
                ", ".join(map(str, dependent)),
            )
        return maps, biases, dependent

    def cka(self) -> Tensor:
        """Return the table `[L + 1, L + 1]` of linear CKA; NaN for pairs that are not summed.

        With centred states, `K = H_i H_i^T` and `M = H_j H_j^T` (Kornblith et al., 1905.00414),

            CKA = <K, M> / (||K|| ||M||) = ||H_i^T H_j||^2 / (||H_i^T H_i|| ||H_j^T H_j||)

        in Frobenius norms. The left form needs a matrix of positions x positions, the right form
        only what the statistics hold. NaN also where a layer's states never vary.
        """
        self.flush()
        aligned = torch.full((self.num_layers + 1,) * 2, float("nan"), dtype=torch.float64)
        for source, targets in self.target_layers.items():
            equations = self.equations[source]
            aligned[source, source] = equations.gram(centred=True).square().sum()
            for place, target in enumerate(targets):
                outputs = slice(place * self.width, (place + 1) * self.width)
                block = equations.cross(outputs, centred=True)
                aligned[source, target] = aligned[target, source] = block.square().sum()
        own = aligned.diagonal().sqrt()
        return aligned / (own[:, None] * own)


class R2:
    """r^2 of given maps over a stream of states.

    It is the mean over output dimensions `k` of

        1 - sum (h_j[k] - predicted[k])^2 / sum (h_j[k] - mean[k])^2

    as scikit-learn's `r2_score` with its uniform average: a dimension that never varies counts 1 if
    it is predicted exactly and 0 otherwise. Float32 states are predicted in float32, all others in
    float64, where all sums are made: the tables of both agree to 1e-6.
    """

    def __init__(
        self, pairs: Iterable[tuple[int, int]], predict: Callable[[Tensor, int, int], Tensor]
    ) -> None:
        """Start without states; `predict(hidden, i, j)` takes states of layer `i` to layer `j`."""
        self.pairs, self.predict = list(pairs), predict
        self.residuals: dict[tuple[int, int], Tensor] = {}
        self.count = 0

    def update(self, states: Sequence[Tensor]) -> None:
        """Add positions: `L + 1` tensors `[n, d]`."""
        check_states(states)
        for start in range(0, len(states[0]), WAITING_ROWS):
            self._add([state[start : start + WAITING_ROWS] for state in states])

    def table(self) -> Tensor:
        """Return `(L + 1, L + 1)` r^2 of all positions so far; NaN where there is no map."""
        variation = self.squares - self.sums.square() / self.count
        # What is left of a constant dimension by rounding is no variation.
        noise = torch.finfo(torch.float64).eps * (self.squares + self.count * self.shift.square())
        varies = variation > noise
        table = torch.full((len(self.sums),) * 2, float("nan"), dtype=torch.float64)
        table.fill_diagonal_(1.0)
        for (i, j), residual in self.residuals.items():
            explained = 1 - residual / torch.where(varies[j], variation[j], 1.0)
            table[i, j] = torch.where(varies[j], explained, exact(residual == 0)).mean()
        return table

    def _add(self, states: list[Tensor]) -> None:
        doubles = [exact(state) for state in states]
        if self.count == 0:
            # Sums around the first mean keep their digits where a mean is far from zero.
            self.shift = torch.stack([state.mean(0) for state in doubles])
            self.sums = torch.zeros_like(self.shift)
            self.squares = torch.zeros_like(self.shift)
            self.residuals = {pair: torch.zeros_like(self.shift[0]) for pair in self.pairs}
        self.count += len(states[0])
        for layer, state in enumerate(doubles):
            shifted = state - self.shift[layer]
            self.sums[layer] += shifted.sum(0)
            self.squares[layer] += shifted.square_().sum(0)
        rows = states if states[0].dtype == torch.float32 else doubles
        for (i, j), residual in self.residuals.items():
            left = rows[j] - self.predict(rows[i], i, j)
            residual += left.square_().to(residual.device).sum(0, dtype=torch.float64)


def check_states(states: Sequence[Tensor]) -> None:
    """Refuse what is not `L + 1` tensors `[n, d]` of one shape."""
    if len(states) < 2:
        raise UserError("Give the states of at least two layers, h_0 and h_1.")
    shape = states[0].shape
    for layer, state in enumerate(states):
        if state.ndim != 2 or state.shape != shape:
            raise UserError(
                f"The states of layer {layer} have the shape {tuple(state.shape)}: give one tensor "
                f"[positions, width] for each layer, all like the first, {tuple(shape)}."
            )


def check_finite(states: Sequence[Tensor]) -> None:
    """Refuse NaN and infinity, and name the layer that has them; a device is read once."""
    device = states[0].device
    dtype = torch.float64 if has_float64(device) else torch.float32
    # A sum is finite if its terms are, short of overflow, and costs a tenth of `isfinite`.
    sums = torch.stack([state.sum(dtype=dtype).to(device) for state in states])
    for layer, is_finite in enumerate(sums.isfinite().tolist()):
        if not is_finite and not bool(states[layer].isfinite().all()):
            what = "NaN" if bool(states[layer].isnan().any()) else "infinite values"
            raise UserError(
                f"The states of layer {layer} hold {what}: run the model in float32, or look at "
                "its weights and inputs."
            )

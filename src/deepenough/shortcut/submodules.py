"""Linear fits of the parts inside each block: attention, feed-forward, norms.

Jump to Conclusions (arXiv 2303.09435), section 6: the matrix that best maps what a part reads to
what it returns, at the same token, `A = argmin ||y - A x||^2`, without intercept (affine on
request). `replacement.py` puts these maps in the places of the parts.

What a part is, is said in `deepenough.hf.layouts`: it stands between residual connections,
which are not part of it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F

from deepenough.errors import UserError
from deepenough.hf.adapter import Adapter, adapt
from deepenough.hf.intercept import (
    AfterHook,
    BeforeHook,
    LayerCounter,
    hidden_input,
    hidden_output,
    hooked,
)
from deepenough.shortcut.collect import make_reading, run_batch
from deepenough.shortcut.solve import check_enough, make_solver
from deepenough.shortcut.windows import Positions, TokenBatch, batches

KINDS = ("attention", "feed_forward", "norms")
FILE = "submodules.safetensors"

_ROWS = 512

#: One part: the modules it consists of, from the input of the first to the output of the last.
Chain = tuple[nn.Module, ...]
#: Kind, layer, and number among the parts of that kind in the block (a block has several norms).
Place = tuple[str, int, int]


def parts_of(adapter: Adapter, kinds: Sequence[str] = KINDS) -> dict[Place, Chain]:
    """All parts of these kinds; a part of a shared layer stands at every layer it is used in."""
    places: dict[Place, Chain] = {}
    for layer in range(adapter.num_layers):
        for kind, part in adapter.submodules(layer).items():
            if kind not in kinds:
                continue
            modules = tuple(part) if isinstance(part, list) else (part,)
            chains = [(module,) for module in modules] if kind == "norms" else [modules]
            places |= {(kind, layer, number): chain for number, chain in enumerate(chains)}
    if not places:
        raise UserError(
            f"{type(adapter.model).__name__} has no part that is known as {' or '.join(kinds)}: "
            "say where they are with deepenough.hf.layouts.register(...)."
        )
    return places


@dataclass(frozen=True)
class LinearMap:
    """`y = weight x + bias`."""

    weight: Tensor
    bias: Tensor | None = None

    def __call__(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self.weight, self.bias)


class PartSums:
    """Sufficient statistics of one part, in float64: `X^T [X Y]`, the sums of `x` and `y`, `n`.

    Rows wait until there are enough of them for a product to cost more than fetching its result.
    """

    def __init__(self) -> None:
        self.products = torch.zeros(0, 0, dtype=torch.float64)
        self.sums = torch.zeros(0, dtype=torch.float64)
        self.width, self.dtype = 0, torch.float32
        self.count = 0
        self._waiting: list[Tensor] = []

    def update(self, x_ND: Tensor, y_ND: Tensor) -> None:
        self._waiting.append(torch.cat((x_ND, y_ND), dim=-1))
        self.width, self.dtype = x_ND.shape[-1], x_ND.dtype
        if sum(map(len, self._waiting)) >= _ROWS:
            self.flush()

    def flush(self) -> None:
        """Bring what waits into the sums."""
        if not self._waiting:
            return
        both = torch.cat(self._waiting).double()
        self._waiting.clear()
        if not self.count:
            self.products = both.new_zeros(self.width, both.shape[-1])
            self.sums = both.new_zeros(both.shape[-1])
        self.products.addmm_(both[:, : self.width].T, both)
        self.sums += both.sum(0)
        self.count += len(both)

    def solve(self, affine: bool, ridge: float) -> LinearMap:
        """The map, in float64; the shortest where what is read leaves directions empty."""
        self.flush()
        check_enough(self.count, self.width, ridge)
        gram, cross = self.products[:, : self.width], self.products[:, self.width :]
        x_sum, y_sum = self.sums[: self.width], self.sums[self.width :]
        squares = gram.diagonal() + ridge
        if affine:
            gram = gram - torch.outer(x_sum, x_sum) / self.count
            cross = cross - torch.outer(x_sum, y_sum) / self.count
        ridged = gram + ridge * torch.eye(self.width, dtype=gram.dtype, device=gram.device)
        weight = make_solver(ridged, squares, self.dtype)[0](cross).T
        return LinearMap(weight, (y_sum - weight @ x_sum) / self.count if affine else None)


class SubmoduleStatistics:
    """Sums over all parts, gathered while the model runs at the positions that are asked for."""

    def __init__(self, adapter: Adapter, kinds: Sequence[str] = KINDS) -> None:
        self.parts = parts_of(adapter, kinds)
        self.sums = {place: PartSums() for place in self.parts}
        self._counter = LayerCounter(adapter)

    @contextmanager
    def observing(self, row_N: Tensor, position_N: Tensor) -> Iterator[None]:
        """Within, every pass adds what its parts read and return at these places of the batch."""
        uses: dict[Chain, dict[int, PartSums]] = {}
        for place, chain in self.parts.items():
            uses.setdefault(chain, {})[place[1]] = self.sums[place]
        before: list[tuple[nn.Module, BeforeHook]] = []
        after: list[tuple[nn.Module, AfterHook]] = []

        def chosen(hidden: Tensor) -> Tensor:
            batch_and_length = self._counter.shape[:2]
            return hidden.view(*batch_and_length, -1)[row_N, position_N]

        def observe(chain: Chain, sums: dict[int, PartSums]) -> None:
            seen: list[Tensor] = []

            def read(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
                seen[:] = [chosen(hidden_input(args, kwargs))]

            def returned(_: nn.Module, __: Any, output: Any) -> None:
                sums[self._counter.current].update(seen.pop(), chosen(hidden_output(output)))

            before.append((chain[0], read))
            after.append((chain[-1], returned))

        for chain, sums in uses.items():
            observe(chain, sums)
        with self._counter.counting(), hooked(before, after):
            yield


def wanted_places(batch: TokenBatch) -> tuple[Tensor, Tensor]:
    """Row and position in a batch of every token that is asked for, in the order of its states."""
    if batch.windows[0].position is not None:
        return torch.arange(len(batch.windows)), torch.tensor([w.position for w in batch.windows])
    mask = torch.ones_like(batch.ids) if batch.mask is None else batch.mask
    row, position = mask.nonzero(as_tuple=True)
    return row, position


class Submodules:
    """Linear stand-ins for the parts of every block of one model."""

    def __init__(self, maps: dict[Place, LinearMap], meta: dict[str, Any] | None = None) -> None:
        self.maps = maps
        self.meta = meta or {}

    @property
    def kinds(self) -> tuple[str, ...]:
        """Of attention, feed_forward and norms, those that are fitted."""
        return tuple(kind for kind in KINDS if any(place[0] == kind for place in self.maps))

    @classmethod
    def fit(
        cls,
        model: Any,
        tokenizer: Any,
        texts: Iterable[str],
        *,
        positions: Positions = "random",
        affine: bool = False,
        ridge: float = 0.0,
        kinds: Sequence[str] = KINDS,
        seed: int = 0,
        batch_tokens: int = 2048,
        window: int | None = None,
    ) -> Submodules:
        """Fit all parts in one pass. The statistics take two `d x d` float64 matrices for each part
        of each layer: where that is too much, fit one kind at a time."""
        adapter = adapt(model)
        statistics = SubmoduleStatistics(adapter, kinds)
        reading = make_reading(adapter, positions, seed, batch_tokens, window)
        for batch in batches(tokenizer, texts, reading):
            with statistics.observing(*wanted_places(batch)):
                run_batch(adapter, batch)
        return cls.from_statistics(statistics, adapter, affine, ridge)

    @classmethod
    def from_statistics(
        cls,
        statistics: SubmoduleStatistics,
        adapter: Adapter,
        affine: bool = False,
        ridge: float = 0.0,
    ) -> Submodules:
        """Solve for all maps, in the dtype and on the device of the model."""
        parameter = next(adapter.model.parameters())
        maps = {}
        for place, sums in statistics.sums.items():
            solved = sums.solve(affine, ridge)
            bias = None if solved.bias is None else solved.bias.to(parameter)
            maps[place] = LinearMap(solved.weight.to(parameter), bias)
        return cls(maps, {"identity": adapter.identity(), "affine": affine, "ridge": ridge})

    def check_model(self, adapter: Adapter) -> None:
        """Refuse a model whose parts are not those that were fitted."""
        fitted = self.meta.get("identity", {}).get("fingerprint")
        if fitted is not None and fitted != adapter.identity()["fingerprint"]:
            name = self.meta["identity"]["model"] or "another model"
            raise UserError(
                f"These fits of sub-modules are of {name} with other weights: fit them for the "
                "model that is measured."
            )
        if parts_of(adapter, self.kinds).keys() != self.maps.keys():
            raise UserError(
                f"These fits are of the parts of another model than {type(adapter.model).__name__}:"
                " fit them for the model that is measured."
            )

    def save_pretrained(self, folder: str | os.PathLike[str]) -> None:
        """Write the maps as safetensors, beside whatever else is in the folder."""
        tensors = {}
        for (kind, layer, number), found in self.maps.items():
            name = f"{kind}.{layer}.{number}"
            tensors[f"{name}.weight"] = found.weight.contiguous()
            if found.bias is not None:
                tensors[f"{name}.bias"] = found.bias.contiguous()
        path = Path(folder) / FILE
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(path.name + ".tmp")
        save_file(tensors, partial, metadata={"submodules": json.dumps(self.meta)})
        os.replace(partial, path)

    @classmethod
    def from_pretrained(cls, folder: str | os.PathLike[str]) -> Submodules:
        """Read what `save_pretrained` wrote."""
        path = Path(folder) / FILE
        if not path.is_file():
            raise UserError(f"{folder} has no {FILE}: fit the sub-modules first.")
        maps: dict[Place, LinearMap] = {}
        try:
            with safe_open(path, framework="pt") as file:
                meta = json.loads((file.metadata() or {})["submodules"])
                names = set(file.keys())
                for name in sorted(names):
                    kind, layer, number, what = name.split(".")
                    if what == "weight":
                        bias = name.removesuffix("weight") + "bias"
                        maps[kind, int(layer), int(number)] = LinearMap(
                            file.get_tensor(name), file.get_tensor(bias) if bias in names else None
                        )
        except (SafetensorError, ValueError, KeyError) as error:
            raise UserError(
                f"{path} is damaged or not a file of sub-modules: fit them again."
            ) from error
        return cls(maps, meta)

"""Linear stand-ins for the parts inside each block: attention, feed-forward, norms.

Jump to Conclusions (arXiv 2303.09435), section 6: `Submodules` fits the matrix that best maps what
a part reads to what it returns at the same token, `A = argmin ||y - A x||^2`, without intercept
(affine on request). `Replacement` puts these maps in the places of one kind of part in blocks `l`,
`l + 1`, ..., which shows which part of the blocks a linear map can stand for. The parts are not
computed. Where a model keeps residual and norm inside the module of a part (ALBERT's attention),
that module still runs and only its last product is replaced.

Fitted and saved, but never replaced, are the two residual connections as well, from what attention
or the feed-forward returns to the stream after it was added, where a block does just that. So all
six matrices of a block are there that the paper's code writes as `pi_0_1.pickle` to `pi_5_6.pickle`
(`SOURCE_PLACES`).

What a part is, is said in `deepenough.hf.layouts`: it stands between residual connections, which
are not part of it. Attention replaced by such a map mixes no tokens any more, so each token can be
run by itself.

Shapes: B texts, T tokens, N chosen tokens, D width.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from deepenough.devices import exact
from deepenough.errors import UserError
from deepenough.hf.adapter import Adapter
from deepenough.hf.intercept import (
    AfterHook,
    BeforeHook,
    Forward,
    LayerCounter,
    OutputForms,
    hidden_input,
    hidden_output,
    hooked,
    patched_forward,
    start_at,
)
from deepenough.shortcut.normal_equations import AffineMap, NormalEquations

KINDS = ("attention", "feed_forward", "norms")
RESIDUALS = "residuals"
#: Kind and number of the part that leads to place b = 1 ... 6 within a block of the paper's code.
SOURCE_PLACES = {
    1: ("norms", 0),
    2: ("attention", 0),
    3: (RESIDUALS, 0),
    4: ("norms", 1),
    5: ("feed_forward", 0),
    6: (RESIDUALS, 1),
}

#: One part: the modules it consists of, from the input of the first to the output of the last.
Chain = tuple[nn.Module, ...]
#: Kind, layer, and number among the parts of that kind in the block (a block has several norms).
Place = tuple[str, int, int]
#: From what a part reads to what it returns.
Function = Callable[[Tensor], Tensor]


def parts_of(adapter: Adapter) -> dict[Place, Chain]:
    """Return all parts of a model; one of a shared layer stands at every layer it serves."""
    places: dict[Place, Chain] = {}
    for layer in range(adapter.num_layers):
        for kind, part in adapter.submodules(layer).items():
            modules = tuple(part) if isinstance(part, list) else (part,)
            chains = [(module,) for module in modules] if kind == "norms" else [modules]
            places |= {(kind, layer, number): chain for number, chain in enumerate(chains)}
    if not places:
        raise UserError(
            f"{type(adapter.model).__name__} has no part that is known as {' or '.join(KINDS)}: "
            "say where they are with deepenough.hf.layouts.register(...)."
        )
    return places


class SubmoduleStatistics:
    """Sums over what all parts read and return, gathered while the model runs."""

    def __init__(
        self,
        adapter: Adapter,
        kinds: Sequence[str] = (*KINDS, RESIDUALS),
        massive: float = math.inf,
        in_single: bool = False,
    ) -> None:
        """Observe parts of these kinds, but tokens whose input or output is massive.

        That is, more than so many times the median size of those it is observed with. `in_single`
        is of `NormalEquations`.
        """
        self.in_single = in_single
        self.parts = {p: chain for p, chain in parts_of(adapter).items() if p[0] in kinds}
        self.massive = massive
        self.equations: dict[Place, NormalEquations] = {}
        self._layers = dict.fromkeys(adapter.layers if RESIDUALS in kinds else ())
        self._counter = LayerCounter(adapter)
        self.adds_both = True

    @contextmanager
    def observing(self, row_N: Tensor, position_N: Tensor) -> Iterator[None]:
        """Add what the parts read and return in every pass, at these places of the batch."""
        uses: dict[Chain, dict[int, Place]] = {}
        for place, chain in self.parts.items():
            uses.setdefault(chain, {})[place[1]] = place
        before: list[tuple[nn.Module, BeforeHook]] = []
        after: list[tuple[nn.Module, AfterHook]] = []
        stream: dict[str, Tensor] = {}

        def enter(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            stream.clear()
            stream["block"] = chosen(hidden_input(args, kwargs))

        def leave(_: nn.Module, __: Any, output: Any) -> None:
            if not self.adds_both or not {"attention", "feed_forward"} <= stream.keys():
                return
            between, end = stream["block"] + stream["attention"], chosen(hidden_output(output))
            error, size = (between + stream["feed_forward"] - end).abs(), end.abs()
            is_close = error <= 0.02 * size + 0.01 * size.median()
            self.adds_both = bool(exact(is_close).mean() > 0.99)  # but for half precision
            if self.adds_both:
                layer = self._counter.current
                self._add((RESIDUALS, layer, 0), stream["attention"], between)
                self._add((RESIDUALS, layer, 1), stream["feed_forward"], end)

        def chosen(hidden: Tensor) -> Tensor:
            batch_and_length = self._counter.shape[:2]
            return hidden.view(*batch_and_length, -1)[row_N, position_N]

        def observe(chain: Chain, places: dict[int, Place]) -> None:
            seen: list[Tensor] = []

            def read(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
                seen[:] = [chosen(hidden_input(args, kwargs))]

            def returned(_: nn.Module, __: Any, output: Any) -> None:
                x_ND, y_ND = seen.pop(), chosen(hidden_output(output))
                place = places[self._counter.current]
                stream[place[0]] = y_ND
                self._add(place, x_ND, y_ND)

            before.append((chain[0], read))
            after.append((chain[-1], returned))

        before += [(layer, enter) for layer in self._layers]
        for chain, places in uses.items():
            observe(chain, places)
        after += [(layer, leave) for layer in self._layers]
        with self._counter.counting(), hooked(before, after):
            yield

    def _add(self, place: Place, x_ND: Tensor, y_ND: Tensor) -> None:
        if self.massive < math.inf:
            size = torch.stack([x_ND.norm(dim=-1), y_ND.norm(dim=-1)])
            usual = (size <= self.massive * size.median(dim=1, keepdim=True).values).all(0)
            x_ND, y_ND = x_ND[usual], y_ND[usual]
        if place not in self.equations:
            sizes = x_ND.shape[1], y_ND.shape[1]
            self.equations[place] = NormalEquations(*sizes, x_ND.device, self.in_single)
        self.equations[place].update(x_ND, y_ND)


class Submodules:
    """Linear stand-ins for the parts of every block of one model."""

    texts: str | None = None
    """Hash of the texts they were fitted on, where that is known."""

    def __init__(self, maps: dict[Place, AffineMap], identity: dict[str, Any]) -> None:
        """Take maps and `Adapter.identity()` of the model that they are of."""
        self.maps, self.identity = maps, identity

    @property
    def kinds(self) -> tuple[str, ...]:
        """Those of attention, feed_forward and norms that are fitted."""
        return tuple(kind for kind in KINDS if any(place[0] == kind for place in self.maps))

    @classmethod
    def from_statistics(
        cls, statistics: SubmoduleStatistics, adapter: Adapter, affine: bool, ridge: float
    ) -> Submodules:
        """Solve for all maps, in the dtype and on the device of the model."""
        parameter = next(adapter.model.parameters())
        if not statistics.equations:
            raise UserError("There is no position to fit on: give texts of two tokens or more.")
        maps = {}
        for place, equations in statistics.equations.items():
            if place[0] == RESIDUALS and not statistics.adds_both:
                continue
            solved = equations.solve(affine, ridge, dtype=parameter.dtype)
            bias = None if solved.bias is None else solved.bias.to(parameter)
            maps[place] = AffineMap(solved.weight.to(parameter), bias)
        return cls(maps, adapter.identity())

    def tensors(self) -> dict[str, Tensor]:
        """Return the maps as a file has them: `part.A.KIND.LAYER.NUMBER`, biases `part.b. ...`."""
        found: dict[str, Tensor] = {}
        for place, each in sorted(self.maps.items()):
            name = ".".join(map(str, place))
            found[f"part.A.{name}"] = each.weight
            found |= {} if each.bias is None else {f"part.b.{name}": each.bias}
        return found

    @classmethod
    def take_from(cls, tensors: dict[str, Tensor], identity: dict[str, Any]) -> Submodules | None:
        """Take the maps out of the tensors of a file and return them; None where it has none."""
        maps: dict[Place, AffineMap] = {}
        for name in [name for name in tensors if name.startswith("part.A.")]:
            kind, layer, number = name.split(".")[2:]
            bias = tensors.pop(f"part.b.{kind}.{layer}.{number}", None)
            weight = tensors.pop(name)
            if weight.ndim != 2 or (bias is not None and bias.shape != weight.shape[:1]):
                raise ValueError(f"{name} is no map")
            maps[kind, int(layer), int(number)] = AffineMap(weight, bias)
        return cls(maps, identity) if maps else None


class Replacement:
    """Runs a model with fitted maps in the places of its parts."""

    def __init__(self, submodules: Submodules | None, adapter: Adapter) -> None:
        self.submodules, self.adapter = submodules, adapter
        self.counter = LayerCounter(adapter)
        self.forms = OutputForms(adapter)
        self._parts = parts_of(adapter)
        if submodules is None:
            return
        adapter.check_made_for(submodules.identity, "These fits of sub-modules")
        wanted = {place for place in self._parts if place[0] in submodules.kinds}
        if missing := wanted - submodules.maps.keys():
            raise UserError(f"These sub-modules have no map of {min(missing)}: fit them again.")

    @contextmanager
    def replaced(self, kind: str, layer: int) -> Iterator[None]:
        """Make the parts of this kind linear in block `layer` (from 0) and all later ones.

        With `layer` the number of layers, the model is as it was.
        """
        assert self.submodules is not None
        maps = self.submodules.maps
        chosen = [place for place in self._parts if place[0] == kind and place[1] >= layer]
        with self.placed({place: maps[place] for place in chosen}):
            yield

    @contextmanager
    def placed(
        self, parts: Mapping[Place, Function], layers: Mapping[int, Function] | None = None
    ) -> Iterator[None]:
        """Put functions of what they read in the places of some parts, and of whole layers."""
        uses: dict[Chain, dict[int, Function]] = {}
        for place, function in parts.items():
            uses.setdefault(self._parts[place], {})[place[1]] = function
        for layer, function in (layers or {}).items():
            uses.setdefault((self.adapter.layers[layer],), {})[layer] = function
        forwards: dict[nn.Module, Forward] = {}
        for chain, functions in uses.items():
            forwards |= self._forwards(chain, functions)
        with self.counter.counting(), patched_forward(forwards):
            yield

    def without_attention(self, layer: int, hidden_ND: Tensor) -> Tensor:
        """Return the last state `[N, D]` of tokens from their inputs of block `layer`.

        Attention is replaced: tokens then do not see each other, so each is a text of its own.
        """
        ids = torch.ones(len(hidden_ND), 1, dtype=torch.long, device=hidden_ND.device)
        return self.last_state("attention", layer, hidden_ND[:, None], ids, None)[:, 0]

    @torch.no_grad()
    def last_state(
        self, kind: str, layer: int, hidden_BTD: Tensor, ids_BT: Tensor, mask_BT: Tensor | None
    ) -> Tensor:
        """Return the last state `[B, T, D]` of texts from their inputs of block `layer`."""
        with self.replaced(kind, layer), start_at(self.counter, self.forms, layer, hidden_BTD):
            return self.adapter.states(ids_BT, attention_mask=mask_BT)[-1]

    def _forwards(self, chain: Chain, maps: dict[int, Function]) -> dict[nn.Module, Forward]:
        """Return what the modules of a part do in the layers where it is replaced.

        The first keeps what the part reads and the last returns its map; whatever stands between
        them in the model (an activation) works on something that is not used.
        """
        first, last = chain[0], chain[-1]
        contained = len(chain) > 1 and any(module is last for module in first.modules())
        read: list[Tensor] = []

        def exchanged(module: nn.Module) -> Forward:
            run = module.forward

            def forward(*args: Any, **kwargs: Any) -> Any:
                linear = maps.get(self.counter.current)
                if linear is None:
                    return run(*args, **kwargs)
                hidden = hidden_input(args, kwargs)
                if module is first:
                    read[:] = [hidden]
                if module is last:
                    return self.forms.wrap(module, linear(read.pop()))
                return run(*args, **kwargs) if contained else self.forms.wrap(module, hidden)

            return forward

        return {module: exchanged(module) for module in chain}

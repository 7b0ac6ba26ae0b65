"""Fit the maps of a choice again, in order, and correct what is kept.

The maps of `ReplaceableModel.fit` read what the full model's parts read. In the pruned model they
read something else, and nothing makes up for the errors before them. So layer by layer, with `h`
the full model's state behind a part and `h'` that of the pruned model before it:

- a map is fitted to return `h - h'` from what it now reads. Where a norm follows the part before it
  is added, it is to return what the part returns in the full model;
- a part that is kept returns `r'` from `W z`, its last product. `W` becomes `W + D`, with `D` the
  ridge regression of what is missing, `h - h' - r'`, on `z`: it costs nothing when the model runs.

The ridge is the one that is best on held-out text, and each is taken only if the KL of the output
falls there. Everything is in closed form, from one more pass over the text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from deepenough.hf.intercept import (
    AfterHook,
    BeforeHook,
    LayerCall,
    LayerStack,
    OneDnnProducts,
    StopForward,
    eval_mode,
    hidden_input,
    hidden_output,
    hooked,
)
from deepenough.shortcut.normal_equations import AffineMap, NormalEquations
from deepenough.shortcut.replaceable import (
    PARTS,
    Block,
    Choice,
    ReplaceableModel,
    behind_first,
    best_ridge,
    last_product,
    usual,
)
from deepenough.shortcut.submodules import Place

_RIDGES = (1e-3, 1e-2, 1e-1, 1.0)
"""Penalties of a correction, relative to each input's own sum of squares."""
_ACCEPTED_BY = 1_024
"""Held-out tokens by whose KL a fit is accepted."""


@dataclass
class LayerPass:
    """One layer run over a batch: its input, what its parts read and returned, its output."""

    start: Tensor
    read: dict[str, Tensor] = field(default_factory=dict)
    returned: dict[str, Tensor] = field(default_factory=dict)
    output: Tensor = field(default_factory=lambda: torch.empty(0))
    multiplied: Tensor | None = None
    """What the last product of a part reads, if that product is what the part returns."""

    @property
    def adds_up(self) -> bool:
        """Whether the layer adds what its two parts return to what it read."""
        total = self.start + self.returned["attention"] + self.returned["feed_forward"]
        return torch.allclose(total, self.output, 1e-2, 1e-2 * float(self.output.abs().median()))

    def behind(self, kind: str) -> Tensor:
        """Return the sum of the layer's input and what its parts up to this one return."""
        parts = PARTS[: PARTS.index(kind) + 1]
        return self.start + sum(self.returned[each] for each in parts)


class SequentialFit:
    """Goes through the layers of a full and of a pruned model side by side."""

    def __init__(self, whole: ReplaceableModel, choice: Choice, corrects: bool = True) -> None:
        """Take a model with its maps; with `corrects`, parts that are kept are corrected."""
        self.whole, self.choice, self.corrects = whole, choice, corrects
        self.texts = [*whole.fitted, *whole.held_out]
        self.stack = LayerStack(whole.adapter.trunk, whole.adapter.layers)
        self.calls: list[list[LayerCall]] = []
        more = {"use_cache": False} if whole.adapter.kind == "causal" else {}
        with torch.no_grad(), eval_mode(whole.adapter.model):
            for batch in self.texts:
                ids, mask = batch.inputs(whole.adapter)
                self.calls.append(self.stack.begin(input_ids=ids, attention_mask=mask, **more))
        self.full = [calls[0].hidden for calls in self.calls]
        """States of the full model before the present layer, of every text."""
        self.pruned = self.full
        """Those of the pruned model; the same list as long as nothing is replaced."""
        self.reached = 0.0
        whole.corrected = {}

    @torch.no_grad()
    def run(self, progress: Callable[[int, int], None] | None = None) -> float:
        """Fit again and return the KL that is reached on all held-out text."""
        whole, num_layers = self.whole, self.whole.adapter.num_layers
        whole.settle(self.choice)
        self.reached = whole.divergence(self.choice, tokens=_ACCEPTED_BY)
        layer = 0
        while layer < num_layers:
            run = next((run for run in self.choice.runs if run.first == layer), None)
            if run is None:
                self._fit_layer(layer)
                layer += 1
            else:
                self._fit_run(run)
                layer = run.end
            whole.settle_at(layer, self.pruned[len(whole.fitted) :])
            if progress is not None:
                progress(layer, num_layers)
        return whole.divergence(self.choice)

    def _fit_run(self, run: Block) -> None:
        """Fit the map of a run of blocks."""
        for layer in range(*run):
            self.full = [each.output for each in self._passes(layer, self.full, Choice())]
        sums = self._equations(zip(self.pruned, self.full, strict=True))
        found = best_ridge(sums[0], sums[1])
        self._accept(self.whole.maps, run, found, run.first)
        self.pruned = [self.whole.maps[run](hidden) for hidden in self.pruned]

    def _fit_layer(self, layer: int) -> None:
        """Fit the maps of a layer's parts, or correct what is kept of it."""
        full = list(self._passes(layer, self.full, Choice()))
        is_same, adds_up = self.pruned is self.full, full[0].adds_up
        passes: list[LayerPass] = []
        for kind in PARTS:
            place, passes = (kind, layer, 0), []
            mode = self.choice.parts.get(place)
            corrects = mode is None and not is_same and adds_up and self.corrects
            if mode == "linear" or corrects:
                passes = list(self._passes(layer, self.pruned, self.choice, kind))
                (self._correct if corrects else self._fit_map)(place, full, passes)
            is_same &= mode is None
        self.full = [each.output for each in full]
        if is_same:
            self.pruned = self.full
        elif adds_up and passes and (passes[0].multiplied is not None or mode == "linear"):
            self.pruned = self._outputs(place, passes)
        else:
            self.pruned = [e.output for e in self._passes(layer, self.pruned, self.choice)]

    def _fit_map(self, place: Place, full: list[LayerPass], passes: list[LayerPass]) -> None:
        """Fit the linear map of a part to what it should return in the pruned model."""
        kind, layer, _ = place
        adds_up = full[0].adds_up

        def aims() -> Iterator[tuple[Tensor, Tensor]]:
            for expected, own in zip(full, passes, strict=True):
                aim = expected.returned[kind]
                if adds_up:
                    aim = expected.behind(kind) - own.behind(kind) + own.returned[kind]
                yield own.read[kind], aim

        sums = self._equations(aims())
        self._accept(self.whole.maps, place, best_ridge(sums[0], sums[1]), layer)

    def _correct(self, place: Place, full: list[LayerPass], passes: list[LayerPass]) -> None:
        """Add to the last product of a part what brings the state behind it nearer."""
        kind, layer, _ = place
        product = last_product(self.whole.chains[place])
        if product is None or any(own.multiplied is None for own in passes):
            return

        def missing() -> Iterator[tuple[Tensor, Tensor]]:
            for expected, own in zip(full, passes, strict=True):
                assert own.multiplied is not None
                yield own.multiplied, expected.behind(kind) - own.behind(kind)

        sums = self._equations(missing())
        weight, bias = weights_of(product)
        added = best_ridge(sums[0], sums[1], _RIDGES, affine=bias is not None)
        if sums[1].excess_error(added) < 0:
            new_bias = None if bias is None or added.bias is None else bias + added.bias.to(bias)
            found = AffineMap(weight + added.weight.to(weight), new_bias)
            self._accept(self.whole.corrected, place, found, layer)

    def _outputs(self, place: Place, passes: list[LayerPass]) -> list[Tensor]:
        """Return what a layer returns with the map, or the last product, that its last part has."""
        found, kind = self.whole.maps.get(place), place[0]
        if self.choice.parts.get(place) is None:
            product = last_product(self.whole.chains[place])
            found = self.whole.corrected.get(place) or AffineMap(*weights_of(product))
        assert found is not None
        with OneDnnProducts():
            return [
                own.behind(PARTS[0])
                + found(own.read[kind] if own.multiplied is None else own.multiplied)
                for own in passes
            ]

    def _equations(self, rows: Iterable[tuple[Tensor, Tensor]]) -> list[NormalEquations]:
        """Return the sums of fitted and of held-out text."""
        sums: list[NormalEquations] = []
        for number, (batch, (x, y)) in enumerate(zip(self.texts, rows, strict=False)):
            at = behind_first(batch)
            x, y = usual([x[at], y[at]])
            if not sums:
                sizes = x.shape[1], y.shape[1], x.device
                sums = [NormalEquations(*sizes, in_single=True) for _ in range(2)]
            sums[number >= len(self.whole.fitted)].update(x, y)
        return sums

    def _accept(self, table: dict[Any, AffineMap], key: Any, found: AffineMap, layer: int) -> None:
        """Put a map into a table if the KL falls by it."""
        before = table.get(key)
        table[key] = self.whole.as_model(found)
        kl = self.whole.divergence(self.choice, layer, _ACCEPTED_BY)
        if kl < self.reached:
            self.reached = kl
        elif before is None:
            del table[key]
        else:
            table[key] = before

    def _passes(
        self, layer: int, starts: Sequence[Tensor], choice: Choice, until: str = ""
    ) -> Iterator[LayerPass]:
        """Run one layer of the model, or of what a choice makes of it, over all texts.

        With `until` it is run no further than that part, whose last product is observed.
        """
        own = LayerPass(starts[0])
        before: list[tuple[nn.Module, BeforeHook]] = []
        after: list[tuple[nn.Module, AfterHook]] = []
        seen: list[Tensor] = []

        def observe(kind: str, chain: Sequence[nn.Module]) -> None:
            def read(_: Any, args: Any, kwargs: Any) -> None:
                own.read[kind] = hidden_input(args, kwargs).view_as(own.start)

            def returned(_: Any, __: Any, output: Any) -> None:
                own.returned[kind] = hidden_output(output).view_as(own.start)
                if kind == until:
                    if seen and torch.equal(seen[1].view_as(own.start), own.returned[kind]):
                        own.multiplied = seen[0].view(*own.start.shape[:-1], -1)
                    raise StopForward

            before.append((chain[0], read))
            after.append((chain[-1], returned))

        def multiplied(_: Any, args: Any, output: Any) -> None:
            seen[:] = [args[0], output]

        if until and (product := last_product(self.whole.chains[until, layer, 0])) is not None:
            after.append((product, multiplied))
        for kind in PARTS:
            observe(kind, self.whole.chains[kind, layer, 0])
        counter = self.whole.replacement.counter
        with self.whole.replaced(choice), hooked(before, after), OneDnnProducts(in_half=True):
            for calls, start in zip(self.calls, starts, strict=True):
                own = LayerPass(start)
                seen.clear()
                counter.current = layer - 1  # as the model's own loop would have it
                with suppress(StopForward):
                    own.output = self.stack.run(layer, start, calls)
                yield own


def weights_of(product: Any) -> tuple[Tensor, Tensor | None]:
    """Return weight `[outputs, inputs]` and bias of a linear module."""
    return product.weight.T if isinstance(product, Conv1D) else product.weight, product.bias


def parameters_of(product: nn.Module, found: AffineMap) -> dict[str, Tensor]:
    """Return a map as the parameters of a linear module, by name."""
    weight = found.weight.T if isinstance(product, Conv1D) else found.weight
    return {"weight": weight} if found.bias is None else {"weight": weight, "bias": found.bias}

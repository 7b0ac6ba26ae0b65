"""The model with one kind of part replaced by linear maps, from a layer on.

Attention, feed-forward or norms of blocks `l`, `l + 1`, ... are exchanged for their linear fits
(Jump to Conclusions, arXiv 2303.09435, section 6), which shows which part of the blocks a linear
map can stand for. The parts are not computed. Where a model keeps residual and norm inside the
module of a part (ALBERT's attention), that module still runs and only its last product is replaced.

Attention replaced by such a map mixes no tokens any more, so each token can be run by itself.

Shapes: B texts, T tokens, N chosen tokens, D width.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from deepenough.hf.adapter import Adapter
from deepenough.hf.intercept import (
    Forward,
    LayerCounter,
    OutputForms,
    hidden_input,
    last_mlp_at_one_token,
    patched_forward,
    start_at,
)
from deepenough.shortcut.folding import folded, readers_of
from deepenough.shortcut.submodules import Chain, LinearMap, Submodules, parts_of


class Replacement:
    """Puts fitted maps in the places of a model's parts."""

    def __init__(self, submodules: Submodules, adapter: Adapter) -> None:
        submodules.check_model(adapter)
        self.submodules, self.adapter = submodules, adapter
        self.counter = LayerCounter(adapter)
        self.forms = OutputForms(adapter)
        self._parts = parts_of(adapter, submodules.kinds)
        self._readers: dict[nn.Module, list[nn.Module]] = {}
        self._folded: dict[tuple[nn.Module, int], LinearMap] = {}

    def fold_norms(self) -> bool:
        """Multiply the maps of norms into the layers that read them, where that is the same.

        For speed: it costs the memory of those layers' weights once more. Returns whether it is.
        """
        norms = {chain[0]: place for place, chain in self._parts.items() if place[0] == "norms"}
        readers = readers_of(self.adapter, list(norms))
        if not norms or not all(readers.values()):
            return False
        ids = torch.arange(1, 4, device=self.adapter.model.device)[None]

        def last_state() -> Tensor:
            with self.replaced("norms", 0):
                return self.adapter.states(ids, torch.ones_like(ids))[-1]

        expected = last_state()
        self._readers = readers
        if not bool((last_state() - expected).norm() <= 1e-4 * expected.norm()):
            self._readers, self._folded = {}, {}
        return bool(self._readers)

    @contextmanager
    def replaced(self, kind: str, layer: int) -> Iterator[None]:
        """Within, the parts of this kind in block `layer` (from 0) and all later ones are linear.

        With `layer` the number of layers, the model is as it was.
        """
        uses: dict[Chain, dict[int, LinearMap]] = {}
        for (part_kind, part_layer, number), chain in self._parts.items():
            if part_kind == kind and part_layer >= layer:
                found = self.submodules.maps[part_kind, part_layer, number]
                uses.setdefault(chain, {})[part_layer] = found
        forwards: dict[nn.Module, Forward] = {}
        for chain, maps in uses.items():
            if readers := self._readers.get(chain[0]) if kind == "norms" else None:
                forwards |= self._folded_forwards(chain[0], readers, maps)
            else:
                forwards |= self._forwards(chain, maps)
        with self.counter.counting(), patched_forward(forwards):
            yield

    def without_attention(self, layer: int, hidden_ND: Tensor) -> Tensor:
        """The last state `[N, D]` of tokens from their inputs of block `layer`, attention replaced:
        tokens then do not see each other, so each is a text of its own."""
        ids = torch.ones(len(hidden_ND), 1, dtype=torch.long, device=hidden_ND.device)
        return self.last_state("attention", layer, hidden_ND[:, None], ids)[:, 0]

    @torch.no_grad()
    def last_state(
        self,
        kind: str,
        layer: int,
        hidden_BTD: Tensor,
        ids_BT: Tensor,
        mask_BT: Tensor | None = None,
        position_B: Tensor | None = None,
    ) -> Tensor:
        """The last state `[B, T, D]` of texts from their inputs of block `layer`.

        If `position_B` is given, the state is right at that position of each text only.
        """
        with ExitStack() as stack:
            stack.enter_context(self.replaced(kind, layer))
            stack.enter_context(start_at(self.counter, self.forms, layer, hidden_BTD))
            if position_B is not None:
                stack.enter_context(last_mlp_at_one_token(self.counter, position_B))
            return self.adapter.states(ids_BT, attention_mask=mask_BT)[-1]

    def _forwards(self, chain: Chain, maps: dict[int, LinearMap]) -> dict[nn.Module, Forward]:
        """What the modules of a part do in the layers where it is replaced.

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

    def _folded_forwards(
        self, norm: nn.Module, readers: list[nn.Module], maps: dict[int, LinearMap]
    ) -> dict[nn.Module, Forward]:
        """The norm hands on what it reads; its readers apply its map and their own in one."""

        def exchanged(module: nn.Module) -> Forward:
            run = module.forward

            def forward(*args: Any, **kwargs: Any) -> Any:
                layer = self.counter.current
                if layer not in maps:
                    return run(*args, **kwargs)
                hidden = hidden_input(args, kwargs)
                if module is norm:
                    return self.forms.wrap(norm, hidden)
                if (module, layer) not in self._folded:
                    self._folded[module, layer] = folded(module, maps[layer])
                return self._folded[module, layer](hidden)

            return forward

        return {module: exchanged(module) for module in (norm, *readers)}

"""A forward pass in which tokens leave early: the logits of every position, as its exit gives them.

Likelihoods of an exiting model are those of the text it would have written: a position that leaves
after layer `l` predicts from there, and later positions find in the layers it skipped what the fill
puts there. Layer `j` needs of a position only what it reads, so all positions go up together, layer
by layer, and one pass gives what decoding gives token by token.

This is for measuring, not for speed: a layer runs for all positions if one has got there. It goes
through the model's own layers, hence for every architecture, and the model makes logits and losses
itself, from last states that were put in.

As in a text generated from its first token on, the first position runs through all layers.

Shapes: B texts, T tokens, D width, N positions.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from deepenough.decoding.costs import Costs
from deepenough.decoding.engine import Engine
from deepenough.decoding.leaving import EarlyExit, ExitTest, Streaks
from deepenough.hf.intercept import hidden_input, this_thread_only
from deepenough.trace import DepthTrace

#: Positions whose probabilities are held at once.
_CHUNK = 256


class ExitPass:
    """The positions of one forward pass on their way up.

    `place_BT` is how many tokens of its text come before each, negative for padding. `may_BT` says
    which may leave; by default all that are not first or padding.
    """

    def __init__(
        self, engine: Engine, early: EarlyExit, place_BT: Tensor, may_BT: Tensor | None = None
    ) -> None:
        self.engine, self.early = engine, early
        self.test = ExitTest(engine, early)
        self.place_N = place_BT.flatten()
        self.going_N = (self.place_N > 0) if may_BT is None else may_BT.flatten()
        self.depth_N = torch.full_like(self.place_N, engine.num_layers)
        self.tests_N = torch.zeros_like(self.place_N)
        self.heads_N = torch.zeros_like(self.place_N)
        self.streaks = Streaks.none(len(self.place_N), place_BT.device)
        self.left_ND = torch.empty(0)
        self.last_ND = torch.empty(0)

    def check(self, layer: int, hidden_ND: Tensor) -> None:
        """Who leaves after `layer`."""
        for units in self.going_N.nonzero()[:, 0].split(_CHUNK):
            jumped = self.test.jump(layer, hidden_ND[units])
            answer = self.test.ask(layer, jumped, self.place_N[units], units, self.streaks)
            self.tests_N[units] += 1
            self.heads_N[units] += answer.asked_N
            gone = units[answer.leaves_N]
            self.depth_N[gone] = layer
            self.going_N[gone] = False
            self.left_ND[gone] = hidden_ND[gone]
            self.last_ND[gone] = jumped[answer.leaves_N]

    def reads(self, index: int, hidden_BTD: Tensor) -> Tensor:
        """What layer `index` (from 0) reads: of those that have left, what the fill says."""
        hidden_ND = hidden_BTD.flatten(0, 1)
        if index == 0:
            self.left_ND, self.last_ND = torch.zeros_like(hidden_ND), torch.zeros_like(hidden_ND)
        if index in self.early.layers:
            self.check(index, hidden_ND)
        if self.early.fill == "deferred":
            return hidden_BTD
        hidden_ND = hidden_ND.clone()
        for depth in self.depth_N[self.depth_N < index].unique().tolist():
            there = self.depth_N == depth
            left = self.left_ND[there]
            copied = self.early.fill == "copy"
            hidden_ND[there] = left if copied else self.early.shortcuts.apply(left, depth, index)
        return hidden_ND.view_as(hidden_BTD)

    def ends(self, hidden_BTD: Tensor) -> Tensor:
        """`h_L`, of those that have left as they said it would be."""
        left_N = self.depth_N < self.engine.num_layers
        hidden_ND = torch.where(left_N[:, None], self.last_ND, hidden_BTD.flatten(0, 1))
        return hidden_ND.view_as(hidden_BTD)

    def trace(self, batch: int) -> DepthTrace:
        """Depth and cost of every position; padding has none."""
        costs, last = Costs(self.engine.adapter), self.engine.num_layers
        depth_N = torch.where(self.place_N < 0, 0, self.depth_N).cpu()
        flops = []
        for place, depth, tests, heads in zip(
            self.place_N.tolist(),
            depth_N.tolist(),
            self.tests_N.tolist(),
            self.heads_N.tolist(),
            strict=True,
        ):
            # A position that is not first has all its tests behind it, and then one whole head.
            heads = heads + (depth == last)
            cost = costs.token(place + 1, 0, depth) + tests * self.test.flops
            cost += heads * costs.head + costs.filling(depth, self.early.fill)
            flops.append(cost if depth else 0.0)
        depth_BT = depth_N.view(batch, -1)
        ran = torch.arange(last) < depth_BT[..., None]
        return DepthTrace(depth_BT, ran, torch.tensor(flops, dtype=torch.float64).view(batch, -1))

    @contextmanager
    def put_in(self) -> Iterator[None]:
        """Within, a pass of the model goes this way."""
        layers = self.engine.adapter.layers

        def before(index: int) -> Callable[..., Any]:
            def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
                hidden = self.reads(index, hidden_input(args, kwargs))
                if args:
                    return (hidden, *args[1:]), kwargs
                return args, {**kwargs, "hidden_states": hidden}

            return hook

        def after(_: nn.Module, __: Any, output: Any) -> Any:
            if isinstance(output, tuple):
                return (self.ends(output[0]), *output[1:])
            return self.ends(output)

        handles = [
            layer.register_forward_pre_hook(this_thread_only(before(index)), with_kwargs=True)
            for index, layer in enumerate(layers)
        ]
        handles.append(layers[-1].register_forward_hook(this_thread_only(after)))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


def places(ids_BT: Tensor, mask_BC: Tensor | None, past: int) -> Tensor:
    """How many tokens of its text come before each position; negative for padding."""
    batch, width = ids_BT.shape
    if mask_BC is None or mask_BC.ndim != 2:
        return (torch.arange(width, device=ids_BT.device) + past).repeat(batch, 1)
    seen_BT = mask_BC.to(ids_BT.device).long()
    return (seen_BT.cumsum(1) - 1).masked_fill(seen_BT == 0, -1)[:, -width:]


class ExitForward:
    """What `accelerate` puts in front of a model's class so that a plain call has exits too."""

    _exit_engine: Any
    _exit_early: EarlyExit | None
    _exit_lock: Any
    trace: DepthTrace | None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """As the model's own; of an exiting model, with the logits of every position's exit."""
        early = self._exit_early
        own = super().forward  # type: ignore[misc]
        given = {} if early is None else inspect.signature(own).bind(*args, **kwargs).arguments
        ids_BT = given.get("input_ids")
        if early is None or ids_BT is None:
            return own(*args, **kwargs)
        cache = given.get("past_key_values")
        past = 0 if cache is None else cache.get_seq_length()
        place_BT = places(ids_BT, given.get("attention_mask"), past)
        with self._exit_lock, torch.no_grad():
            way = ExitPass(self._exit_engine, early, place_BT)
            with way.put_in():
                output = own(*args, **kwargs)
        self.trace = way.trace(len(ids_BT))
        return output

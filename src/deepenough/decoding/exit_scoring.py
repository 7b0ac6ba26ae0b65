"""Exits over whole texts at once: the logits of every position, and which exits are worth having.

*Scoring.* A position that leaves after layer `l` predicts from there, and later positions find in
the layers it skipped what KV propagation puts there. All positions go up together, layer by layer,
so one forward pass gives what decoding gives token by token. This is for measuring, not for speed:
every layer runs for all positions. It goes through the model's own layers, hence for every
architecture. As in a text generated from its first token on, the first position runs through all
layers.

*Choosing the exit.* A check pays only for tokens that leave and are right. The model writes a few
texts, and the layer is taken at which a token would read the fewest weights, which is what decoding
waits for. A token that leaves with another prediction than the full model's counts as if it had
gone all the way, so exits whose confidence is not earned are not chosen for their speed.

Shapes: B texts, T tokens, D width, N positions.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from deepenough.decoding.early_exit import ExitCheck, ExitRule
from deepenough.decoding.engine import Engine
from deepenough.decoding.request import plain_request
from deepenough.decoding.verification import decode
from deepenough.devices import exact
from deepenough.hf.intercept import (
    hidden_input,
    hidden_output,
    hooked,
    with_hidden_input,
    with_hidden_output,
)
from deepenough.trace import DepthTrace

#: Positions whose probabilities are held at once.
_CHUNK = 256
#: Texts that the model writes to plan by, tokens of these that are sampled, and their length.
_PLANNING_TEXTS, _SAMPLED_TOKENS, _PLANNING_LENGTH = 8, 6, 24
#: More layers than this are not considered one by one.
_MOST_CANDIDATES = 16


# -- scoring -------------------------------------------------------------------------------------


class ExitForwardPass:
    """The positions of one forward pass on their way up.

    Args:
        engine: The model.
        rule: Where tokens may leave.
        generated_BT: How many tokens of its text come before each position; negative for padding.
            Only positions with tokens before them may leave.
    """

    def __init__(self, engine: Engine, rule: ExitRule, generated_BT: Tensor) -> None:
        self.engine, self.rule = engine, rule
        self.check = ExitCheck(engine, rule)
        self.generated_N = generated_BT.flatten()
        self.going_N = self.generated_N > 0
        self.depth_N = torch.full_like(self.generated_N, engine.num_layers)
        self.checks_N = torch.zeros_like(self.generated_N)
        self.heads_N = torch.zeros_like(self.generated_N)
        self.left_ND = torch.empty(0)
        self.last_ND = torch.empty(0)

    @contextmanager
    def patched(self) -> Iterator[None]:
        """Make the forward passes of the model leave early while the context is open."""
        layers = self.engine.adapter.layers

        def before(index: int, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            hidden = self._layer_input(index, hidden_input(args, kwargs))
            return with_hidden_input(args, kwargs, hidden)

        def after(_: nn.Module, __: Any, output: Any) -> Any:
            return with_hidden_output(output, self._last_output(hidden_output(output)))

        hooks = [(layer, partial(before, index)) for index, layer in enumerate(layers)]
        with hooked(hooks, [(layers[-1], after)], this_thread=True):
            yield

    def _layer_input(self, index: int, hidden_BTD: Tensor) -> Tensor:
        """Return what layer `index` (from 0) reads, for tokens that left as propagated."""
        hidden_ND = hidden_BTD.flatten(0, 1)
        if index == 0:
            self.left_ND, self.last_ND = torch.zeros_like(hidden_ND), torch.zeros_like(hidden_ND)
        if index in self.rule.layers:
            self._check_exits(index, hidden_ND)
        if self.rule.kv_propagation == "deferred":
            return hidden_BTD
        hidden_ND = hidden_ND.clone()
        for depth in self.depth_N[self.depth_N < index].unique().tolist():
            there = self.depth_N == depth
            hidden_ND[there] = self.rule.next_input(self.left_ND[there], depth, index)
        return hidden_ND.view_as(hidden_BTD)

    def _check_exits(self, layer: int, hidden_ND: Tensor) -> None:
        for units in self.going_N.nonzero()[:, 0].split(_CHUNK):
            jumped = self.check.jump(layer, hidden_ND[units])
            decision = self.check.decide(layer, jumped, self.generated_N[units])
            self.checks_N[units] += 1
            self.heads_N[units[decision.full_head]] += 1
            gone = units[decision.leaving]
            self.depth_N[gone] = layer
            self.going_N[gone] = False
            self.left_ND[gone] = hidden_ND[gone]
            self.last_ND[gone] = jumped[decision.leaving]

    def _last_output(self, hidden_BTD: Tensor) -> Tensor:
        """Return `h_L`, for tokens that left as their shortcut predicts it."""
        left_N = self.depth_N < self.engine.num_layers
        hidden_ND = torch.where(left_N[:, None], self.last_ND, hidden_BTD.flatten(0, 1))
        return hidden_ND.view_as(hidden_BTD)

    def trace(self, batch: int) -> DepthTrace:
        """Return depth and cost of every position; padding has none."""
        costs, last = self.engine.costs, self.engine.num_layers
        kept = (self.generated_N, self.depth_N, self.checks_N, self.heads_N)
        generated_N, depth_N, checks_N, heads_N = (counts.cpu() for counts in kept)
        # A position that left has its head among the checks; the others have one at the end.
        heads_N = heads_N + (depth_N == last)
        flops_N = exact(checks_N) * self.check.flops + heads_N * costs.head
        places = zip(generated_N.tolist(), depth_N.tolist(), strict=True)
        for unit, (before, depth) in enumerate(places):
            flops_N[unit] += costs.token(before + 1, 0, depth)
            flops_N[unit] += costs.filling(depth, self.rule.kv_propagation)
        if self.rule.kv_propagation == "deferred":
            flops_N += self._taken_along(batch)
        padding_N = generated_N < 0
        depth_BT = depth_N.masked_fill(padding_N, 0).view(batch, -1)
        flops_BT = flops_N.masked_fill(padding_N, 0.0).view(batch, -1)
        return DepthTrace(depth_BT, torch.arange(last) < depth_BT[..., None], flops_BT)

    def _taken_along(self, batch: int) -> Tensor:
        """Return what the layers cost that positions run for earlier ones, which had left."""
        costs, found = self.engine.costs, []
        befores, depths = self.generated_N.view(batch, -1), self.depth_N.view(batch, -1)
        for before_T, depth_T in zip(befores.tolist(), depths.tolist(), strict=True):
            waiting = [0] * (self.engine.num_layers + 1)  # positions by the layer they are at
            for before, depth in zip(before_T, depth_T, strict=True):
                taken = [(count, layer) for layer, count in enumerate(waiting[:depth]) if count]
                flops = [count * costs.token(before + 1, layer, depth) for count, layer in taken]
                found.append(sum(flops))
                waiting[:depth] = [0] * depth
                waiting[depth] += sum(count for count, _ in taken) + (before >= 0)
        return torch.tensor(found, dtype=torch.float64)


def count_before(ids_BT: Tensor, mask_BC: Tensor | None, past: int) -> Tensor:
    """Return how many tokens of its text come before each position; negative for padding."""
    batch, width = ids_BT.shape
    if mask_BC is None or mask_BC.ndim != 2:
        return (torch.arange(width, device=ids_BT.device) + past).repeat(batch, 1)
    seen_BT = mask_BC.to(ids_BT.device).long()
    return (seen_BT.cumsum(1) - 1).masked_fill(seen_BT == 0, -1)[:, -width:]


# -- choosing the exit ---------------------------------------------------------------------------


def write_planning_texts(engine: Engine) -> Tensor:
    """Return texts `[B, T]` that the model writes: begun by sampling, continued greedily."""
    model: Any = engine.adapter.model
    start = model.config.get_text_config().bos_token_id
    ids_BT = torch.full((_PLANNING_TEXTS, 1), int(start or 0), device=model.device)
    limit, greedy = engine.max_length, _PLANNING_LENGTH - _SAMPLED_TOKENS - 1
    for generator, new in ((torch.Generator().manual_seed(0), _SAMPLED_TOKENS), (None, greedy)):
        request = plain_request(
            model, ids_BT, None, new, limit, generator=generator, stop_at_eos=False
        )
        rows = decode(engine, request).rows
        ids_BT = torch.tensor([row.ids for row in rows], device=model.device)
    engine.release()
    return ids_BT


@torch.inference_mode()
def choose_exits(engine: Engine, rule: ExitRule) -> list[int]:
    """Return the one layer whose exit saves most, whatever the layers of `rule` are."""
    adapter, last = engine.adapter, engine.num_layers
    stride = -(-(last - 1) // _MOST_CANDIDATES)
    layers = list(range(last - 1, 0, -stride))[::-1]
    ids_BT = write_planning_texts(engine)
    # The first tokens of a text are like no others.
    skipped = min(_SAMPLED_TOKENS, ids_BT.shape[1] // 2)
    states = [h[:, skipped:].flatten(0, 1) for h in adapter.states(ids_BT)]
    generated = torch.arange(ids_BT.shape[1] - skipped, device=ids_BT.device)
    generated_N = generated.repeat(len(ids_BT))
    expected_N = engine.head(engine.norm(states[-1])).argmax(-1)
    check = ExitCheck(engine, replace(rule, layers=layers))
    square = adapter.width**2
    run = sum(p.numel() for layer in adapter.layers for p in layer.parameters()) / last
    skip = {"shortcut": 3 * square, "copy": 2 * square, "deferred": 0}[rule.kv_propagation]
    head = adapter.width * adapter.model.config.get_text_config().vocab_size
    # Without an exit vocabulary the check has the head that a token leaves with.
    leave = 0 if rule.exit_vocab is None else head

    def cost(layer: int) -> float:
        decision = check.decide(layer, check.jump(layer, states[layer]), generated_N)
        right = decision.logits.argmax(-1) == expected_N[decision.leaving]
        share = int(right.sum()) / len(generated_N)
        left = layer * run + (last - layer) * skip + leave
        return share * left + (1 - share) * (last * run + head)

    return [min(layers, key=cost)]

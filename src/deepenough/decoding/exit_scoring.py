"""Exits over whole texts at once: the logits of every position, and which exits are worth having.

*Scoring.* The likelihoods of an exiting model are those of the text it would have written: a
position that leaves after layer `l` predicts from there, and later positions find in the layers it
skipped what KV propagation puts there. Layer `j` needs of a position only what it reads, so all
positions go up together, layer by layer, and one forward pass gives what decoding gives token by
token. This is for measuring, not for speed: a layer runs for all positions if one has got there. It
goes through the model's own layers, hence for every architecture, and the model makes logits and
losses itself. As in a text generated from its first token on, the first position runs through all
layers.

*Planning.* A check at an exit costs time, and pays only for tokens that leave there and are right.
From tokens whose whole way up is known (does the policy let go at layer `l`, and is the token the
last layer's?) the expected time of a set of exits follows, and the set is grown one layer at a
time, each time by the one that saves most, until none does. A token that leaves with another
prediction than the full model's saves nothing: it counts as if it had gone all the way, so exits
whose confidence is not earned are not chosen for their speed. Without texts to look at, the model
writes some itself. Costs are the weights that a token reads, which is what decoding waits for; that
is the same for every run, and so are the exits.

Shapes: B texts, T tokens, D width, N positions, E layers that may become exits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from deepenough.decoding.early_exit import ExitCheck, ExitRule, Streaks
from deepenough.decoding.engine import DecodingCosts, Engine
from deepenough.decoding.request import plain_request
from deepenough.decoding.verification import decode
from deepenough.hf.intercept import hidden_input, hooked, with_hidden_input, with_hidden_output
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
        may_exit_BT: Which positions may leave; by default all that are not first or padding.
    """

    def __init__(
        self,
        engine: Engine,
        rule: ExitRule,
        generated_BT: Tensor,
        may_exit_BT: Tensor | None = None,
    ) -> None:
        self.engine, self.rule = engine, rule
        self.check = ExitCheck(engine, rule)
        self.generated_N = generated_BT.flatten()
        self.going_N = (self.generated_N > 0) if may_exit_BT is None else may_exit_BT.flatten()
        self.depth_N = torch.full_like(self.generated_N, engine.num_layers)
        self.checks_N = torch.zeros_like(self.generated_N)
        self.heads_N = torch.zeros_like(self.generated_N)
        self.streaks = Streaks.none(len(self.generated_N), generated_BT.device)
        self.left_ND = torch.empty(0)
        self.last_ND = torch.empty(0)

    @contextmanager
    def patched(self) -> Iterator[None]:
        """Make the forward passes of the model leave early while the context is open."""
        layers = self.engine.adapter.layers

        def before(index: int) -> Callable[..., Any]:
            def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
                hidden = self._layer_input(index, hidden_input(args, kwargs))
                return with_hidden_input(args, kwargs, hidden)

            return hook

        def after(_: nn.Module, __: Any, output: Any) -> Any:
            hidden = output[0] if isinstance(output, tuple) else output
            return with_hidden_output(output, self._last_output(hidden))

        hooks = [(layer, before(index)) for index, layer in enumerate(layers)]
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
            generated = self.generated_N[units]
            decision = self.check.decide(layer, jumped, generated, units, self.streaks)
            self.checks_N[units] += 1
            self.heads_N[units] += decision.full_head_N
            gone = units[decision.exits_N]
            self.depth_N[gone] = layer
            self.going_N[gone] = False
            self.left_ND[gone] = hidden_ND[gone]
            self.last_ND[gone] = jumped[decision.exits_N]

    def _last_output(self, hidden_BTD: Tensor) -> Tensor:
        """Return `h_L`, for tokens that left as their shortcut predicts it."""
        left_N = self.depth_N < self.engine.num_layers
        hidden_ND = torch.where(left_N[:, None], self.last_ND, hidden_BTD.flatten(0, 1))
        return hidden_ND.view_as(hidden_BTD)

    def trace(self, batch: int) -> DepthTrace:
        """Return depth and cost of every position; padding has none."""
        costs, last = DecodingCosts(self.engine.adapter), self.engine.num_layers
        # A position that left has its head among the checks; the others have one at the end.
        heads_N = self.heads_N + (self.depth_N == last)
        flops_N = self.checks_N.double() * self.check.flops + heads_N * costs.head
        for unit, (before, depth) in enumerate(
            zip(self.generated_N.tolist(), self.depth_N.tolist(), strict=True)
        ):
            flops_N[unit] += costs.token(before + 1, 0, depth)
            flops_N[unit] += costs.filling(depth, self.rule.kv_propagation)
        padding_N = self.generated_N < 0
        depth_BT = self.depth_N.masked_fill(padding_N, 0).view(batch, -1).cpu()
        flops_BT = flops_N.masked_fill(padding_N, 0.0).view(batch, -1).cpu()
        return DepthTrace(depth_BT, torch.arange(last) < depth_BT[..., None], flops_BT)


def count_before(ids_BT: Tensor, mask_BC: Tensor | None, past: int) -> Tensor:
    """Return how many tokens of its text come before each position; negative for padding."""
    batch, width = ids_BT.shape
    if mask_BC is None or mask_BC.ndim != 2:
        return (torch.arange(width, device=ids_BT.device) + past).repeat(batch, 1)
    seen_BT = mask_BC.to(ids_BT.device).long()
    return (seen_BT.cumsum(1) - 1).masked_fill(seen_BT == 0, -1)[:, -width:]


# -- planning ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ExitPrices:
    """What a token pays, in any unit."""

    layer: float
    check: float
    """A map and the head of the exit vocabulary; without one, the whole head."""
    head: float
    fill: float
    """Keys and values of a layer that is skipped."""


def weight_prices(engine: Engine, rule: ExitRule) -> ExitPrices:
    """Return prices in weights that are read."""
    adapter, width = engine.adapter, engine.adapter.width
    config = adapter.model.config.get_text_config()
    layer = sum(p.numel() for each in adapter.layers for p in each.parameters())
    head = float(width * config.vocab_size)
    checked = head if rule.exit_vocab is None else float(width * len(rule.exit_vocab))
    kv = width * width * 2.0
    filled = {"shortcut": width * width + kv, "copy": kv, "deferred": 0.0}[rule.kv_propagation]
    return ExitPrices(layer / adapter.num_layers, width * width + checked, head, filled)


def expected_price(
    exits_EN: Tensor,
    right_EN: Tensor,
    layers: Sequence[int],
    chosen: Sequence[int],
    num_layers: int,
    prices: ExitPrices,
    partial_head: bool,
) -> float:
    """Return the mean price of a token with the exits `chosen`.

    The rows of `exit_tables` are `layers`. With `partial_head`, checks look at a part of the
    vocabulary first.
    """
    order = [layers.index(layer) for layer in sorted(chosen)]
    exits_XN, right_XN = exits_EN[order], right_EN[order]
    left_N = exits_XN.any(0)
    first_N = exits_XN.to(torch.uint8).argmax(0)  # the first exit that lets go
    checks_N = torch.where(left_N, first_N + 1, len(order)).double()
    saves_N = left_N & right_XN.gather(0, first_N[None])[0]
    depth_N = torch.where(saves_N, torch.tensor(sorted(chosen))[first_N], num_layers).double()
    # Without an exit vocabulary the check of a token that leaves is its choice as well.
    heads_N = torch.ones_like(depth_N) if partial_head else (~saves_N).double()
    price_N = depth_N * prices.layer + (num_layers - depth_N) * prices.fill
    return float((price_N + checks_N * prices.check + heads_N * prices.head).mean())


def grow_exits(price: Callable[[list[int]], float], layers: Sequence[int]) -> list[int]:
    """Return the set that no further layer makes cheaper; at least one layer."""
    chosen: list[int] = []
    best = float("inf")
    while left := [layer for layer in layers if layer not in chosen]:
        found, layer = min((price(sorted([*chosen, layer])), layer) for layer in left)
        if found >= best:
            break
        best, chosen = found, sorted([*chosen, layer])
    return chosen


def candidate_layers(num_layers: int) -> list[int]:
    """Return layers that may become exits: all but the last, or of very many an even spread."""
    stride = -(-(num_layers - 1) // _MOST_CANDIDATES)
    return list(range(num_layers - 1, 0, -stride))[::-1] if num_layers > 1 else []


@torch.inference_mode()
def exit_tables(
    engine: Engine, rule: ExitRule, states: Sequence[Tensor], generated_N: Tensor
) -> tuple[Tensor, Tensor]:
    """Return for every exit and token whether it would leave, and whether it would be right.

    `states` are `h_0 ... h_L` of the tokens, each `[N, D]`, and `generated_N` is how many tokens
    come before each in its text.
    """
    check = ExitCheck(engine, rule)
    units, exits, right = len(generated_N), [], []
    expected_N = torch.cat(
        [engine.head(engine.norm(part)).argmax(-1) for part in states[-1].split(_CHUNK)]
    )
    streaks = Streaks.none(units, generated_N.device)
    for layer in sorted(set(rule.layers)):
        exits_N = torch.zeros(units, dtype=torch.bool)
        right_N = torch.zeros(units, dtype=torch.bool)
        for part in torch.arange(units, device=generated_N.device).split(_CHUNK):
            jumped = check.jump(layer, states[layer][part])
            decision = check.decide(layer, jumped, generated_N[part], part, streaks)
            gone = part[decision.exits_N]
            exits_N[gone.cpu()] = True
            right_N[gone.cpu()] = (decision.logits.argmax(-1) == expected_N[gone]).cpu()
        exits.append(exits_N)
        right.append(right_N)
    return torch.stack(exits), torch.stack(right)


def write_planning_texts(engine: Engine, seed: int = 0) -> Tensor:
    """Return texts `[B, T]` that the model writes: begun by sampling, continued greedily."""
    model: Any = engine.adapter.model
    start = model.config.get_text_config().bos_token_id
    limit = engine.adapter.max_length or _PLANNING_LENGTH
    length = min(_PLANNING_LENGTH, limit - 1)
    ids_BT = torch.full((_PLANNING_TEXTS, 1), int(start or 0), device=model.device)
    generator = torch.Generator().manual_seed(seed)
    for drawn_by, upto in ((generator, min(_SAMPLED_TOKENS + 1, length)), (None, length)):
        new = upto - ids_BT.shape[1]
        if new > 0:
            request = plain_request(
                model, ids_BT, None, new, None, generator=drawn_by, stop_at_eos=False
            )
            rows = decode(engine, request).rows
            ids_BT = torch.tensor([row.ids for row in rows], device=model.device)
    engine.release()
    return ids_BT


def choose_exits(
    engine: Engine,
    rule: ExitRule,
    ids_BT: Tensor | None = None,
    prices: ExitPrices | None = None,
) -> list[int]:
    """Return the layers that are worth an exit, whatever the layers of `rule` are.

    By default the model writes the texts `ids_BT` itself, and `prices` are `weight_prices`.
    """
    layers = candidate_layers(engine.num_layers) or [1]
    wide = replace(rule, layers=layers)
    ids_BT = write_planning_texts(engine) if ids_BT is None else ids_BT
    # The first tokens of a text are like no others.
    skipped = min(_SAMPLED_TOKENS, ids_BT.shape[1] // 2)
    states = [h[:, skipped:].flatten(0, 1) for h in engine.adapter.states(ids_BT)]
    generated = torch.arange(ids_BT.shape[1] - skipped, device=ids_BT.device)
    exits_EN, right_EN = exit_tables(engine, wide, states, generated.repeat(len(ids_BT)))
    used = prices or weight_prices(engine, wide)
    partial_head = rule.exit_vocab is not None

    def price(chosen: list[int]) -> float:
        return expected_price(
            exits_EN, right_EN, layers, chosen, engine.num_layers, used, partial_head
        )

    return grow_exits(price, layers)

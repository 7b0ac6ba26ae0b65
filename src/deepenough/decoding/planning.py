"""Which layers are worth an exit.

A test at an exit costs time, and pays only for tokens that leave there and are right. From tokens
whose whole way up is known (does the policy let go at layer `l`, and is the word the last layer's?)
the expected time of a set of exits follows by following the rule, and the set is grown one layer at
a time, each time by the one that saves most, until none does.

A token that leaves with another word than the full model's saves nothing: it counts as if it had
gone all the way. So exits whose confidence is not earned are not chosen for their speed.

Without texts to look at, the model writes some itself: beginnings drawn at random, then continued
greedily. Costs are then the weights that a token reads, which is what decoding waits for; that is
the same for every run, and so are the exits. `measured_costs` are the seconds of this machine.

Shapes: E layers that may become exits, N tokens, B rows, T tokens of a row.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from deepenough.decoding.engine import Engine
from deepenough.decoding.leaving import EarlyExit, ExitTest, Streaks

ROWS, BEGINNING, LENGTH = 8, 6, 24
#: More layers than this are not looked at one by one.
MOST = 16
#: States whose probabilities are held at once.
CHUNK = 256


@dataclass(frozen=True)
class Prices:
    """What a token pays, in any unit."""

    layer: float
    test: float
    """A map and, where there is a shortlist, its words; without one, the whole vocabulary."""
    head: float
    fill: float
    """Of a layer that is skipped."""


def weight_prices(engine: Engine, early: EarlyExit) -> Prices:
    """Weights that are read."""
    adapter, width = engine.adapter, engine.adapter.width
    config = adapter.model.config.get_text_config()
    layer = sum(p.numel() for each in adapter.layers for p in each.parameters())
    head = float(width * config.vocab_size)
    words = head if early.shortlist is None else float(width * len(early.shortlist))
    keys = width * width * 2.0
    mapped = {"shortcut": width * width + keys, "copy": keys, "deferred": 0.0}[early.fill]
    return Prices(layer / adapter.num_layers, width * width + words, head, mapped)


@torch.inference_mode()
def measured_prices(engine: Engine, early: EarlyExit, rounds: int = 7) -> Prices:
    """Seconds on this machine: medians of one token after a short text."""
    device, last = engine.adapter.model.device, engine.num_layers
    limit = engine.adapter.model.config.get_text_config().vocab_size
    prompt = torch.arange(1, 33, device=device)[None].remainder(limit)
    exits = sorted(set(early.layers))
    test = ExitTest(engine, early)
    engine.prefill(prompt, None, 40)
    step = engine.enter(prompt[:, :1])
    state_BD = step.hidden[:, 0]
    unit = torch.zeros(1, dtype=torch.long, device=device)

    def ask() -> None:
        jumped = test.jump(exits[0], state_BD)
        test.ask(exits[0], jumped, unit, unit, Streaks.none(1, device))

    def fill() -> None:
        again = engine.resume(step.hidden, engine.lengths, [0])
        for index in range(exits[0], last):
            shortcut = early.fill == "shortcut"
            read = early.shortcuts.apply(state_BD, exits[0], index) if shortcut else state_BD
            engine.fill(index, read, again)

    prices = Prices(
        layer=_median(lambda: engine.through(step, step.hidden, 0, last), rounds) / last,
        test=_median(ask, rounds),
        head=_median(lambda: engine.head(engine.norm(state_BD)), rounds),
        fill=0.0 if early.fill == "deferred" else _median(fill, rounds) / (last - exits[0]),
    )
    engine.release()
    return prices


def _median(action: Callable[[], Any], rounds: int) -> float:
    seconds = []
    for _ in range(rounds):
        began = time.perf_counter()
        action()
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)


def expected_price(
    leaves_EN: Tensor,
    right_EN: Tensor,
    layers: Sequence[int],
    exits: Sequence[int],
    num_layers: int,
    prices: Prices,
    listed: bool,
) -> float:
    """Mean price of a token with these exits; rows of the tables are `layers`."""
    order = [layers.index(layer) for layer in sorted(exits)]
    leaves_XN, right_XN = leaves_EN[order], right_EN[order]
    left_N = leaves_XN.any(0)
    first_N = leaves_XN.to(torch.uint8).argmax(0)  # the first exit that lets go
    tests_N = torch.where(left_N, first_N + 1, len(order)).double()
    saves_N = left_N & right_XN.gather(0, first_N[None])[0]
    depth_N = torch.where(saves_N, torch.tensor(sorted(exits))[first_N], num_layers).double()
    # Without a shortlist the test of a token that leaves is its choice as well.
    heads_N = torch.ones_like(depth_N) if listed else (~saves_N).double()
    price_N = depth_N * prices.layer + (num_layers - depth_N) * prices.fill
    return float((price_N + tests_N * prices.test + heads_N * prices.head).mean())


def grow_exits(price: Callable[[list[int]], float], layers: Sequence[int]) -> list[int]:
    """The set that no further layer makes cheaper; at least one layer."""
    chosen: list[int] = []
    best = float("inf")
    while left := [layer for layer in layers if layer not in chosen]:
        found, layer = min((price(sorted([*chosen, layer])), layer) for layer in left)
        if found >= best:
            break
        best, chosen = found, sorted([*chosen, layer])
    return chosen


def candidates(num_layers: int) -> list[int]:
    """Layers that may become exits: all but the last, or of very many evenly spread ones."""
    stride = -(-(num_layers - 1) // MOST)
    return list(range(num_layers - 1, 0, -stride))[::-1] if num_layers > 1 else []


@torch.inference_mode()
def tables(
    engine: Engine, early: EarlyExit, states: Sequence[Tensor], place_N: Tensor
) -> tuple[Tensor, Tensor]:
    """Of every exit of `early` and every token: would it leave, and would it be right?

    `states` are `h_0 ... h_L` of the tokens, each `[N, D]`.
    """
    test = ExitTest(engine, early)
    units, leaves, right = len(place_N), [], []
    expected_N = torch.cat(
        [engine.head(engine.norm(part)).argmax(-1) for part in states[-1].split(CHUNK)]
    )
    streaks = Streaks.none(units, place_N.device)
    for layer in sorted(set(early.layers)):
        leaves_N = torch.zeros(units, dtype=torch.bool)
        right_N = torch.zeros(units, dtype=torch.bool)
        for part in torch.arange(units, device=place_N.device).split(CHUNK):
            jumped = test.jump(layer, states[layer][part])
            answer = test.ask(layer, jumped, place_N[part], part, streaks)
            gone = part[answer.leaves_N]
            leaves_N[gone.cpu()] = True
            right_N[gone.cpu()] = (answer.logits.argmax(-1) == expected_N[gone]).cpu()
        leaves.append(leaves_N)
        right.append(right_N)
    return torch.stack(leaves), torch.stack(right)


@torch.inference_mode()
def write_some(engine: Engine, seed: int = 0) -> Tensor:
    """Texts of the model's own, `[B, T]`: begun by drawing, continued greedily."""
    model: Any = engine.adapter.model
    generator = torch.Generator().manual_seed(seed)
    config = model.config.get_text_config()
    start = config.bos_token_id if config.bos_token_id is not None else 0
    limit = engine.adapter.max_length or LENGTH
    length = min(LENGTH, limit - 1)
    ids_BT = torch.full((ROWS, 1), int(start), device=model.device)
    state_BD = engine.prefill(ids_BT, None, length + 1)
    while ids_BT.shape[1] < length:
        logits_BV = engine.head(state_BD).float().cpu()
        if ids_BT.shape[1] <= BEGINNING:
            next_B1 = torch.multinomial(logits_BV.softmax(-1), 1, generator=generator)
        else:
            next_B1 = logits_BV.argmax(-1, keepdim=True)
        next_B1 = next_B1.to(model.device)
        ids_BT = torch.cat([ids_BT, next_B1], dim=1)
        state_BD = engine.run(next_B1)[:, 0]
        engine.keep([1] * ROWS)
    engine.release()
    return ids_BT


def choose_exits(
    engine: Engine,
    early: EarlyExit,
    ids_BT: Tensor | None = None,
    prices: Prices | None = None,
) -> list[int]:
    """The exits of `early` worth having, on texts of the model's own unless some are given."""
    layers = candidates(engine.num_layers) or [1]
    wide = replace(early, layers=layers)
    ids_BT = write_some(engine) if ids_BT is None else ids_BT
    # The first tokens of a text are like no others.
    skipped = min(BEGINNING, ids_BT.shape[1] // 2)
    states = [h[:, skipped:].flatten(0, 1) for h in engine.adapter.states(ids_BT)]
    places = torch.arange(ids_BT.shape[1] - skipped, device=ids_BT.device)
    leaves_EN, right_EN = tables(engine, wide, states, places.repeat(len(ids_BT)))
    chosen_prices = prices or weight_prices(engine, wide)

    def price(exits: list[int]) -> float:
        listed = early.shortlist is not None
        return expected_price(
            leaves_EN, right_EN, layers, exits, engine.num_layers, chosen_prices, listed
        )

    return grow_exits(price, layers)

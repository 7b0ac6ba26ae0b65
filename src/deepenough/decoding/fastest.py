"""Which drafts are the fastest here: candidates race over a few prompts, on this machine.

All candidates generate from the same prompts, in turn, so that whatever else the machine does hits
all alike. After each round the faster half goes on, over twice as many prompts; the last two are
compared on all of them. Then the winner tries shorter shortlists. Plain decoding takes part, and
wins where guessing does not pay.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from deepenough.decoding.drafters import DraftConfig, DrafterBuilder
from deepenough.decoding.engine import Engine
from deepenough.decoding.request import Request, plain_request
from deepenough.decoding.verification import decode

_NUM_DRAFTS = (1, 2, 3)
#: Of a shortlist, in turn with all of it.
_SHARES = (0.25, 0.5)
#: Layers of a shortcut draft, as a share of all.
_DEPTHS = (0.1, 0.25)
_PROMPTS, _PROMPT_TOKENS = 8, 12

Time = Callable[[DraftConfig, Sequence[int]], tuple[float, int]]
"""Seconds and new tokens of one candidate from one prompt."""


@dataclass
class Lap:
    """What one candidate has done so far."""

    drafting: DraftConfig
    seconds: float = 0.0
    tokens: int = 0

    @property
    def rate(self) -> float:
        return self.tokens / max(self.seconds, 1e-9)


@dataclass
class Fastest:
    drafting: DraftConfig
    laps: list[Lap] = field(default_factory=list)
    """Of all candidates, the fastest first; they ran from different numbers of prompts."""

    def choice(self) -> dict[str, Any]:
        """As it is kept with a tuned model."""
        table = [
            _plain(lap.drafting) | {"tokens_per_second": lap.rate, "tokens": lap.tokens}
            for lap in self.laps
        ]
        return _plain(self.drafting) | {"machine": machine_facts(), "measured": table}


def find_fastest(
    workshop: DrafterBuilder,
    num_drafts: int | None = None,
    layer: int | None = None,
    prompts: Sequence[Sequence[int]] | None = None,
    new_tokens: int = 48,
) -> Fastest:
    """Race all that the workshop can make; what is given is not varied."""
    prompts = prompts or _prompts(workshop)
    numbers = _NUM_DRAFTS if num_drafts is None else (num_drafts,)
    runners = candidates(workshop, numbers, layer)
    sources = {drafting: workshop.build(drafting) for drafting in runners}

    def timed(drafting: DraftConfig, prompt: Sequence[int]) -> tuple[float, int]:
        source = sources.setdefault(drafting, workshop.build(drafting))
        request = _request(workshop.engine, prompt, new_tokens)
        began = time.perf_counter()
        generated = decode(workshop.engine, request, source)
        return time.perf_counter() - began, len(generated.rows[0].tokens)

    workshop.engine.refresh()
    try:
        timed(runners[-1], prompts[0])  # the first run of all is slow
        laps = race(runners, prompts, timed)
        best = laps[0].drafting
        if workshop.linear_drafter is not None and set(best.names) - {"lookup"}:
            size = len(workshop.linear_drafter.draft_vocab)
            shorter = [replace(best, vocab_size=int(share * size)) for share in _SHARES]
            again = race([*shorter, best], prompts[:4], timed)
            best = again[0].drafting
            laps = again + [lap for lap in laps if lap.drafting != best]
    finally:
        workshop.engine.release()
    return Fastest(best, laps)


def candidates(
    workshop: DrafterBuilder, numbers: Sequence[int], layer: int | None
) -> list[DraftConfig]:
    """Plain decoding, every source alone, and lookup before each of the others."""
    found = [DraftConfig(())]
    others = [name for name in workshop.available() if name != "lookup"]
    orders: list[tuple[str, ...]] = [("lookup",)]
    orders += [order for name in others for order in ((name,), ("lookup", name))]
    for order in orders:
        for number in numbers:
            depths = _depths(workshop, order[-1], layer)
            found += [DraftConfig(order, number, None, depth) for depth in depths]
    return found


def _depths(workshop: DrafterBuilder, name: str, layer: int | None) -> Sequence[int | None]:
    """Layers that a source is tried with; None where it runs none."""
    if name == "shortcut":
        return draft_layers(workshop.engine.num_layers) if layer is None else [layer]
    return [None]


def draft_layers(num_layers: int) -> list[int]:
    """Layers from which shortcut drafts are tried."""
    return sorted({max(1, round(share * num_layers)) for share in _DEPTHS})


def race(
    runners: Sequence[DraftConfig], prompts: Sequence[Sequence[int]], timed: Time
) -> list[Lap]:
    """Laps of all runners, the fastest first: those that went further before those that did not."""
    going = [Lap(runner) for runner in runners]
    out: list[Lap] = []
    first, number = 0, 1
    while first < len(prompts):
        for prompt in prompts[first : first + number]:
            for lap in going:
                seconds, tokens = timed(lap.drafting, prompt)
                lap.seconds += seconds
                lap.tokens += tokens
        first, number = first + number, 2 * number
        going.sort(key=lambda lap: lap.rate, reverse=True)
        half = max(2, (len(going) + 1) // 2)
        if first < len(prompts):
            going, out = going[:half], going[half:] + out
    return going + out


def _prompts(workshop: DrafterBuilder) -> list[list[int]]:
    """Those that a tuned model brings, or else words drawn at random."""
    if workshop.draft_model is not None and (known := workshop.draft_model.meta.get("prompts")):
        return [list(prompt) for prompt in known]
    size = workshop.engine.adapter.model.config.get_text_config().vocab_size
    generator = torch.Generator().manual_seed(0)
    return torch.randint(size, (_PROMPTS, _PROMPT_TOKENS), generator=generator).tolist()


def _plain(drafting: DraftConfig) -> dict[str, Any]:
    return asdict(drafting) | {"names": list(drafting.names)}


def _request(engine: Engine, prompt: Sequence[int], new_tokens: int) -> Request:
    model = engine.adapter.model
    ids_BT = torch.tensor([list(prompt)], device=model.device)
    return plain_request(model, ids_BT, None, new_tokens, engine.adapter.max_length)


def machine_facts() -> dict[str, Any]:
    """What the result depends on besides the model."""
    processor = platform.processor() or platform.machine()
    information = Path("/proc/cpuinfo")
    if information.is_file():
        lines = information.read_text(errors="replace").splitlines()
        names = [line.partition(":")[2].strip() for line in lines if "model name" in line]
        processor = names[0] if names else processor
    threads = torch.get_num_threads()
    return {"processor": processor, "threads": threads, "torch": torch.__version__}

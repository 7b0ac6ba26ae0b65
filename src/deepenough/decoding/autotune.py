"""Find the drafters that are fastest on this machine, by successive halving.

All candidates generate from the same prompts, in turn, so that whatever else the machine does hits
all of them. After each round the faster half continues, over twice as many prompts; the last two
are compared on all of them. Then the winner is tried with smaller draft vocabularies. Decoding
without drafts takes part, and wins where drafting does not pay.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from deepenough.decoding.drafters import DraftConfig, DrafterBuilder
from deepenough.decoding.request import plain_request
from deepenough.decoding.verification import decode

_NUM_DRAFT_TOKENS = (1, 2, 3)
#: Smaller draft vocabularies that are tried, as shares of the whole one.
_VOCAB_SHARES = (0.25, 0.5)
#: Layers of a shortcut drafter that are tried, as shares of all.
_DEPTHS = (0.1, 0.25)
_NUM_PROMPTS, _PROMPT_TOKENS = 8, 12

Measure = Callable[[DraftConfig, Sequence[int]], tuple[float, int]]
"""Returns the seconds and the new tokens of a candidate that continues a prompt."""


@dataclass
class Trial:
    """What one candidate has generated so far, and how long that took."""

    config: DraftConfig
    seconds: float = 0.0
    tokens: int = 0

    @property
    def rate(self) -> float:
        """Tokens a second."""
        return self.tokens / max(self.seconds, 1e-9)


def autotune(
    builder: DrafterBuilder,
    num_draft_tokens: int | None = None,
    layer: int | None = None,
    prompts: Sequence[Sequence[int]] | None = None,
    new_tokens: int = 48,
) -> list[Trial]:
    """Time all drafters that can be built and return their trials, the fastest first.

    The trials ran from different numbers of prompts.

    Args:
        builder: The model, and what was fitted for it.
        num_draft_tokens: Tokens drafted at once; several numbers are tried by default.
        layer: Layers that a shortcut drafter runs; several numbers are tried by default.
        prompts: Token ids to continue; by default those that the draft model was saved with.
        new_tokens: Most new tokens after each prompt.
    """
    prompts = prompts or _prompts(builder)
    numbers = _NUM_DRAFT_TOKENS if num_draft_tokens is None else (num_draft_tokens,)
    configs = candidates(builder, numbers, layer)
    drafters = {config: builder.build(config) for config in configs}
    engine, model = builder.engine, builder.engine.adapter.model

    def measure(config: DraftConfig, prompt: Sequence[int]) -> tuple[float, int]:
        if config not in drafters:
            drafters[config] = builder.build(config)
        ids_BT = torch.tensor([list(prompt)], device=model.device)
        request = plain_request(model, ids_BT, None, new_tokens, engine.adapter.max_length)
        began = time.perf_counter()
        decoded = decode(engine, request, drafters[config])
        seconds = time.perf_counter() - began
        if decoded.interrupted:
            raise KeyboardInterrupt
        return seconds, len(decoded.rows[0].tokens)

    engine.refresh()
    try:
        measure(configs[-1], prompts[0])  # the first run of all is slow
        trials = successive_halving(configs, prompts, measure)
        best = trials[0].config
        if builder.linear_drafter is not None and set(best.names) - {"lookup"}:
            size = len(builder.linear_drafter.draft_vocab)
            smaller = [replace(best, vocab_size=int(share * size)) for share in _VOCAB_SHARES]
            again = successive_halving([*smaller, best], prompts[:4], measure)
            trials = again + [trial for trial in trials if trial.config != again[0].config]
    finally:
        engine.release()
    return trials


def candidates(
    builder: DrafterBuilder, numbers: Sequence[int], layer: int | None = None
) -> list[DraftConfig]:
    """Return no drafts, every drafter alone, and lookup before each of the others."""
    found = [DraftConfig(())]
    others = [name for name in builder.available() if name != "lookup"]
    orders: list[tuple[str, ...]] = [("lookup",)]
    orders += [order for name in others for order in ((name,), ("lookup", name))]
    for order in orders:
        depths: Sequence[int | None] = [None]
        if order[-1] == "shortcut":
            depths = draft_layers(builder.engine.num_layers) if layer is None else [layer]
        found += [DraftConfig(order, number, None, depth) for number in numbers for depth in depths]
    return found


def draft_layers(num_layers: int) -> list[int]:
    """Return the layers from which shortcut drafts are tried."""
    return sorted({max(1, round(share * num_layers)) for share in _DEPTHS})


def successive_halving(
    configs: Sequence[DraftConfig], prompts: Sequence[Sequence[int]], measure: Measure
) -> list[Trial]:
    """Return the trials of all candidates, those that got further first, then the faster first."""
    going = [Trial(config) for config in configs]
    out: list[Trial] = []
    first, number = 0, 1
    while first < len(prompts):
        for prompt in prompts[first : first + number]:
            for trial in going:
                seconds, tokens = measure(trial.config, prompt)
                trial.seconds += seconds
                trial.tokens += tokens
        first, number = first + number, 2 * number
        going.sort(key=lambda trial: trial.rate, reverse=True)
        half = max(2, (len(going) + 1) // 2)
        if first < len(prompts):
            going, out = going[:half], going[half:] + out
    return going + out


def _prompts(builder: DrafterBuilder) -> list[list[int]]:
    """Return the prompts that a draft model was saved with, or else random tokens."""
    if builder.draft_model is not None and (known := builder.draft_model.meta.get("prompts")):
        return [list(prompt) for prompt in known]
    size = builder.engine.adapter.model.config.get_text_config().vocab_size
    generator = torch.Generator().manual_seed(0)
    return torch.randint(size, (_NUM_PROMPTS, _PROMPT_TOKENS), generator=generator).tolist()


def choice(trials: Sequence[Trial]) -> dict[str, Any]:
    """Return the fastest drafters, and how all did on this machine, as a draft model keeps it."""
    measured = [
        _plain(trial.config) | {"tokens_per_second": trial.rate, "tokens": trial.tokens}
        for trial in trials
    ]
    return _plain(trials[0].config) | {"machine": machine_facts(), "measured": measured}


def _plain(config: DraftConfig) -> dict[str, Any]:
    return asdict(config) | {"names": list(config.names)}


def machine_facts() -> dict[str, Any]:
    """Return what a measured speed depends on besides the model."""
    processor = platform.processor() or platform.machine()
    cpu_info = Path("/proc/cpuinfo")
    if cpu_info.is_file():
        lines = cpu_info.read_text(errors="replace").splitlines()
        names = [line.partition(":")[2].strip() for line in lines if "model name" in line]
        processor = names[0] if names else processor
    return {
        "processor": processor,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
    }

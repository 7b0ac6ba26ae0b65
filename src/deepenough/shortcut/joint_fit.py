"""Everything the paper fits, from a single pass over the texts.

Linear and affine maps between layers need the same sums, and the parts of blocks can be watched
while the layers' states are read: a model runs once over each text for all three. What `Shortcuts`
and `Submodules` fit one by one, with passes of their own, is the same to rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel

from deepenough.hf.adapter import Adapter, adapt
from deepenough.hf.intercept import fused_gelu
from deepenough.shortcut.collect import make_reading, run_batch
from deepenough.shortcut.pairs import Targets, make_plan
from deepenough.shortcut.shortcuts import Shortcuts
from deepenough.shortcut.similarity import alignments, cka_table
from deepenough.shortcut.solve import solve
from deepenough.shortcut.statistics import Statistics
from deepenough.shortcut.submodules import KINDS, Submodules, SubmoduleStatistics, wanted_places
from deepenough.shortcut.windows import Positions, Tally, batches


class JointStatistics(NamedTuple):
    """The sums of one pass."""

    layers: Statistics
    parts: SubmoduleStatistics
    tally: Tally
    positions: Positions


class JointFit(NamedTuple):
    linear: Shortcuts
    affine: Shortcuts
    submodules: Submodules


def collect(
    model: PreTrainedModel | Adapter,
    tokenizer: Any,
    texts: Iterable[str],
    *,
    positions: Positions = "random",
    targets: Targets = "all",
    kinds: Sequence[str] = KINDS,
    seed: int = 0,
    batch_tokens: int = 1024,
    window: int | None = None,
    progress: Callable[[int, int | None], None] | None = None,
) -> JointStatistics:
    """Run the model over the texts and keep the sums that all fits need."""
    adapter = model if isinstance(model, Adapter) else adapt(model)
    plan = make_plan(adapter.num_layers, targets)
    layers = Statistics(adapter.num_layers, adapter.width, plan, adapter.model.device)
    parts = SubmoduleStatistics(adapter, kinds)
    tally = Tally()
    total = len(texts) if isinstance(texts, Sequence) else None
    reading = make_reading(adapter, positions, seed, batch_tokens, window)
    with fused_gelu(adapter.model):
        for batch in batches(tokenizer, texts, reading, tally):
            with parts.observing(*wanted_places(batch)):
                layers.update(run_batch(adapter, batch).states)
            if progress is not None:
                progress(batch.texts, total)
    layers.finish()
    return JointStatistics(layers, parts, tally, positions)


def fit(
    model: PreTrainedModel | Adapter, statistics: JointStatistics, ridge: float = 0.0
) -> JointFit:
    """Solve for all maps. The statistics of layers are used up."""
    adapter = model if isinstance(model, Adapter) else adapt(model)
    layers = statistics.layers
    again = Statistics(layers.num_layers, layers.width, layers.plan, layers.sums.device)
    again.load_state_dict(layers.state_dict())
    cka = cka_table(alignments(layers))
    dtype = torch.float64 if adapter.model.dtype == torch.float64 else torch.float32
    targets: Targets = "all" if layers.num_layers == 1 or len(layers.plan[0]) > 1 else "last"
    about = {
        "model": adapter.identity(),
        "fit": {
            "positions": layers.count,
            "positions_taken": statistics.positions,
            "ridge": ridge,
            "texts": statistics.tally.texts,
        },
    }

    def shortcuts(sums: Statistics, affine: bool) -> Shortcuts:
        maps, biases, dependent = solve(sums, affine, ridge, dtype)
        meta = {**about, "fit": {**about["fit"], "affine": affine, "dependent": dependent}}
        return Shortcuts(
            sums.num_layers, sums.width, maps, biases, targets=targets, cka=cka, meta=meta
        )

    return JointFit(
        shortcuts(layers, affine=False),
        shortcuts(again, affine=True),
        Submodules.from_statistics(statistics.parts, adapter, ridge=ridge),
    )

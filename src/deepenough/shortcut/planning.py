"""What a fit will take, told before it begins: `deepenough shortcut fit MODEL --dry_run`.

Only the model's config is read. The model is built on the device `meta`, where tensors have shapes
and no memory, so that a model of any size is planned for in seconds. FLOPs of a pass are those that
torch counts there; those of the sums and their solution follow from their shapes:

    sums        positions * sum over sources of d^2 + 2 d^2 targets
    solution    sum over sources of d^3 + 2 d^3 targets         (factor, its inverse; each target)

Times are FLOPs over the rate of large products on this machine, or a rate that is given: layers and
sums are little else, but a machine that waits for memory or for other programs takes longer.
"""

from __future__ import annotations

import math
import os
import shutil
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from transformers import PreTrainedModel

from deepenough.devices import find_device, sums_device
from deepenough.errors import UserError
from deepenough.hf.adapter import Adapter, adapt
from deepenough.hf.intercept import eval_mode
from deepenough.hf.layouts import Layout, heaviest_list
from deepenough.hf.loading import load_skeleton, load_tokenizer_of
from deepenough.hf.twin import make_twin
from deepenough.shortcut.config import ShortcutFitConfig
from deepenough.shortcut.fitting import maps_bytes, place_sums
from deepenough.shortcut.reading import batches, make_reading
from deepenough.shortcut.statistics import layer_targets, statistics_bytes, waiting_rows

#: Characters of a token, where there is no tokenizer to tell.
CHARACTERS = 4
_PRODUCT, _ROUNDS = 1024, 3


@dataclass(frozen=True)
class Plan:
    """What a fit will take; bytes, FLOPs and seconds are those of one process."""

    model: str
    layers: int
    width: int
    weights: int
    """Number of weights."""
    weight_bytes: int
    dtype: str
    device: str
    processes: int
    texts: int
    tokens: int
    """Tokens of the texts that are run, padding included, of all processes."""
    positions: int
    """Positions whose states are fitted on."""
    is_counted: bool
    """Whether tokens were counted, and not estimated from characters."""
    passes: int
    """How often the texts are run."""
    targets: str
    sums_bytes: dict[str, int]
    """Of the sums for maps between all pairs of layers, and for those to the last layer."""
    maps_bytes: dict[str, int]
    buffer_bytes: int
    """Rows that wait until they are multiplied into the sums."""
    room: float | None
    """Memory that there is for the sums; None where that is not known."""
    in_files: bool
    """Whether memory has no room for the sums, so that they are kept in files."""
    disk_bytes: float
    """What is then read and written."""
    disk_free: int
    forward_flops: float
    sums_flops: float
    solve_flops: float
    rate: float
    """FLOPs a second of the model."""
    sums_rate: float
    """FLOPs a second of the sums, in float64."""
    seconds: float

    def lines(self) -> list[str]:
        """Return the plan as people read it."""
        of_sums, of_maps = self.sums_bytes, self.maps_bytes
        chosen = of_sums[self.targets]
        counted = "" if self.is_counted else f" (estimated: {CHARACTERS} characters a token)"
        needed = chosen + self.buffer_bytes
        room = "enough, as far as is known" if self.room is None else _bytes(self.room)
        where = f"memory has room for {room}"
        if self.in_files:
            where += (
                f": they are kept in files ({_bytes(self.disk_free)} free there), of which "
                f"{_bytes(self.disk_bytes)} are read and written, and an interrupted fit begins "
                "again"
            )
            if self.disk_free < chosen:
                where += "; the disk is too small: give --out on a larger one"
        maps = of_maps[self.targets]
        rates = f"{self.rate:.3g} FLOP/s, as given"
        if self.rate != self.sums_rate:
            rates = (
                f"{self.rate:.3g} FLOP/s through the layers and {self.sums_rate:.3g} in float64, "
                "as this machine multiplies matrices"
            )
        return [
            f"model       {self.model}: {self.layers} layers of width {self.width}, "
            f"{self.weights / 1e9:.3g} billion weights, {_bytes(self.weight_bytes)} in "
            f"{self.dtype}; each process has them once, on {self.device}",
            f"text        {self.texts:,} texts, {self.tokens:,} tokens{counted}, run "
            f"{self.passes} time{'s' if self.passes > 1 else ''}, shared by {self.processes} "
            f"process{'es' if self.processes > 1 else ''}; {self.positions:,} positions",
            f"sums        {_bytes(of_sums['all'])} for maps between all pairs of layers, "
            f"{_bytes(of_sums['last'])} for those to the last one; chosen: {self.targets}",
            f"            {_bytes(needed)} with the rows that wait; {where}",
            f"maps        {_bytes(of_maps['all'])} for all pairs, {_bytes(of_maps['last'])} to the "
            f"last layer; {_bytes(2 * maps)} of memory while they are written",
            f"FLOPs       {self.forward_flops:.3g} through the layers, {self.sums_flops:.3g} into "
            f"the sums, {self.solve_flops:.3g} to solve for maps, in each process",
            f"time        {_seconds(self.seconds)} at {rates}",
        ]


def plan_fit(config: ShortcutFitConfig, texts: list[str]) -> Plan:
    """Return what a fit of a model on texts will take, from the model's config alone."""
    model = load_skeleton(**vars(config.model))
    adapter = adapt_skeleton(model)
    layers, width, chosen = adapter.num_layers, adapter.width, config.fit
    processes = config.plan.processes or int(os.environ.get("WORLD_SIZE", "1"))
    device = find_device()
    tokens, positions, longest, is_counted = _count(config, adapter, texts)
    share = positions / processes
    memory = None if chosen.memory is None else chosen.memory * 1e9
    where = place_sums(layers, width, chosen.targets, device, memory)
    rows = waiting_rows(layers, width, chosen.targets, where.room / 2 if where.on_disk else None)
    sums = {kind: statistics_bytes(layers, width, kind) for kind in ("all", "last")}
    maps = {kind: maps_bytes(layers, width, kind, model.dtype) for kind in ("all", "last")}
    passes = len(chosen.folders) + config.tuned
    targets = [len(own) for own in layer_targets(layers, chosen.targets).values()]
    folder = Path(config.out).absolute()
    while not folder.is_dir():
        folder = folder.parent
    forward = flops_per_token(adapter, longest) * tokens * passes / processes
    sums_flops = share * width**2 * sum(1 + 2 * number for number in targets)
    solve_flops = float(width) ** 3 * sum(1 + 2 * number for number in targets if number)
    given = config.plan.rate
    rate = given or measure_rate(model.dtype, device)
    sums_rate = given or measure_rate(torch.float64, sums_device(device))
    parameters = {id(weight): weight for weight in model.parameters()}.values()
    return Plan(
        model=config.model.name,
        layers=layers,
        width=width,
        weights=sum(weight.numel() for weight in parameters),
        weight_bytes=sum(weight.nbytes for weight in parameters),
        dtype=str(model.dtype).removeprefix("torch."),
        device=config.device_map or str(device),
        processes=processes,
        texts=len(texts),
        tokens=tokens,
        positions=positions,
        is_counted=is_counted,
        passes=passes,
        targets=chosen.targets,
        sums_bytes=sums,
        maps_bytes=maps,
        buffer_bytes=rows * (layers + 1) * width * 8,
        room=where.room if math.isfinite(where.room) else None,
        in_files=where.on_disk,
        disk_bytes=2 * sums[chosen.targets] * -(-share // rows) if where.on_disk else 0.0,
        disk_free=shutil.disk_usage(folder).free,
        forward_flops=forward,
        sums_flops=sums_flops,
        solve_flops=solve_flops,
        rate=rate,
        sums_rate=sums_rate,
        seconds=forward / rate + (sums_flops + solve_flops) / sums_rate,
    )


def adapt_skeleton(model: PreTrainedModel) -> Adapter:
    """Return the adapter of a model without weights, found on a small model of the same config."""
    twin, _ = make_twin(model)
    if twin is not None:
        return Adapter(model, adapt(twin).layout)
    return Adapter(model, Layout(heaviest_list))


@torch.no_grad()
def flops_per_token(adapter: Adapter, length: int) -> float:
    """Return the FLOPs of a token in a text of so many, through all layers, as torch counts.

    Of a model that looks at values while it runs, they are those of its matrices alone.
    """
    try:
        with (
            eval_mode(adapter.model),
            FakeTensorMode(allow_non_fake_inputs=True),  # transformers looks at no values in it
            sdpa_kernel(SDPBackend.MATH),  # whose products are counted
            FlopCounterMode(display=False) as counter,
        ):
            adapter.states(torch.zeros(1, length, dtype=torch.long, device="meta"))
        return float(counter.get_total_flops()) / length
    except (RuntimeError, NotImplementedError):  # there are no values on `meta`
        weights = (p for layer in adapter.layers for p in layer.parameters() if p.ndim > 1)
        return 2.0 * sum(weight.numel() for weight in weights)


def measure_rate(dtype: torch.dtype, device: torch.device) -> float:
    """Return the FLOPs a second of a large product of matrices, the best of a few."""
    left, right = torch.randn(2, _PRODUCT, _PRODUCT).to(device, dtype)
    best = float("inf")
    for _ in range(1 + _ROUNDS):
        began = time.perf_counter()
        product = left @ right
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
        best = min(best, time.perf_counter() - began)
        del product
    return 2.0 * _PRODUCT**3 / best


def _count(
    config: ShortcutFitConfig, adapter: Adapter, texts: list[str]
) -> tuple[int, int, int, bool]:
    """Return tokens and positions of texts, their mean length, and whether they were counted."""
    reading = make_reading(adapter, config.fit.positions, window=config.fit.window)
    try:
        tokenizer = load_tokenizer_of(config.model.name, config.model.revision)
    except UserError:
        tokens = max(2, sum(map(len, texts)) // CHARACTERS)
        positions = tokens if config.fit.positions == "all" else len(texts)
        return tokens, positions, min(reading.window, max(2, tokens // len(texts))), False
    tokens = positions = windows = 0
    for batch in batches(tokenizer, texts, reading):
        tokens += batch.ids.numel()
        positions += len(batch.wanted()[0])
        windows += len(batch.windows)
    if not windows:
        raise UserError("There is no position to fit maps on: give texts of two tokens or more.")
    return tokens, positions, tokens // windows, True


def _bytes(size: float) -> str:
    for unit, number in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if size >= number:
            return f"{size / number:.3g} {unit}"
    return f"{size:.0f} bytes"


def _seconds(seconds: float) -> str:
    for unit, number in (("days", 86400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * number:
            return f"{seconds / number:.3g} {unit}"
    return f"{seconds:.2g} seconds"

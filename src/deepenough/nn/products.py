"""Products of float32 matrices by the library that is fastest at them on this processor.

torch leaves them to MKL, which keeps AVX-512 to Intel's processors; on AMD's, oneDNN multiplies
more than twice as fast. torch hands float32 to oneDNN only with the permission to round to
bfloat16. A processor without AMX makes no use of it and loses nothing, which is measured first.

oneDNN is slow to begin: torch's fused attention, which makes many small products of a short text,
took 3 to 16 times as long with it. Short texts get attention as batched products instead.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

SHORT = 256
"""Tokens up to which attention as batched products is the faster one."""


@contextlib.contextmanager
def fast_products() -> Iterator[None]:
    """Within it, float32 products on the CPU are oneDNN's, where these are faster and as exact."""
    settings = _settings()
    if settings is None or settings.fp32_precision not in ("none", "ieee") or not is_faster():
        yield
        return
    before, settings.fp32_precision = settings.fp32_precision, "bf16"
    try:
        with _ShortAttention():
            yield
    finally:
        settings.fp32_precision = before


class _ShortAttention(TorchFunctionMode):
    """Within it, attention over short texts on the CPU is not fused."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run one function of torch."""
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            query = args[0] if args else kwargs["query"]
            key = args[1] if len(args) > 1 else kwargs["key"]
            if query.device.type == "cpu" and query.shape[-2] * key.shape[-2] <= SHORT**2:
                with sdpa_kernel(SDPBackend.MATH):
                    return func(*args, **kwargs)
        return func(*args, **kwargs)


@functools.cache
def is_faster() -> bool:
    """Return whether oneDNN is faster than MKL here, and rounds no more."""
    settings = _settings()
    if (
        settings is None
        or not processor_has("AuthenticAMD", "avx512f")
        or processor_has("amx_tile")
    ):
        return False
    generator = torch.Generator().manual_seed(0)
    left, right = (torch.randn(256, 256, generator=generator) for _ in range(2))
    exact = left.double() @ right.double()
    before, errors = settings.fp32_precision, []
    for precision in ("ieee", "bf16"):
        settings.fp32_precision = precision
        errors.append(float((left @ right - exact).abs().max()))
    settings.fp32_precision = before
    return errors[1] <= 8 * errors[0]  # rounded to bfloat16 it would be thousands of times


@functools.cache
def processor_has(*flags: str) -> bool:
    """Return whether the processor is known to have all of these."""
    try:
        processor = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return False
    return all(flag in processor for flag in flags)


def _settings() -> Any:
    """Return torch's settings of oneDNN's matrix products, None where it has none."""
    settings = getattr(torch.backends.mkldnn, "matmul", None)
    is_there = torch.backends.mkldnn.is_available() and hasattr(settings, "fp32_precision")
    return settings if is_there else None

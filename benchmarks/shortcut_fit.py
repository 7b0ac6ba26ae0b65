"""Speed and exactness of all maps between layers, beside scikit-learn and one matrix product.

    python benchmarks/shortcut_fit.py [--rounds 3] [--dtype float64] [--save]

Given states of 13 layers of width 768 (GPT-2 small) at 9,000 positions, and at 3,000 others: all 78
maps from the first and their r^2 on the second. scikit-learn does `LinearRegression` and `r2_score`
pair by pair, all 78 of them, once. The floor is one float64 product of the concatenated 9,000
states with themselves, as `torch.mm` and as BLAS `syrk`, which does half of it; ours and the floor
take turns, best of several rounds. The states are made up, with the growth and the dependence from
layer to layer of a residual network; their values do not matter to the time.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch
from record import save_result
from scipy.linalg.blas import dsyrk
from sklearn.linear_model import LinearRegression
from sklearn.metrics import r2_score
from torch import Tensor

from deepenough.shortcut.modeling import Shortcuts

NUM_LAYERS, WIDTH = 12, 768


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--fit", type=int, default=9000, help="positions to fit maps on")
    parser.add_argument("--test", type=int, default=3000, help="other positions, for r^2")
    parser.add_argument("--dtype", choices=["float32", "float64"], default="float32")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--save", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    states = make_states(arguments.fit + arguments.test, getattr(torch, arguments.dtype))
    fit, test = ([h[part] for h in states] for part in _parts(arguments.fit))
    concatenated = torch.cat(fit, dim=1).double()

    best = {"maps": float("inf"), "r2": float("inf"), "mm": float("inf"), "syrk": float("inf")}
    for _ in range(arguments.rounds):
        shortcuts = _time(best, "maps", lambda: Shortcuts.fit_states(fit))
        table = _time(best, "r2", lambda: shortcuts.r2(test))  # noqa: B023 - called at once
        _time(best, "mm", lambda: torch.mm(concatenated.T, concatenated))
        # BLAS counts columns first, so the transposed view is read without a copy.
        _time(best, "syrk", lambda: dsyrk(1.0, concatenated.numpy().T))
    theirs = scikit_learn(fit, test, shortcuts, table)
    ours = best["maps"] + best["r2"]
    result = {
        "dtype": arguments.dtype,
        "positions": [arguments.fit, arguments.test],
        "pairs": len(shortcuts.pairs),
        "seconds": {"maps": best["maps"], "r2": best["r2"], "both": ours},
        "scikit_learn_seconds": theirs["seconds"],
        "times_faster_than_scikit_learn": theirs["seconds"]["both"] / ours,
        "one_mm_seconds": best["mm"],
        "one_syrk_seconds": best["syrk"],
        "share_of_one_mm": ours / best["mm"],
        "share_of_one_syrk": ours / best["syrk"],
        "largest_difference": theirs["largest_difference"],
    }
    save_result("shortcut_fit", result, arguments.save)


def make_states(num: int, dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    states = [torch.randn(num, WIDTH, generator=generator)]
    for _ in range(NUM_LAYERS):
        weight = torch.randn(WIDTH, WIDTH, generator=generator) / WIDTH**0.5
        states.append(states[-1] + torch.tanh(states[-1] @ weight))
    return [h.to(dtype) for h in states]


def scikit_learn(
    fit: list[Tensor], test: list[Tensor], shortcuts: Shortcuts, table: Tensor
) -> dict[str, Any]:
    """Time of every pair, and how far its map and r^2 are from ours."""
    seconds = {"maps": 0.0, "r2": 0.0}
    of_maps = of_r2 = 0.0
    for i, j in shortcuts.pairs:
        started = time.perf_counter()
        model = LinearRegression(fit_intercept=False).fit(fit[i].numpy(), fit[j].numpy())
        fitted = time.perf_counter()
        score = r2_score(test[j].numpy(), model.predict(test[i].numpy()))
        seconds["maps"] += fitted - started
        seconds["r2"] += time.perf_counter() - fitted
        coefficients = torch.from_numpy(model.coef_).double()
        difference = (shortcuts.matrix(i, j).double() - coefficients).abs().max()
        of_maps = max(of_maps, float(difference / coefficients.abs().max()))
        of_r2 = max(of_r2, abs(float(table[i, j]) - float(score)) / abs(float(score)))
    return {
        "seconds": {**seconds, "both": sum(seconds.values())},
        "largest_difference": {"maps": of_maps, "r2": of_r2},
    }


def _parts(num: int) -> tuple[slice, slice]:
    return slice(0, num), slice(num, None)


def _time(best: dict[str, float], name: str, function: Callable[[], Any]) -> Any:
    started = time.perf_counter()
    result = function()
    best[name] = min(best[name], time.perf_counter() - started)
    return result


if __name__ == "__main__":
    main()

"""All 78 maps between 13 layers take a tenth of scikit-learn's time and agree with it to rounding.

Given states of 13 layers of width 768 (GPT-2 small) at 9,000 positions, and at 3,000 others: all 78
maps from the first and their r^2 on the second. scikit-learn does `LinearRegression` and `r2_score`
pair by pair, all 78 of them, once. The floor is one float64 product of the concatenated 9,000
states with themselves, as `torch.mm` and as BLAS `syrk`, which does half of it; ours and the floor
take turns. The states are made up, with the growth and the dependence from layer to layer of a
residual network; their values do not matter to the time.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from scipy.linalg.blas import dsyrk
from sklearn.linear_model import LinearRegression
from sklearn.metrics import r2_score
from torch import Tensor

from benchmarks.figures import Figure, interleaved
from deepenough.shortcut.modeling import Shortcuts

QUICK = True
SEEDS = [0]
VARIANTS = {"float64": {"dtype": "float64"}, "float32": {"dtype": "float32"}}
NUM_LAYERS, WIDTH = 12, 768
#: Largest relative difference to scikit-learn that a check accepts.
ROUNDING = {"float64": 1e-10, "float32": 1e-4}


def measure(
    dtype: str = "float64", fit: int = 9000, test: int = 3000, rounds: int = 3, threads: int = 2
) -> dict[str, Any]:
    """Fit all maps here and with scikit-learn; return seconds, ratios and differences.

    Args:
        dtype: Of the states; sums are in float64 whatever it is.
        fit: Positions to fit maps on.
        test: Other positions, for r^2.
        rounds: Rounds of ours and of the floor.
        threads: Threads of torch.
    """
    torch.set_num_threads(threads)
    states = make_states(fit + test, getattr(torch, dtype))
    fitted, tested = [h[:fit] for h in states], [h[fit:] for h in states]
    concatenated = torch.cat(fitted, dim=1).double()
    last: list[Shortcuts] = []

    def fit_maps() -> Shortcuts:
        last[:] = [Shortcuts.fit_states(fitted)]
        return last[0]

    # BLAS counts columns first, so the transposed view is read without a copy.
    timings = interleaved(
        {
            "maps": fit_maps,
            "r2": lambda: last[0].r2(tested),
            "mm": lambda: torch.mm(concatenated.T, concatenated),
            "syrk": lambda: dsyrk(1.0, concatenated.numpy().T),
        },
        rounds,
        warmup=0,
    )
    pairs = zip(timings.seconds["maps"], timings.seconds["r2"], strict=True)
    timings.seconds["both"] = [maps + r2 for maps, r2 in pairs]
    shortcuts, table = timings.results["maps"][0], timings.results["r2"][0]
    theirs = scikit_learn(fitted, tested, shortcuts, table)
    both = timings.best("both")
    assert both.low is not None and both.high is not None
    total = theirs["seconds"]["both"]
    return {
        "pairs": len(shortcuts.pairs),
        "seconds": {name: timings.best(name) for name in ("maps", "r2", "both")},
        "scikit_learn_seconds": theirs["seconds"],
        "times_faster_than_scikit_learn": Figure(
            total / both.value, "x", total / both.high, total / both.low
        ),
        "one_mm_seconds": timings.best("mm"),
        "one_syrk_seconds": timings.best("syrk"),
        "share_of_one_mm": timings.ratio("both", "mm"),
        "share_of_one_syrk": timings.ratio("both", "syrk"),
        "largest_difference": {
            name: Figure(value, "relative", 0.0, ROUNDING[dtype])
            for name, value in theirs["largest_difference"].items()
        },
        "settings": {"positions": [fit, test], "rounds": rounds},
    }


def make_states(num: int, dtype: torch.dtype) -> list[Tensor]:
    """Return made-up states of all layers, grown from layer to layer as in a residual network."""
    generator = torch.Generator().manual_seed(0)
    states = [torch.randn(num, WIDTH, generator=generator)]
    for _ in range(NUM_LAYERS):
        weight = torch.randn(WIDTH, WIDTH, generator=generator) / WIDTH**0.5
        states.append(states[-1] + torch.tanh(states[-1] @ weight))
    return [h.to(dtype) for h in states]


def scikit_learn(
    fit: list[Tensor], test: list[Tensor], shortcuts: Shortcuts, table: Tensor
) -> dict[str, Any]:
    """Return the seconds of all pairs, and how far their maps and r^2 are from ours."""
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

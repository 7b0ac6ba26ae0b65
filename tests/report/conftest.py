"""Run folders as a search or a training would leave them, made without a model."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from deepenough.runs import Metrics, Record, RunFolder

MakeRun = Callable[..., Path]

EVIL = "</script><script>alert(1)</script><img src=x onerror=alert(2)>"
STEPS = 40


def softmax(logits: np.ndarray) -> np.ndarray:
    weights = np.exp(logits - logits.max(axis=1, keepdims=True))
    return weights / weights.sum(axis=1, keepdims=True)


def write_run(
    path: Path,
    *,
    pattern: str = "aadad-",
    num_steps: int = 2000,
    every: int = 10,
    search: bool = True,
    derived: bool = True,
    seed: int = 0,
    config: dict[str, Any] | None = None,
) -> Path:
    """A run whose loss falls as losses do and whose search decides, one block before another."""
    folder = RunFolder.create(path)
    settings = {"method": "par", "model": {"num_blocks": len(pattern)}}
    folder.config.write_text(yaml.safe_dump(config or settings))
    rng = np.random.default_rng(seed)
    metrics = Metrics(folder.metrics)
    chosen = np.array(["ad-".index(letter) for letter in pattern])
    drift = rng.uniform(1.0, 5.0, len(pattern))
    noise = rng.normal(0, 0.3, (len(pattern), 3))
    pi = softmax(noise)
    for step in range(every, num_steps + 1, every):
        done = step / num_steps
        loss = 3.6 + 5.2 * math.exp(-9 * done) + rng.normal(0, 0.08) - 0.3 * done
        values: dict[str, Any] = {
            "loss": loss,
            "perplexity": math.exp(loss),
            "lr": 2e-3 * min(step / 200, 0.5 * (1 + math.cos(math.pi * done))),
            "grad_norm": float(rng.uniform(0.3, 0.9)),
            "tokens_per_second": 9000.0,
        }
        if search:
            logits = noise.copy()
            logits[np.arange(len(pattern)), chosen] += drift * done
            pi = softmax(logits)
            entropy = -(pi * np.log(pi)).sum(axis=1).mean() / math.log(3)
            values |= {"tau": 0.1**done, "entropy": float(entropy), "pi": pi.tolist()}
        metrics.append(Record(step, "train", values))
        if step % (num_steps // 10) == 0:
            valid = loss + 0.12
            metrics.append(
                Record(
                    step, "valid", {"loss": valid, "perplexity": math.exp(valid), "tokens": 250000}
                )
            )
    metrics.append(Record(num_steps, "test", {"loss": 3.37, "perplexity": math.exp(3.37)}))
    if search and derived:
        values = {
            "pattern": pattern,
            "pi": pi.tolist(),
            "relative_cost": 0.65,
            "parameters": 4_210_688,
        }
        metrics.append(Record(num_steps, "derive", values))
    return folder.path


@pytest.fixture
def make_run(tmp_path: Path) -> MakeRun:
    """`make_run("name", ...)` writes a fake run folder and returns its path."""
    return lambda name="first", **options: write_run(tmp_path / name, **options)


# -- what a report is made from -----------------------------------------------------------------


def write_records(folder: Path, records: list[Record], config: str) -> Path:
    folder.mkdir(parents=True)
    metrics = Metrics(folder / "metrics.jsonl")
    for record in records:
        metrics.append(record)
    (folder / "config.yaml").write_text(config)
    return folder


def write_search(folder: Path) -> Path:
    records = []
    for step in range(STEPS):
        sure = 0.34 + 0.6 * step / STEPS
        pi = [[sure, (1 - sure) / 2, (1 - sure) / 2], [(1 - sure) / 2, sure, (1 - sure) / 2]]
        values = {"loss": 5 - step / 20, "pi": pi, "tau": 1 - step / 50}
        records.append(Record(step * 10, "train", values))
    records.append(Record(STEPS * 10, "derive", {"pattern": "ad", "pi": pi}))
    write_records(folder, records, "method: par\nsearch: {tau: linear}\n")
    trained = [Record(step, "train", {"loss": 4.0 - step / 9}) for step in range(3)]
    tested = Record(3, "test", {"perplexity": 42.0})
    write_records(folder / "derived", [*trained, tested], "method: par\n")
    return folder


def write_shortcut(folder: Path, word: str = " Paris") -> Path:
    tokens = ["The", " capital", " of", EVIL, word]
    words = [[f"w{layer}"] * 4 + ["w3"] for layer in range(3)] + [["w3"] * 5]
    lens = {
        "prompt": "".join(tokens), "mode": "mat", "tokens": tokens, "layers": [0, 1, 2, 3],
        "words": words, "probability": [[0.2 * (layer + 1)] * 5 for layer in range(4)],
        "agrees": [[word == "w3" for word in row] for row in words],
        "top": [[[word, EVIL, "third"] for word in row] for row in words],
        "top_probability": [[[0.2 * (n + 1), 0.1, 0.05]] * 5 for n in range(4)],
        "kl": [[0.5 * (3 - n)] * 5 for n in range(4)], "entropy": [[1.5] * 5] * 4,
        "target_rank": [[9 - n, 7, 5, 2, None] for n in range(4)],
    }  # fmt: skip
    records = [Record(0, "fit", {"model": "tiny", "mode": "mat"})]
    records += [
        Record(0, "layer", {"mode": "mat", "layer": n, "precision_1": n / 3, "surprisal": 3.0 - n})
        for n in range(4)
    ]
    records += [
        Record(0, "exit", {"mode": "mat", "lambda": v, "saved": 1 - v, "agreement": v})
        for v in (0.2, 0.6, 1.0)
    ]
    saved = {"agreement": 0.99, "saved": 0.25, "intervals": {"saved": [0.2, 0.3]}}
    records.append(Record(0, "saved", {"mode": "mat", **saved}))
    decided = {"layer": 2, "shares": [0.1, 0.4, 0.6, 1.0], "intervals": {"layer": [1, 2]}}
    records.append(Record(0, "decided", {"mode": "mat", **decided}))
    table = [[1.0 - 0.1 * abs(a - b) for b in range(4)] for a in range(4)]
    records.append(Record(0, "r2", {"mode": "mat", "table": table}))
    records.append(Record(0, "lens", lens))
    return write_records(folder, records, "method: shortcut\n")


def write_ponder(folder: Path) -> Path:
    about = {"model": "ponder", "evaluation": 1}
    records = [
        Record(9, "ponder_exit", about | {"policy": "quantile", "setting": n / 4, "passes": n,
                                         "accuracy": 0.8 + n / 50})
        for n in (1, 2, 3)
    ]  # fmt: skip
    counts = {"by": "label", "groups": ["bad", EVIL], "counts": [[3, 2, 1], [1, 2, 3]]}
    records.append(Record(9, "ponder_passes", about | counts))
    records += [
        Record(9, "parity", {"lowest": n, "highest": n, "beyond": n > 2, "accuracy": 0.9,
                             "passes": float(n), "mechanism": "ponder"})
        for n in (1, 2, 3)
    ]  # fmt: skip
    return write_records(folder, records, "method: ponder\n")


def write_lazy(folder: Path) -> Path:
    """A look at a program, and what share of programs is executed exactly."""
    side = {"similarity": [[0.5, 0.9], [0.6, 1.0]], "gates": [[0.4, 0.1], [0.3, 0.0]]}
    look = {
        "source": f"print({EVIL})", "target": "3.", "epsilon": 0.2,
        "encoder": {"tokens": ["1", EVIL], "sentence": [0.5, 0.9], "depth": [2, 1], **side},
        "decoder": {"tokens": ["3", "."], "sentence": [0.4, 1.0], **side},
    }  # fmt: skip
    exact = {"exact": 0.5, "exact_by": [{"kind": "addition", "length": 1, "exact": 0.5,
                                         "programs": 4}]}  # fmt: skip
    records = [Record(5, "lazy_tokens", look), Record(5, "programs", exact)]
    return write_records(folder, records, "method: lazy\n")


def write_comparison(folder: Path, about: Path) -> Path:
    folder.mkdir(parents=True)
    points = [
        {"run": "mine", "folder": str(about), "mechanism": group,
         "command": f"run {name} {EVIL}", "name": name, "settings": {}, "quality": quality,
         "quality_low": quality - 0.02, "quality_high": quality + 0.02, "layers": cost,
         "flops": cost * 1e6, "milliseconds": cost, "milliseconds_low": cost - 0.2,
         "milliseconds_high": cost + 0.2, "relative_time": cost / 6, "relative_time_low": cost / 7,
         "relative_time_high": cost / 5, "units": 64, "flops_counted": None, "optimal": optimal,
         "sample": sample}
        for group, name, quality, cost, optimal, sample in (
            ("full", "all", 0.95, 6.0, ["layers", "flops", "milliseconds"], None),
            ("exit", "early", 0.94, 3.0, ["layers", "flops", "milliseconds"],
             {"tokens": ["It", " is", EVIL], "depth": [None, 2, 6], "layers": 6}),
            ("exit", "worse", 0.70, 5.0, [], None),
        )
    ]  # fmt: skip
    task = {"kind": "writing", "data": "python", "split": "valid", "unit": "token",
            "quality": "agreement", "higher_is_better": True}  # fmt: skip
    protocol = {"rounds": 7, "threads": 1, "seed": 0, "processor": "My CPU"}
    content = {"task": task, "protocol": protocol, "points": points, "bookkeeping": 0.01,
               "provenance": {}}  # fmt: skip
    content["command"] = "deepenough compare 'runs/my own' --out=runs/both"
    (folder / "frontier.json").write_text(json.dumps(content))
    return folder


@pytest.fixture(scope="session")
def evil() -> str:
    """A text that is markup, and stands in every run."""
    return EVIL


@pytest.fixture(scope="session")
def search_run() -> Callable[[Path], Path]:
    return write_search


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """A comparison, and a run of every method."""
    root = tmp_path_factory.mktemp("runs")
    return [
        write_comparison(root / "both", about=root / "shortcut"),
        write_search(root / "search"),
        write_shortcut(root / "shortcut"),
        write_ponder(root / "ponder"),
        write_lazy(root / "lazy"),
    ]

"""Gather the figures of the WikiText-2 runs into one table beside the first PAR code's own.

    deepenough search --config configs/par-wikitext2.yaml
    python benchmarks/par_wikitext2.py runs/par-wikitext2 [runs/...] [--save]

Reads run folders only; the training commands are those in each run's config.yaml.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import yaml
from record import save_result

from deepenough.runs import RunFolder, read_records

SOURCE = {2825: 114.4, 8475: 62.33, 14125: 51.88, 28250: 42.61, 48025: 39.57, 56500: 39.41}
"""Validation perplexity that the first public code reports, by iteration."""

_QUALITY = ("perplexity", "word_perplexity", "bits_per_byte")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--save", action="store_true")
    arguments = parser.parse_args()
    result = {
        "source_validation_perplexity": SOURCE,
        "runs": {folder.name: gather(RunFolder.open(folder)) for folder in arguments.runs},
    }
    save_result("par_wikitext2", result, arguments.save)


def gather(run: RunFolder) -> dict[str, Any]:
    records, _ = read_records(run.metrics)
    settings = yaml.safe_load(run.config.read_text())
    gathered: dict[str, Any] = {
        "steps": settings["train"]["steps"],
        "seed": settings["train"]["seed"],
        "pattern": settings["model"]["pattern"],
        "commit": settings["provenance"].get("commit"),
        "valid": {r.step: _pick(r.values) for r in records if r.kind == "valid"},
        "test": [_pick(r.values) for r in records if r.kind == "test"],
    }
    for record in records:
        if record.kind == "derive":
            gathered["derived"] = record.values["pattern"]
            gathered["pi"] = record.values["pi"]
    return gathered


def _pick(values: dict[str, Any]) -> dict[str, float]:
    return {name: round(values[name], 4) for name in _QUALITY}


if __name__ == "__main__":
    main()

r"""PAR on WikiText-2 passes the first public code's final perplexity in an eighth of its steps.

Reads run folders that these commands leave (a day of one core):

    deepenough par search --config configs/par-wikitext2.yaml --out runs/par-wikitext2
    deepenough par search --config configs/par-wikitext2.yaml --steps 7000 --valid_every 1400 \
        --out runs/par-wikitext2-7k

The first also retrains the pattern it finds, in `runs/par-wikitext2/derived`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from benchmarks.figures import require
from deepenough.runs import RunFolder, read_records

QUICK = False
SEEDS = [0]
FIRST_CODE = {2825: 114.4, 8475: 62.33, 14125: 51.88, 28250: 42.61, 48025: 39.57, 56500: 39.41}
"""Validation perplexity that the first public code reports, by iteration."""
REMEDY = "the commands at the top of benchmarks/par_wikitext2.py make it."
QUALITY = ("perplexity", "word_perplexity", "bits_per_byte")


def measure(runs: str = "runs") -> dict[str, Any]:
    """Return validation and test quality of the search, the short search and the retraining."""
    folders = {
        "search": Path(runs) / "par-wikitext2",
        "search_7k": Path(runs) / "par-wikitext2-7k",
        "retrained": Path(runs) / "par-wikitext2" / "derived",
    }
    gathered = {
        name: gather(RunFolder.open(require(folder, REMEDY))) for name, folder in folders.items()
    }
    settings = {name: values.pop("settings") for name, values in gathered.items()}
    return {
        "first_code": {"perplexity": FIRST_CODE},
        **gathered,
        "settings": {"runs": settings},
    }


def gather(run: RunFolder) -> dict[str, Any]:
    """Return the figures of one run: by validation step, and of the test split."""
    records, _ = read_records(run.metrics)
    settings = yaml.safe_load(run.config.read_text())
    about = {
        "steps": settings["train"]["steps"],
        "pattern": settings["model"]["pattern"],
        "commit": settings["provenance"].get("commit"),
    }
    figures: dict[str, Any] = {
        "valid": {str(r.step): quality(r.values) for r in records if r.kind == "valid"},
    }
    for record in records:
        if record.kind == "test":
            figures["test"] = quality(record.values)
        if record.kind == "derive":
            about["derived"] = record.values["pattern"]
            figures["pi"] = record.values["pi"]
    return {**figures, "settings": about}


def quality(values: dict[str, Any]) -> dict[str, float]:
    """Return the figures of quality in a record."""
    return {name: round(values[name], 4) for name in QUALITY}

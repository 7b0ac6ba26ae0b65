"""What the layers of a real model know: SmolLM2-135M on WikiText-2, agreement by layer and mode.

    python benchmarks/shortcut_real.py --run runs/shortcut-real [--shortcuts FOLDER] [--save]

Fits linear maps between all layers on the first 100,000 tokens of the training split, all
positions, tunes those to the last layer on the same text, and measures both on the first 8,000
tokens of the validation split, all positions. The text is read as it runs, in windows of 512
tokens. `--shortcuts` takes maps that are fitted (and tuned, if they carry tuned maps) already.
The run folder gets the maps and `metrics.jsonl`, from which `deepenough plot` draws the paper's
figures.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

from record import save_result

from deepenough.data.corpus import open_corpus
from deepenough.hf.adapter import adapt
from deepenough.hf.loading import load
from deepenough.runs import Metrics, RunFolder
from deepenough.shortcut.evaluation import evaluate, lens
from deepenough.shortcut.modeling import Shortcuts
from deepenough.shortcut.tune import tune
from deepenough.training.trainer import keep_freed_memory

CORPUS = "wikitext-2"
WINDOW = 512
PROMPT = "The capital of France is Paris, and the capital of Germany is"
# Agreement of the top token with the last layer's that linear maps shall reach.
WANTED = {2: 0.35, 12: 0.40, 22: 0.54, 26: 0.66, 29: 0.78}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--run", type=Path, required=True)
    parser.add_argument("--overwrite", action="store_true")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--shortcuts", type=Path, default=None)
    parser.add_argument("--corpus", default=CORPUS)
    parser.add_argument("--train-tokens", type=int, default=100_000)
    parser.add_argument("--valid-tokens", type=int, default=8_000)
    parser.add_argument("--steps", type=int, default=300, help="steps of tuning; 0 for none")
    parser.add_argument("--save", action="store_true")
    arguments = parser.parse_args()
    keep_freed_memory()

    run = RunFolder.create(arguments.run, overwrite=arguments.overwrite)
    model, tokenizer = load(arguments.model)
    adapter = adapt(model)
    train = running_text(tokenizer, arguments.corpus, "train", arguments.train_tokens)
    valid = running_text(tokenizer, arguments.corpus, "valid", arguments.valid_tokens)
    seconds: dict[str, float] = {}

    def timed(name: str, function: Any, *args: Any, **options: Any) -> Any:
        began = time.perf_counter()
        result = function(*args, **options)
        seconds[name] = round(time.perf_counter() - began, 1)
        print(f"{name}: {seconds[name]} s", flush=True)
        return result

    if arguments.shortcuts:
        maps = Shortcuts.from_pretrained(arguments.shortcuts)
    else:
        maps = timed("fit", Shortcuts.fit, adapter, tokenizer, train, window=WINDOW)
        maps.save_pretrained(run.path / "shortcuts")
    if arguments.steps and not maps.tuned:
        tuning, steps = run.path / "tuning", arguments.steps
        maps = timed("tune", tune, maps, adapter, tokenizer, train, run=tuning, steps=steps)
        maps.save_pretrained(run.path / "shortcuts")
    evaluation = timed(
        "evaluate", evaluate, adapter, tokenizer, maps, valid, positions="all", window=WINDOW
    )
    modes = [mode for mode in ("id", "mat", "tuned") if (mode, 0) in evaluation.layers]
    records = evaluation.records()
    records += [lens(adapter, tokenizer, maps, PROMPT, mode) for mode in ("id", "mat")]
    metrics = Metrics(run.metrics)
    for record in [maps.record(), *records]:
        metrics.append(record)

    layers = [record.values for record in records if record.kind == "layer"]
    table = {mode: {v["layer"]: _rounded(v) for v in layers if v["mode"] == mode} for mode in modes}
    saved = [record.values for record in records if record.kind == "saved"]
    result = {
        "model": adapter.identity(),
        "corpus": arguments.corpus,
        "positions": {"fit": maps.meta["fit"]["positions"], "evaluated": evaluation.positions},
        "seconds": seconds,
        "wanted": WANTED,
        "reached": {
            layer: table["mat"][layer]["agreement"]
            for layer in WANTED
            if layer <= adapter.num_layers
        },
        "layers": table,
        "saved": saved,
    }
    save_result("shortcut_real", result, arguments.save)


def running_text(tokenizer: Any, corpus: str, split: str, tokens: int) -> list[str]:
    """The beginning of a split, about so many tokens of it."""
    found: list[str] = []
    for line in open_corpus(corpus).lines(split):
        if tokens <= 0:
            break
        found.append(line.rstrip("\n"))
        tokens -= len(tokenizer(found[-1] + "\n", verbose=False)["input_ids"])
    return ["\n".join(found)]


def _rounded(values: dict[str, Any]) -> dict[str, float]:
    return {
        "agreement": round(values["precision_1"], 4),
        "kl": round(values["kl"], 4),
        "surprisal": round(values["surprisal"], 4),
    }


if __name__ == "__main__":
    main()

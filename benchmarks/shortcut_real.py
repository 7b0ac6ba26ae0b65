"""What the layers of a real model know: SmolLM2-135M on WikiText-2, agreement by layer and mode.

    python benchmarks/shortcut_real.py --run runs/shortcut-real [--shortcuts FOLDER] [--save]

Fits linear and affine maps on about 41,000 tokens of the training split, all positions, and
measures them on about 8,000 tokens of the validation split, all positions. `--shortcuts` takes
linear maps that are fitted already, and tuned if they carry tuned maps, instead of fitting them.
The run folder gets `metrics.jsonl`, from which `deepenough plot` draws the paper's figures.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

from record import save_result

from deepenough.adaptive.shortcut.shortcuts import Shortcuts
from deepenough.adaptive.shortcut.submodules import Submodules
from deepenough.data import open_corpus
from deepenough.measure.shortcut import evaluate, lens
from deepenough.models.hf import adapt
from deepenough.models.pretrained import load_model
from deepenough.runs import Metrics, RunFolder
from deepenough.train.allocator import keep_freed_memory

CORPUS = "wikitext-2-raw"
PROMPT = "The capital of France is Paris, and the capital of Germany is"
# Agreement of the top token with the last layer's that linear maps shall reach.
WANTED = {2: 0.35, 12: 0.40, 22: 0.54, 26: 0.66, 29: 0.78}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--run", type=Path, required=True)
    parser.add_argument("--overwrite", action="store_true")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--shortcuts", type=Path, default=None)
    parser.add_argument("--train-tokens", type=int, default=41_000)
    parser.add_argument("--valid-tokens", type=int, default=8_000)
    parser.add_argument("--submodules", action="store_true")
    parser.add_argument("--save", action="store_true")
    arguments = parser.parse_args()
    keep_freed_memory()

    run = RunFolder.create(arguments.run, overwrite=arguments.overwrite)
    model, tokenizer = load_model(arguments.model)
    adapter = adapt(model)
    train = paragraphs(tokenizer, "train", arguments.train_tokens)
    valid = paragraphs(tokenizer, "valid", arguments.valid_tokens)
    seconds: dict[str, float] = {}

    def timed(name: str, function: Any, *args: Any, **options: Any) -> Any:
        began = time.perf_counter()
        result = function(*args, **options)
        seconds[name] = round(time.perf_counter() - began, 1)
        print(f"{name}: {seconds[name]} s", flush=True)
        return result

    given = arguments.shortcuts
    linear = (
        Shortcuts.from_pretrained(given)
        if given
        else timed("fit mat", Shortcuts.fit, adapter, tokenizer, train)
    )
    affine = timed(
        "fit affine", Shortcuts.fit, adapter, tokenizer, train, targets="last", affine=True
    )
    parts = None
    if arguments.submodules:
        parts = timed("fit sub-modules", Submodules.fit, model, tokenizer, train, positions="all")
    evaluation = timed(
        "evaluate",
        evaluate,
        adapter,
        tokenizer,
        [linear, affine],
        valid,
        positions="all",
        submodules=parts,
    )
    modes = [mode for mode in ("id", "mat", "affine", "tuned") if (mode, 0) in evaluation.layers]
    records = evaluation.records()
    records += [lens(adapter, tokenizer, linear, PROMPT, mode) for mode in ("id", "mat")]
    metrics = Metrics(run.metrics)
    for record in [linear.record(), *records]:
        metrics.append(record)

    layers = [record.values for record in records if record.kind == "layer"]
    table = {mode: {v["layer"]: _rounded(v) for v in layers if v["mode"] == mode} for mode in modes}
    saved = [record.values for record in records if record.kind == "saved"]
    result = {
        "model": adapter.identity(),
        "positions": {"fit": linear.meta["fit"]["positions"], "evaluated": evaluation.positions},
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


def paragraphs(tokenizer: Any, split: str, tokens: int) -> list[str]:
    """The first paragraphs of a split, headings passed over, of at least `tokens` tokens in all."""
    found: list[str] = []
    for line in open_corpus(CORPUS).lines(split):
        if tokens <= 0:
            break
        text = line.strip()
        if len(text) >= 40:
            found.append(text)
            tokens -= len(tokenizer(text, verbose=False)["input_ids"])
    return found


def _rounded(values: dict[str, Any]) -> dict[str, float]:
    return {
        "agreement": round(values["precision_1"], 4),
        "kl": round(values["kl"], 4),
        "surprisal": round(values["surprisal"], 4),
    }


if __name__ == "__main__":
    main()

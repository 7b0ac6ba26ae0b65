"""A linear map from layer 2 of SmolLM2-135M gives a third of the final answers, from layer 29 80 %.

Fits linear maps between all layers on the first 90,000 tokens of WikiText-2's training split, all
positions, tunes those to the last layer on the same text, and measures both on the first 8,000
tokens of the validation split, all positions. The text is read as it runs, in windows of 512
tokens. The run folder gets the maps and `metrics.jsonl`, from which `deepenough shortcut plot`
draws the paper's figures.
"""

from __future__ import annotations

import time
from typing import Any

from deepenough.data.corpus import open_corpus
from deepenough.hf.adapter import adapt
from deepenough.hf.loading import load
from deepenough.runs import Metrics, RunFolder
from deepenough.shortcut.evaluation import evaluate
from deepenough.shortcut.lens import lens
from deepenough.shortcut.modeling import Shortcuts
from deepenough.shortcut.training import tune
from deepenough.training.trainer import keep_freed_memory

QUICK = False
SEEDS = [0]
CORPUS = "wikitext-2"
WINDOW = 512
PROMPT = "The capital of France is Paris, and the capital of Germany is"


def measure(
    run: str = "runs/shortcut-real",
    shortcuts: str | None = None,
    model: str = "smollm2",
    train_tokens: int = 90_000,
    valid_tokens: int = 8_000,
    steps: int = 300,
) -> dict[str, Any]:
    """Fit, tune and measure; return agreement, KL and surprisal by mode and layer.

    Args:
        run: Run folder that is written.
        shortcuts: Folder of maps that are fitted (and tuned) already.
        model: Name or folder of the model.
        train_tokens: Tokens to fit on, about.
        valid_tokens: Tokens to measure on, about.
        steps: Steps of tuning; 0 for none.
    """
    keep_freed_memory()
    folder = RunFolder.create(run, overwrite=True)
    loaded, tokenizer = load(model)
    adapter = adapt(loaded)
    train = running_text(tokenizer, CORPUS, "train", train_tokens)
    valid = running_text(tokenizer, CORPUS, "valid", valid_tokens)
    seconds: dict[str, float] = {}

    def timed(name: str, function: Any, *args: Any, **options: Any) -> Any:
        began = time.perf_counter()
        result = function(*args, **options)
        seconds[name] = round(time.perf_counter() - began, 1)
        print(f"{name}: {seconds[name]} s", flush=True)
        return result

    if shortcuts:
        maps = Shortcuts.from_pretrained(shortcuts)
    else:
        maps = timed("fit", Shortcuts.fit, adapter, tokenizer, train, window=WINDOW)
        maps.save_pretrained(folder.path / "shortcuts")
    if steps and not maps.tuned:
        tuning = folder.path / "tuning"
        maps = timed("tune", tune, maps, adapter, tokenizer, train, out=str(tuning), steps=steps)
        maps.save_pretrained(folder.path / "shortcuts")
    evaluation = timed(
        "evaluate", evaluate, adapter, tokenizer, maps, valid, positions="all", window=WINDOW
    )
    records = evaluation.records()
    metrics = Metrics(folder.metrics)
    for record in [maps.record(), *records, lens(adapter, tokenizer, maps, PROMPT)]:
        metrics.append(record)
    layers: dict[str, Any] = {}
    saved: dict[str, Any] = {}
    for record in records:
        values = record.values
        if record.kind == "layer":
            layers.setdefault(values["mode"], {})[f"layer_{values['layer']}"] = {
                "agreement": values["precision_1"],
                "kl": values["kl"],
                "surprisal": values["surprisal"],
            }
        if record.kind == "saved":
            goal = f"at_{100 * values['agreement']:g}_percent"
            saved.setdefault(values["mode"], {})[goal] = values["saved"]
    return {
        **layers,
        "layers_saved_share": saved,
        "seconds": seconds,
        "positions": {"fit": maps.meta["fit"]["positions"], "evaluated": evaluation.positions},
        "settings": {"model": adapter.identity(), "corpus": CORPUS},
    }


def running_text(tokenizer: Any, corpus: str, split: str, tokens: int) -> list[str]:
    """Return the beginning of a split as one text of about so many tokens."""
    found: list[str] = []
    for line in open_corpus(corpus).lines(split):
        if tokens <= 0:
            break
        found.append(line.rstrip("\n"))
        tokens -= len(tokenizer(found[-1] + "\n", verbose=False)["input_ids"])
    return ["\n".join(found)]

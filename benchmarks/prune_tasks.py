"""Three tasks of lm-eval on local text, by the full model and by its pruned ones.

Takes the models that `python -m benchmarks prune_smollm2 runs=RUNS` has left. The tasks are
made of local data: `reviews` (is a sentence of SST-2 positive or negative, by the likelier word),
`last_word` (the last word of a line of WikiText-2, as LAMBADA asks; accuracy and perplexity) and
`articles` (perplexity of words). Needs `pip install deepenough[eval]`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from benchmarks.figures import require
from benchmarks.prune_smollm2 import CORPUS, stage
from deepenough.data.classification import open_classification
from deepenough.data.config import ClassificationConfig
from deepenough.data.corpus import open_corpus
from deepenough.decoding.api import speculate
from deepenough.decoding.evaluation import evaluate
from deepenough.hf.loading import load

QUICK = False
SEEDS = [0]
ACCURACY = "  - metric: acc\n    aggregation: mean\n    higher_is_better: true\n"
TASKS = {
    "reviews": "output_type: multiple_choice\ndoc_to_text: 'Review: {{text}}\\nSentiment:'\n"
    "doc_to_choice: ['negative', 'positive']\ndoc_to_target: label\n"
    f"metric_list:\n{ACCURACY}",
    "last_word": "output_type: loglikelihood\ndoc_to_text: '{{text}}'\ndoc_to_target: ' {{word}}'\n"
    f"metric_list:\n{ACCURACY}  - metric: perplexity\n    aggregation: perplexity\n"
    "    higher_is_better: false\n",
    "articles": "output_type: loglikelihood_rolling\ndoc_to_text: ''\ndoc_to_target: '{{text}}'\n"
    "metric_list:\n  - metric: word_perplexity\n",
}


def measure(
    runs: str = "runs/prune-smollm2",
    model: str = "smollm2",
    shares: Sequence[float] = (0.83, 0.73),
    methods: Sequence[str] = ("replace", "influence"),
    rows: int = 200,
    threads: int = 1,
) -> dict[str, Any]:
    """Return the scores of all tasks by model.

    Args:
        runs: Folder of `prune_smollm2`.
        model: Name or folder of the full model.
        shares: Shares of the layers' time that were kept.
        methods: Ways of pruning.
        rows: Examples of a task; articles are an eighth of that.
        threads: Threads of torch.
    """
    torch.set_num_threads(threads)
    full, tokenizer = load(model)
    tasks = write_tasks(Path(runs) / "tasks", rows)
    folders = {
        f"keep_{round(100 * share)}_{method}": require(
            Path(runs) / f"time-{share}-{method}" / "model",
            "python -m benchmarks prune_smollm2 makes it.",
        )
        for share in shares
        for method in methods
    }

    def scores(own: Any) -> dict[str, float]:
        found = evaluate(speculate(own, "none"), tokenizer, list(TASKS), str(tasks), 8)
        return {
            f"{task}_{name.partition(',')[0]}": value
            for task, values in found.items()
            for name, value in values.items()
            if isinstance(value, float) and "stderr" not in name
        }

    found = {"full": stage(tasks / "full", lambda: scores(full))}
    for name, folder in folders.items():
        found[name] = stage(
            tasks / name,
            lambda f=folder: scores(AutoModelForCausalLM.from_pretrained(f).eval()),
        )
    return {**found, "settings": {"model": model, "rows": rows, "threads": threads}}


def write_tasks(folder: Path, rows: int) -> Path:
    """Write data and descriptions of all tasks into a folder and return it."""
    reviews = open_classification("sst2", ClassificationConfig()).splits["valid"]
    lines = [line.strip() for line in open_corpus(CORPUS).lines("valid")]
    prose = [line for line in lines if not line.startswith("=") and len(line.split()) > 30]
    sentences = [line.split(" . ")[0].split() for line in prose]
    words = [each for each in sentences if len(each) > 8 and each[-1].isalpha()]
    data: dict[str, list[dict[str, Any]]] = {
        "reviews": [{"text": each.text, "label": int(each.label)} for each in reviews[:rows]],
        "last_word": [{"text": " ".join(w[:-1]), "word": w[-1]} for w in words[:rows]],
        "articles": [{"text": line} for line in prose[: rows // 8]],
    }
    folder.mkdir(parents=True, exist_ok=True)
    for task, own in data.items():
        path = (folder / f"{task}.jsonl").resolve()
        path.write_text("\n".join(map(json.dumps, own)), encoding="utf-8")
        head = (
            f"task: {task}\ndataset_path: json\ndataset_kwargs:\n  data_files:\n    test: {path}\n"
        )
        text = f"{head}test_split: test\n{TASKS[task]}"
        (folder / f"{task}.yaml").write_text(text, encoding="utf-8")
    return folder

"""lm-eval on a model that exits early: the scores of what is really used, and its layers."""

import json
import tempfile
from pathlib import Path
from typing import Any

from texts import paragraphs

import deepenough as de
from deepenough.decoding.evaluation import evaluate

TASK = """
task: own_text
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{{{text}}}}"
metric_list:
  - metric: bits_per_byte
"""


def main(name: str = "smollm2", num_texts: int = 200, threshold: float = 0.6) -> dict[str, Any]:
    """Return bits per byte on held-out text, and the mean number of layers that ran.

    A task of your own is made here, so that nothing is downloaded; names of the harness's tasks,
    such as "lambada_openai", go in its place.
    """
    model, tokenizer = de.load(name)
    texts = paragraphs(num_texts)
    held_out, fit_on = texts[: num_texts // 10], texts[num_texts // 10 :]
    shortcuts = de.Shortcuts.fit(model, tokenizer, fit_on, ridge=1e-3)
    early = de.early_exit(model, shortcuts, threshold, policy="top")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "text.jsonl"
        file.write_text("".join(json.dumps({"text": text}) + "\n" for text in held_out))
        (Path(folder) / "own_text.yaml").write_text(TASK.format(file=file))
        scores = evaluate(early, tokenizer, ["own_text"], include=folder)
    print(scores)
    return scores


if __name__ == "__main__":
    main()

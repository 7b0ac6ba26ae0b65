"""The tasks of GLUE (arXiv 1804.07461) by name: their columns, labels and metrics.

Read are the folders of GLUE's own download (`CoLA`, `STS-B`, ...), under their names or those of
the tasks, and the same tasks on the hub, whose columns are called differently.
"""

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from deepenough.data.config import REGRESSION, SINGLE_LABEL, ProblemType
from deepenough.data.corpus import candidates

HUB = "nyu-mll/glue"
COLA_COLUMNS = ["source", "label", "mark", "sentence"]
"""Of CoLA's files to train and validate on, which do not name their columns."""
_ENTAILED = ("entailment", "not_entailment")


OTHER_NAMES = {
    "#1 String": "sentence1",
    "#2 String": "sentence2",
    "premise": "sentence1",
    "hypothesis": "sentence2",
    "Quality": "label",
    "gold_label": "label",
    "is_duplicate": "label",
    "score": "label",
}
"""What a column is called here, by its name in some task's files or on the hub."""


@dataclass(frozen=True)
class GlueTask:
    """One task: its folder, columns, labels in the order of their numbers, and how it is scored."""

    folder: str
    text: str = "sentence1"
    pair: str | None = "sentence2"
    labels: tuple[str, ...] = _ENTAILED
    metrics: tuple[str, ...] = ("accuracy",)
    problem: ProblemType = SINGLE_LABEL

    def columns(self, here: Collection[str]) -> tuple[str, str | None, str | None] | None:
        """Return the columns of text, pair and label among those here; None if a text is not."""
        known = {OTHER_NAMES.get(name, name): name for name in here}
        if self.text not in known or (self.pair is not None and self.pair not in known):
            return None
        return known[self.text], self.pair and known[self.pair], known.get("label")

    def places(self, name: str) -> list[Path]:
        """Return where the task's folder may be, as given or under `$DEEPENOUGH_DATA`."""
        names = (name, self.folder, f"glue/{name}", f"glue/{self.folder}")
        return [
            place for each in (*names, f"glue_data/{self.folder}") for place in candidates(each)
        ]


_QUALITY = ("accuracy", "f1")
TASKS = {
    "cola": GlueTask("CoLA", "sentence", None, ("unacceptable", "acceptable"), ("matthews",)),
    "sst2": GlueTask("SST-2", "sentence", None, ("negative", "positive")),
    "mrpc": GlueTask("MRPC", labels=("not_equivalent", "equivalent"), metrics=_QUALITY),
    "stsb": GlueTask(
        "STS-B", labels=("score",), metrics=("pearson", "spearman"), problem=REGRESSION
    ),
    "qqp": GlueTask("QQP", "question1", "question2", ("not_duplicate", "duplicate"), _QUALITY),
    "mnli": GlueTask("MNLI", labels=("entailment", "neutral", "contradiction")),
    "qnli": GlueTask("QNLI", "question", "sentence"),
    "rte": GlueTask("RTE"),
    "wnli": GlueTask("WNLI", labels=("not_entailment", "entailment")),
}


def glue_task(data: str) -> GlueTask | None:
    """Return the task that a name means: `cola`, `.../CoLA`, `hf:glue:cola`."""
    name = data
    if data.startswith("hf:") or ":" in data:
        repository, _, name = data.removeprefix("hf:").partition(":")
        if repository not in ("glue", HUB):
            return None
    last = Path(name).name.lower()
    return next((t for key, t in TASKS.items() if last in (key, t.folder.lower())), None)

"""Classification tasks by name: those of GLUE, and the twenty of bAbI.

**GLUE** (arXiv 1804.07461). Read are the folders of its own download (`CoLA`, `STS-B`, ...), under
their names or those of the tasks, and the same tasks on the hub, whose columns are called
differently.

**bAbI** (Weston et al., arXiv 1502.05698), as labelled pairs of texts. A file holds numbered lines,
of which a number 1 begins a story. A line with a tab is a question and its answer; every question
is an example, with the statements of its story so far before it.
"""

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from deepenough.data.config import REGRESSION, SINGLE_LABEL, ProblemType
from deepenough.data.corpus import candidates, read_lines
from deepenough.errors import UserError

# -- GLUE ------------------------------------------------------------------------------------------

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


# -- bAbI ------------------------------------------------------------------------------------------

BABI, NUM_TASKS = "babi", 20
Row = tuple[str, Mapping[str, str]]
"""Where a question stands, and its story, question and answer as text, pair and label."""
_FILE = re.compile(r"qa(?P<task>\d+)_.*_(?P<split>train|valid|test)\.txt")


def read_babi(name: str) -> tuple[dict[str, Iterator[Row]], tuple[str, ...]]:
    """Return the rows of `babi` (all tasks) or `babi:1,2,3` by split, and all answers there are.

    Some answers stand only in the test split. They are no mistakes in the files, but answers that a
    model has no example of, and count against it.
    """
    asked = name.partition(":")[2].split(",") if ":" in name else map(str, range(1, NUM_TASKS + 1))
    tasks = [int(part) if part.strip().isdigit() else 0 for part in asked]
    if not all(1 <= task <= NUM_TASKS for task in tasks):
        raise UserError(
            f"bAbI has tasks 1 to {NUM_TASKS}, not {name}: give some as babi:7 or babi:1,2."
        )
    places = [path for place in candidates(BABI) for path in (place / "en", place)]
    files = [path for place in places if place.is_dir() for path in sorted(place.iterdir())]
    rows: dict[str, list[Row]] = {}
    for task in tasks:
        matches = ((path, _FILE.fullmatch(path.name)) for path in files)
        found = [(path, m["split"]) for path, m in matches if m and int(m["task"]) == task]
        if not any(split == "train" for _, split in found):
            raise UserError(
                f"The training file of bAbI task {task}, qa{task}_..._train.txt, is in no folder "
                "babi, here or under $DEEPENOUGH_DATA: put it there."
            )
        for path, split in found:
            rows.setdefault(split, []).extend(read_stories(path))
    answers = {values["label"] for split in rows.values() for _, values in split}
    return {split: iter(part) for split, part in rows.items()}, tuple(sorted(answers))


def read_stories(path: Path) -> Iterator[Row]:
    """Yield every question of a file, with the statements of its story so far."""
    story: list[str] = []
    for number, line in enumerate(read_lines([path]), start=1):
        position, _, content = line.strip().partition(" ")
        if position and not position.isdigit():
            raise UserError(
                f"Line {number} of {path.name} does not begin with a number, as lines of bAbI do."
            )
        if position == "1":
            story = []
        question, *answer = re.split(r"[\t|]", content)  # a bar in some copies
        if answer:
            values = {"text": " ".join(story), "pair": question.strip(), "label": answer[0].strip()}
            yield f"line {number} of {path.name}", values
        elif content:
            story.append(content.strip())

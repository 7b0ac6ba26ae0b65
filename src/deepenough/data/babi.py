"""The twenty bAbI tasks (Weston et al., arXiv 1502.05698) as labelled pairs of texts.

A file holds numbered lines, of which a number 1 begins a story. A line with a tab is a question and
its answer; every question is an example, with the statements of its story so far before it.
"""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from deepenough.data.corpus import candidates, read_lines
from deepenough.errors import UserError

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

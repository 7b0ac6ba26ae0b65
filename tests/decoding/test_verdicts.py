"""Sentences about ways to generate: each is said only where its interval bears it out."""

from typing import Any

from deepenough.decoding.verdicts import comparison_findings
from deepenough.measurement import ComparedTask, Comparison, FrontierPoint


def point(name: str, quality: float, time: float, spread: float = 0.02, **more: Any) -> Any:
    given: dict[str, Any] = {"run": "r", "name": name, "mechanism": name.split()[0]}
    given |= {"settings": {}, "command": f"run {name}", "quality": quality, "units": 100}
    given |= {"quality_low": quality - 0.03, "quality_high": min(1.0, quality + 0.03)}
    given |= {"layers": 4.0, "flops": 1e6, "flops_counted": None, "sample": None}
    given |= {"relative_time": time, "relative_time_low": time - spread}
    given |= {"relative_time_high": time + spread, "milliseconds": time}
    given |= {"milliseconds_low": time, "milliseconds_high": time}
    return FrontierPoint(**given | more)


def told(*points: FrontierPoint, kind: str = "writing") -> Any:
    task = ComparedTask(kind, "text", "valid", "token", "agreement", True)
    rows = [point("transformers", 1.0, 1.0), *points]
    return comparison_findings(Comparison("compare", task, {}, 0.0, rows, {}))


def test_the_fastest_way_that_changes_nothing_is_told_with_its_interval():
    (said,) = told(point("full", 1.0, 0.8), point("speculative", 1.0, 0.5))
    assert said == (
        "Lossless decoding gives 2.00 (1.92 to 2.08) times the speed of generate() here, every "
        "token the model's first choice: de.speculate(model). The drafts account for "
        "1.6 (1.5 to 1.7) times of it."
    )
    assert said.command == "run speculative"
    (said,) = told(point("full", 1.0, 0.51), point("speculative", 1.0, 0.5))
    assert said.endswith("de.speculate(model). Without drafts it is not significantly slower.")
    (said,) = told(point("full", 1.0, 0.4), point("speculative", 1.0, 0.5))
    assert "gives 2.5" in said and said.endswith("de.speculate(model, 'none').")
    # What is faster but changes tokens is not lossless.
    (said,) = told(point("full", 1.0, 0.8), point("speculative", 0.9, 0.5))
    assert "gives 1.25" in said and said.endswith("de.speculate(model, 'none').")


def test_what_does_not_pay_is_said():
    (said,) = told(point("speculative", 1.0, 1.2))
    assert "does not pay here" in said and "is slower than generate(), 0.83 (0.82 to 0.85)" in said
    (said,) = told(point("speculative", 1.0, 0.99))
    assert "is no faster than generate()" in said


def test_early_exit_is_judged_against_what_loses_nothing():
    drafts = point("speculative", 1.0, 0.5)
    _, said = told(drafts, point("exit 0.9", 0.95, 0.3), point("exit 0.1", 0.3, 0.1))
    assert said.startswith("Early exit pays: with 95 % (92 to 98) of the tokens unchanged its")
    assert "1.7 (1.5 to 1.9) times that of speculative" in said and said.command == "run exit 0.9"
    _, said = told(drafts, point("exit 0.9", 0.95, 0.8))
    assert said.startswith("Early exit does not pay on this model: with 95 %")
    _, said = told(drafts, point("exit 0.9", 0.95, 0.49))
    assert said.startswith("Early exit is not significantly faster here")
    _, said = told(drafts, point("exit 0.9", 0.5, 0.1))
    assert "no threshold tried keeps 90 % of the tokens, the best is 50 % (47 to 53)." in said


def test_other_tasks_are_left_to_others():
    assert told(point("full", 1.0, 0.5), kind="classification") is None

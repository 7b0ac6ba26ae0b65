"""The toy measured, alone and in a comparison."""

from __future__ import annotations

from typing import Any

import torch
from deepenough.toy.config import ToyEvalConfig
from deepenough.toy.modeling import ToyModel, ToyOutput
from deepenough.toy.training import points

from deepenough.measurement import (
    ComparedData,
    ComparedTask,
    Interval,
    OperatingPoint,
    Scores,
)
from deepenough.runs import Record, RunFolder, append_record, model_folder, read_config


def evaluate(config: ToyEvalConfig) -> float:
    """Measure the error, record and return it."""
    model = ToyModel.from_pretrained(model_folder(config.run))
    x, y = points(read_config(config.run)["slope"], "eval")
    with torch.inference_mode():
        error = float((model(x, config.blocks).prediction - y).abs().mean())
    values = {"error": error, "blocks": config.blocks or len(model.weights)}
    append_record(RunFolder(model_folder(config.run).parent).metrics, Record(0, "toy", values))
    return error


class ToyCandidate:
    """A toy at each of its depths."""

    mechanism = "toy"

    def __init__(self, run: str, name: str, data: ComparedData) -> None:
        self.name, self.grid = name, data.grid
        self.model = ToyModel.from_pretrained(model_folder(run))
        self.x, self.y = points(read_config(run)["slope"], "compare")
        self.task = ComparedTask("lines", "points", "compare", "point", "error", False)

    def points(self) -> list[OperatingPoint]:
        """Return the depths to measure."""
        depths = self.grid.blocks or range(len(self.model.weights), 0, -1)
        return [OperatingPoint(f"{depth} blocks", {"blocks": depth}) for depth in depths]

    @torch.inference_mode()
    def run(self, point: OperatingPoint) -> ToyOutput:
        """Answer all points."""
        return self.model(self.x, point.settings["blocks"])

    def judge(self, point: OperatingPoint, answers: ToyOutput) -> Scores:
        """Return the mean error."""
        error = float((answers.prediction - self.y).abs().mean())
        trace = answers.trace
        quality = Interval(error, error, error)
        return Scores(quality, trace.num_units, trace.mean_blocks, trace.total_flops)


def open_candidate(run: str, name: str, data: ComparedData) -> Any:
    """Return a run of the toy as a comparison measures it."""
    return ToyCandidate(run, name, data)

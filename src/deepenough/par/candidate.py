"""Language models with memory as candidates of a comparison: perplexity, over lengths of memory.

Losses are kept by segment of the text, over all lanes, so that the interval of the perplexity comes
from resampling segments.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from deepenough.config import resolve
from deepenough.data import ContextBatches, DatasetConfig, load_tokenizer
from deepenough.data.prepare import split_tokens
from deepenough.data.tokens import tokenizer_fingerprint
from deepenough.errors import UserError
from deepenough.measurement import (
    ComparedData,
    ComparedTask,
    Entry,
    OperatingPoint,
    Scores,
    content_of,
    perplexity_interval,
)
from deepenough.par.evaluation import load_model
from deepenough.par.model import Memories, ParForCausalLM
from deepenough.runs import RunFolder, model_folder, read_config, read_section
from deepenough.trace import DepthTrace
from deepenough.training.language import num_evaluation_streams

SEGMENTS = 64


class Read(NamedTuple):
    """One pass over the text."""

    losses: list[Tensor]
    """Mean of a segment."""
    traces: list[DepthTrace]


class LanguageCandidate:
    mechanism = "par"

    def __init__(self, entry: Entry, name: str, data: ComparedData) -> None:
        self.name, self.entry = name, entry
        self.folder = _trained_pattern(entry.run)
        self.model = load_model(self.folder).eval()
        self.own_mem_len = self.model.config.mem_len
        self.batches, self.task = _text(self.folder, data)

    def points(self) -> Sequence[OperatingPoint]:
        own = self.own_mem_len
        lengths = self.entry.grid.mem_len or sorted({own, own // 2, own // 4}, reverse=True)
        if any(length < 0 for length in lengths):
            raise UserError(f"grid.mem_len must not be negative: got {lengths}.")
        pattern = self.model.config.pattern
        command = f"deepenough evaluate --run {shlex.quote(self.folder)} --mem_len"
        return [
            OperatingPoint(
                f"memory {length}",
                {"mem_len": length, "pattern": pattern},
                command=f"{command} {length}",
            )
            for length in lengths
        ]

    @torch.inference_mode()
    def run(self, point: OperatingPoint) -> Read:
        model: ParForCausalLM = self.model
        model.config.mem_len = int(point.settings["mem_len"])
        memories: Memories | None = None
        read = Read([], [])
        for batch in self.batches:
            output = model(batch["input_ids"], targets=batch["labels"], memories=memories)
            memories = output.memories
            read.losses.append(output.loss)
            read.traces.append(output.trace)
        return read

    def judge(self, point: OperatingPoint, answers: Read) -> Scores:
        tokens = [trace.num_units for trace in answers.traces]
        losses = [float(loss) * num for loss, num in zip(answers.losses, tokens, strict=True)]
        return Scores(
            quality=perplexity_interval(losses, tokens),
            units=sum(tokens),
            layers=DepthTrace.join(answers.traces).mean_blocks,
            flops=sum(trace.total_flops for trace in answers.traces),
        )


def _trained_pattern(run: str) -> str:
    """The folder of the model that a search led to, or of one that was trained as it is."""
    derived = RunFolder(Path(run)).derived
    if (derived / "model" / "config.json").is_file():
        return str(derived)
    if "search" in read_config(run):
        raise UserError(
            f"The run {run} is a search, whose blocks are a mixture: train what it found with "
            f"deepenough train --model.pattern PATTERN, and compare that run."
        )
    return run


def _text(run: str, data: ComparedData) -> tuple[list[dict[str, Tensor]], ComparedTask]:
    """The segments to read, on the model's device already, and what the task is called."""
    trained = _trained_on(run)
    name = data.data or str(read_config(str(model_folder(run).parent)).get("data"))
    tokenizer = load_tokenizer(str(model_folder(run)))
    tokens, split = split_tokens(name, trained, data.split, tokenizer, trained.ends_lines)
    if data.batch_size is not None:
        trained.batch_size = data.batch_size
    streams = num_evaluation_streams(tokens, trained, split)
    segments = ContextBatches(tokens.ids, streams, trained.length)
    kept = [segments[place] for place in range(min(len(segments), data.limit or SEGMENTS))]
    shape = {"streams": streams, "length": trained.length, "segments": len(kept)}
    fingerprint = tokenizer_fingerprint(tokenizer)
    content = content_of(segment["input_ids"].tolist() for segment in kept)
    detail = {**shape, "tokenizer": fingerprint, "content": content}
    task = ComparedTask("language modelling", name, split, "token", "perplexity", False, detail)
    return kept, task


def _trained_on(run: str) -> DatasetConfig:
    return resolve(DatasetConfig, overrides=read_section(run, "dataset"))

"""Use of a finished model: measure it on a text, continue a prompt, compare it.

In a comparison the operating points are lengths of memory. Losses are kept by segment of the text,
over all streams, so that the interval of the perplexity comes from resampling segments.
"""

import shlex
import time
from collections.abc import Sequence
from dataclasses import asdict, replace

import torch
from torch import Tensor

from deepenough.config import ContinueConfig, resolve, validate
from deepenough.data.config import DatasetConfig
from deepenough.data.tokenizer import load_tokenizer
from deepenough.data.tokens import ContextBatches, split_tokens, tokenizer_fingerprint
from deepenough.devices import to_device
from deepenough.errors import UserError
from deepenough.hf import generation
from deepenough.hf.loading import load
from deepenough.measurement import (
    ComparedData,
    ComparedTask,
    OperatingPoint,
    Scores,
    content_of,
    perplexity_interval,
)
from deepenough.par.config import ParEvalConfig
from deepenough.par.modeling import Memories, ParForCausalLM, ParPreTrainedModel
from deepenough.runs import RunFolder, find_run, model_folder, read_config, read_section
from deepenough.trace import DepthTrace
from deepenough.training.language import evaluate_language, masking_for, num_evaluation_streams

#: Segments that a comparison reads by default.
SEGMENTS = 64


def load_model(folder: str) -> ParPreTrainedModel:
    """Return the model of a finished run, or of a folder in Hugging Face form, for evaluation."""
    model, _ = load(str(model_folder(folder)), trust_remote_code=None)
    if not isinstance(model, ParPreTrainedModel):
        raise UserError(
            f"The model in {folder} is a {type(model).__name__}, not one of deepenough par: give "
            "another folder."
        )
    return model


def check_causal(model: ParPreTrainedModel, folder: str, instead: str) -> ParForCausalLM:
    """Return the model; a masked one is refused, saying what to do `instead`."""
    if not isinstance(model, ParForCausalLM):
        raise UserError(
            f"The model in {folder} was trained to fill in masked tokens and has neither memory "
            f"nor a next token: {instead}."
        )
    return model


def evaluate(config: ParEvalConfig) -> dict[str, float]:
    """Return quality, compute and rate of a model on one split of a text, with its tokenizer."""
    validate(config)
    model = load_model(config.run)
    if config.mem_len is not None:
        check_causal(model, config.run, "leave --mem_len out")
    length = config.dataset.length or model.config.length
    dataset = replace(_trained_on(config.run), **asdict(config.dataset) | {"length": length})
    if config.mem_len is not None:
        # With a memory of another length a token sees all of it and of its segment.
        model.config.mem_len, model.config.length = config.mem_len, length
    tokenizer = load_tokenizer(model_folder(config.run))
    tokens, _ = split_tokens(config.data, dataset, config.split, tokenizer)
    started = time.perf_counter()
    masking = masking_for(model, tokenizer)
    values = evaluate_language(model, tokens, dataset, masking=masking)
    values["tokens_per_second"] = values["tokens"] / (time.perf_counter() - started)
    return values


def _trained_on(folder: str) -> DatasetConfig:
    """Return how the text of a training was cut; the defaults where no run tells."""
    path = model_folder(folder)
    if path.name == "model" and RunFolder(path.parent).is_run():
        return resolve(DatasetConfig, overrides=read_section(folder, "dataset"))
    return DatasetConfig()


def continue_text(config: ContinueConfig) -> str:
    """Return the prompt and what the model writes after it."""
    options = validate(config).options
    instead = "give one that was trained with --objective causal"
    model = check_causal(load_model(options.pop("run")), config.run, instead)
    tokenizer = load_tokenizer(model_folder(config.run))
    ends_lines = _trained_on(config.run).ends_lines
    return generation.continue_text(model, tokenizer, ends_lines=ends_lines, **options)


# -- comparison ------------------------------------------------------------------------------------


class ParCandidate:
    """A language model with memory, as `deepenough compare` measures it."""

    mechanism = "par"

    def __init__(self, run: str, name: str, data: ComparedData) -> None:
        self.name, self.path, self.grid = name, run, data.grid
        self.folder = _trained_pattern(run)
        instead = "compare the classifiers that were fine-tuned from it"
        self.model = check_causal(load_model(self.folder), self.folder, instead)
        self.own_mem_len = self.model.config.mem_len
        self.batches, self.task = _compared_text(self.folder, data)

    def points(self) -> Sequence[OperatingPoint]:
        """Return one operating point for each length of memory, the longest first."""
        validate(self.grid)
        own = self.own_mem_len
        lengths = self.grid.mem_len or sorted({own, own // 2, own // 4}, reverse=True)
        command = f"deepenough par eval {shlex.quote(self.folder)} --mem_len"
        return [
            OperatingPoint(
                f"memory {length}",
                {"mem_len": length, "pattern": self.model.pattern},
                command=f"{command} {length}",
            )
            for length in lengths
        ]

    @torch.inference_mode()
    def run(self, point: OperatingPoint) -> list[tuple[Tensor, DepthTrace]]:
        """Read the text once with this length of memory; return loss and trace by segment."""
        self.model.config.mem_len = int(point.settings["mem_len"])
        memories: Memories | None = None
        answers = []
        for batch in self.batches:
            ids, targets = (to_device(batch[n], self.model.device) for n in ("input_ids", "labels"))
            output = self.model(ids, targets=targets, memories=memories)
            memories = output.memories
            answers.append((output.loss, output.trace))
        return answers

    def judge(self, point: OperatingPoint, answers: list[tuple[Tensor, DepthTrace]]) -> Scores:
        """Return perplexity with its interval, blocks and FLOPs of one pass."""
        traces = [trace for _, trace in answers]
        return Scores(
            quality=perplexity_interval(
                [float(loss) * trace.num_units for loss, trace in answers],
                [trace.num_units for trace in traces],
            ),
            units=sum(trace.num_units for trace in traces),
            layers=DepthTrace.join(traces).mean_blocks,
            flops=sum(trace.total_flops for trace in traces),
        )


open_candidate = ParCandidate


def _trained_pattern(run: str) -> str:
    """Return the folder of the model that a search led to, or of one that was trained as it is."""
    derived = RunFolder(find_run(run)).derived
    if (derived / "model" / "config.json").is_file():
        return str(derived)
    if "search" in read_config(run):
        raise UserError(
            f"The run {run} is a search, whose blocks are a mixture: train what it found with "
            "deepenough par train --pattern PATTERN, and compare that run."
        )
    return run


def _compared_text(run: str, data: ComparedData) -> tuple[list[dict[str, Tensor]], ComparedTask]:
    """Return the segments to read, and what the task is called."""
    dataset = _trained_on(run)
    text = data.data or str(read_config(str(model_folder(run).parent))["data"])
    tokenizer = load_tokenizer(str(model_folder(run)))
    tokens, split = split_tokens(text, dataset, data.split, tokenizer)
    if data.batch_size is not None:
        dataset.batch_size = data.batch_size
    num_streams = num_evaluation_streams(tokens, dataset, split)
    segments = ContextBatches(tokens.ids, num_streams, dataset.length)
    kept = [segments[place] for place in range(min(len(segments), data.limit or SEGMENTS))]
    detail = {
        "streams": num_streams,
        "length": dataset.length,
        "segments": len(kept),
        "tokenizer": tokenizer_fingerprint(tokenizer),
        "content": content_of(segment["input_ids"].tolist() for segment in kept),
    }
    task = ComparedTask("language modelling", text, split, "token", "perplexity", False, detail)
    return kept, task

"""Use of a finished model: measure it on a text, let it write."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors import SafetensorError

from deepenough.data import DatasetConfig, load_tokenizer
from deepenough.data.prepare import split_tokens
from deepenough.errors import UserError
from deepenough.par import ParConfig, ParForCausalLM
from deepenough.runs import RunFolder, model_folder
from deepenough.training.language import evaluate_language
from deepenough.training.logging import without_bars

#: Below this temperature sampling is taking the likeliest.
COLDEST = 1e-6


def load_model(folder: str) -> ParForCausalLM:
    """The model of a finished run, or of a folder in Hugging Face form."""
    path = model_folder(folder)
    kind = _model_type(path)
    if kind != ParConfig.model_type:
        raise UserError(
            f"The model in {folder} is of type {kind}, not one of deepenough train or search: give "
            "another folder."
        )
    try:
        with without_bars():
            return ParForCausalLM.from_pretrained(path)
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        reason = " ".join(str(error).split()).rstrip(".")
        raise UserError(f"The model in {folder} cannot be loaded: {reason}.") from error


def _model_type(folder: Path) -> str | None:
    try:
        content = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{folder / 'config.json'} cannot be read: {error}.") from error
    return content.get("model_type") if isinstance(content, dict) else None


def evaluate(
    folder: str,
    text: str,
    data: DatasetConfig,
    split: str,
    mem_len: int | None = None,
    length: int | None = None,
) -> dict[str, float]:
    """Quality, compute and rate of a model on one split of a text, with its own tokenizer.

    Segments are as long as `length` says, or, where it is None, as in training.
    """
    model = load_model(folder)
    data = replace(data, length=length or model.config.length)
    if mem_len is not None:
        if mem_len < 0:
            raise UserError(f"mem_len must not be negative: got {mem_len}.")
        # With a memory of another length a token sees all of it and of its segment.
        model.config.mem_len, model.config.length = mem_len, data.length
    tokenizer = load_tokenizer(str(model_folder(folder)))
    ends_lines = _ends_lines(folder, data.end_of_line)
    tokens, _ = split_tokens(text, data, split, tokenizer, ends_lines)
    started = time.perf_counter()
    values = evaluate_language(model, tokens, data)
    values["tokens_per_second"] = values["tokens"] / (time.perf_counter() - started)
    return values


def _ends_lines(folder: str, asked: bool | None = None) -> bool:
    """Whether line ends are tokens: as asked for, else as they were when the model was trained."""
    if asked is not None:
        return asked
    path = model_folder(folder)
    config = RunFolder(path.parent).config
    if path.name != "model" or not config.is_file():
        return True
    try:
        trained_on = yaml.safe_load(config.read_text(encoding="utf-8"))["dataset"]
    except (OSError, ValueError, KeyError, TypeError, yaml.YAMLError) as error:
        raise UserError(
            f"{config} cannot be read, which tells how to read a text: {error}."
        ) from error
    if trained_on["end_of_line"] is not None:
        return bool(trained_on["end_of_line"])
    return trained_on["tokenizer"] is None


def continue_text(
    folder: str, prompt: str, tokens: int, temperature: float, top_k: int, seed: int
) -> str:
    """The prompt and what the model writes after it."""
    if tokens < 1:
        raise UserError(f"tokens must be at least 1: got {tokens}.")
    if not temperature >= 0:
        raise UserError(f"temperature must not be negative: got {temperature}.")
    if top_k < 0:
        raise UserError(f"top_k must not be negative: got {top_k}; 0 stands for all tokens.")
    model = load_model(folder).eval()
    tokenizer = load_tokenizer(str(model_folder(folder)))
    # Where the model has learned line ends as a token of their own, prompts have them too.
    end = tokenizer.eos_token_id if _ends_lines(folder) else None
    if not prompt.strip():
        raise UserError("The prompt is empty: give at least one word to go on from.")
    given = _encode(tokenizer, prompt, end)
    ids = torch.tensor([given], dtype=torch.long)
    torch.manual_seed(seed)
    sampling = {"do_sample": True, "temperature": temperature, "top_k": top_k}
    written = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=tokens,
        **(sampling if temperature > COLDEST else {"do_sample": False}),
    )
    return _decode(tokenizer, written[0].tolist(), end)


def _encode(tokenizer: Any, text: str, end: int | None) -> list[int]:
    if end is None:
        return list(tokenizer.encode(text, add_special_tokens=False))
    first, *others = (tokenizer.encode(line, add_special_tokens=False) for line in text.split("\n"))
    return [*first, *(token for line in others for token in [end, *line])]


def _decode(tokenizer: Any, ids: list[int], end: int | None) -> str:
    lines: list[list[int]] = [[]]
    for token in ids:
        if token == end:
            lines.append([])
        else:
            lines[-1].append(token)
    return "\n".join(tokenizer.decode(line, skip_special_tokens=True) for line in lines)

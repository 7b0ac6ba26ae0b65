"""Use of a finished model: measure it on a text, let it write."""

from __future__ import annotations

import time
from pathlib import Path

import torch
import yaml
from safetensors import SafetensorError

from deepenough.adaptive.par import ParForCausalLM
from deepenough.data import DataSettings, load_tokenizer, open_corpus, token_file
from deepenough.errors import UserError
from deepenough.runs import RunFolder
from deepenough.train.language import evaluate_language
from deepenough.train.log import without_bars


def model_folder(folder: str) -> Path:
    """Where the model is: in a finished run, or the folder itself."""
    path = Path(folder)
    path = path / "model" if (path / "model" / "config.json").is_file() else path
    if not (path / "config.json").is_file():
        raise UserError(
            f"There is no model in {folder}: give the folder of a finished run, or one with a "
            "config.json."
        )
    return path


def load_model(folder: str) -> ParForCausalLM:
    """The model of a finished run, or of a folder in Hugging Face form."""
    path = model_folder(folder)
    try:
        with without_bars():
            return ParForCausalLM.from_pretrained(path)
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        reason = " ".join(str(error).split()).rstrip(".")
        raise UserError(f"The model in {folder} cannot be loaded: {reason}.") from error


def evaluate(
    folder: str, data: DataSettings, split: str, mem_len: int | None = None
) -> dict[str, float]:
    """Quality, compute and rate of a model on one split of a corpus, with its own tokenizer."""
    model = load_model(folder)
    if mem_len is not None:
        if mem_len < 0:
            raise UserError(f"mem_len must not be negative: got {mem_len}.")
        model.config.mem_len = mem_len
    tokenizer = load_tokenizer(str(model_folder(folder)))
    corpus = open_corpus(
        data.corpus,
        valid_fraction=data.valid_fraction,
        test_fraction=data.test_fraction,
        cache=data.cache,
    )
    if split not in corpus.splits:
        known = ", ".join(corpus.splits)
        raise UserError(f"The corpus {data.corpus} has no split {split!r}: it has {known}.")
    tokens = token_file(
        corpus,
        split,
        tokenizer,
        end_of_line=_ends_lines(Path(folder), data),
        cache_dir=data.cache,
    )
    started = time.perf_counter()
    values = evaluate_language(model, tokens, data)
    values["tokens_per_second"] = values["tokens"] / (time.perf_counter() - started)
    return values


def _ends_lines(folder: Path, data: DataSettings) -> bool:
    """Whether line ends are tokens: as asked for, else as they were when the model was trained."""
    if data.end_of_line is not None:
        return data.end_of_line
    config = RunFolder(folder).config
    if not config.is_file():
        return True
    trained_on = yaml.safe_load(config.read_text(encoding="utf-8"))["data"]
    if trained_on["end_of_line"] is not None:
        return bool(trained_on["end_of_line"])
    return trained_on["tokenizer"] is None


def continue_text(
    folder: str, prompt: str, tokens: int, temperature: float, top_k: int, seed: int
) -> str:
    """The prompt and what the model writes after it."""
    if tokens < 1:
        raise UserError(f"tokens must be at least 1: got {tokens}.")
    if temperature < 0:
        raise UserError(f"temperature must not be negative: got {temperature}.")
    model = load_model(folder).eval()
    tokenizer = load_tokenizer(str(model_folder(folder)))
    ids = torch.tensor([tokenizer.encode(prompt, add_special_tokens=False)], dtype=torch.long)
    if ids.shape[1] == 0:
        raise UserError("The prompt is empty: give at least one word to go on from.")
    torch.manual_seed(seed)
    sampling = {"do_sample": True, "temperature": temperature, "top_k": top_k}
    written = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=tokens,
        **(sampling if temperature > 0 else {"do_sample": False}),
    )
    return str(tokenizer.decode(written[0], skip_special_tokens=True))

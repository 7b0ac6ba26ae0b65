"""The text that a draft head learns from: what the model writes, kept on disk part by part.

A part is one batch of texts in one safetensors file: tokens, and the states behind them in half
precision. It is written when its batch is done, so that an interrupted command loses at most one
batch and goes on with the next. States read back are mapped from disk.

Prompts are beginnings of a corpus's lines and, in turn with them, instructions in the model's own
chat format.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from deepenough.data.corpus import open_corpus
from deepenough.decoding.engine import make_engine
from deepenough.decoding.instructions import instructions
from deepenough.decoding.own_text import LEAST_PROMPT, Written, beginnings, continue_prompts
from deepenough.errors import UserError
from deepenough.shortcut import files
from deepenough.training.config import seed_at

INDEX = "text.json"


@dataclass
class OwnTextSettings:
    """What the model writes"""

    data: str = "python"
    """Corpus whose lines are begun: python (built in), a file, folder or glob, a folder of
    $DEEPENOUGH_DATA, or a name on the hub."""

    split: str = "train"
    """Part of the corpus."""

    instructions: bool = True
    """Let every second prompt be an instruction, in the model's chat format if it has one."""

    tokens: int = 150_000
    """New tokens in all; fewer if the corpus runs out."""

    prompt_tokens: int = 32
    """Tokens of a line that are its prompt."""

    new_tokens: int = 128
    """New tokens of each text at most."""

    min_chars: int = 200
    """Lines shorter than this are passed over."""

    batch: int = 32
    """Texts written side by side."""

    sample_every: int = 8
    """Every so-manyth batch is drawn instead of taking the likeliest words; 0 for none."""

    def check(self) -> None:
        for name in ("tokens", "prompt_tokens", "new_tokens", "batch"):
            if getattr(self, name) < 1:
                raise UserError(f"text.{name} must be at least 1: got {getattr(self, name)}.")
        if self.prompt_tokens < LEAST_PROMPT:
            raise UserError(f"text.prompt_tokens must be at least {LEAST_PROMPT}.")
        if self.sample_every < 0:
            raise UserError("text.sample_every must not be negative: 0 draws nothing.")

    def lines(self) -> Iterator[str]:
        """Lines that are long enough; a corpus that is not there is refused at once."""
        corpus = open_corpus(self.data)
        if self.split not in corpus.splits:
            known = ", ".join(corpus.splits)
            raise UserError(f"The corpus {self.data} has no split {self.split!r}: it has {known}.")
        stripped = (line.strip() for line in corpus.lines(self.split))
        return (line for line in stripped if len(line) >= self.min_chars)


class OwnTexts(Sequence[Written]):
    """All texts of a folder, by number, their states mapped from disk."""

    def __init__(self, folder: Path) -> None:
        self._texts: list[Written] = []
        self.num_new = 0
        """Tokens that the model itself has written."""
        self.num_parts = 0
        while (path := _part(folder, self.num_parts)).is_file():
            self._add(files.load_tensors(path)[0])

    def _add(self, tensors: dict[str, Tensor]) -> None:
        lengths = tensors["lengths"].tolist()
        ids = tensors["ids"].long().split(lengths)
        states = tensors["states"].split([length - 1 for length in lengths])
        for each in zip(ids, states, tensors["prompts"].tolist(), strict=True):
            self._texts.append(Written(*each))
            self.num_new += len(each[0]) - each[2]
        self.num_parts += 1

    def append(self, folder: Path, texts: Sequence[Written]) -> None:
        """Write one more part."""
        tensors = {
            "ids": torch.cat([text.ids_T for text in texts]).int(),
            "lengths": torch.tensor([len(text.ids_T) for text in texts]),
            "prompts": torch.tensor([text.prompt for text in texts]),
            "states": torch.cat([text.states_TD for text in texts]).cpu().half(),
        }
        path = _part(folder, self.num_parts)
        try:
            files.save_tensors(path, tensors)
        except OSError as error:
            raise UserError(
                f"{path} cannot be written ({error}): make room and go on with --resume."
            ) from error
        self._add(files.load_tensors(path)[0])

    def __len__(self) -> int:
        return len(self._texts)

    def __getitem__(self, index: Any) -> Any:
        return self._texts[index]


def write_texts(
    folder: Path,
    model: PreTrainedModel,
    tokenizer: Any,
    settings: OwnTextSettings,
    seed: int,
    progress: Callable[[int, int], None] | None = None,
) -> OwnTexts:
    """Let the model write until there are `settings.tokens`; what is in `folder` stays."""
    settings.check()
    engine = make_engine(model)
    _check_index(folder, engine.adapter.identity()["fingerprint"], settings, seed)
    texts = OwnTexts(folder)
    prompts = islice(make_prompts(tokenizer, settings), len(texts), None)
    while texts.num_new < settings.tokens:
        batch = list(islice(prompts, settings.batch))
        if not batch:
            break
        generator = None
        if settings.sample_every and texts.num_parts % settings.sample_every == 1:
            generator = torch.Generator().manual_seed(seed_at(seed, "text", texts.num_parts))
        texts.append(folder, continue_prompts(engine, batch, settings.new_tokens, generator))
        if progress is not None:
            progress(min(texts.num_new, settings.tokens), settings.tokens)
    if not len(texts):
        raise UserError(
            f"No line of {settings.data} ({settings.split}) has {settings.min_chars} characters: "
            "give another text or a lower text.min_chars."
        )
    return texts


def make_prompts(tokenizer: Any, settings: OwnTextSettings) -> Iterator[list[int]]:
    """Tokens of lines, each followed by those of an instruction while there are any."""
    orders = _orders(tokenizer) if settings.instructions else iter(())
    for prompt in beginnings(tokenizer, settings.lines(), settings.prompt_tokens):
        yield prompt
        yield from islice(orders, 1)


def _orders(tokenizer: Any) -> Iterator[list[int]]:
    for text in instructions():
        if not getattr(tokenizer, "chat_template", None):
            yield tokenizer(text)["input_ids"]
            continue
        message = [{"role": "user", "content": text}]
        text = tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
        yield tokenizer(text, add_special_tokens=False)["input_ids"]


def _check_index(folder: Path, model: str, settings: OwnTextSettings, seed: int) -> None:
    """Texts that were written in another way are not gone on with; more of the same are."""
    about = {"model": model, "seed": seed, **asdict(settings)}
    path = folder / INDEX
    try:
        if path.is_file():
            known = json.loads(path.read_text(encoding="utf-8"))
            for name, value in about.items():
                if name != "tokens" and known.get(name) != value:
                    raise UserError(
                        f"The texts in {folder} were written otherwise: {name} was "
                        f"{known.get(name)} and is now {value}; give the same or another folder."
                    )
        folder.mkdir(parents=True, exist_ok=True)
        files.write_json(path, about)
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be used ({error}): choose another folder.") from error


def _part(folder: Path, number: int) -> Path:
    return folder / f"part-{number:05d}.safetensors"

"""Encoding many lines at once, with SentencePiece's own encoder where a tokenizer has one.

SentencePiece in C++ is about ten times as fast as the same model in `tokenizers`, and it is what
defines the ids of a SentencePiece model. A tokenizer made from such a model carries it along as an
attribute; any other tokenizer encodes by itself.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import sentencepiece
from tokenizers import normalizers
from transformers import PreTrainedTokenizerBase

from deepenough.data.sentencepiece_fast import SPACE, STAND_IN, is_lossless, parse_model

MODEL_FILE = "sentencepiece.model"
ATTRIBUTE = "sentencepiece_encoder"

Encoder = Callable[[list[str]], list[list[int]]]

_lower = normalizers.Lowercase()


def lower(text: str) -> str:
    """Lower case as the saved tokenizer makes it: letter by letter.

    `str.lower` differs in one place, a capital sigma at the end of a word.
    """
    return text.lower() if text.isascii() else str(_lower.normalize_str(text))


class SentencePieceEncoder:
    """A SentencePiece model with what its Hugging Face form does to the text beforehand."""

    def __init__(self, model: bytes, lowercase: bool) -> None:
        self.model = model
        self.lowercase = lowercase
        self._escape = is_lossless(parse_model(model))
        self._processor = sentencepiece.SentencePieceProcessor(model_proto=model)

    def __call__(self, lines: list[str]) -> list[list[int]]:
        if self.lowercase:
            lines = [lower(line) for line in lines]
        if self._escape:
            lines = [line.replace(SPACE, STAND_IN) for line in lines]
        ids: list[list[int]] = self._processor.encode(lines, num_threads=num_cores())
        return ids


def num_cores() -> int:
    """The cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def attach_encoder(tokenizer: PreTrainedTokenizerBase, model: bytes) -> None:
    """Let the tokenizer carry the SentencePiece model that it was made from."""
    setattr(tokenizer, ATTRIBUTE, SentencePieceEncoder(model, lowers_case(tokenizer)))


def save_tokenizer(tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """`save_pretrained`, and the SentencePiece model beside it, which makes encoding faster."""
    tokenizer.save_pretrained(folder)
    encoder = getattr(tokenizer, ATTRIBUTE, None)
    if encoder is not None:
        (folder / MODEL_FILE).write_bytes(encoder.model)


def encoder_of(tokenizer: PreTrainedTokenizerBase) -> Encoder:
    """A function from lines to their ids, special tokens not added."""
    encoder: Encoder | None = getattr(tokenizer, ATTRIBUTE, None)
    if encoder is not None:
        return encoder

    def encode(lines: list[str]) -> list[list[int]]:
        ids: list[list[int]] = tokenizer(
            lines, add_special_tokens=False, return_attention_mask=False, verbose=False
        )["input_ids"]
        return ids

    return encode


def lowers_case(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether the tokenizer's first step is to lower the case of its text."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or backend.normalizer is None:
        return False
    normalizer = json.loads(backend.to_str())["normalizer"]
    first = normalizer["normalizers"][0] if normalizer["type"] == "Sequence" else normalizer
    return bool(first["type"] == "Lowercase")

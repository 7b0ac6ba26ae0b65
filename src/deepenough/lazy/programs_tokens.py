"""Programs as tokens: a tokenizer of single characters, as Learning to Execute reads them."""

from __future__ import annotations

import string
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from deepenough.data.tokenizer import SPECIAL_TOKENS

CHARACTERS = string.digits + string.ascii_lowercase + "()+-*=;:.> "
"""All that programs are written in."""


def character_tokenizer() -> Any:
    """One token a character; what programs never hold is unknown."""
    pieces = [*SPECIAL_TOKENS.values(), *CHARACTERS]
    vocabulary = {piece: number for number, piece in enumerate(pieces)}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token=SPECIAL_TOKENS["unk"]))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    backend.decoder = decoders.Fuse()
    special = {
        f"{role}_token": AddedToken(piece, normalized=False, special=True)
        for role, piece in SPECIAL_TOKENS.items()
    }
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        clean_up_tokenization_spaces=False,
        model_input_names=["input_ids", "attention_mask"],
        **special,
    )

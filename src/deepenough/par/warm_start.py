"""Start a model from the weights of another, such as a pattern from its SuperNet."""

from __future__ import annotations

import logging
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from deepenough.data import load_tokenizer
from deepenough.data.tokens import tokenizer_fingerprint
from deepenough.errors import UserError
from deepenough.par import ParForCausalLM
from deepenough.runs import model_folder

log = logging.getLogger("deepenough")


def take_weights(
    model: ParForCausalLM, source: ParForCausalLM, tokenizer: PreTrainedTokenizerBase, origin: str
) -> None:
    """Copy from `source` all weights that `model` has too; both must be of one shape.

    A block of a kind that the source does not have there keeps its new weights. That happens where
    a budget asks for another branch than the search had settled on.
    """
    _check_tokenizer(tokenizer, model_folder(origin), origin)
    own, given = model.state_dict(), source.state_dict()
    for name, tensor in own.items():
        if name in given and tensor.shape != given[name].shape:
            raise UserError(
                f"The model in {origin} has another shape: {name} is {_shape(given[name].shape)} "
                f"there and {_shape(tensor.shape)} here; give the same model and data settings."
            )
    missing = [name for name in own if name not in given]
    if other := [name for name in missing if not name.startswith("blocks.")]:
        raise UserError(
            f"The model in {origin} has no {other[0]}: give the same model settings as there."
        )
    for block in sorted({int(name.split(".")[1]) for name in missing}):
        log.warning(
            "Block %d starts from new weights: %s has none for %r there.",
            block + 1,
            origin,
            model.pattern[block],
        )
    model.load_state_dict({name: given[name] for name in own if name in given}, strict=False)


def _check_tokenizer(tokenizer: PreTrainedTokenizerBase, folder: Path, origin: str) -> None:
    theirs = tokenizer_fingerprint(load_tokenizer(folder))
    if theirs != tokenizer_fingerprint(tokenizer):
        raise UserError(
            f"The model in {origin} has another tokenizer, so its weights mean other words: give "
            f"--dataset.tokenizer {folder}."
        )


def _shape(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape))

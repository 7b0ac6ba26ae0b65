"""Held-out programs of a run, encoded as pairs: what is read, and what is to be printed."""

from __future__ import annotations

from typing import Any, NamedTuple

from deepenough.config import resolve
from deepenough.data.translation_pairs import EncodedPairs, encode_pairs
from deepenough.lazy.programs_training import ProgramTraining, held_out_programs
from deepenough.runs import RunFolder, model_folder


class HeldOut(NamedTuple):
    pairs: EncodedPairs
    trained: ProgramTraining
    """How the run was made, which tells what the programs are drawn from."""


def held_out_pairs(run: str, split: str, tokenizer: Any, limit: int | None = None) -> HeldOut:
    """The programs that training was measured on, the first `limit` of them."""
    trained = resolve(ProgramTraining, RunFolder(model_folder(run).parent).config)
    kept = held_out_programs(trained.data, split, trained.train.seed)[:limit]
    longest = max(max(len(each.source), len(each.target)) for each in kept) + 1
    pairs = encode_pairs((each.pair for each in kept), tokenizer, longest, split, keep=True)
    return HeldOut(pairs, trained)

"""One prompt continued by an accelerated model, and by the model itself for comparison.

Both take turns, so that whatever else the machine does meets both; medians are reported. FLOPs of
the full model are counted as for a token that runs all layers.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from deepenough.decoding.engine import DecodingCosts
from deepenough.errors import UserError
from deepenough.hf.adapter import adapt
from deepenough.trace import DepthTrace

#: New tokens of a first, untimed turn: what is done once is done then.
_WARM = 4


@dataclass
class Told:
    """What one way of generating gave, and what it spent."""

    ids: list[int]
    """The new tokens."""
    depths: list[int]
    flops: list[float]
    seconds: float
    interrupted: bool = False

    @property
    def tokens_per_second(self) -> float:
        return len(self.ids) / self.seconds

    @property
    def mean_layers(self) -> float:
        """Of the tokens whose depth is known: not of one at which Ctrl-C came."""
        return sum(self.depths) / max(sum(depth > 0 for depth in self.depths), 1)


@dataclass
class Comparison:
    """An accelerated generation and, where asked for, the full model's."""

    fast: Told
    full: Told | None
    num_layers: int
    drafted: int = 0
    accepted: int = 0

    @property
    def ratio(self) -> float | None:
        """How many times as fast."""
        if self.full is None:
            return None
        return self.fast.tokens_per_second / self.full.tokens_per_second

    @property
    def identical(self) -> bool | None:
        """Whether the tokens are the full model's."""
        return None if self.full is None else self.fast.ids == self.full.ids


def prompt_ids(tokenizer: Any, prompt: str, chat: bool = False) -> Tensor:
    """Tokens `[1, T]` of a prompt, as it stands or as what a user says in a chat."""
    if not prompt.strip():
        raise UserError("The prompt is empty: give some text to go on from.")
    if chat:
        if not getattr(tokenizer, "chat_template", None):
            raise UserError("This model's tokenizer has no chat template: leave out chat.")
        message = [{"role": "user", "content": prompt}]
        prompt = tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
    # A template has the special tokens in it.
    return torch.tensor([tokenizer(prompt, add_special_tokens=not chat)["input_ids"]])


def generate_told(
    fast: Any,
    ids_BT: Tensor,
    max_new_tokens: int,
    against: Any = None,
    rounds: int = 1,
    **options: Any,
) -> Comparison:
    """Continue a prompt with `fast` and, in turns, with the model `against`; Ctrl-C ends it early.

    `options` are those of `generate`.
    """
    if max_new_tokens < 1 or rounds < 1:
        raise UserError("At least one new token and one round are needed.")
    adapter = adapt(fast)
    given = {
        "input_ids": ids_BT.to(fast.device),
        "attention_mask": torch.ones_like(ids_BT).to(fast.device),
        "do_sample": False,
        # The sentence a pad token is missing in is of no interest here.
        "pad_token_id": fast.generation_config.pad_token_id or 0,
        **options,
    }
    length = ids_BT.shape[1]
    if against is not None:
        for model in (fast, against):
            model.generate(**given, max_new_tokens=min(_WARM, max_new_tokens))
    times: tuple[list[float], list[float]] = ([], [])
    full = None
    for _ in range(rounds):
        began = time.perf_counter()
        output = fast.generate(**given, max_new_tokens=max_new_tokens, return_dict_in_generate=True)
        times[0].append(time.perf_counter() - began)
        if against is None or output.interrupted:
            break
        began = time.perf_counter()
        try:
            ids = against.generate(**given, max_new_tokens=max_new_tokens)[0, length:]
        except KeyboardInterrupt:
            output.interrupted = True
            break
        times[1].append(time.perf_counter() - began)
        full = ids
    trace: DepthTrace = output.trace
    told = Told(
        output.sequences[0, length:].tolist(),
        trace.depth[0].tolist(),
        trace.flops[0].tolist(),
        statistics.median(times[0]),
        bool(output.interrupted),
    )
    compared = Comparison(told, None, adapter.num_layers, output.drafted, output.accepted)
    if full is not None:
        compared.full = _full(full, length, DecodingCosts(adapter), statistics.median(times[1]))
    return compared


def _full(ids_T: Tensor, prompt: int, costs: DecodingCosts, seconds: float) -> Told:
    flops = [costs.token(prompt + 1 + n) + costs.head for n in range(len(ids_T))]
    return Told(ids_T.tolist(), [len(costs.layers)] * len(ids_T), flops, seconds)


def pieces(tokenizer: Any, prompt: Sequence[int], new: Sequence[int]) -> list[str]:
    """What each new token adds to the text; a character of several tokens comes with its last."""
    ids = list(prompt)
    shown = tokenizer.decode(ids)
    found: list[str] = []
    for token in new:
        ids.append(token)
        text = tokenizer.decode(ids)
        whole = not text.endswith("\ufffd") or len(found) == len(new) - 1
        found.append(text[len(shown) :] if whole else "")
        shown = text if whole else shown
    return found

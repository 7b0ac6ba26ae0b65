"""`calibrate(fast, tokenizer, texts)`: the fastest exit threshold that keeps its word.

The model continues the beginnings of the texts, the losses of early exits are measured on what it
wrote (`exit_losses.py`), and thresholds are tested from the most careful on until one cannot be
trusted (`exit_guarantee.py`). What is bounded is the expected loss of a text drawn like the ones
given: by default the share of tokens at which the exits say another word than the full model, the
text so far being the full model's.

In use an exiting model goes on from its own words, and one that errs may come to places where it
errs more. With `text="own"` it writes the texts itself, anew for every threshold, and its words are
compared with what the full model would have said at each place: slower, and a guarantee of just
what comes out. With `text="full"` this is measured on some of the texts at the threshold that was
found, and reported as `check`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

from torch import Tensor

from deepenough.decoding.api import AdaptiveDecoding
from deepenough.decoding.calibrated import Calibrated, maps_hash, policy_parts
from deepenough.decoding.early_exit import ExitRule
from deepenough.decoding.engine import Engine
from deepenough.decoding.guarantee import accept_in_order, check_asked, texts_needed
from deepenough.decoding.losses import (
    ExitLosses,
    ExitTable,
    Loss,
    disagreement,
    full_words,
    losses_at,
    losses_in_use,
    with_threshold,
)
from deepenough.decoding.own_text import Written, beginnings, continue_prompts
from deepenough.errors import UserError

#: The most careful first, finer where high agreements are.
THRESHOLDS: tuple[float, ...] = (
    *(0.99, 0.98, 0.97, 0.96, 0.95, 0.94, 0.92, 0.9, 0.875, 0.85, 0.825, 0.8, 0.775, 0.75),
    *(0.7, 0.65, 0.6, 0.55, 0.5, 0.4, 0.3, 0.2, 0.1),
)
#: Gets what is done, how much of it, and of how much.
Progress = Callable[[str, int, int], Any]


def calibrate(
    fast: Any,
    tokenizer: Any,
    texts: Iterable[str],
    max_disagreement: float = 0.05,
    confidence: float = 0.95,
    loss: Loss | None = None,
    *,
    text: Literal["full", "own"] = "full",
    thresholds: Sequence[float] = THRESHOLDS,
    bound: str = "hoeffding-bentkus",
    prompt_tokens: int = 32,
    new_tokens: int = 64,
    batch: int = 8,
    checked: int = 8,
    progress: Progress | None = None,
) -> Calibrated:
    """The fastest of `thresholds` whose risk is at most `max_disagreement`, or that none is.

    `fast` is what `early_exit(...)` returned; its exits, fill and kind of policy are
    calibrated. `text` says who writes the texts, the full model or the exiting one.

    `loss(found, expected)` takes the words of one text, as token ids, and gives a
    number between 0 and 1. `bound` is "hoeffding-bentkus", or "betting", which needs fewer texts if
    their losses are alike. The texts count as drawn independently: give them in random order, and
    not several pieces of one. `checked` texts are written again with exits; 0 for none.
    """
    engine, early = _parts(fast)
    name, options = policy_parts(early.policy)
    check_asked(max_disagreement, confidence, bound)
    if not thresholds or list(thresholds) != sorted(thresholds, reverse=True):
        raise UserError("Thresholds to test are given from the highest, the most careful, down.")
    tell = progress or (lambda *_: None)
    prompts = list(beginnings(tokenizer, texts, prompt_tokens))
    _check_enough(len(prompts), new_tokens, max_disagreement, confidence, bound)
    if text not in ("full", "own"):
        raise UserError(f"Texts are written by the full model or are its own, not {text!r}.")
    if text == "own":
        losses_of = _measure_own(fast, prompts, new_tokens, loss or disagreement, batch, tell)
    else:
        written = write(engine, prompts, new_tokens, batch, tell)
        losses_of = _measure(engine, early, written, loss or disagreement, batch, tell)
    points: dict[float, ExitLosses] = {}

    def losses(threshold: float) -> Tensor:
        points[threshold] = losses_of(threshold)
        return points[threshold].losses_N

    found = accept_in_order(losses, thresholds, max_disagreement, confidence, bound)
    check = None
    if found.threshold is not None and checked and text == "full":
        chosen = with_threshold(early, found.threshold)
        check = check_in_use(fast, chosen, prompts[:checked], new_tokens)
    return Calibrated(
        threshold=found.threshold,
        policy=name,
        policy_options=options,
        exits=tuple(sorted(set(early.layers))),
        fill=early.kv_propagation,
        shortlist=None if early.exit_vocab is None else tuple(early.exit_vocab.tolist()),
        max_disagreement=max_disagreement,
        confidence=confidence,
        bound=bound,
        loss="disagreement" if loss is None else getattr(loss, "__name__", "loss"),
        texts=found.texts,
        text=text,
        tokens=points[thresholds[0]].tokens,
        thresholds=tuple(thresholds[: len(found.risks)]),
        risks=found.risks,
        p_values=found.p_values,
        layers=None if found.threshold is None else float(points[found.threshold].layers_N.mean()),
        model=engine.adapter.identity(),
        maps=maps_hash(early),
        check=check,
    )


def _parts(fast: Any) -> tuple[Engine, ExitRule]:
    if not isinstance(fast, AdaptiveDecoding) or fast.exit_rule is None:
        raise UserError("Only an exiting model is calibrated: give what early_exit() returned.")
    return fast.decoding_engine, fast.exit_rule


def _check_enough(
    texts: int, new_tokens: int, max_disagreement: float, confidence: float, bound: str
) -> None:
    needed = texts_needed(max_disagreement, confidence, bound)
    if texts < needed:
        raise UserError(
            f"{texts} texts are too few: a disagreement of at most {max_disagreement} with "
            f"confidence {confidence} needs at least {needed} texts of four tokens or more, which "
            f"are {needed * new_tokens} new tokens, and more if the exits err at all."
        )


def write(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    new_tokens: int,
    batch: int = 8,
    tell: Progress = lambda *_: None,
) -> list[Written]:
    """What the full model makes of the prompts."""
    written: list[Written] = []
    for start in range(0, len(prompts), batch):
        written += continue_prompts(engine, prompts[start : start + batch], new_tokens)
        tell("texts written", len(written), len(prompts))
    return written


def _measure(
    engine: Engine,
    early: ExitRule,
    written: Sequence[Written],
    loss: Loss,
    batch: int,
    tell: Progress,
) -> Callable[[float], ExitLosses]:
    """Losses of a threshold: looked up if the cache is exact whatever the threshold, else run."""
    if early.kv_propagation == "deferred":
        table = ExitTable.collect(
            engine, early, written, batch, lambda done, of: tell("texts measured", done, of)
        )
        return lambda threshold: table.losses_at(threshold, loss)
    expected = full_words(engine, written, batch)
    tested = 0

    def run(threshold: float) -> ExitLosses:
        nonlocal tested
        tested += 1
        tell("thresholds measured", tested, 0)
        chosen = with_threshold(early, threshold)
        return losses_at(engine, chosen, written, expected, loss, batch)

    return run


def _measure_own(
    fast: Any,
    prompts: Sequence[Sequence[int]],
    new_tokens: int,
    loss: Loss,
    batch: int,
    tell: Progress,
) -> Callable[[float], ExitLosses]:
    tested = 0

    def run(threshold: float) -> ExitLosses:
        nonlocal tested
        tested += 1
        tell("thresholds measured", tested, 0)
        early = with_threshold(fast.exit_rule, threshold)
        return losses_in_use(fast, early, prompts, new_tokens, loss, batch)

    return run


def check_in_use(
    fast: Any, early: ExitRule, prompts: Sequence[Sequence[int]], new_tokens: int
) -> dict[str, float]:
    """Disagreement and layers of a token where the exiting model writes the text itself."""
    found = losses_in_use(fast, early, prompts, new_tokens)
    return {
        "texts": len(prompts),
        "disagreement": float(found.losses_N.mean()),
        "layers": float(found.layers_N.mean()),
    }

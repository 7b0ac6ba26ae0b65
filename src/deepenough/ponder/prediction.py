"""From texts to answers in one call: `model.predict` and `model.ponder`.

Shapes: B texts, N passes, C labels.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor
from transformers import AutoTokenizer

from deepenough.errors import UserError
from deepenough.ponder.halting import (
    MULTI_LABEL,
    REGRESSION,
    HaltingPolicy,
    expected_steps,
    log_geometric,
)
from deepenough.ponder.inference import ContinuousBatcher, StreamedAnswer

if TYPE_CHECKING:
    from deepenough.ponder.modeling import PonderClassifier

Text = str | tuple[str, str]
"""A text, or a text and its pair."""

CHUNK = 256
"""Texts given to the tokenizer at once: enough for its speed, few enough to stream."""


@dataclass(frozen=True)
class Prediction:
    """The answer to one text."""

    label: str | list[str] | list[float]
    """The likeliest label; the labels that apply, where there can be several; the numbers of a
    regression."""
    probability: float | list[float] | None
    """Of that label, or of each of those labels; None of a regression."""
    passes: int
    """After how many passes the text was decided."""
    flops: float


@dataclass(frozen=True)
class Pondering:
    """All that a model computes of some texts, at every pass."""

    logits: Tensor
    """`[B, C]`, each row of the pass at which that text halts."""
    passes: Tensor
    """`[B]`, counted from 1."""
    step_logits: Tensor
    """`[N, B, C]`, the answers of every pass."""
    halt_probabilities: Tensor | None
    """`[B, N]`, `lambda_n`."""
    distribution: Tensor | None
    """`[B, N]`, the model's halting distribution `p_n`."""
    target: Tensor
    """`[N]`, the prior it was trained towards."""
    expected_passes: Tensor | None
    """`[B]`, the mean of the distribution."""
    loss: Tensor | None
    """The mean over the texts, where labels were given."""


class ReadsTexts:
    """Methods of pondering classifiers that take texts."""

    @torch.no_grad()
    def ponder(
        self,
        texts: Sequence[Text],
        tokenizer: Any = None,
        labels: Sequence[Any] | Tensor | None = None,
        policy: HaltingPolicy | None = None,
        truncate: bool = False,
        batch_size: int = 32,
    ) -> Pondering:
        """Return answers, halting probabilities and distributions of some texts at every pass.

        All passes are made, so that all can be told; use `predict` for answers alone.

        Args:
            texts: At least one text, or pairs of texts.
            tokenizer: By default the one saved with the model.
            labels: Wanted answers; the result then has a loss.
            policy: Replaces the exit of the model's config.
            truncate: Cut texts that are too long instead of refusing them.
            batch_size: Texts in one batch.
        """
        model = cast("PonderClassifier", self)
        if isinstance(texts, str) or not len(texts):
            raise UserError("Give a list of at least one text.")
        if labels is not None and len(labels) != len(texts):
            raise UserError(f"{len(texts)} texts need as many labels: got {len(labels)}.")
        tokenizer = tokenizer or _own_tokenizer(model)
        encodings = list(encode(model, texts, tokenizer, truncate))
        training = model.training
        model.eval()
        try:
            outputs = []
            for start in range(0, len(texts), batch_size):
                part = slice(start, start + batch_size)
                columns = {key: [row[key] for row in encodings[part]] for key in encodings[0]}
                batch = tokenizer.pad(columns, return_tensors="pt").to(model.device)
                numbers = torch.arange(start, start + len(batch["input_ids"]), device=model.device)
                own = None if labels is None else labels[part]
                outputs.append(
                    model(**batch, labels=own, policy=policy, all_passes=True, example_ids=numbers)
                )
        finally:
            model.train(training)
        return _join(model, outputs)

    def predict(
        self,
        texts: Iterable[Text],
        tokenizer: Any = None,
        policy: HaltingPolicy | None = None,
        truncate: bool = False,
        batch_size: int = 32,
        max_length: int | None = None,
    ) -> Iterator[Prediction]:
        """Yield answers in the order of the texts, which may be endless.

        Examples stop when they are decided, and the next ones take their rows.

        Args:
            texts: Texts, or pairs of texts.
            tokenizer: By default the one saved with the model.
            policy: Replaces the exit of the model's config.
            truncate: Cut texts that are too long instead of refusing them.
            batch_size: Texts that are worked on at once.
            max_length: Tokens at which texts are cut; by default what the model takes.
        """
        model = cast("PonderClassifier", self)
        own = tokenizer or _own_tokenizer(model)
        encodings = encode(model, texts, own, truncate, max_length, min(batch_size, CHUNK))
        for answer in self.stream(encodings, policy, batch_size):
            yield _prediction(model, answer)

    def stream(
        self,
        encodings: Iterable[Mapping[str, Any]],
        policy: HaltingPolicy | None = None,
        batch_size: int = 32,
    ) -> Iterator[StreamedAnswer]:
        """Yield the same for what a tokenizer returns, one mapping a text, without padding."""
        model = cast("PonderClassifier", self)
        return ContinuousBatcher(model, batch_size, policy or model.exit_policy()).run(encodings)


def encode(
    model: PonderClassifier,
    texts: Iterable[Text],
    tokenizer: Any,
    truncate: bool = False,
    max_length: int | None = None,
    at_once: int = CHUNK,
) -> Iterator[dict[str, list[int]]]:
    """Yield the tokens of each text; empty and too long texts are refused by number."""
    source, number = iter(texts), 0
    limit = min((n for n in (model.max_length, max_length) if n is not None), default=None)
    while chunk := list(islice(source, max(1, at_once))):
        for offset, text in enumerate(chunk):
            _check_text(text, number + offset)
        firsts = [text if isinstance(text, str) else text[0] for text in chunk]
        seconds = None if isinstance(chunk[0], str) else [text[1] for text in chunk]
        if any(isinstance(text, str) != (seconds is None) for text in chunk):
            raise UserError("Some texts have a pair and some have none: give all of them one kind.")
        cut = {"truncation": True, "max_length": limit} if truncate and limit else {}
        encoded = tokenizer(firsts, seconds, verbose=False, **cut)
        for row in range(len(chunk)):
            ids = encoded["input_ids"][row]
            if limit is not None and len(ids) > limit:
                raise UserError(
                    f"Text {number + row} is {len(ids)} tokens long, and the model takes at most "
                    f"{limit}: shorten it, or let it be cut with truncate."
                )
            yield {key: encoded[key][row] for key in encoded}
        number += len(chunk)


def _check_text(text: Any, number: int) -> None:
    parts = [text] if isinstance(text, str) else text
    right = isinstance(parts, list | tuple) and all(isinstance(part, str) for part in parts)
    if not right or (not isinstance(text, str) and len(parts) != 2):
        raise UserError(f"Text {number} is neither a string nor a pair of strings: {text!r:.80}.")
    if any(not part.strip() for part in parts):
        raise UserError(f"Text {number} is empty: remove it.")


def _own_tokenizer(model: PonderClassifier) -> Any:
    name = model.name_or_path
    try:
        if not name:
            raise OSError
        return AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise UserError(
            f"There is no tokenizer with the model{f' in {name}' if name else ''}: pass one."
        ) from error


def _prediction(model: PonderClassifier, answer: StreamedAnswer) -> Prediction:
    names: Any = model.config.id2label
    logits, problem = answer.logits.float(), model.config.problem_type
    label: Any
    probability: Any
    if problem == REGRESSION or (problem is None and model.num_labels == 1):
        label, probability = logits.tolist(), None
    elif problem == MULTI_LABEL:
        probabilities = logits.sigmoid().tolist()
        chosen = [number for number, value in enumerate(probabilities) if value > 0.5]
        label = [names[number] for number in chosen]
        probability = [probabilities[number] for number in chosen]
    else:
        likeliest = int(logits.argmax())
        label, probability = names[likeliest], float(logits.softmax(-1)[likeliest])
    return Prediction(label, probability, answer.passes, answer.flops)


def _join(model: PonderClassifier, outputs: list[Any]) -> Pondering:
    """Return the outputs of several batches as one."""

    def together(name: str, dim: int = 0) -> Any:
        parts = [output[name] for output in outputs]
        return None if parts[0] is None else torch.cat(parts, dim)

    loss = None
    if outputs[0].loss is not None:
        sizes = torch.tensor([len(output.passes) for output in outputs], dtype=torch.float32)
        each = torch.stack([output.loss.cpu() for output in outputs])
        loss = (each * sizes).sum() / sizes.sum()
    halting = together("halting")
    return Pondering(
        logits=together("logits"),
        passes=together("passes"),
        step_logits=together("step_logits", 1),
        halt_probabilities=together("halt_probabilities"),
        distribution=halting,
        target=log_geometric(model.config.halting_target, model.num_passes).exp(),
        expected_passes=None if halting is None else expected_steps(halting.log()),
        loss=loss,
    )

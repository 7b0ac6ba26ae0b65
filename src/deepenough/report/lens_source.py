"""The lens records of a run, checked: what every layer would say after every token of a prompt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeGuard

import numpy as np

from deepenough.report.shortcut_source import share
from deepenough.report.source import Run, number


@dataclass(frozen=True)
class Lens:
    """One prompt seen through one mode; rows are layers, the last layer last."""

    prompt: str
    mode: str
    tokens: tuple[str, ...]
    layers: tuple[int, ...]
    words: tuple[tuple[str, ...], ...]
    """[layer][token] the likeliest next word, or the word in place of a mask."""
    probability: np.ndarray
    """[layer, token] of that word, NaN where it was not recorded."""
    agrees: np.ndarray
    """[layer, token] whether it is the last layer's word."""
    first: int = 0
    """The number of tokens of the prompt left out before the first one here."""

    def last_tokens(self, limit: int) -> Lens:
        """The same with at most `limit` tokens: the end of a prompt is what it leads to."""
        cut = max(0, len(self.tokens) - limit)
        return replace(
            self,
            tokens=self.tokens[cut:],
            words=tuple(row[cut:] for row in self.words),
            probability=self.probability[:, cut:],
            agrees=self.agrees[:, cut:],
            first=self.first + cut,
        )

    def some_layers(self, limit: int) -> Lens:
        """The same with at most `limit` layers, evenly, first and last always among them."""
        rows = np.unique(np.linspace(0, len(self.layers) - 1, min(limit, len(self.layers))).round())
        picks = rows.astype(int)
        return replace(
            self,
            layers=tuple(self.layers[i] for i in picks),
            words=tuple(self.words[i] for i in picks),
            probability=self.probability[picks],
            agrees=self.agrees[picks],
        )

    def known_from(self) -> np.ndarray:
        """[token] the first row from which on every layer has the last layer's word."""
        later_agree = np.logical_and.accumulate(self.agrees[::-1], axis=0)
        return len(self.layers) - later_agree.sum(axis=0)


def lenses(run: Run) -> list[Lens]:
    """Every lens of the run, the latest first; of one prompt and mode only the latest."""
    found: dict[tuple[str, str], Lens] = {}
    for record in run.records:
        lens = read_lens(record.values) if record.kind == "lens" else None
        if lens is not None:
            found.pop((lens.prompt, lens.mode), None)
            found[lens.prompt, lens.mode] = lens
    return list(found.values())[::-1]


def read_lens(values: dict[str, Any]) -> Lens | None:
    """The lens in a record, or None if its parts do not fit together."""
    tokens, words = values.get("tokens"), values.get("words")
    if not _texts(tokens) or not isinstance(words, list) or not words:
        return None
    shape = (len(words), len(tokens))
    if not all(_texts(row) and len(row) == len(tokens) for row in words):
        return None
    layers = [number(layer) for layer in _list(values.get("layers"))]
    known = [int(layer) for layer in layers if layer is not None]
    agrees = _grid(values.get("agrees"), shape)
    return Lens(
        prompt=str(values.get("prompt") or "".join(tokens)),
        mode=str(values.get("mode") or "mat"),
        tokens=tuple(tokens),
        layers=tuple(known if len(known) == len(words) else range(len(words))),
        words=tuple(map(tuple, words)),
        probability=_probabilities(values.get("probability"), shape),
        # Without a word on it, equal words agree.
        agrees=np.array(words) == np.array(words[-1]) if agrees is None else agrees == 1.0,
    )


def _texts(value: Any) -> TypeGuard[list[str]]:
    return isinstance(value, list) and bool(value) and all(isinstance(v, str) for v in value)


def _list(value: Any) -> Sequence[Any]:
    return value if isinstance(value, list) else []


def _grid(value: Any, shape: tuple[int, int]) -> np.ndarray | None:
    try:
        grid = np.array(value, dtype=float)
    except (TypeError, ValueError, OverflowError):
        return None
    return grid if grid.shape == shape else None


def _probabilities(value: Any, shape: tuple[int, int]) -> np.ndarray:
    grid = _grid(value, shape)
    if grid is None:
        return np.full(shape, np.nan)
    checked = [np.nan if (p := share(v)) is None else p for v in grid.flat]
    return np.array(checked).reshape(shape)

"""Lookup drafts: a text goes on as it went on where its end stood before.

`SuffixAutomaton` (Blumer et al., 1985) holds all substrings of a text in at most two states a
token. Substrings that end at the same places share a state; the suffixes of the text are the states
from `last` along the suffix links, ever shorter, and the link of `last` is the longest suffix that
stands elsewhere too. Every state counts what followed it. With `c(s, w)` how often token `w`
followed the context `s`, `n(s)` all that followed, and `s'` the next shorter context that stands at
more places, `w` follows with probability

    p(w | s) = (c(s, w) + p(w | s')) / (n(s) + 1)

so that a context seen once is half believed. A token is added, and looked up, in amortised constant
time: at most `MAX_CONTEXTS` contexts of the end of a text are counted.

`LookupTable` holds the texts of many requests.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from deepenough.artifacts import load_artifact, save_artifact
from deepenough.decoding.engine import Engine
from deepenough.errors import UserError

FORMAT, VERSION, TENSORS = "deepenough-lookup-table", 1, "lookup_table.safetensors"
#: Contexts of one place that are counted, the longest first; running text has about ten.
MAX_CONTEXTS = 32
#: Tokens that match before a continuation is drafted, and the least probability of all of it.
MIN_MATCH, MIN_PROB = 2, 0.2
#: Ends a text among others; no token of a model.
_END = -1


class SuffixAutomaton:
    """All substrings of a text, with what followed them and how often."""

    def __init__(self) -> None:
        self.next: list[dict[int, int]] = [{}]
        """By state, which state a token leads to."""
        self.link, self.length = [0], [0]
        """By state, its suffix link, and the tokens of its longest substring."""
        self.counts: list[dict[int, int]] = [{}]
        """By state, how often each token followed."""
        self.total, self.best = [0], [_END]
        """By state, the sum of its counts, and the token of the highest, the latest of equal."""
        self.last = 0

    def extend(self, token: int) -> None:
        """Add a token to the text; a negative one ends it, and is never a continuation."""
        state = self.last
        for _ in range(MAX_CONTEXTS if token >= 0 else 0):
            counts = self.counts[state]
            count = counts[token] = counts.get(token, 0) + 1
            self.total[state] += 1
            if count >= counts.get(self.best[state], 0):
                self.best[state] = token
            if state == 0:
                break
            state = self.link[state]
        new = self._add(self.length[self.last] + 1)
        state, self.last = self.last, new
        while token not in self.next[state]:
            self.next[state][token] = new
            if state == 0:
                return  # the link of the new state is the empty context
            state = self.link[state]
        following = self.next[state][token]
        if self.length[following] > self.length[state] + 1:
            following = self._split(state, token, following)
        self.link[new] = following

    def _split(self, state: int, token: int, whole: int) -> int:
        """Give a state of their own to the substrings of `whole` that `state` and `token` make."""
        short = self._add(self.length[state] + 1, whole)
        self.link[whole] = short
        while self.next[state].get(token) == whole:
            self.next[state][token] = short
            if state == 0:
                break
            state = self.link[state]
        return short

    def _add(self, length: int, like: int | None = None) -> int:
        self.length.append(length)
        self.link.append(0 if like is None else self.link[like])
        self.next.append({} if like is None else dict(self.next[like]))
        self.counts.append({} if like is None else dict(self.counts[like]))
        self.total.append(0 if like is None else self.total[like])
        self.best.append(_END if like is None else self.best[like])
        return len(self.length) - 1

    def advance(self, state: int, length: int, token: int) -> tuple[int, int]:
        """Return the longest match, state and length, of another text after one more token."""
        while token not in self.next[state]:
            if state == 0:
                return 0, 0
            state = self.link[state]
            length = self.length[state]
        return self.next[state][token], length + 1

    def probability(self, state: int, token: int) -> float:
        """Return `p(token | state)`, from the longest context to the shortest."""
        share, weight = 0.0, 1.0
        while weight > 1e-3:
            weight /= self.total[state] + 1
            share += weight * self.counts[state].get(token, 0)
            if state == 0:
                break
            state = self.link[state]
        return share

    def draft(self, state: int, length: int, most: int) -> tuple[list[int], list[float]]:
        """Return the most frequent continuation of a match and the probability of its tokens."""
        tokens: list[int] = []
        probs: list[float] = []
        whole = 1.0
        while len(tokens) < most:
            while state and not self.total[state]:  # it stands at the end of the text alone
                state = self.link[state]
                length = self.length[state]
            token = self.best[state]
            if length < MIN_MATCH:
                break
            chance = self.probability(state, token)
            whole *= chance
            if whole < MIN_PROB:
                break
            tokens.append(token)
            probs.append(chance)
            state, length = self.next[state][token], length + 1
        return tokens, probs


class LookupTable:
    """Texts whose continuations are drafted, shared by requests; safetensors and JSON on disk.

    `vocab_size` is that of the model whose tokens they are, and becomes known with the first model.
    With more than `max_tokens` tokens the oldest texts are forgotten.
    """

    def __init__(
        self,
        texts: Iterable[Sequence[int]] = (),
        vocab_size: int | None = None,
        max_tokens: int = 200_000,
    ) -> None:
        self.vocab_size, self.max_tokens = vocab_size, max_tokens
        self.texts: list[list[int]] = []
        self.growing: list[list[int]] = []
        """Texts that are being written; `settle` adds them as they are by then."""
        self.automaton = SuffixAutomaton()
        self._size = 0
        for text in texts:
            self.add(text)

    def add(self, text: Sequence[int]) -> None:
        """Add the tokens of a text."""
        self._size += len(text)
        self.texts.append(list(text))
        new = self.texts[-1:]
        if self._size > self.max_tokens:  # half of them go, so that this is seldom
            while len(self.texts) > 1 and self._size > self.max_tokens // 2:
                self._size -= len(self.texts.pop(0))
            self.automaton, new = SuffixAutomaton(), self.texts
        for each in new:
            for token in (*each, _END):
                self.automaton.extend(token)

    def settle(self) -> None:
        """Add the texts that have been written."""
        for text in self.growing:
            self.add(text)
        self.growing = []

    def check_made_for(self, engine: Engine) -> None:
        """Refuse a model of another vocabulary."""
        vocab_size = engine.adapter.model.config.get_text_config().vocab_size
        if self.vocab_size not in (None, vocab_size):
            raise UserError(
                f"The lookup table has tokens of a vocabulary of {self.vocab_size}, and the model "
                f"has {vocab_size}: give the table of this model, or a new one."
            )
        self.vocab_size = vocab_size

    def save_pretrained(self, folder: str | os.PathLike[str]) -> None:
        """Write the texts; other files in the folder stay."""
        self.settle()
        flat = [token for text in self.texts for token in text]
        tensors: dict[str, Tensor] = {
            "tokens": torch.tensor(flat, dtype=torch.int32),
            "lengths": torch.tensor([len(text) for text in self.texts], dtype=torch.int64),
        }
        index = {"format": FORMAT, "version": VERSION, "vocab_size": self.vocab_size}
        try:
            save_artifact(Path(folder) / TENSORS, tensors, index | {"max_tokens": self.max_tokens})
        except OSError as error:
            raise UserError(f"The lookup table cannot be written to {folder}: {error}.") from error

    @classmethod
    def from_pretrained(cls, folder: str | os.PathLike[str]) -> LookupTable:
        """Read what `save_pretrained` wrote."""
        path = Path(folder) / TENSORS
        if not path.is_file():
            raise UserError(
                f"{folder} holds no lookup table ({TENSORS}): give the folder that "
                "LookupTable.save_pretrained wrote."
            )
        try:
            tensors, index = load_artifact(path, FORMAT, VERSION)
            size, tokens = index["vocab_size"], tensors["tokens"]
            if len(tokens) and not 0 <= int(tokens.min()) <= int(tokens.max()) < (size or 2**31):
                raise ValueError("there are tokens outside of the vocabulary")
            texts = [part.tolist() for part in tokens.split(tensors["lengths"].tolist())]
            return cls(texts, size, int(index["max_tokens"]))
        except (OSError, ValueError, KeyError, TypeError, RuntimeError) as error:
            raise UserError(f"{path} cannot be used ({error}): make the table anew.") from error

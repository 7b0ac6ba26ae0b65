"""Sources of drafts: guesses of the next tokens, which the model then verifies in one pass.

A wrong guess costs a little time and never changes the output, so a source is free in how it
guesses. `Lookup` continues the text as it continued where its last words stood before (prompt
lookup decoding); `FirstOf` asks several sources in turn.

Shapes: B rows, T tokens, D width.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from deepenough.decoding.engine import Engine
from deepenough.decoding.rows import Row
from deepenough.errors import UserError


@dataclass
class Proposal:
    """Drafts of every row, possibly none."""

    tokens: list[list[int]]
    hidden: Tensor | None = None
    """`h_layer` of each row's last token and of its drafts, `[B, T, D]`, where drafting has made
    them: the verification goes on from there."""
    layer: int = 0
    flops: float = 0.0
    """What drafting cost a row beyond what the verification has to do anyway."""


class DraftSource(ABC):
    """Guesses up to `most` tokens a row."""

    def __init__(self, most: int) -> None:
        if most < 1:
            raise UserError(f"A source must draft at least 1 token: got {most}.")
        self.most = most

    def begin(self, engine: Engine) -> None:  # noqa: B027
        """A new generation; what is known of earlier ones is forgotten."""

    def observe(  # noqa: B027
        self, rows: list[Row], normed_BTD: Tensor, counts: Sequence[int]
    ) -> None:
        """After a pass: normed states, and how many tokens each row has got from the first of
        them on."""

    @abstractmethod
    def propose(self, rows: list[Row], state_BD: Tensor, engine: Engine) -> Proposal:
        """Drafts after each row's last token. `state_BD` are the normed states that led to those
        tokens: of the tokens before them."""


class Lookup(DraftSource):
    """The continuation of the last place where the row's last `longest ... shortest` tokens stood.

    The places of all n-grams are kept in a table that grows with the row, so that looking up takes
    no time however long the text is.
    """

    def __init__(self, most: int = 2, longest: int = 3, shortest: int = 2) -> None:
        super().__init__(most)
        if not 1 <= shortest <= longest:
            raise UserError(f"Lookup takes 1 <= shortest <= longest: got {shortest} and {longest}.")
        self.sizes = range(longest, shortest - 1, -1)
        self._tables: dict[int, dict[tuple[int, ...], int]] = {}
        self._read: dict[int, int] = {}

    def begin(self, engine: Engine) -> None:
        self._tables, self._read = {}, {}

    def propose(self, rows: list[Row], state_BD: Tensor, engine: Engine) -> Proposal:
        return Proposal([self.find(row.number, row.context) for row in rows])

    def find(self, number: int, context: list[int]) -> list[int]:
        """Drafts for row `number`, whose text so far is `context`."""
        table = self._tables.setdefault(number, {})
        # An n-gram is entered once it is known what follows it.
        for end in range(self._read.get(number, 0) + 1, len(context)):
            for size in self.sizes:
                if size <= end:
                    table[tuple(context[end - size : end])] = end
        self._read[number] = len(context) - 1
        for size in self.sizes:
            place = table.get(tuple(context[-size:])) if size <= len(context) else None
            if place is not None:
                return context[place : place + self.most]
        return []


class FirstOf(DraftSource):
    """Each row's drafts come from the first source that has any for it."""

    def __init__(self, sources: Sequence[DraftSource]) -> None:
        super().__init__(max(source.most for source in sources))
        self.sources = list(sources)

    def begin(self, engine: Engine) -> None:
        for source in self.sources:
            source.begin(engine)

    def observe(self, rows: list[Row], normed_BTD: Tensor, counts: Sequence[int]) -> None:
        for source in self.sources:
            source.observe(rows, normed_BTD, counts)

    def propose(self, rows: list[Row], state_BD: Tensor, engine: Engine) -> Proposal:
        tokens: list[list[int]] = [[] for _ in rows]
        flops = 0.0
        for source in self.sources:
            proposal = source.propose(rows, state_BD, engine)
            flops += proposal.flops
            if not any(tokens):
                tokens, answer = proposal.tokens, proposal
            else:
                # States of some rows' drafts only are of no use to a verification of all.
                tokens = [own or other for own, other in zip(tokens, proposal.tokens, strict=True)]
                answer = Proposal(tokens)
            if all(tokens):
                break
        answer.flops = flops
        return answer

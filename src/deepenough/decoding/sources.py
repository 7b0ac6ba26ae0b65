"""Sources of drafts by name, from the maps and heads that are at hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from deepenough.decoding.carry import Carry, CarryDraft
from deepenough.decoding.drafts import DraftSource, FirstOf, Lookup
from deepenough.decoding.engine import Engine
from deepenough.decoding.head_draft import HeadDraft
from deepenough.decoding.shortcut_draft import ShortcutDraft
from deepenough.decoding.tuned import Tuned
from deepenough.errors import UserError
from deepenough.shortcut.modeling import Shortcuts

NAMES = ("lookup", "carry", "shortcut", "tuned")
_NEEDED = {
    "carry": "carry=Carry...",
    "shortcut": "shortcuts",
    "tuned": "tuned=FOLDER",
}


@dataclass(frozen=True)
class Drafting:
    """Which sources are asked, in which order, and how they guess."""

    names: tuple[str | DraftSource, ...]
    num_drafts: int = 2
    """Tokens that a source guesses at once."""
    words: int | None = None
    """Of the shortlist, those that are most frequent; None for all of it."""
    layer: int | None = None
    """Layers that a shortcut draft runs, by default a quarter of them."""


class Workshop:
    """Makes sources for one model, from what has been fitted for it; refuses what was not."""

    def __init__(
        self,
        engine: Engine,
        shortcuts: Shortcuts | None = None,
        carry: Carry | None = None,
        tuned: Tuned | None = None,
    ) -> None:
        if tuned is not None:
            tuned.check_model(engine.adapter)
            carry, shortcuts = carry or tuned.carry, shortcuts or tuned.shortcuts
        if carry is not None:
            carry.check_model(engine.adapter)
        if shortcuts is not None:
            shortcuts.check_model(engine.adapter)
        self.engine, self.shortcuts, self.carry, self.tuned = engine, shortcuts, carry, tuned

    def names(self) -> list[str]:
        """The sources that can be made."""
        found = {
            "carry": self.carry,
            "shortcut": self.shortcuts,
            "tuned": self.tuned,
        }
        return [name for name in NAMES if name == "lookup" or found[name] is not None]

    def default(self) -> tuple[str, ...]:
        """Lookup, and the best of what runs no layer of the model."""
        known = self.names()
        best = "tuned" if "tuned" in known else "carry"
        return ("lookup", best) if best in known else ("lookup",)

    def make(self, drafting: Drafting) -> DraftSource | None:
        """None for plain decoding, without names."""
        sources = [self._make(name, drafting) for name in drafting.names]
        if len(sources) < 2:
            return sources[0] if sources else None
        return FirstOf(sources)

    def _make(self, name: str | DraftSource, drafting: Drafting) -> DraftSource:
        if isinstance(name, DraftSource):
            return name
        if name not in NAMES:
            raise UserError(
                f"Drafts come from {', '.join(NAMES)} or a DraftSource, not from {name!r}."
            )
        most = drafting.num_drafts
        if name == "lookup":
            return Lookup(most)
        if name == "carry" and self.carry is not None:
            return CarryDraft(self.carry.of_words(drafting.words), most)
        if name == "shortcut" and self.shortcuts is not None:
            layer = self.engine.num_layers // 4 if drafting.layer is None else drafting.layer
            mode = "tuned" if layer in self.shortcuts.tuned else None
            return ShortcutDraft(self.shortcuts, layer, most, self._words(drafting), mode)
        if name == "tuned" and self.tuned is not None:
            words = self._words(drafting)
            assert words is not None
            return HeadDraft(self.tuned.head, words, most)
        raise UserError(f"Drafts from {name} need its maps: give {_NEEDED[name]} as well.")

    def _words(self, drafting: Drafting) -> Tensor | None:
        return None if self.carry is None else self.carry.shortlist[: drafting.words]


def make_drafting(
    workshop: Workshop,
    names: Sequence[str | DraftSource] | None,
    num_drafts: int | None,
    layer: int | None,
) -> Drafting:
    """What was asked for; where nothing was, what was found to be the fastest."""
    if names is not None and not names:
        raise UserError("A speculative model needs a source of drafts: give at least one.")
    chosen = workshop.tuned.choice if workshop.tuned is not None else {}
    if names is None and chosen:
        return Drafting(
            tuple(chosen["names"]),
            chosen["num_drafts"] if num_drafts is None else num_drafts,
            chosen["words"],
            chosen["layer"] if layer is None else layer,
        )
    wanted = workshop.default() if names is None else tuple(names)
    return Drafting(wanted, 2 if num_drafts is None else num_drafts, None, layer)

"""What each layer of a model already knows: every mode and layer in one pass over the texts.

Modes are the ways from layer `l` to a prediction: `id` (the head on `h_l` itself), `mat`, `affine`
and `tuned` (a map to the last layer, then the head), and `attention`, `feed_forward`, `norms` (the
blocks from `l` on, with that part replaced by its linear fit). Measured is what
`shortcut_scores` says, and for the first four also early exit (`exit_sweep`) and r^2.

The model runs once over each text. What is replaced from layer `l` on starts from the state `h_l`
of that run; with attention replaced, tokens do not see each other and only the chosen ones are run.
The head runs at chosen positions only, on blocks of rows of bounded size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from deepenough.errors import UserError
from deepenough.hf.adapter import Adapter, adapt
from deepenough.hf.intercept import fused_gelu
from deepenough.shortcut.evaluation_records import Evaluation
from deepenough.shortcut.exit_sweep import LAMBDAS
from deepenough.shortcut.lens import lens
from deepenough.shortcut.modeling import Shortcuts
from deepenough.shortcut.reading import Positions, TokenBatch, batches, make_reading
from deepenough.shortcut.scores import Reference, Scores
from deepenough.shortcut.statistics import R2, check_finite
from deepenough.shortcut.submodules import Replacement, Submodules

__all__ = ["Evaluation", "evaluate", "lens"]

#: Logits that are held at once, in bytes; a few tensors of that size exist.
_LOGIT_BYTES = 100_000_000


@torch.no_grad()
def evaluate(
    model: PreTrainedModel | Adapter,
    tokenizer: Any,
    shortcuts: Shortcuts | Sequence[Shortcuts],
    texts: Iterable[str],
    *,
    positions: Positions = "random",
    modes: Sequence[str] | None = None,
    submodules: Submodules | None = None,
    lambdas: Sequence[float] = LAMBDAS,
    seed: int = 0,
    tables: bool = True,
    batch_tokens: int = 1024,
    window: int | None = None,
    progress: Callable[[int, int | None], None] | None = None,
) -> Evaluation:
    """Measure shortcuts of a model on texts.

    Linear and affine shortcuts of the same model can be given together. `modes` names what to
    measure (by default all there is), `submodules` the fits of parts, `tables` whether r^2 of all
    pairs is wanted too. A model without a language-model head is measured by r^2 alone.
    `progress` is called with the number of texts read and of texts in all, where that is known.
    """
    adapter = model if isinstance(model, Adapter) else adapt(model)
    given = [shortcuts] if isinstance(shortcuts, Shortcuts) else list(shortcuts)
    for each in given:
        each.check_model(adapter)
    ways = _choose(_ways(given), submodules, modes)
    wanted_kinds = [kind for kind in _kinds(submodules) if modes is None or kind in modes]
    replacement = Replacement(submodules, adapter) if submodules and wanted_kinds else None
    if replacement and "norms" in wanted_kinds:
        replacement.fold_norms()
    evaluation = Evaluation(adapter.num_layers, lambdas)
    measuring = _Measuring(adapter, ways, replacement, wanted_kinds, evaluation)
    if tables:
        measuring.streams = {
            mode: each.r2_stream(mode)
            for mode, each in {"id": given[0], **{each.mode: each for each in given}}.items()
            if mode in ways
        }
    reading = make_reading(adapter, positions, seed, batch_tokens, window)
    total = len(texts) if isinstance(texts, Sequence) else None
    with fused_gelu(adapter.model):
        for batch in batches(tokenizer, texts, reading, evaluation.tally):
            measuring.add(batch)
            if progress is not None:
                progress(batch.texts, total)
        measuring.flush()
    if not evaluation.positions:
        raise UserError("There is nothing to measure on: give texts of two tokens or more.")
    evaluation.r2 = {mode: stream.table() for mode, stream in measuring.streams.items()}
    if tables:
        with suppress(UserError):  # imported maps come without it
            evaluation.cka = given[0].cka()
    return evaluation


#: Takes states of a layer to the last one; None where there is no map.
Way = Callable[[Tensor, int], Tensor | None]


def _ways(given: Sequence[Shortcuts]) -> dict[str, Way]:
    """How each mode takes states `[n, d]` of a layer to the last one."""

    def way(shortcuts: Shortcuts, mode: str) -> Way:
        last = shortcuts.num_layers

        def take(hidden: Tensor, layer: int) -> Tensor | None:
            if mode == "tuned" and layer not in shortcuts.tuned:  # some layers alone can be tuned
                return None
            return shortcuts.apply(hidden, layer, last, mode)

        return take

    if not given:
        raise UserError("There are no shortcuts to measure: give at least one.")
    ways: dict[str, Way] = {"id": lambda hidden, _: hidden}
    for shortcuts in given:
        for mode in (shortcuts.mode, *(["tuned"] if shortcuts.tuned else [])):
            if mode in ways:
                raise UserError(
                    f"Two of the shortcuts have {mode!r} maps: give at most one linear and one "
                    "affine, and tune only one of them."
                )
            ways[mode] = way(shortcuts, mode)
    return ways


def _kinds(submodules: Submodules | None) -> tuple[str, ...]:
    return submodules.kinds if submodules else ()


def _choose(
    ways: dict[str, Way], submodules: Submodules | None, modes: Sequence[str] | None
) -> dict[str, Way]:
    known = [*ways, *_kinds(submodules)]
    for mode in modes or ():
        if mode not in known:
            raise UserError(
                f"The mode {mode!r} cannot be measured with what was fitted: choose from "
                f"{', '.join(known)}, or fit it first."
            )
    return {mode: way for mode, way in ways.items() if modes is None or mode in modes}


class _Measuring:
    """Gathers rows of states until there are enough for the head, then measures them."""

    def __init__(
        self,
        adapter: Adapter,
        ways: dict[str, Way],
        replacement: Replacement | None,
        kinds: Sequence[str],
        evaluation: Evaluation,
    ) -> None:
        self.adapter, self.ways = adapter, ways
        self.replacement, self.kinds = replacement, kinds
        self.evaluation = evaluation
        self.streams: dict[str, R2] = {}
        self.has_head = adapter.kind != "encoder"
        vocabulary = adapter.model.config.get_text_config().vocab_size
        self._rows = max(16, _LOGIT_BYTES // (4 * vocabulary))
        self._waiting: dict[tuple[str, int], list[Tensor]] = {}
        self._num_waiting = 0

    def add(self, batch: TokenBatch) -> None:
        """Run the model on a batch, and with parts replaced from every layer on."""
        ids, mask = batch.inputs(self.adapter)
        row, position = (places.to(ids.device) for places in batch.wanted())
        states = self.adapter.states(ids, attention_mask=mask)
        rows = [state[row, position] for state in states]
        check_finite(rows)
        for layer, chosen in enumerate(rows):
            self._waiting.setdefault(("", layer), []).append(chosen)
        alone = position if len(row) == len(ids) else None
        for kind in self.kinds if self.has_head and self.replacement else ():
            if kind == "attention":  # needs no text, so it waits for the head
                continue
            for layer, state in enumerate(states[:-1]):
                assert self.replacement is not None
                last = self.replacement.last_state(kind, layer, state, ids, mask, alone)
                self._waiting.setdefault((kind, layer), []).append(last[row, position])
        self.evaluation.position.append(position.cpu())
        self.evaluation.lengths += [window.length for window in batch.windows]
        self._num_waiting += len(row)
        if self._num_waiting >= self._rows:
            self.flush()

    def flush(self) -> None:
        """Measure what is waiting."""
        if not self._num_waiting:
            return
        waiting = {place: torch.cat(pieces) for place, pieces in self._waiting.items()}
        self._waiting, num, self._num_waiting = {}, self._num_waiting, 0
        for stream in self.streams.values():
            stream.update([waiting["", layer] for layer in range(self.adapter.num_layers + 1)])
        if self.has_head:
            for start in range(0, num, self._rows):
                block = {p: t[start : start + self._rows] for p, t in waiting.items()}
                self._measure(block)

    def _measure(self, block: dict[tuple[str, int], Tensor]) -> None:
        last = self.adapter.num_layers
        reference = Reference(self.adapter.logits(block["", last]))
        own = reference.scores()

        def keep(mode: str, layer: int, scores: Scores) -> None:
            self.evaluation.add(mode, layer, scores, exits=mode in self.ways)

        for mode in (*self.ways, *self.kinds):
            keep(mode, last, own)
        for layer in range(last):
            for mode, way in self.ways.items():
                mapped = way(block["", layer], layer)
                if mapped is None:
                    continue
                keep(mode, layer, reference.score(self.adapter.logits(mapped)))
            for kind in self.kinds:
                hidden = self._replaced(kind, layer, block)
                keep(kind, layer, reference.score(self.adapter.logits(hidden)))

    def _replaced(self, kind: str, layer: int, block: dict[tuple[str, int], Tensor]) -> Tensor:
        if kind == "attention" and self.replacement is not None:
            return self.replacement.without_attention(layer, block["", layer])
        return block[kind, layer]

"""What each layer of a model already knows: every mode and layer in one pass over the texts.

Modes are the ways from layer `l` to a prediction: `id` (the head on `h_l` itself), `mat`, `affine`
and `tuned` (a map to the last layer, then the head), and `attention`, `feed_forward`, `norms` (the
blocks from `l` on, with that part replaced by its linear fit). Measured is what `lens.Reference`
scores, and for the first four also r^2 and early exit.

The model runs once over each text. What is replaced from layer `l` on starts from the state `h_l`
of that run; with attention replaced, tokens do not see each other and only the chosen ones are run.
The head runs at chosen positions only, on blocks of rows of bounded size.

Early exit: a token exits at the first layer `l` whose prediction has a gap between its two largest
probabilities of more than (Confident Adaptive Language Modeling, arXiv 2207.07061)

    0.9 * lambda + 0.1 * exp(-4 * t / N)

with `t` the token's position and `N` the mean length of the texts; at the last layer it exits in
any case. Layer 0 is the embeddings, so what exits at layer `l` of `L` has run `l` layers and saved
the share `1 - l / L`. A token agrees if what is predicted where it exits is the last layer's top
token. The gaps do not depend on `lambda`, so one pass of the model serves the whole sweep. Exiting
always at one and the same layer is the baseline: what does watching each token add?

Shapes: L+1 layers, N tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from deepenough.errors import UserError
from deepenough.hf.adapter import Adapter, adapt
from deepenough.hf.intercept import fused_gelu
from deepenough.runs import Record
from deepenough.shortcut.fitting import Progress
from deepenough.shortcut.lens import PRECISIONS, Reference, TokenScores
from deepenough.shortcut.modeling import Shortcuts
from deepenough.shortcut.reading import Positions, Tally, TokenBatch, batches, make_reading
from deepenough.shortcut.statistics import R2, check_finite
from deepenough.shortcut.submodules import Replacement, Submodules

#: Logits that are held at once, in bytes; a few tensors of that size exist.
_LOGIT_BYTES = 100_000_000
#: From exiting almost at once to never. CALM's end at 1, a gap of 0.9, which high agreements are
#: beyond: ten finer steps lead to 10/9, a gap of 1.
LAMBDAS: tuple[float, ...] = (
    *(round(step / 24, 4) for step in range(25)),
    *(round(1 + step / 90, 4) for step in range(1, 10)),
    10 / 9,
)
#: Agreements with the last layer at which the layers saved are reported.
AGREEMENTS: tuple[float, ...] = (0.90, 0.95, 0.99)


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
    progress: Progress | None = None,
) -> Evaluation:
    """Measure shortcuts of a model on texts.

    A model without a language-model head is measured by r^2 alone.

    Args:
        model: The model.
        tokenizer: Its tokenizer.
        shortcuts: Its maps; linear and affine ones can be given together.
        texts: Strings.
        positions: Whether every token of a text is measured, or one drawn at random.
        modes: What to measure; by default all there is.
        submodules: Linear fits of the parts inside the blocks.
        lambdas: Thresholds of early exit.
        seed: Seed of the random positions.
        tables: Whether r^2 of all pairs is wanted too.
        batch_tokens: Most tokens in a batch, padding included.
        window: Longest stretch of text that is run at once.
        progress: Called with the number of texts read, and of all texts or None.
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
    """Return how each mode takes states `[n, d]` of a layer to the last one."""

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

        def keep(mode: str, layer: int, scores: TokenScores) -> None:
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


# -- what was measured ---------------------------------------------------------------------------


@dataclass
class LayerScores:
    """Sums over tokens for one mode and layer."""

    hits: Tensor = field(default_factory=lambda: torch.zeros(len(PRECISIONS), dtype=torch.long))
    surprisal: float = 0.0
    kl: float = 0.0
    positions: int = 0

    def add(self, scores: TokenScores) -> None:
        """Count the scores of more tokens."""
        self.hits += torch.stack([(scores.rank < k).sum() for k in PRECISIONS]).cpu()
        self.surprisal += float(scores.surprisal.double().sum())
        self.kl += float(scores.kl.double().sum())
        self.positions += len(scores.rank)

    def values(self) -> dict[str, Any]:
        """Return precisions, mean surprisal and KL, and the number of tokens."""
        shares = (self.hits / self.positions).tolist()
        return {
            **{f"precision_{k}": share for k, share in zip(PRECISIONS, shares, strict=True)},
            "surprisal": self.surprisal / self.positions,
            "kl": self.kl / self.positions,
            "positions": self.positions,
        }


@dataclass
class Evaluation:
    """All that was measured in one pass over texts."""

    num_layers: int
    lambdas: Sequence[float] = LAMBDAS
    layers: dict[tuple[str, int], LayerScores] = field(default_factory=dict)
    """Scores by mode and layer."""
    gaps: dict[tuple[str, int], list[Tensor]] = field(default_factory=dict)
    """Confidence of every token, by mode and layer, in pieces."""
    agrees: dict[tuple[str, int], list[Tensor]] = field(default_factory=dict)
    """Whether the prediction of every token is the last layer's, by mode and layer, in pieces."""
    position: list[Tensor] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    """Number of tokens of every text."""
    r2: dict[str, Tensor] = field(default_factory=dict)
    cka: Tensor | None = None
    tally: Tally = field(default_factory=Tally)
    """Texts read and skipped."""

    @property
    def positions(self) -> int:
        """Number of tokens that were measured."""
        return sum(len(piece) for piece in self.position)

    @property
    def exit_modes(self) -> list[str]:
        """Modes whose confidences are known at every layer."""
        modes = dict.fromkeys(mode for mode, _ in self.gaps)
        return [
            mode
            for mode in modes
            if all((mode, layer) in self.gaps for layer in range(self.num_layers + 1))
        ]

    def add(self, mode: str, layer: int, scores: TokenScores, exits: bool) -> None:
        """Count the scores of more tokens; with `exits`, keep what early exit needs of each."""
        place = (mode, layer)
        self.layers.setdefault(place, LayerScores()).add(scores)
        if exits:
            self.gaps.setdefault(place, []).append(scores.gap.cpu())
            self.agrees.setdefault(place, []).append((scores.rank == 0).cpu())

    def records(self) -> list[Record]:
        """Return one record for each table, each mode and layer, and each threshold."""
        found = [Record(0, "r2", {"mode": m, "table": _rows(t)}) for m, t in self.r2.items()]
        if self.cka is not None:
            found.append(Record(0, "cka", {"table": _rows(self.cka)}))
        for (mode, layer), scores in sorted(self.layers.items(), key=lambda item: item[0][1]):
            found.append(Record(0, "layer", {"mode": mode, "layer": layer, **scores.values()}))
        for mode in self.exit_modes:
            found += self._exit_records(mode)
        return found

    def _exit_records(self, mode: str) -> Iterator[Record]:
        layers = range(self.num_layers + 1)
        gap_LN = torch.stack([torch.cat(self.gaps[mode, layer]) for layer in layers])
        agrees_LN = torch.stack([torch.cat(self.agrees[mode, layer]) for layer in layers])
        mean_length = sum(self.lengths) / len(self.lengths)
        position_N = torch.cat(self.position)
        points = sweep(gap_LN, agrees_LN, position_N, mean_length, self.lambdas)
        for point in points:
            values = {
                "lambda": point.lambda_,
                "layers_mean": point.layers_mean,
                "saved": point.saved,
                "agreement": point.agreement,
            }
            yield Record(0, "exit", {"mode": mode, **values})
        for row in layers_saved(points, fixed_exits(agrees_LN)):
            values = {
                "agreement": row.agreement,
                "saved": row.saved,
                "lambda": row.lambda_,
                "fixed_layer_saved": row.fixed_layer_saved,
            }
            yield Record(0, "saved", {"mode": mode, **values})


def _rows(table: Tensor) -> list[list[float | None]]:
    return [[None if math.isnan(value) else value for value in row] for row in table.tolist()]


# -- early exit ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class SweepPoint:
    """What one threshold (or one fixed layer, without `lambda_`) gives."""

    lambda_: float | None
    layers_mean: float
    saved: float
    agreement: float


@dataclass(frozen=True)
class LayersSaved:
    """Most layers saved at an agreement, by a threshold, and by one layer for all tokens."""

    agreement: float
    saved: float
    lambda_: float | None
    fixed_layer_saved: float


def thresholds(lambda_: float, position_N: Tensor, mean_length: float) -> Tensor:
    """Return the gap to exceed, `0.9 * lambda + 0.1 * exp(-4 * t / N)`, for every position."""
    return 0.9 * lambda_ + 0.1 * torch.exp(-4.0 * position_N.double() / mean_length)


def sweep(
    gap_LN: Tensor,
    agrees_LN: Tensor,
    position_N: Tensor,
    mean_length: float,
    lambdas: Sequence[float] = LAMBDAS,
) -> list[SweepPoint]:
    """Return one point per threshold; `gap_LN` and `agrees_LN` have a row for layers 0 ... L."""
    points = []
    for lambda_ in lambdas:
        exits_LN = gap_LN > thresholds(lambda_, position_N, mean_length)
        exits_LN[-1] = True
        # The first layer that is sure: `argmax` of a 0/1 table gives the first 1.
        layer_N = exits_LN.to(torch.uint8).argmax(0)
        points.append(_point(lambda_, layer_N, agrees_LN))
    return points


def fixed_exits(agrees_LN: Tensor) -> list[SweepPoint]:
    """Return what it gives if every token exits at layer 0, or 1, ... or `L`."""
    num_tokens = agrees_LN.shape[1]
    return [
        _point(None, torch.full((num_tokens,), layer), agrees_LN) for layer in range(len(agrees_LN))
    ]


def layers_saved(
    points: Sequence[SweepPoint],
    fixed: Sequence[SweepPoint],
    agreements: Sequence[float] = AGREEMENTS,
) -> list[LayersSaved]:
    """Return the most that a swept threshold and a fixed layer save at each agreement.

    Where no threshold agrees often enough, nothing is saved: all layers are run.
    """
    rows = []
    for agreement in agreements:
        best = _most_saving(points, agreement)
        rows.append(
            LayersSaved(
                agreement,
                best.saved if best else 0.0,
                best.lambda_ if best else None,
                chosen.saved if (chosen := _most_saving(fixed, agreement)) else 0.0,
            )
        )
    return rows


def _most_saving(points: Sequence[SweepPoint], agreement: float) -> SweepPoint | None:
    enough = [point for point in points if point.agreement >= agreement]
    return max(enough, key=lambda point: point.saved, default=None)


def _point(lambda_: float | None, layer_N: Tensor, agrees_LN: Tensor) -> SweepPoint:
    num_layers = len(agrees_LN) - 1
    mean = layer_N.sum().item() / layer_N.numel()
    agreeing = agrees_LN.gather(0, layer_N[None]).sum().item()
    return SweepPoint(lambda_, mean, 1 - mean / num_layers, agreeing / layer_N.numel())

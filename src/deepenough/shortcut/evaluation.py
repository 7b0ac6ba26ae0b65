"""What each layer of a model already knows: every mode and layer in one pass over the texts.

Modes are the ways from layer `l` to a prediction: `id` (the head on `h_l` itself), `mat`, `affine`
and `tuned` (a map to the last layer, then the head), and `attention`, `feed_forward`, `norms` (the
blocks from `l` on, with that part replaced by its linear fit). Measured is what `lens.Reference`
scores, and for the first four also r^2 and early exit.

The model runs once over each text. What is replaced from layer `l` on starts from the state `h_l`
of that run; with attention replaced, tokens do not see each other and only the chosen ones are run.

Early exit: a token exits at the first layer `l` whose prediction has a gap between its two largest
probabilities of more than (Confident Adaptive Language Modeling, arXiv 2207.07061)

    0.9 * lambda + 0.1 * exp(-4 * t / N)

with `t` the token's position and `N` the mean of these positions plus one; from layer 1 on, and at
the last layer in any case. That is what the code of the paper does; `ExitSweep` has other choices.
Layer 0 is the embeddings, so what exits at layer `l` of `L` has run `l` layers and saved the share
`1 - l / L`. A token agrees if what is predicted where it exits is the last layer's top
token. The gaps do not depend on `lambda`, so one pass of the model serves the whole sweep. Exiting
always at one and the same layer is the baseline: what does watching each token add?

A token is decided at the layer from which on every layer predicts the last one's token. The layers
saved, and the layer by which half of the tokens are decided, have intervals over texts drawn anew:
tokens of one text are no independent evidence.

Shapes: L+1 layers, N tokens, T texts, K thresholds.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from deepenough.devices import exact
from deepenough.errors import UserError
from deepenough.hf.adapter import Adapter, adapt
from deepenough.hf.intercept import OneDnnProducts, eval_mode, fused_gelu
from deepenough.measurement import resampled_interval, share_interval
from deepenough.runs import Record
from deepenough.shortcut.config import ExitSweep
from deepenough.shortcut.fitting import Progress
from deepenough.shortcut.lens import PRECISIONS, TARGET_SCORES, Reference, TokenScores
from deepenough.shortcut.modeling import Shortcuts
from deepenough.shortcut.reading import Positions, TokenBatch, batches, make_reading, only_wanted
from deepenough.shortcut.statistics import check_finite
from deepenough.shortcut.submodules import KINDS, Replacement, Submodules

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
    submodules: Submodules | None = None,
    seed: int = 0,
    batch_tokens: int = 1024,
    window: int | None = None,
    num_top: int = 0,
    progress: Progress | None = None,
) -> Evaluation:
    """Measure shortcuts of a model on texts; linear and affine ones can be given together.

    A model without a language-model head is measured by r^2 alone. Texts are read as in
    `Shortcuts.fit`. Of the likeliest tokens of every layer, `num_top` are kept, at most 10.
    """
    adapter = model if isinstance(model, Adapter) else adapt(model)
    given = [shortcuts] if isinstance(shortcuts, Shortcuts) else list(shortcuts)
    for each in given:
        adapter.check_made_for(each.made_for, "These shortcuts")
    modes = _by_mode(given)
    of_maps = given[0].meta.get("data", {}).get("fingerprint")
    if of_maps and submodules and submodules.texts not in (None, of_maps):
        raise UserError(
            "The sub-modules were fitted on other text than the maps, so that they cannot be "
            "compared: fit both on the same text."
        )
    reading = make_reading(adapter, positions, seed, batch_tokens, window)
    total = len(texts) if isinstance(texts, Sequence) else None
    with eval_mode(adapter.model), fused_gelu(adapter.model), OneDnnProducts():
        measuring = _Measuring(adapter, modes, submodules, num_top)
        for batch in batches(tokenizer, texts, reading):
            measuring.add(batch)
            if progress is not None:
                progress(batch.texts, total)
        measuring.flush()
    if not measuring.positions:
        raise UserError("There is nothing to measure on: give texts of two tokens or more.")
    places = torch.cat(measuring.positions), torch.cat(measuring.texts)
    length = sum(measuring.lengths) / len(measuring.lengths)
    scores = {
        place: TokenScores(*map(torch.cat, zip(*pieces, strict=True)))
        for place, pieces in measuring.scores.items()
    }
    r2 = {mode: stream.table() for mode, stream in measuring.streams.items()}
    return Evaluation(adapter.num_layers, *places, length, scores, r2, given[0].table)


def _by_mode(given: Sequence[Shortcuts]) -> dict[str, Shortcuts]:
    """Return the shortcuts of every mode that they can be measured in."""
    if not given:
        raise UserError("There are no shortcuts to measure: give at least one.")
    found = {"id": given[0]}
    for shortcuts in given:
        for mode in (shortcuts.mode, *(["tuned"] if shortcuts.tuned else [])):
            if mode in found:
                raise UserError(
                    f"Two of the shortcuts have {mode!r} maps: give at most one linear and one "
                    "affine, and tune only one of them."
                )
            found[mode] = shortcuts
    return found


class _Measuring:
    """Gathers rows of states until there are enough for the head, then measures them."""

    def __init__(
        self,
        adapter: Adapter,
        shortcuts: dict[str, Shortcuts],
        submodules: Submodules | None,
        num_top: int,
    ) -> None:
        self.adapter, self.shortcuts, self.num_top = adapter, shortcuts, num_top
        self.scores: dict[tuple[str, int], list[TokenScores]] = defaultdict(list)
        self.positions: list[Tensor] = []
        self.texts: list[Tensor] = []
        self.lengths: list[int] = []
        self.has_head = adapter.kind != "encoder"
        self.kinds: tuple[str, ...] = ()
        if submodules and self.has_head:
            self.kinds, self.replacement = submodules.kinds, Replacement(submodules, adapter)
        self.streams = {m: each.r2_stream(m) for m, each in shortcuts.items() if m != "tuned"}
        vocabulary = adapter.model.config.get_text_config().vocab_size
        self._rows = max(16, _LOGIT_BYTES // (4 * vocabulary))
        self._waiting: dict[tuple[str, int], list[Tensor]] = defaultdict(list)
        self._targets: list[Tensor] = []
        self._num_waiting = 0

    def add(self, batch: TokenBatch) -> None:
        """Run the model on a batch, also with parts replaced; measure if enough rows wait."""
        ids, mask = batch.inputs(self.adapter)
        row, position = (places.to(ids.device) for places in batch.wanted())
        with only_wanted(self.adapter, batch):
            states = self.adapter.states(ids, attention_mask=mask)
            rows = [state[row, position] for state in states]
            check_finite(rows)
            for layer, chosen in enumerate(rows):
                self._waiting["", layer].append(chosen)
            for kind in self.kinds:
                if kind == "attention":  # needs no text, so it waits for the head
                    continue
                for layer, state in enumerate(states[:-1]):
                    last = self.replacement.last_state(kind, layer, state, ids, mask)
                    self._waiting[kind, layer].append(last[row, position])
        self._targets.append(batch.targets())
        self.positions.append(position.cpu())
        self.texts.append(torch.tensor([window.text for window in batch.windows])[row.cpu()])
        self.lengths += [window.length for window in batch.windows]
        self._num_waiting += len(row)
        if self._num_waiting >= self._rows:
            self.flush()

    def flush(self) -> None:
        """Measure what is waiting."""
        if not self._num_waiting:
            return
        waiting = {place: torch.cat(pieces) for place, pieces in self._waiting.items()}
        targets = torch.cat(self._targets)
        self._waiting.clear()
        self._targets.clear()
        num, self._num_waiting = self._num_waiting, 0
        for stream in self.streams.values():
            stream.update([waiting["", layer] for layer in range(self.adapter.num_layers + 1)])
        if self.has_head:
            for start in range(0, num, self._rows):
                block = {p: t[start : start + self._rows] for p, t in waiting.items()}
                self._measure(block, targets[start : start + self._rows])

    def _measure(self, block: dict[tuple[str, int], Tensor], targets: Tensor) -> None:
        last = self.adapter.num_layers

        def keep(mode: str, layer: int, scores: TokenScores) -> None:
            self.scores[mode, layer].append(TokenScores(*(column.cpu() for column in scores)))

        reference = Reference(self.adapter.logits(block["", last]), targets, self.num_top)
        own = reference.scores()
        for mode in (*self.shortcuts, *self.kinds):
            keep(mode, last, own)
        for layer in range(last):
            for mode, shortcuts in self.shortcuts.items():
                if mode == "tuned" and layer not in shortcuts.tuned:  # some layers alone are tuned
                    continue
                mapped = shortcuts.apply(block["", layer], layer, last, mode)
                keep(mode, layer, reference.score(self.adapter.logits(mapped)))
            for kind in self.kinds:
                if kind == "attention":
                    replaced = self.replacement.without_attention(layer, block["", layer])
                else:
                    replaced = block[kind, layer]
                keep(kind, layer, reference.score(self.adapter.logits(replaced)))


@dataclass
class Evaluation:
    """All that was measured in one pass over texts."""

    num_layers: int
    position: Tensor
    """Position of every token in its text, `[N]`."""
    text: Tensor
    """Number of every token's text, `[N]`."""
    mean_length: float
    """Tokens in a text."""
    scores: dict[tuple[str, int], TokenScores] = field(default_factory=dict)
    """Scores of all tokens by mode and layer."""
    r2: dict[str, Tensor] = field(default_factory=dict)
    cka: Tensor | None = None

    @property
    def positions(self) -> int:
        """Number of tokens that were measured."""
        return len(self.position)

    def records(self, exit: ExitSweep | None = None) -> list[Record]:
        """Return one record for each table, each mode and layer, and each threshold."""
        found = [Record(0, "r2", {"mode": m, "table": _rows(t)}) for m, t in self.r2.items()]
        if self.cka is not None:
            found.append(Record(0, "cka", {"table": _rows(self.cka)}))
        for (mode, layer), own in sorted(self.scores.items(), key=lambda item: item[0][1]):
            found.append(Record(0, "layer", {"mode": mode, "layer": layer, **_means(own)}))
        for mode in self.exit_modes():
            layers = [self.scores[mode, layer] for layer in range(self.num_layers + 1)]
            agrees_LN = torch.stack([scores.rank == 0 for scores in layers])
            found.append(Record(0, "decided", {"mode": mode, **self._decided(agrees_LN)}))
            points, exits = [], []
            for lambda_, layer_N in self.exits(mode, exit):
                points.append({"lambda": lambda_, **exit_point(layer_N, agrees_LN)})
                exits.append(layer_N)
                # What each token is predicted where it exits.
                columns = (torch.stack(column) for column in zip(*layers, strict=True))
                own = TokenScores(*(c[layer_N, torch.arange(self.positions)] for c in columns))
                values = {"mode": mode, **points[-1], **_means(own)}
                found.append(Record(0, "exit", values))
            intervals = self._saved_intervals(torch.stack(exits), agrees_LN)
            for row, ends in zip(
                layers_saved(points, fixed_exits(agrees_LN)), intervals, strict=True
            ):
                values = {"mode": mode, **row, "intervals": {"saved": ends}}
                found.append(Record(0, "saved", values))
        return found

    def _decided(self, agrees_LN: Tensor) -> dict[str, Any]:
        """Return the share of tokens decided by each layer, and the first that half of them are."""
        last = self.num_layers
        agreeing_N = agrees_LN.flip(0).to(torch.uint8).cumprod(0).sum(0)
        decided_N = (last + 1 - agreeing_N).clamp_max(last)
        counts_LT = self._sums(torch.nn.functional.one_hot(decided_N, last + 1).T)

        def half(texts: np.ndarray) -> float:
            shares = counts_LT[:, texts].sum(1).cumsum() / counts_LT[:, texts].sum()
            return float(np.argmax(shares >= 0.5))

        layer, low, high = resampled_interval(half, counts_LT.shape[1])
        shares = counts_LT.sum(1).cumsum() / self.positions
        return {"layer": layer, "shares": shares.tolist(), "intervals": {"layer": [low, high]}}

    def _saved_intervals(self, exits_KN: Tensor, agrees_LN: Tensor) -> list[list[float]]:
        """Return the ends of the layers saved at each of `AGREEMENTS`, over texts drawn anew."""
        layers_KT = self._sums(exits_KN)
        agreed_KT = self._sums(agrees_LN.gather(0, exits_KN))
        tokens_T = self._sums(torch.ones_like(self.position)[None])[0]
        found = []
        for level in AGREEMENTS:

            def saved(texts: np.ndarray, level: float = level) -> float:
                total = tokens_T[texts].sum()
                holds_K = agreed_KT[:, texts].sum(1) / total >= level
                saved_K = 1 - layers_KT[:, texts].sum(1) / total / self.num_layers
                return float(saved_K[holds_K].max(initial=0.0))

            found.append(list(resampled_interval(saved, len(tokens_T))[1:]))
        return found

    def _sums(self, values_KN: Tensor) -> np.ndarray:
        """Return the sums over the tokens of each text, `[K, T]`."""
        number_N = self.text.unique(return_inverse=True)[1]
        sums = torch.zeros(len(values_KN), int(number_N.max()) + 1, dtype=torch.float64)
        return sums.index_add_(1, number_N, exact(values_KN)).numpy()

    def exit_modes(self) -> list[str]:
        """Return the modes that have a prediction at every layer, and replace no sub-module."""
        every = range(self.num_layers + 1)
        modes = dict.fromkeys(mode for mode, _ in self.scores if mode not in KINDS)
        return [m for m in modes if all((m, layer) in self.scores for layer in every)]

    def exits(self, mode: str, exit: ExitSweep | None = None) -> Iterator[tuple[float, Tensor]]:
        """Yield every lambda and the layers `[N]` at which tokens exit."""
        exit = exit or ExitSweep()
        mean_length = exit.mean_length
        if mean_length is None:
            of_positions = float(exact(self.position + 1).mean())
            mean_length = self.mean_length if exit.length == "text" else of_positions
        position_N = self.position
        if exit.at_position is not None:
            position_N = torch.full_like(position_N, exit.at_position)
        gap_LN = torch.stack([self.scores[mode, n].gap for n in range(self.num_layers + 1)])
        for lambda_ in LAMBDAS if exit.lambdas is None else exit.lambdas:
            limit_N = thresholds(lambda_, position_N, mean_length)
            yield lambda_, exit_layers(gap_LN, limit_N, exit.min_layer)


def _means(scores: TokenScores) -> dict[str, Any]:
    """Return means over tokens and their number, with 95 % intervals for tokens drawn anew."""
    num = len(scores.rank)
    means: dict[str, Any] = {}
    intervals: dict[str, list[float]] = {}
    for k in PRECISIONS:
        share = share_interval(int((scores.rank < k).sum()), num)
        means[f"precision_{k}"], *intervals[f"precision_{k}"] = share
    for name in ("surprisal", "kl", *TARGET_SCORES):
        values = exact(getattr(scores, name))
        if name in ("cross_entropy", "target_rank"):
            values = values[scores.target_rank > 0]
            if not len(values):  # no text goes on behind the tokens measured
                continue
        mean = float(values.mean())
        half = 1.96 * float(values.std(correction=0)) / len(values) ** 0.5
        means[name], intervals[name] = mean, [mean - half, mean + half]
    return {**means, "positions": num, "intervals": intervals}


def _rows(table: Tensor) -> list[list[float | None]]:
    return [[None if math.isnan(value) else value for value in row] for row in table.tolist()]


def thresholds(lambda_: float, position_N: Tensor, mean_length: float) -> Tensor:
    """Return the gap to exceed, `0.9 * lambda + 0.1 * exp(-4 * t / N)`, for every position."""
    return 0.9 * lambda_ + 0.1 * torch.exp(-4.0 * exact(position_N) / mean_length)


def exit_layers(gap_LN: Tensor, limit_N: Tensor, min_layer: int = 1) -> Tensor:
    """Return the first layer from `min_layer` on whose gap exceeds the limit, else the last."""
    exits_LN = gap_LN > limit_N
    exits_LN[: min(min_layer, len(gap_LN) - 1)] = False
    exits_LN[-1] = True
    # `argmax` of a 0/1 table gives the first 1.
    return exits_LN.to(torch.uint8).argmax(0)


def fixed_exits(agrees_LN: Tensor) -> list[dict[str, float]]:
    """Return what it gives if every token exits at layer 0, or 1, ... or `L`."""
    layers = torch.arange(len(agrees_LN))[:, None].expand_as(agrees_LN)
    return [exit_point(layer_N, agrees_LN) for layer_N in layers]


def exit_point(layer_N: Tensor, agrees_LN: Tensor) -> dict[str, float]:
    """Return mean layer, share of layers saved and agreement of tokens that exit at layers."""
    mean = layer_N.sum().item() / layer_N.numel()
    agreeing = agrees_LN.gather(0, layer_N[None]).sum().item()
    return {
        "layers_mean": mean,
        "saved": 1 - mean / (len(agrees_LN) - 1),
        "agreement": agreeing / layer_N.numel(),
    }


def layers_saved(
    points: Sequence[dict[str, float]],
    fixed: Sequence[dict[str, float]],
    agreements: Sequence[float] = AGREEMENTS,
) -> Iterator[dict[str, float | None]]:
    """Yield the most that a swept threshold and a fixed layer save at each agreement.

    Where no threshold agrees often enough, nothing is saved: all layers are run.
    """
    nothing: dict[str, Any] = {"saved": 0.0, "lambda": None}
    for agreement in agreements:
        best, fixed_best = (
            max(
                (point for point in given if point["agreement"] >= agreement),
                key=lambda point: point["saved"],
                default=nothing,
            )
            for given in (points, fixed)
        )
        yield {
            "agreement": agreement,
            "saved": best["saved"],
            "lambda": best["lambda"],
            "fixed_layer_saved": fixed_best["saved"],
        }

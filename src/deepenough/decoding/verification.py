"""The decoding loop: draft, run the model once over the drafts, keep what it confirms.

`decode` is the only loop. What a pass of the model is, a `ForwardStrategy` says: `FullDepth` here
(all layers, with the drafts of a `Drafter` or none) or `ExitingDepth` (`early_exit.py`). A pass
over a few drafts costs about what one token costs, since it is the weights that have to be read.

`Verifier` turns logits into tokens and accepts drafts losslessly: each token is chosen, or drawn
from `p`, as if nothing had been drafted, and a draft is accepted if it is that token. So when
sampling a draft `x` is accepted with probability `p(x)`, as often as rejection sampling
(arXiv 2211.17192, 2302.01318) accepts a draft that is always the same, and tokens depend on the
seed alone, not on the drafts. `p` is what transformers' logits processors leave of the logits. They
are called once for every token that is emitted and in that order, as in `generate`.

Shapes: B sequences, T places (one more than drafts), D width, V vocabulary.
"""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from deepenough.decoding.drafters import Drafter, Proposal
from deepenough.decoding.engine import DecodingCosts, Engine, row_lengths
from deepenough.decoding.request import Request, SequenceState, make_sequences
from deepenough.errors import UserError

log = logging.getLogger("deepenough")


@dataclass
class Decoded:
    """All sequences at the end of a generation, and how it went."""

    rows: list[SequenceState]
    passes: int = 0
    drafted_at: list[int] = field(default_factory=list)
    """Drafts by their place in the draft."""
    accepted_at: list[int] = field(default_factory=list)
    """Those of them that were accepted."""
    reused: int = 0
    """Tokens of the prompt whose keys and values were there already."""
    interrupted: bool = False
    scores: list[Tensor] = field(default_factory=list)
    logits: list[Tensor] = field(default_factory=list)


@dataclass
class PassOutput:
    """What one pass of the model predicts for the tokens that follow."""

    logits_BTV: Tensor
    drafts: list[list[int]]
    """The draft tokens that the logits verify, of each sequence."""
    depths: list[int]
    """How many layers ran for each sequence."""
    overhead: list[float]
    """FLOPs of each sequence beside its layers and one head: drafting, exit checks, skipped KV."""
    normed_BTD: Tensor | None = None
    """Normed last states, where all layers ran."""
    draft_seconds: float = 0.0
    """What drafting took."""
    first_layer: int = 0
    """Up to where drafting has run the layers already."""
    best_BT: Tensor | None = None
    """Tokens of the largest logits, where they are known."""


class ForwardStrategy(ABC):
    """How the model is run over the latest tokens, once for each pass of the loop."""

    drafter: Drafter | None = None
    """Who proposes tokens to verify."""
    state_BD: Tensor
    """Normed states that led to the sequences' last tokens, where there is a drafter."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    @abstractmethod
    def capacity(self, request: Request) -> int:
        """Return how many tokens of a sequence the cache must hold."""

    @abstractmethod
    def run(self, rows: list[SequenceState]) -> PassOutput:
        """Run the model over each sequence's last token and its drafts."""


def decode(
    engine: Engine,
    request: Request,
    strategy: ForwardStrategy | Drafter | None = None,
    cached: Sequence[int] = (),
) -> Decoded:
    """Generate what a request asks for; Ctrl-C ends it with what there is.

    `strategy` says how the model is run; a drafter, or None, stands for `FullDepth` with it.
    `cached` are the tokens of the one sequence whose keys and values the engine still holds.
    """
    result = Decoded(make_sequences(request))
    engine.inputs = request.inputs
    lengths = {len(row.context) for row in result.rows}
    if not engine.ignores_padding and len(lengths) > 1:
        raise UserError(
            f"{type(engine.adapter.model).__name__} counts padding as tokens, so that prompts of "
            f"{min(lengths)} to {max(lengths)} tokens cannot be continued in one batch: give them "
            "one by one."
        )
    if not isinstance(strategy, ForwardStrategy):
        # Drafts would let sequences of one batch grow to different lengths.
        may_differ = engine.ignores_padding and engine.layered
        together = request.in_lockstep or (len(result.rows) > 1 and not may_differ)
        strategy = FullDepth(engine, None if together else strategy)
    try:
        with torch.inference_mode():
            capacity, drafter = strategy.capacity(request), strategy.drafter
            engine.layers_read = () if drafter is None else drafter.layers_read
            strategy.state_BD = _read_prompts(engine, request, capacity, result, cached)
            _run_loop(engine, request, strategy, result)
    except KeyboardInterrupt:
        if not all(row.tokens for row in result.rows):
            raise
        log.warning("interrupted: what was generated so far is returned")
        result.interrupted = True
    return result


def _read_prompts(
    engine: Engine, request: Request, capacity: int, result: Decoded, cached: Sequence[int]
) -> Tensor:
    """Return the normed states of the prompts' last tokens; what is cached is not read again."""
    row_lengths(request.ids_BT, request.mask_BT)  # refuses masks with gaps
    prompt = result.rows[0].context
    pairs = enumerate(zip(cached, prompt[:-1], strict=False))
    shared = min(len(cached), len(prompt) - 1)
    shared = next((place for place, (own, new) in pairs if own != new), shared)
    if not shared or len(result.rows) > 1 or not engine.keep_prefix(shared, capacity):
        return engine.prefill(request.ids_BT, request.mask_BT, capacity)
    result.reused = shared
    new_1T = torch.tensor([prompt[shared:]], device=request.ids_BT.device)
    for part_1T in new_1T.split(engine.tokens_at_once, dim=1):
        step = engine.start_step(part_1T)
        hidden_BTD = engine.run_layers(step, step.hidden, 0, engine.num_layers)
        engine.keep([part_1T.shape[1]])
    return engine.norm(hidden_BTD[:, -1])


def _run_loop(engine: Engine, request: Request, strategy: ForwardStrategy, result: Decoded) -> None:
    costs, drafter = engine.costs, strategy.drafter
    price = None if drafter is None else drafter.price
    rows, batch = list(result.rows), len(result.rows)
    verifier = Verifier(request, result, is_apart=price is not None and batch > 1)
    # Where nothing is drafted, sequences are sampled beside finished ones, as in transformers.
    plain = isinstance(strategy, FullDepth) and drafter is None
    keeps_finished = request.in_lockstep or (request.sampled and plain) or not engine.layered
    if drafter is not None:
        drafter.begin(engine)
    logits_BTV = engine.head(strategy.state_BD)[:, None]
    first = PassOutput(logits_BTV, [[]] * batch, [engine.num_layers] * batch, [0.0] * batch)
    _emit(verifier, rows, first, costs, result)
    while not all(row.done for row in rows):
        if not keeps_finished and any(row.done for row in rows):
            staying = [place for place, row in enumerate(rows) if not row.done]
            engine.select(staying)
            strategy.state_BD = strategy.state_BD[staying]
            rows = [rows[place] for place in staying]
        began = time.perf_counter()
        output = strategy.run(rows)
        counts = _emit(verifier, rows, output, costs, result)
        if price is not None:
            spent = time.perf_counter() - began - output.draft_seconds
            size = len(rows) * output.logits_BTV.shape[1]
            times = output.draft_seconds, spent
            price.add(engine, size, output.first_layer, times, sum(counts))
        result.passes += 1
        engine.keep(counts)
        if drafter is not None and output.normed_BTD is not None:
            drafter.observe(rows, output.normed_BTD, counts)
            last = torch.tensor(counts, device=output.normed_BTD.device) - 1
            strategy.state_BD = output.normed_BTD[torch.arange(len(rows)), last]


def _emit(
    verifier: Verifier,
    rows: list[SequenceState],
    output: PassOutput,
    costs: DecodingCosts,
    result: Decoded,
) -> list[int]:
    """Append tokens and account for them; return how many each sequence got."""
    was_done = [row.done for row in rows]
    counts = verifier.verify(rows, output.logits_BTV, output.drafts, output.best_BT)
    longest = max(map(len, output.drafts))
    for counted in (result.drafted_at, result.accepted_at):
        counted += [0] * (longest - len(counted))
    for place, (row, count) in enumerate(zip(rows, counts, strict=True)):
        if was_done[place]:
            continue
        drafts, depth = output.drafts[place], output.depths[place]
        # All that was emitted but the last was a draft; the last is one if it ended the row.
        accepted = count - 1 + (row.tokens[-count:] == drafts[:count])
        for spot in range(len(drafts)):
            result.drafted_at[spot] += 1
            result.accepted_at[spot] += spot < accepted
        row.from_draft += [True] * accepted + [False] * (count - accepted)
        # Every token costs its way through the model, the last also what was drafted in vain.
        one = costs.token(len(row.context), 0, depth) + costs.head
        row.depths += [depth] * count
        row.flops += [one] * count
        row.flops[-1] += output.overhead[place] + one * (len(drafts) + 1 - count)
    if hasattr(verifier.request.streamer, "account"):
        verifier.request.streamer.account(rows)
    return counts


class FullDepth(ForwardStrategy):
    """All layers for every token; a drafter, if there is one, proposes tokens to verify."""

    def __init__(self, engine: Engine, drafter: Drafter | None = None) -> None:
        super().__init__(engine)
        self.drafter = drafter

    def capacity(self, request: Request) -> int:
        """Return room for all tokens and the drafts behind the last."""
        return request.max_length + (self.drafter.num_draft_tokens if self.drafter else 0)

    def run(self, rows: list[SequenceState]) -> PassOutput:
        """Draft, then run all layers over each sequence's last token and its drafts."""
        engine, drafter, limit = self.engine, self.drafter, self.engine.pass_limit()
        proposal, began = Proposal([[] for _ in rows]), time.perf_counter()
        if drafter is not None and limit != 1:
            proposal = drafter.ask(rows, self.state_BD, engine)
            if drafter.price is not None:
                proposal.cut(drafter.price.length(proposal, engine, len(rows)))
            if limit is not None:
                proposal.cut(limit - 1)
        draft_seconds = time.perf_counter() - began
        # Sequences with fewer drafts are padded.
        longest = max(map(len, proposal.tokens))
        lines = [
            [row.context[-1], *drafts, *[0] * (longest - len(drafts))]
            for row, drafts in zip(rows, proposal.tokens, strict=True)
        ]
        step = engine.start_step(torch.tensor(lines, device=self.state_BD.device))
        hidden_BTD, first, last = step.hidden, 0, engine.num_layers
        # Layers that drafting has run already run again if their inputs are read.
        if proposal.hidden is not None and proposal.layer <= min(engine.layers_read, default=last):
            hidden_BTD, first = proposal.hidden, proposal.layer
        normed_BTD = engine.norm(engine.run_through(step, hidden_BTD, first))
        logits_BTV = engine.head(normed_BTD)
        return PassOutput(
            logits_BTV,
            proposal.tokens,
            depths=[last] * len(rows),
            overhead=[proposal.flops] * len(rows),
            normed_BTD=normed_BTD,
            draft_seconds=draft_seconds,
            first_layer=first,
            best_BT=engine.best(logits_BTV),
        )


class Verifier:
    """Appends to sequences the tokens that their logits say; knows nothing of the model."""

    def __init__(self, request: Request, result: Decoded, is_apart: bool = False) -> None:
        self.generators: list[torch.Generator] = []
        if is_apart and request.sampled:
            # How far each sequence gets in a pass must not decide what another one draws.
            seeds = torch.randint(2**62, (len(result.rows),), generator=request.generator)
            self.generators = [torch.Generator().manual_seed(seed) for seed in seeds.tolist()]
        self.request, self.scores, self.logits = request, result.scores, result.logits
        self.ends, self.other_criteria = request.ends, request.other_criteria
        self.plain = not (request.sampled or len(request.processors) or request.keeps_scores)

    def verify(
        self,
        rows: list[SequenceState],
        logits_BTV: Tensor,
        drafts: Sequence[Sequence[int]],
        best_BT: Tensor | None = None,
    ) -> list[int]:
        """Append to every sequence its accepted drafts and the token that follows them.

        `logits_BTV` are those after each sequence's last token, then after each of its drafts;
        `best_BT` the tokens of the largest, if they are known.
        Returns how many tokens each sequence got.
        """
        before = [len(row.tokens) for row in rows]
        places = None
        if self.plain:
            places = (logits_BTV.argmax(-1) if best_BT is None else best_BT).tolist()
        going = list(range(len(rows)))
        for place in range(logits_BTV.shape[1]):
            active = [rows[index] for index in going]
            proposed = [
                drafts[index][place] if place < len(drafts[index]) else None for index in going
            ]
            if places is not None:
                tokens = [places[index][place] for index in going]
            else:
                tokens = self._tokens(active, logits_BTV[going, place])
            self._append(active, tokens)
            going = [
                index
                for index, token, draft in zip(going, tokens, proposed, strict=True)
                if token == draft and not rows[index].done
            ]
            if not going:
                break
        return [len(row.tokens) - count for row, count in zip(rows, before, strict=True)]

    def _append(self, rows: list[SequenceState], tokens: list[int]) -> None:
        """Add a token to each sequence, and mark those that it has ended."""
        request = self.request
        for row, token in zip(rows, tokens, strict=True):
            # Without end tokens, transformers goes on writing until all sequences are done.
            row.append(request.pad if row.done and self.ends else token)
            row.done |= token in self.ends
            row.done |= len(row.prompt) + len(row.tokens) >= request.max_length
        if request.streamer is not None:
            request.streamer.put(torch.tensor([row.tokens[-1] for row in rows]))
        if self.other_criteria:
            # Rows are equally long here: they advance in lockstep.
            ids = torch.tensor([row.ids for row in rows], device=request.ids_BT.device)
            keeps = request.keeps_scores and request.config.output_scores
            scores: Any = tuple(self.scores) if keeps else None
            for row, end in zip(rows, self.other_criteria(ids, scores).tolist(), strict=True):  # type: ignore[arg-type]
                row.done |= end

    def _tokens(self, rows: list[SequenceState], logits_BV: Tensor) -> list[int]:
        request = self.request
        logits_BV = scores_BV = logits_BV.float()
        if len(request.processors):
            # Rows differ in length only where no processor reads their tokens.
            tokens = [[] if request.reads_scores_only else row.ids for row in rows]
            ids = torch.tensor(tokens, dtype=torch.long, device=logits_BV.device)
            scores_BV = request.processors(ids, logits_BV)  # type: ignore[arg-type]
        if request.keeps_scores:
            self.scores.append(scores_BV)
            self.logits.append(logits_BV)
        if not request.sampled:
            return scores_BV.argmax(-1).tolist()
        probs_BV = scores_BV.softmax(-1)
        if self.generators:
            draws = [
                torch.multinomial(probs_V.cpu(), 1, generator=self.generators[row.index])
                for row, probs_V in zip(rows, probs_BV, strict=True)
            ]
            return torch.cat(draws).tolist()
        generator = request.generator
        probs_BV = probs_BV if generator is None else probs_BV.cpu()
        return torch.multinomial(probs_BV, num_samples=1, generator=generator)[:, 0].tolist()

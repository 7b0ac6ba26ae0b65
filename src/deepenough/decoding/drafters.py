"""Drafters: guesses of the next tokens, which the model then verifies in one pass.

A wrong guess costs a little time and never changes the output, so a drafter is free in how it
guesses. In order of what they cost:

- `LookupDrafter` continues the text as it continued where its last tokens stood before (prompt
  lookup decoding, with a suffix automaton: `lookup.py`). It needs nothing but the text.
- `LinearDrafter` maps the last state and the last token's embedding linearly to the next state.
- `Eagle3Drafter` runs a head of one layer (`eagle3.py`), with a cache of its own.
- `ShortcutDrafter` runs the first layers of the model and jumps to the last state by a shortcut.
- `FallbackDrafter` asks several drafters in turn; `make_drafter` makes drafters by name.

Drafts come with the probability that they are right; how many of them are verified, and how many
are asked for, `draft_price.py` decides.

Shapes: B sequences, T tokens, D width, S draft vocabulary.
"""

from __future__ import annotations

import os
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional as F

from deepenough.artifacts import load_artifact, save_artifact
from deepenough.decoding.draft_price import DraftPrice, DraftRecord
from deepenough.decoding.engine import Engine
from deepenough.decoding.lookup import LookupTable, SuffixAutomaton
from deepenough.decoding.request import SequenceState
from deepenough.errors import UserError
from deepenough.hf.adapter import Adapter
from deepenough.shortcut.modeling import Shortcuts

if TYPE_CHECKING:
    from deepenough.decoding.draft_model import DraftModel

INDEX, TENSORS = "linear_drafter.json", "linear_drafter.safetensors"
FORMAT, VERSION = "deepenough-linear-drafter", 1
#: Tokens that are drafted at most where the number is left open.
MOST_DRAFTS = 8


@dataclass
class Proposal:
    """The draft tokens of every sequence, possibly none."""

    tokens: list[list[int]]
    hidden: Tensor | None = None
    """`h_layer` of each sequence's last token and of its drafts, `[B, T, D]`, where drafting has
    computed them: the verification goes on from there."""
    layer: int = 0
    flops: float = 0.0
    """What drafting cost a sequence beyond what the verification has to do anyway."""
    probs: list[list[float]] | None = None
    """How likely each draft is right if those before it are, by the drafter; None if unknown."""
    sources: list[Drafter] = field(default_factory=list)
    """Whose drafts they are, of each sequence; `Drafter.ask` fills it in."""

    @property
    def chances(self) -> list[list[float]]:
        """The probabilities, one half where they are unknown."""
        return [[0.5] * len(each) for each in self.tokens] if self.probs is None else self.probs

    def cut(self, length: int) -> None:
        """Leave out all drafts behind the first `length` of each sequence."""
        self.tokens = [tokens[:length] for tokens in self.tokens]
        self.hidden = None if self.hidden is None else self.hidden[:, : length + 1]


class Drafter(ABC):
    """Guesses up to `num_draft_tokens` tokens of each sequence."""

    reads_states: bool = False
    """Whether it needs the states of the model, which not every engine has."""
    layers_read: tuple[int, ...] = ()
    """Layers whose inputs the engine is to keep for it, as `Engine.layer_inputs`."""
    reads_prompt: bool = True
    """Whether `begin` reads the states of all tokens of the prompts (`Engine.prompt`)."""
    price: DraftPrice | None = None
    """Decides how far to draft; None for always as far as there are drafts."""

    def __init__(self, num_draft_tokens: int) -> None:
        if num_draft_tokens < 1:
            raise UserError(f"A drafter must draft at least 1 token: got {num_draft_tokens}.")
        self.num_draft_tokens = self.num_wanted = num_draft_tokens
        self.record = DraftRecord(num_draft_tokens)

    def ask(self, rows: list[SequenceState], state_BD: Tensor, engine: Engine) -> Proposal:
        """Return the drafts of `propose`, of no more than `num_wanted` tokens, those that pay."""
        price, self.num_wanted = self.price, self.num_draft_tokens
        if price is not None:
            self.num_wanted = price.wanted(self.record, engine, len(rows))
        if not self.num_wanted:
            return Proposal([[] for _ in rows], sources=[self] * len(rows))
        began = time.perf_counter()
        proposal = replace(self.propose(rows, state_BD, engine), sources=[self] * len(rows))
        if price is not None:
            seconds = (time.perf_counter() - began) / engine.pass_times.level
            self.record.add(rows, proposal, self.num_wanted, seconds)
        return proposal

    def begin(self, engine: Engine) -> None:  # noqa: B027
        """Start a new generation, after the prompts, and forget what is known of earlier ones."""

    def observe(  # noqa: B027
        self, rows: list[SequenceState], normed_BTD: Tensor, counts: Sequence[int]
    ) -> None:
        """Take notice of a pass of the model.

        `normed_BTD` are the normed last states of the tokens that went through it, `counts` how
        many tokens each sequence has got from the first of these states on.
        """

    @abstractmethod
    def propose(self, rows: list[SequenceState], state_BD: Tensor, engine: Engine) -> Proposal:
        """Return drafts of what follows each sequence's last token.

        `state_BD` are the normed states of the tokens before the last ones, which led to those.
        """


class LookupDrafter(Drafter):
    """Continues each sequence as it, or a text of the table, went on after the longest match."""

    reads_prompt = False

    def __init__(self, num_draft_tokens: int = 8, table: LookupTable | None = None) -> None:
        super().__init__(num_draft_tokens)
        self.table = table
        self._texts: dict[int, SuffixAutomaton] = {}
        self._matches: dict[int, tuple[int, int]] = {}

    def begin(self, engine: Engine) -> None:
        """Forget the texts of the last generation, but for the table."""
        if self.table is not None:
            self.table.check_made_for(engine)
            self.table.settle()
        self._texts, self._matches = {}, {}

    def propose(self, rows: list[SequenceState], state_BD: Tensor, engine: Engine) -> Proposal:
        """Return the continuations that were found."""
        found = [self.find(row.index, row.context) for row in rows]
        return Proposal([tokens for tokens, _ in found], probs=[probs for _, probs in found])

    def find(self, index: int, context: list[int]) -> tuple[list[int], list[float]]:
        """Return drafts for sequence `index`, whose text so far is `context`, and probabilities."""
        if index not in self._texts:
            self._texts[index], self._matches[index] = SuffixAutomaton(), (0, 0)
            if self.table is not None:
                self.table.growing.append(context)
        own, match = self._texts[index], self._matches[index]
        table = None if self.table is None else self.table.automaton
        for token in context[own.length[own.last] :]:
            own.extend(token)
            if table is not None:
                match = table.advance(*match, token)
        self._matches[index] = match
        state = own.link[own.last]
        if table is not None and match[1] > own.length[state]:
            return table.draft(*match, self.num_wanted)
        return own.draft(state, own.length[state], self.num_wanted)


class FallbackDrafter(Drafter):
    """Takes each sequence's drafts from the first of several drafters that has any for it."""

    def __init__(self, drafters: Sequence[Drafter]) -> None:
        super().__init__(max(drafter.num_draft_tokens for drafter in drafters))
        self.drafters = list(drafters)
        self.layers_read = next((each.layers_read for each in drafters if each.layers_read), ())
        self.reads_prompt = any(drafter.reads_prompt for drafter in drafters)
        self.reads_states = any(drafter.reads_states for drafter in drafters)

    def begin(self, engine: Engine) -> None:
        """Start a new generation with all drafters."""
        for drafter in self.drafters:
            drafter.begin(engine)

    def observe(self, rows: list[SequenceState], normed_BTD: Tensor, counts: Sequence[int]) -> None:
        """Let all drafters take notice of a pass of the model."""
        for drafter in self.drafters:
            drafter.observe(rows, normed_BTD, counts)

    def propose(self, rows: list[SequenceState], state_BD: Tensor, engine: Engine) -> Proposal:
        """Ask the drafters in turn until every sequence has drafts, each for as many as pay."""
        answer = Proposal([[] for _ in rows], sources=[self] * len(rows))
        for drafter in self.drafters:
            drafter.price = self.price
            proposal = drafter.ask(rows, state_BD, engine)
            flops = answer.flops + proposal.flops
            if any(answer.tokens):
                # States of some sequences' drafts only are of no use to a verification of all.
                origin = [answer if tokens else proposal for tokens in answer.tokens]
                answer = Proposal(
                    [each.tokens[row] for row, each in enumerate(origin)],
                    flops=flops,
                    probs=[each.chances[row] for row, each in enumerate(origin)],
                    sources=[each.sources[row] for row, each in enumerate(origin)],
                )
            else:
                answer = replace(proposal, flops=flops)
            if all(answer.tokens):
                break
        return answer

    ask = propose  # it has no drafts of its own


# -- a part of the output head -------------------------------------------------------------------


def head_rows(adapter: Adapter, tokens_S: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return the rows of the output head that belong to some tokens: `(S, D)`, and their biases.

    What a model does to its logits behind the head (scaling, capping) leaves their order alone.
    """
    head: Any = adapter.model.get_output_embeddings()
    weight = getattr(head, "weight", None)
    if weight is None or weight.ndim != 2 or weight.shape[1] != adapter.width:
        raise UserError(
            f"{type(adapter.model).__name__} has no head of one matrix over its states, so logits "
            "of a part of the vocabulary cannot be computed: leave out the vocabulary, and linear "
            "and shortcut drafts."
        )
    bias = getattr(head, "bias", None)
    return weight.detach()[tokens_S], None if bias is None else bias.detach()[tokens_S]


class DraftVocab:
    """The tokens that can be drafted, and the rows of a model's head for them."""

    def __init__(self, adapter: Adapter, tokens_S: Tensor) -> None:
        self.tokens_S = tokens_S.to(adapter.model.device)
        self.weight_SD, self.bias_S = head_rows(adapter, self.tokens_S)

    def best(self, state_BD: Tensor) -> tuple[Tensor, Tensor]:
        """Return the most likely token of each normed state and its probability, `[B]` each."""
        return most_likely(F.linear(state_BD, self.weight_SD, self.bias_S), self.tokens_S)


def most_likely(logits_BS: Tensor, tokens_S: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return the most likely of some tokens, by default all, and its probability, `[B]` each."""
    best_B, place_B = logits_BS.float().max(-1)
    probs_B = torch.exp(best_B - logits_BS.float().logsumexp(-1))
    return place_B if tokens_S is None else tokens_S[place_B], probs_B


# -- linear --------------------------------------------------------------------------------------


def make_proposal(places: list[tuple[Tensor, Tensor]], flops: float, **others: Any) -> Proposal:
    """Return a proposal of the drafts `[B]` and their probabilities, place by place."""
    tokens, probs = (torch.stack(each, dim=1) for each in zip(*places, strict=True))
    # One read for both, since a device waits for each; float32 holds any vocabulary's ids exactly.
    drafts, found = torch.stack([tokens.float(), probs.float()]).tolist()
    whole = [[int(token) for token in row] for row in drafts]
    return Proposal(whole, flops=flops, probs=found, **others)


class LinearDrafter(Drafter):
    """Drafts by linear maps of what is known anyway, without running a layer.

    When token `t` is to be decoded, the last state of the token before it is known from the pass
    that chose `t`, and it has seen the whole context. With `e_t` the embedding of `t`, `x_t` its
    normed last state and `rms` the root-mean-square norm,

        x_t     ~ B_1 [rms(e_t); x_(t-1)] + b_1
        x_(t+1) ~ B_2 [rms(e_(t+1)); rms(e_t); x_(t-1)] + b_2

    and so on: the n-th map has the drafts of those before it among its inputs. States enter as the
    model's final norm leaves them.

    Args:
        maps: Pairs `(B_n, b_n)`, `B_n` of shape `(D, (n + 1) D)`.
        draft_vocab: Tokens that can be drafted, the most frequent first.
        meta: What the maps were fitted to.
        num_draft_tokens: At most one for each map, which is the default.
    """

    reads_prompt = False
    reads_states = True

    def __init__(
        self,
        maps: Sequence[tuple[Tensor, Tensor]],
        draft_vocab: Tensor,
        meta: Mapping[str, Any] | None = None,
        num_draft_tokens: int | None = None,
    ) -> None:
        self.maps = list(maps)
        self.draft_vocab = draft_vocab
        self.meta = dict(meta or {})
        self.width = len(self.maps[0][1]) if self.maps else 0
        for number, (matrix, bias) in enumerate(self.maps, start=1):
            expected = (self.width, (number + 1) * self.width)
            if matrix.shape != expected or bias.shape != (self.width,):
                raise ValueError(f"map {number} has the shape {tuple(matrix.shape)}")
            if not matrix.is_floating_point() or not bias.is_floating_point():
                raise ValueError(f"map {number} is of {matrix.dtype}")
        if not self.maps or draft_vocab.ndim != 1 or not len(draft_vocab):
            raise ValueError("there is no map, or no token to choose")
        if draft_vocab.dtype != torch.int64 or int(draft_vocab.min()) < 0:
            raise ValueError("tokens to choose are no ids")
        most = len(self.maps)
        super().__init__(most if num_draft_tokens is None else min(num_draft_tokens, most))

    @property
    def made_for(self) -> dict[str, Any]:
        """Return what is known of the model they were fitted for, as `Adapter.identity` has it."""
        return {"width": self.width} | (self.meta.get("model") or {})

    def begin(self, engine: Engine) -> None:
        """Follow the model's device and dtype."""
        place = engine.adapter.model.device, engine.adapter.model.dtype
        self._cast = [(matrix.to(*place), bias.to(*place)) for matrix, bias in self.maps]
        self._vocab = DraftVocab(engine.adapter, self.draft_vocab)

    def propose(self, rows: list[SequenceState], state_BD: Tensor, engine: Engine) -> Proposal:
        """Return the tokens that the maps predict."""
        latest_B = torch.tensor([row.context[-1] for row in rows], device=state_BD.device)
        inputs_BZ = state_BD
        places: list[tuple[Tensor, Tensor]] = []
        flops = 0.0
        for matrix, bias in self._cast[: self.num_wanted]:
            embedding_BD = F.rms_norm(engine.embeddings(latest_B), state_BD.shape[-1:])
            inputs_BZ = torch.cat([embedding_BD, inputs_BZ], dim=-1)
            places.append(self._vocab.best(F.linear(inputs_BZ, matrix, bias)))
            latest_B, _ = places[-1]
            flops += 2.0 * (matrix.numel() + len(self.draft_vocab) * self.width)
        return make_proposal(places, flops)

    def save_pretrained(self, folder: str | os.PathLike[str]) -> None:
        """Write the maps as safetensors with a JSON index; other files in the folder stay."""
        tensors = {"draft_vocab": self.draft_vocab}
        for number, (matrix, bias) in enumerate(self.maps, start=1):
            tensors |= {f"B.{number}": matrix, f"b.{number}": bias}
        index = {"format": FORMAT, "version": VERSION, "maps": len(self.maps), "meta": self.meta}
        try:
            save_artifact(Path(folder) / TENSORS, tensors, index)
        except OSError as error:
            raise UserError(
                f"The linear drafter cannot be written to {folder}: {error}."
            ) from error

    @classmethod
    def from_pretrained(cls, folder: str | os.PathLike[str]) -> LinearDrafter:
        """Read what `save_pretrained` wrote; safetensors and JSON only."""
        index_path, path = Path(folder) / INDEX, Path(folder) / TENSORS
        if not index_path.is_file() or not path.is_file():
            raise UserError(
                f"{folder} holds no linear drafter ({INDEX} and {TENSORS}): give the folder that "
                "LinearDrafter.save_pretrained wrote."
            )
        try:
            tensors, index = load_artifact(path, FORMAT, VERSION)
            numbers = range(1, len(tensors) // 2 + 1)
            maps = [(tensors[f"B.{number}"], tensors[f"b.{number}"]) for number in numbers]
            found = cls(maps, tensors["draft_vocab"], index["meta"])
            if index["maps"] != len(maps) or not dict(found.made_for):
                raise ValueError("maps are missing or too many")
            return found
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(
                f"{index_path} cannot be used ({error}): fit the maps again."
            ) from error


# -- the first layers ----------------------------------------------------------------------------


class ShortcutDrafter(Drafter):
    """Runs the first layers, jumps to the last state by a shortcut and takes the best token.

    The states and the keys and values of those layers are what the verification needs first, so it
    begins behind them: drafting costs a map and a projection on the draft vocabulary, and that the
    first layers run for one token after the other.

    `layer` is how many layers run; `draft_vocab` the tokens that can be drafted, None for all.
    """

    reads_prompt = False
    reads_states = True

    def __init__(
        self,
        shortcuts: Shortcuts,
        layer: int,
        num_draft_tokens: int = 1,
        draft_vocab: Tensor | None = None,
    ) -> None:
        super().__init__(num_draft_tokens)
        if not 0 <= layer < shortcuts.num_layers:
            raise UserError(
                f"Drafts can come from layers 0 to {shortcuts.num_layers - 1}: got {layer}."
            )
        self.shortcuts, self.layer, self.draft_vocab = shortcuts, layer, draft_vocab
        self.mode = "tuned" if layer in shortcuts.tuned else None
        self._vocab: DraftVocab | None = None

    def begin(self, engine: Engine) -> None:
        """Follow the model's device and dtype."""
        if self.draft_vocab is not None:
            self._vocab = DraftVocab(engine.adapter, self.draft_vocab)

    def propose(self, rows: list[SequenceState], state_BD: Tensor, engine: Engine) -> Proposal:
        """Return the drafts, and the states of the layers that ran for them."""
        last, vocab = engine.num_layers, self._vocab
        token_B1 = torch.tensor([[row.context[-1]] for row in rows], device=state_BD.device)
        places: list[tuple[Tensor, Tensor]] = []
        states = []
        for offset in range(self.num_wanted + 1):
            step = engine.start_step(token_B1, offset)
            states.append(engine.run_layers(step, step.hidden, 0, self.layer))
            if offset == self.num_wanted:  # the last draft drafts nothing, but is verified
                break
            jumped = self.shortcuts.apply(states[-1][:, 0], self.layer, last, self.mode, keep=True)
            normed = engine.norm(jumped)
            own = most_likely(engine.head(normed)) if vocab is None else vocab.best(normed)
            places.append(own)
            token_B1 = own[0][:, None]
        width = engine.adapter.width
        config = engine.adapter.model.config.get_text_config()
        vocab_size = config.vocab_size if vocab is None else len(vocab.tokens_S)
        flops = self.num_wanted * 2.0 * width * (width + vocab_size)
        return make_proposal(places, flops, hidden=torch.cat(states, dim=1), layer=self.layer)


# -- by name -------------------------------------------------------------------------------------

_NEEDED = {"linear": "linear_drafter", "shortcut": "shortcuts", "draft_model": "draft_model"}


def make_drafter(
    engine: Engine,
    names: Sequence[str | Drafter] | None,
    num_draft_tokens: int | None = None,
    *,
    draft_model: DraftModel | None = None,
    linear_drafter: LinearDrafter | None = None,
    shortcuts: Shortcuts | None = None,
    layer: int | None = None,
    table: LookupTable | None = None,
) -> Drafter | None:
    """Return the drafter of these names for a model, None if there are no names.

    The other arguments are those of `speculate`. A draft model brings a linear drafter, whose
    vocabulary is that of all drafts but the head's. Without `num_draft_tokens`, drafters made here
    draft as many as pay.
    """
    given = [draft_model and draft_model.linear_drafter, linear_drafter, shortcuts, *(names or ())]
    for made in given:
        if isinstance(made, LinearDrafter | Shortcuts):
            engine.adapter.check_made_for(made.made_for, "The maps that drafts are made with")
    if draft_model is not None:
        linear_drafter = linear_drafter or draft_model.linear_drafter
    fitted = {"draft_model": draft_model, "linear": linear_drafter, "shortcut": shortcuts}
    if names is None:
        names = ["lookup", *[name for name, made in fitted.items() if made is not None][:1]]
    number = MOST_DRAFTS if num_draft_tokens is None else num_draft_tokens
    vocab_S: Any = None if linear_drafter is None else linear_drafter.draft_vocab
    found: list[Drafter] = []
    for name in names:
        if isinstance(name, Drafter):
            found.append(name)
        elif name == "lookup":
            found.append(LookupDrafter(number, table))
        elif name == "linear" and linear_drafter is not None:
            found.append(LinearDrafter(linear_drafter.maps, vocab_S, num_draft_tokens=number))
        elif name == "shortcut" and shortcuts is not None:
            depth = engine.num_layers // 4 if layer is None else layer
            found.append(ShortcutDrafter(shortcuts, depth, number, vocab_S))
        elif name == "draft_model" and draft_model is not None:
            from deepenough.decoding.eagle3 import Eagle3Drafter

            found.append(Eagle3Drafter(draft_model.head, number))
        elif name in _NEEDED:
            raise UserError(f"The {name} drafter needs what was fitted: give {_NEEDED[name]}.")
        else:
            known = ", ".join(["lookup", *_NEEDED])
            raise UserError(f"A drafter is one of {known} or a Drafter, not {name!r}.")
    if table is not None:
        table.check_made_for(engine)
    if not found:
        return None
    made_of = found[0] if len(found) == 1 else FallbackDrafter(found)
    if num_draft_tokens is None and any(isinstance(name, str) for name in names):
        made_of.price = DraftPrice()
    return made_of

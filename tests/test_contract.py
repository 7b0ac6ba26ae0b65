"""One contract for all methods: every method goes through the same checks.

Each method is a `Subject`, a tiny model with its mechanism, and each check is one function over all
subjects: with a neutral setting a method is its base model, its extremes are the shallowest and the
deepest model, the fast path is the reference, what is saved and loaded answers alike, a batch is
its rows one by one, the trace counts what torch counts. Then, for every command that trains, a run
that was stopped and resumed is the uninterrupted one; and for every command, `--help` is true.

Floats that are computed twice agree within `TOLERANCE`; tokens and depths are equal. A new method
adds a subject, and its training commands to `TRAININGS`.
"""

from __future__ import annotations

import copy
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    BertModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

import deepenough as de
from deepenough.__main__ import main
from deepenough.cli import _settings_class, commands
from deepenough.config import options
from deepenough.decoding import native_backend
from deepenough.decoding.drafters import Proposal
from deepenough.hf.adapter import adapt
from deepenough.lazy.equilibrium import run_in_full
from deepenough.lazy.layers import (
    EncoderMemory,
    PaddedContext,
    StepOptions,
    causal_mask,
    padding_mask,
)
from deepenough.par.config import BRANCHES
from deepenough.ponder.halting import FixedExit, HaltingPolicy, QuantileExit
from deepenough.trace import DepthTrace
from deepenough.training.trainer import Trainer
from tests.ponder.references import run_batch_ref

TOLERANCE: dict[str, float] = {"rtol": 1e-4, "atol": 1e-5}
"""Of what one forward in float32 computes in two ways."""
RESUMED: dict[str, float] = {"rtol": 1e-4, "atol": 1e-6}
"""Of a training that was stopped; forgetting an optimiser, a seed or a batch moves far more."""
NUM_LAYERS = 3
VOCAB = 40
ROWS = [[7, 0], [7, 3], [7, 2]]
"""Width of every row of a batch, and how much of it is padding."""


@dataclass
class Answer:
    """What a subject makes of a batch, row by row and without padding."""

    rows: list[Tensor]
    """Logits, or tokens."""
    blocks: list[Tensor]
    """How many blocks ran for each token or example."""
    traces: list[DepthTrace]
    details: list[Tensor] = field(default_factory=list)
    """What else the method says of each row, such as the probability of halting at each pass."""


class Subject(ABC):
    """A method on a tiny model."""

    least = 1
    """Blocks that run at the shallowest setting."""
    most = NUM_LAYERS
    neutral: tuple[Any, ...]
    """Settings that change nothing."""
    shallowest: Any
    deepest: Any
    typical: Any
    """A setting with which tokens or examples stop at different depths."""

    @abstractmethod
    def run(self, setting: Any, rows: list[int]) -> Answer:
        """Return what the method answers to some rows of the batch."""

    @abstractmethod
    def base(self, num_layers: int, rows: list[int]) -> list[Tensor]:
        """Return what so many blocks of the base model answer, without the method."""

    @abstractmethod
    def reload(self, folder: Path) -> Subject:
        """Return the same after it was saved in a folder and loaded from there."""


def ids_and_mask(rows: list[int], left: bool = False) -> tuple[Tensor, Tensor]:
    """Return rows of the batch, padded to the longest of them."""
    ids = torch.randint(4, VOCAB, (len(ROWS), 7), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    for row, (width, padding) in enumerate(ROWS):
        mask[row, slice(padding) if left else slice(width - padding, None)] = 0
    longest = max(ROWS[row][0] - ROWS[row][1] for row in rows)
    kept = slice(7 - longest, None) if left else slice(longest)
    ids, mask = ids[rows, kept], mask[rows, kept]
    return ids.masked_fill(mask == 0, 0), mask


# -- PAR -------------------------------------------------------------------------------------------


class Par(Subject):
    """A SuperNet with all weight on one branch of every block, or that leaves blocks out."""

    pattern = "ada"
    neutral = ("preferred",)
    shallowest = "a--"
    deepest = "ada"
    typical = "a-a"

    def __init__(self, model: Any = None) -> None:
        torch.manual_seed(0)
        sizes = {"vocab_size": VOCAB, "d_model": 16, "num_heads": 2, "d_ff": 24, "mem_len": 4}
        config = de.ParConfig(**sizes, num_blocks=NUM_LAYERS, length=7, initializer_range=0.3)
        self.model = model or de.ParForCausalLM(config).eval()

    def run(self, setting: str, rows: list[int]) -> Answer:
        model = copy.deepcopy(self.model)
        for block, kind in enumerate(self.pattern):
            if setting == "preferred":  # open still, but with all weight on one branch
                model.choice.alpha[block, BRANCHES.index(kind)] = 1e4
        if setting != "preferred":
            model = model.with_pattern(setting)
        ids, _ = ids_and_mask([0, 0, 0])
        ids = torch.stack([ids[row].roll(row) for row in rows])  # streams are all of one length
        output = model(ids)
        ran = [row.sum(-1) for row in output.trace.ran]
        return Answer(list(output.logits), ran, [output.trace])

    def base(self, num_layers: int, rows: list[int]) -> list[Tensor]:
        """The model that has no other blocks."""
        return self.run(self.pattern[:num_layers], rows).rows

    def reload(self, folder: Path) -> Subject:
        self.model.save_pretrained(folder)
        return Par(AutoModelForCausalLM.from_pretrained(folder).eval())


# -- ponder ----------------------------------------------------------------------------------------


class Ponder(Subject):
    """A classifier whose examples halt."""

    neutral = (FixedExit(), FixedExit(NUM_LAYERS))
    shallowest = QuantileExit(1e-9)
    deepest = QuantileExit(1.0)
    typical = QuantileExit(0.5)
    sizes: ClassVar[dict[str, Any]] = {
        "vocab_size": VOCAB,
        "hidden_size": 16,
        "num_hidden_layers": NUM_LAYERS,
        "num_attention_heads": 2,
        "intermediate_size": 24,
        "max_position_embeddings": 16,
        "initializer_range": 0.3,
    }

    def __init__(self, model: Any = None) -> None:
        self.model = model or self.new_model()
        if model is None:
            generator = torch.Generator().manual_seed(4)
            for name, parameter in self.model.named_parameters():
                if "halting" in name and parameter.ndim > 1:  # halting differs between examples
                    parameter.data = torch.randn(parameter.shape, generator=generator)
        self.model.eval()

    @abstractmethod
    def new_model(self) -> PreTrainedModel:
        """Return a new model."""

    def answer(self, output: Any) -> Answer:
        ran, halting = output.trace.ran.sum(-1), output.halting
        return Answer(list(output.logits), list(ran), [output.trace], list(halting))

    def run(self, setting: HaltingPolicy, rows: list[int]) -> Answer:
        ids, mask = ids_and_mask(rows)
        return self.answer(self.model(input_ids=ids, attention_mask=mask, policy=setting))

    def base(self, num_layers: int, rows: list[int]) -> list[Tensor]:
        """The head on what the encoder of transformers returns after so many layers."""
        ids, mask = ids_and_mask(rows)
        encoder = self.model.encoder_model
        output = encoder(input_ids=ids, attention_mask=mask, output_hidden_states=True)
        state = output.hidden_states[num_layers]
        return list(self.model._classifier(num_layers - 1)(state[:, 0]))

    def reference(self, setting: HaltingPolicy, rows: list[int]) -> Answer:
        ids, mask = ids_and_mask(rows)
        inputs = self.model.prepare(ids, mask)
        return self.answer(run_batch_ref(self.model, inputs, setting, torch.arange(len(rows))))

    def reload(self, folder: Path) -> Subject:
        self.model.save_pretrained(folder)
        return type(self)(type(self.model).from_pretrained(folder))


class PonderAlbert(Ponder):
    """One layer, repeated."""

    def new_model(self) -> PreTrainedModel:
        torch.manual_seed(0)
        config = de.PonderAlbertConfig(**self.sizes, embedding_size=8, num_labels=3)
        return de.PonderAlbertForSequenceClassification(config)


class PonderEncoder(Ponder):
    """Layers of their own, and a head for each."""

    def new_model(self) -> PreTrainedModel:
        torch.manual_seed(0)
        encoder = BertModel(BertConfig(**self.sizes))
        return de.PonderEncoderForSequenceClassification.from_encoder(encoder, num_labels=3)


# -- lazy ------------------------------------------------------------------------------------------


class Lazy(Subject):
    """Tokens that halt once they no longer change; settings are epsilons, None for no halting."""

    neutral = (0.0, 1e-9)  # the second as good as unreachable, but asked of every token
    shallowest = 1.0
    deepest = 1e-9
    typical = 0.3
    kind: type[PreTrainedModel]

    def __init__(self, model: Any = None) -> None:
        torch.manual_seed(0)
        sizes = {"vocab_size": VOCAB, "d_model": 16, "num_heads": 2, "d_ff": 24}
        steps = {"encoder_steps": NUM_LAYERS, "decoder_steps": NUM_LAYERS, "pad_token_id": 0}
        config = de.LazyTransformerConfig(**sizes, **steps, dropout=0.0)
        # In double precision, so that rounding does not decide which gate is below epsilon.
        self.model: Any = (model or self.kind(config)).double().eval()

    def reload(self, folder: Path) -> Subject:
        self.model.save_pretrained(folder)
        return type(self)(self.kind.from_pretrained(folder))


class LazyTranslator(Lazy):
    """Tokens of source and target."""

    kind = de.LazyTransformerForConditionalGeneration

    def forward(self, rows: list[int], **options: Any) -> Any:
        ids, mask = ids_and_mask(rows)
        target, _ = ids_and_mask([0, 0, 0])
        target = torch.stack([target[row, :5].roll(row) for row in rows])
        return self.model(input_ids=ids, attention_mask=mask, decoder_input_ids=target, **options)

    def run(self, setting: float, rows: list[int]) -> Answer:
        output = self.forward(rows, epsilon=setting, decoder_epsilon=setting)
        _, mask = ids_and_mask(rows)
        source, target = output.encoder_trace.ran.sum(-1), output.trace.ran.sum(-1)
        blocks = [
            torch.cat([row[kept.bool()], own])
            for row, kept, own in zip(source, mask, target, strict=True)
        ]
        return Answer(list(output.logits), blocks, [output.encoder_trace, output.trace])

    def base(self, num_layers: int, rows: list[int]) -> list[Tensor]:
        output = self.forward(rows, encoder_steps=num_layers, decoder_steps=num_layers)
        return list(output.logits)

    def reference(self, setting: float, rows: list[int]) -> Answer:
        """Both sides with all tokens in every step, those that have halted put back."""
        ids, mask = ids_and_mask(rows)
        target, _ = ids_and_mask([0, 0, 0])
        target = torch.stack([target[row, :5].roll(row) for row in rows])
        encoder, decoder = self.model.encoder, self.model.decoder
        state = encoder.embed(ids)
        context = PaddedContext(2, padding_mask(mask))
        positions = encoder.stack.encoding.positions(0, state)
        source = run_in_full(
            encoder.stack, state, positions, context, StepOptions(NUM_LAYERS, setting, 1)
        )
        embedded = decoder.embed(target)
        memory = EncoderMemory(source.state, padding_mask(mask), 2)
        context = PaddedContext(2, causal_mask(None, 5, 5, state.device), memory=memory)
        positions = decoder.stack.encoding.positions(0, embedded)
        found = run_in_full(
            decoder.stack, embedded, positions, context, StepOptions(NUM_LAYERS, setting, 1)
        )
        blocks = [
            torch.cat([row[kept.bool()], own])
            for row, kept, own in zip(source.depth, mask, found.depth, strict=True)
        ]
        return Answer(list(self.model.output(found.state)), blocks, [])


class LazyCausalLM(Lazy):
    """Tokens of a text."""

    kind = de.LazyTransformerForCausalLM

    def forward(self, rows: list[int], **options: Any) -> tuple[Any, list[Tensor]]:
        ids, mask = ids_and_mask(rows)
        return self.model(input_ids=ids, attention_mask=mask, **options), list(mask.bool())

    def run(self, setting: float, rows: list[int]) -> Answer:
        output, kept = self.forward(rows, decoder_epsilon=setting)
        return self.real(output.logits, output.trace.ran.sum(-1), kept, [output.trace])

    def real(
        self, logits: Tensor, blocks: Tensor, kept: list[Tensor], traces: list[DepthTrace]
    ) -> Answer:
        rows = [row[own] for row, own in zip(logits, kept, strict=True)]
        ran = [row[own] for row, own in zip(blocks, kept, strict=True)]
        return Answer(rows, ran, traces)

    def base(self, num_layers: int, rows: list[int]) -> list[Tensor]:
        output, kept = self.forward(rows, decoder_steps=num_layers)
        return self.real(output.logits, output.trace.ran.sum(-1), kept, []).rows

    def reference(self, setting: float, rows: list[int]) -> Answer:
        ids, mask = ids_and_mask(rows)
        decoder = self.model.decoder
        state = decoder.embed(ids)
        positions = decoder.stack.encoding.positions(0, state)
        # Padding stands behind the text, where a causal mask hides it.
        context = PaddedContext(2, causal_mask(None, *ids.shape[1:] * 2, state.device))
        found = run_in_full(
            decoder.stack, state, positions, context, StepOptions(NUM_LAYERS, setting, 1)
        )
        return self.real(self.model.output(found.state), found.depth, list(mask.bool()), [])


# -- shortcut --------------------------------------------------------------------------------------

SPECIAL: dict[str, Any] = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


@cache
def llama() -> LlamaForCausalLM:
    """Return a decoder with weights so large that no two tokens are nearly as likely."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        num_hidden_layers=NUM_LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=48,
        max_position_embeddings=64,
        initializer_range=0.3,
        **SPECIAL,
    )
    return LlamaForCausalLM(config).eval().requires_grad_(False)


def words_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer of the words `w3`, `w4`, ..."""
    words = {"[PAD]": 0, "[BOS]": 1, "[EOS]": 2} | {f"w{n}": n for n in range(3, VOCAB)}
    tokenizer = Tokenizer(WordLevel(words, unk_token="[PAD]"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="[PAD]")


def word_lines(num: int) -> list[str]:
    """Return lines of 14 words."""
    rows = torch.randint(3, VOCAB, (num, 14), generator=torch.Generator().manual_seed(0))
    return [" ".join(f"w{number}" for number in row) for row in rows.tolist()]


@cache
def fitted(batch_tokens: int = 4096) -> de.Shortcuts:
    """Return shortcuts of the decoder."""
    lines, tokenizer = word_lines(120), words_tokenizer()
    return de.Shortcuts.fit(llama(), tokenizer, lines, batch_tokens=batch_tokens)


class Shortcut(Subject):
    """Predictions from a layer; a setting is that layer, and whether its map or none is used."""

    least = 0
    neutral = ((NUM_LAYERS, "id"), (NUM_LAYERS, "mat"))
    shallowest = (0, "id")
    deepest = (NUM_LAYERS, "mat")
    typical = (1, "mat")

    def __init__(self, shortcuts: de.Shortcuts | None = None) -> None:
        self.shortcuts = shortcuts or fitted()

    def run(self, setting: tuple[int, str], rows: list[int]) -> Answer:
        layer, mode = setting
        adapter = adapt(llama())
        ids, mask = ids_and_mask(rows)
        state = adapter.states(ids, attention_mask=mask)[layer]
        logits = adapter.logits(self.shortcuts.apply(state, layer, NUM_LAYERS, mode))
        found = [row[kept.bool()] for row, kept in zip(logits, mask, strict=True)]
        return Answer(found, [torch.full((len(row),), layer) for row in found], [])

    def base(self, num_layers: int, rows: list[int]) -> list[Tensor]:
        """The model's own logits, or those of a state that was never mapped (the logit lens)."""
        ids, mask = ids_and_mask(rows)
        output = llama()(input_ids=ids, attention_mask=mask, output_hidden_states=True)
        logits = output.logits
        if num_layers < NUM_LAYERS:
            logits = llama().lm_head(llama().model.norm(output.hidden_states[num_layers]))
        return [row[kept.bool()] for row, kept in zip(logits, mask, strict=True)]

    def reference(self, setting: tuple[int, str], rows: list[int]) -> Answer:
        """Maps solved by least squares on all states at once, which were read text by text."""
        adapter = adapt(llama())
        ids = [words_tokenizer()(line)["input_ids"] for line in word_lines(120)]
        parts = [adapter.states(torch.tensor([row])) for row in ids]
        x, y = (torch.cat([part[n][0] for part in parts]).double() for n in (setting[0], -1))
        solved = torch.linalg.lstsq(x, y).solution
        given, mask = ids_and_mask(rows)
        state = adapter.states(given, attention_mask=mask)[setting[0]]
        logits = adapter.logits((state.double() @ solved).float())
        found = [row[kept.bool()] for row, kept in zip(logits, mask, strict=True)]
        return replace(self.run(setting, rows), rows=found)

    def reload(self, folder: Path) -> Subject:
        self.shortcuts.save_pretrained(folder)
        return Shortcut(de.Shortcuts.from_pretrained(folder))


# -- decoding --------------------------------------------------------------------------------------


class Decoding(Subject):
    """Greedy generation after prompts that are padded on the left."""

    def generate(self, model: Any, rows: list[int], **changes: Any) -> Any:
        ids, mask = ids_and_mask(rows, left=True)
        given = {"do_sample": False, "max_new_tokens": 10, "return_dict_in_generate": True}
        return model.generate(input_ids=ids, attention_mask=mask, **given | changes)

    @abstractmethod
    def decoder(self, setting: Any) -> Any:
        """Return a model that generates by a setting."""

    def new_tokens(self, output: Any, rows: list[int]) -> list[Tensor]:
        """Return what follows each prompt, without the padding behind an end."""
        found = []
        for row in output.sequences[:, ids_and_mask(rows, left=True)[0].shape[1] :]:
            end = (row == SPECIAL["eos_token_id"]).nonzero()
            found.append(row[: int(end[0]) + 1] if len(end) else row)
        return found

    def run(self, setting: Any, rows: list[int]) -> Answer:
        output = self.generate(self.decoder(setting), rows)
        found = self.new_tokens(output, rows)
        ran = output.trace.ran.sum(-1)
        # The first token comes from the prompt, which always goes through all layers.
        blocks = [own[1 : len(row)] for own, row in zip(ran, found, strict=True)]
        return Answer(found, blocks, [output.trace])


class Oracle(de.Drafter):
    """Knows what the model will write next, and says so always, never or every second time."""

    def __init__(self, right: str) -> None:
        super().__init__(3)
        self.right = right

    def propose(self, rows: Any, state_BD: Tensor, engine: Any) -> Proposal:
        drafts = []
        for row in rows:
            ids = torch.tensor([row.ids])
            coming = llama().generate(ids, do_sample=False, max_new_tokens=3)[0, ids.shape[1] :]
            said = [int(token) for token in coming]
            if self.right == "never":
                said = [(token + 1) % VOCAB for token in said]
            elif self.right == "sometimes":
                said[1:2] = [(token + 1) % VOCAB for token in said[1:2]]
            drafts.append(said)
        return Proposal(drafts)


@cache
def linear_drafter() -> de.LinearDrafter:
    """Return a linear drafter whose guesses are sometimes right."""
    generator = torch.Generator().manual_seed(0)
    maps = [
        (0.3 * torch.randn(32, (n + 1) * 32, generator=generator), torch.zeros(32)) for n in (1, 2)
    ]
    return de.LinearDrafter(maps, torch.arange(3, VOCAB))


class Speculate(Decoding):
    """Drafts that are never, always or sometimes right, by everybody who can draft."""

    least = NUM_LAYERS  # nothing is skipped
    neutral = ("none", "lookup", "linear", "shortcut", "sometimes", "all")
    shallowest = "never"
    deepest = "always"
    typical = "linear"

    def __init__(self, linear: de.LinearDrafter | None = None) -> None:
        self.linear = linear or linear_drafter()

    def decoder(self, setting: str) -> Any:
        drafter: Any = ["lookup", "linear", "shortcut"] if setting == "all" else setting
        if setting in ("always", "never", "sometimes"):
            drafter = Oracle(setting)
        given: dict[str, Any] = {"linear_drafter": self.linear, "shortcuts": fitted()}
        return de.speculate(llama(), drafter=drafter, draft_layer=1, **given)

    def base(self, num_layers: int, rows: list[int]) -> list[Tensor]:
        return self.new_tokens(self.generate(llama(), rows), rows)

    def reload(self, folder: Path) -> Subject:
        self.linear.save_pretrained(folder)
        return Speculate(de.LinearDrafter.from_pretrained(folder))


class EarlyExit(Decoding):
    """Tokens that leave at a confidence; a setting is a policy."""

    neutral = (de.TopProbability(1.0), de.ConfidenceGap(1.0), de.FixedLayer(NUM_LAYERS))
    shallowest = de.TopProbability(0.0)
    deepest = de.ConfidenceGap(1.0)
    typical = de.TopProbability(0.35)

    def __init__(self, shortcuts: de.Shortcuts | None = None) -> None:
        self.shortcuts = shortcuts or fitted()

    def decoder(self, setting: Any) -> Any:
        return de.early_exit(llama(), self.shortcuts, policy=setting, exit_layers=[1, 2])

    def base(self, num_layers: int, rows: list[int]) -> list[Tensor]:
        """The model itself, or all tokens at one layer, whatever their confidence."""
        whole = num_layers == NUM_LAYERS
        model = llama() if whole else self.decoder(de.FixedLayer(num_layers))
        return self.new_tokens(self.generate(model, rows), rows)

    def reload(self, folder: Path) -> Subject:
        self.shortcuts.save_pretrained(folder)
        return EarlyExit(de.Shortcuts.from_pretrained(folder))


# -- the matrix ------------------------------------------------------------------------------------

SUBJECTS: dict[str, Callable[[], Subject]] = {
    "par": Par,
    "ponder albert": PonderAlbert,
    "ponder encoder": PonderEncoder,
    "lazy translator": LazyTranslator,
    "lazy causal lm": LazyCausalLM,
    "shortcut": Shortcut,
    "decoding speculate": Speculate,
    "decoding early_exit": EarlyExit,
}
ALL_ROWS = list(range(len(ROWS)))

every_subject = pytest.mark.parametrize("name", SUBJECTS)
every_reference = pytest.mark.parametrize(
    "name", [name for name, kind in SUBJECTS.items() if hasattr(kind, "reference")]
)


def assert_same_rows(found: list[Tensor], expected: list[Tensor]) -> None:
    assert len(found) == len(expected) > 0
    for row, other in zip(found, expected, strict=True):
        if row.is_floating_point():
            torch.testing.assert_close(row, other.to(row.dtype), **TOLERANCE)
        else:
            assert row.tolist() == other.tolist()


def assert_same(found: Answer, expected: Answer) -> None:
    assert_same_rows(found.rows, expected.rows)
    assert [row.tolist() for row in found.blocks] == [row.tolist() for row in expected.blocks]
    if found.details:
        assert_same_rows(found.details, expected.details)


@every_subject
@torch.no_grad()
def test_a_neutral_setting_is_the_base_model(name: str) -> None:
    subject = SUBJECTS[name]()
    expected = subject.base(subject.most, ALL_ROWS)
    for setting in subject.neutral:
        assert_same_rows(subject.run(setting, ALL_ROWS).rows, expected)


@every_subject
@torch.no_grad()
def test_extremes_are_the_shallowest_and_the_deepest_model(name: str) -> None:
    subject = SUBJECTS[name]()
    for setting, depth in ((subject.shallowest, subject.least), (subject.deepest, subject.most)):
        answer = subject.run(setting, ALL_ROWS)
        assert {int(blocks) for row in answer.blocks for blocks in row.flatten()} == {depth}
        assert_same_rows(answer.rows, subject.base(depth, ALL_ROWS))


@pytest.mark.parametrize(
    "name", [n for n in SUBJECTS if n not in ("par", "shortcut", "decoding speculate")]
)
@torch.no_grad()
def test_depths_differ_where_tokens_or_examples_decide(name: str) -> None:
    """Else the checks below would say nothing of what halting does to its neighbours."""
    subject = SUBJECTS[name]()
    blocks = subject.run(subject.typical, ALL_ROWS).blocks
    assert len({int(each) for row in blocks for each in row.flatten()}) > 1


@every_subject
@torch.no_grad()
def test_a_batch_is_its_rows_one_by_one(name: str) -> None:
    subject = SUBJECTS[name]()
    together = subject.run(subject.typical, ALL_ROWS)
    alone = [subject.run(subject.typical, [row]) for row in ALL_ROWS]
    rows, blocks, details = (
        [row for answer in alone for row in getattr(answer, name)]
        for name in ("rows", "blocks", "details")
    )
    assert_same(together, Answer(rows, blocks, [], details))


@every_reference
@torch.no_grad()
def test_the_fast_path_is_the_reference(name: str) -> None:
    subject: Any = SUBJECTS[name]()
    expected = subject.reference(subject.typical, ALL_ROWS)
    assert_same(subject.run(subject.typical, ALL_ROWS), expected)


@every_subject
@torch.no_grad()
def test_what_is_saved_and_loaded_answers_alike(name: str, tmp_path: Path) -> None:
    subject = SUBJECTS[name]()
    loaded = subject.reload(tmp_path / "saved")
    expected = subject.run(subject.typical, ALL_ROWS)
    assert_same(loaded.run(subject.typical, ALL_ROWS), expected)


DECODING_CONTEXT = 0.01
"""A token is charged for a context that already includes it: at most this share, of such sizes."""


def flops_of(run: Callable[[], Any]) -> tuple[Any, float]:
    """Return what is returned, and the FLOPs that torch counts; it counts no fused attention."""
    counter = FlopCounterMode(display=False)
    with sdpa_kernel(SDPBackend.MATH), counter:
        returned = run()
    return returned, float(counter.get_total_flops())


@pytest.mark.parametrize("setting", ["deepest", "typical"])
@pytest.mark.parametrize("name", [n for n in SUBJECTS if n.startswith(("par", "ponder", "lazy"))])
@torch.no_grad()
def test_the_trace_counts_what_torch_counts(name: str, setting: str) -> None:
    subject = SUBJECTS[name]()
    value = getattr(subject, setting)
    subject.run(value, [0, 0])  # a first call also learns what layers return
    answer, counted = flops_of(lambda: subject.run(value, [0, 0]))  # of one length: no padding
    assert sum(trace.total_flops for trace in answer.traces) == pytest.approx(counted, rel=1e-9)


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda: Speculate().decoder("none"), id="speculate none"),
        pytest.param(lambda: Speculate().decoder("linear"), id="speculate linear"),
        pytest.param(lambda: EarlyExit().decoder(EarlyExit.deepest), id="early_exit deepest"),
        pytest.param(lambda: EarlyExit().decoder(EarlyExit.shallowest), id="early_exit shortcut"),
        pytest.param(lambda: exit_with("copy"), id="early_exit copy"),
        pytest.param(lambda: exit_with("deferred"), id="early_exit deferred"),
    ],
)
@torch.no_grad()
def test_the_trace_of_generation_counts_what_torch_counts(
    make: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of all tokens but the first, which comes from the prompt."""
    monkeypatch.setattr(native_backend, "load_library", lambda: None)  # which torch does not count
    model, subject = make(), Speculate()

    def generate(num: int) -> Any:
        return subject.generate(model, [0], max_new_tokens=num, min_new_tokens=num)

    generate(3)
    _, prompt = flops_of(lambda: generate(1))
    output, counted = flops_of(lambda: generate(10))
    traced = float(output.trace.flops[0, 1:].sum())
    assert traced == pytest.approx(counted - prompt, rel=DECODING_CONTEXT)


def exit_with(kv_propagation: Any) -> Any:
    """Return a model whose tokens leave at the first layer or at none, in turn."""
    policy = de.TopProbability(0.35)
    given = {"exit_layers": [1], "kv_propagation": kv_propagation}
    return de.early_exit(llama(), fitted(), policy=policy, **given)


def test_every_reference_is_compared_with() -> None:
    """A `_ref` that no test calls says nothing about its fast path."""
    places = (Path(de.__file__).parent, Path(__file__).parent)
    source = "\n".join(path.read_text() for place in places for path in place.rglob("*.py"))
    references = re.findall(r"^def (\w+_ref)\(", source, re.MULTILINE)
    assert len(references) >= 8
    assert [name for name in references if len(re.findall(rf"\b{name}\(", source)) < 2] == []


# -- a stopped run goes on -------------------------------------------------------------------------

STEPS = 10
STOPS = (2, 6, 8)
"""Steps at which runs are stopped: before any checkpoint, between two, and right after one."""
TRAINING = {
    "train.steps": STEPS,
    "train.warmup": 3,
    "train.lr": 0.01,
    "train.log_every": 3,
    "train.valid_every": 4,
    "train.save_every": 4,
    "train.keep": 2,
}


@dataclass
class Texts:
    """Where the trainings find their texts and models."""

    text: Path
    cache: Path
    reviews: Path
    bert: Path
    folder: Path

    def parallel(self) -> Path:
        """Return a folder of sentences and their translations."""
        for split, num in (("train", 60), ("val", 8), ("test", 8)):
            for language, word in (("en", "la"), ("de", "lo")):
                lines = [" ".join([word] * (4 + row % 5)) for row in range(num)]
                (self.folder / f"{split}.{language}").write_text("\n".join(lines) + "\n")
        return self.folder

    def words(self) -> Path:
        """Return a file of lines of words."""
        path = self.folder / "words.txt"
        path.write_text("\n".join(word_lines(120)))
        return path

    def decoder(self) -> Path:
        """Return the folder of a decoder that knows these words."""
        llama().save_pretrained(self.folder / "llama")
        words_tokenizer().save_pretrained(self.folder / "llama")
        return self.folder / "llama"


SMALL = {"model.d_model": 16, "model.num_heads": 2, "model.d_ff": 32}
STREAMS = {"dataset.vocab_size": 400, "dataset.batch_size": 4, "dataset.length": 8}


def language(texts: Texts) -> dict[str, Any]:
    return STREAMS | SMALL | {"data": texts.text, "dataset.cache": texts.cache}


def par(texts: Texts) -> dict[str, Any]:
    # A memory longer than a segment.
    return language(texts) | {"model.mem_len": 12}


def par_search(texts: Texts) -> dict[str, Any]:
    """With everything that has a state: dropout, two optimisers, accumulation."""
    return par(texts) | {
        "model.num_blocks": 3,
        "model.dropout": 0.2,
        "search.optimise": "alternating",
        "search.alternate_every": 2,
        "search.alpha_lr": 60.0,
        "search.cost": "flops",
        "search.cost_weight": 0.3,
        "train.accumulate": 2,
    }


def par_train(texts: Texts) -> dict[str, Any]:
    own = {"model.pattern": "ada", "model.cutoffs": [60, 200], "model.div_value": 2.0}
    return par(texts) | own | {"model.dropout": 0.1}


def par_masked(texts: Texts) -> dict[str, Any]:
    """A search for an encoder: masks are drawn anew at every step."""
    return par_search(texts) | {"model.objective": "masked", "model.mem_len": "null"}


def ponder_train(texts: Texts) -> dict[str, Any]:
    own = {"data": texts.reviews, "dataset.batch_size": 8, "epochs": "null"}
    return own | {"model.encoder": texts.bert, "model.dropout": 0.1}


def ponder_parity(texts: Texts) -> dict[str, Any]:
    own = {"dataset.size": 6, "dataset.train_nonzero": 3, "dataset.bands": 2}
    own |= {"dataset.batch_size": 32, "dataset.eval_size": 50}
    return own | {"model.width": 16, "model.max_passes": 5}


def lazy_translation(texts: Texts) -> dict[str, Any]:
    own = {"data": texts.parallel(), "dataset.cache": texts.cache, "epochs": "null"}
    own |= {"dataset.vocab_size": 265, "dataset.max_length": 40, "dataset.batch_tokens": 150}
    own |= {"model.encoder_steps": 2, "model.decoder_steps": 2, "search.beams": 1}
    return own | SMALL | {"model.dropout": 0.1, "fewest_encoder_steps": 1}


def lazy_programs(texts: Texts) -> dict[str, Any]:
    own = {"task": "programs", "dataset.length": 2, "dataset.batch_size": 8}
    own |= {"dataset.eval_size": 10, "model.encoder_steps": 2, "model.decoder_steps": 2}
    return own | SMALL | {"model.dropout": 0.1}


def lazy_language(texts: Texts) -> dict[str, Any]:
    own = {"task": "language", "model.decoder_steps": 2, "model.dropout": 0.1}
    return language(texts) | own


def shortcut_fit(texts: Texts) -> dict[str, Any]:
    own = {"model.name": texts.decoder(), "data": texts.words(), "dataset.min_chars": 10}
    own |= {"tuned": "true", "tune.batch": 64, "tune.held_out": 64}
    return own | {"tune.top_tokens": 20, "tune.sampled_tokens": 5}


def decode_tune(texts: Texts) -> dict[str, Any]:
    own = {"model.name": texts.decoder(), "data": texts.words(), "text.min_chars": 10}
    own |= {"text.tokens": 600, "text.prompt_tokens": 6}
    own |= {"text.new_tokens": 10, "text.batch": 16, "head.held_out": 8, "head.texts": 8}
    return own | {"head.epochs": 1.5, "head.draft_vocab": 30}


TRAININGS: dict[str, tuple[str, Callable[[Texts], dict[str, Any]]]] = {
    "par search": ("par search", par_search),
    "par train": ("par train", par_train),
    "par search masked": ("par search", par_masked),
    "ponder train": ("ponder train", ponder_train),
    "ponder parity": ("ponder parity", ponder_parity),
    "lazy translation": ("lazy train", lazy_translation),
    "lazy programs": ("lazy train", lazy_programs),
    "lazy language": ("lazy train", lazy_language),
    "shortcut tune": ("shortcut fit", shortcut_fit),
    "decode tune": ("decode tune", decode_tune),
}


@pytest.mark.parametrize("name", TRAININGS)
def test_a_stopped_run_goes_on_as_if_it_had_not_been(
    name: str,
    tmp_path: Path,
    text_file: Path,
    shared_cache: Path,
    reviews: Path,
    tiny_bert: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    command, settings = TRAININGS[name]
    (tmp_path / "texts").mkdir()
    texts = Texts(text_file, shared_cache, reviews, tiny_bert, tmp_path / "texts")
    given = TRAINING | settings(texts)

    def run(folder: Path, stop: int | None = None) -> int:
        step = Trainer._step

        def interrupted(self: Trainer, number: int) -> Any:
            if number == stop:
                raise KeyboardInterrupt
            return step(self, number)

        flags = [f"--{option}={value}" for option, value in given.items()]
        with monkeypatch.context() as patch:
            patch.setattr(Trainer, "_step", interrupted)
            return main([*command.split(), *flags, f"--out={folder}", "--resume"])

    assert run(tmp_path / "whole") == 0
    for stop in STOPS:
        assert run(tmp_path / "stopped", stop) == 130
    assert run(tmp_path / "stopped") == 0
    whole, stopped = results(tmp_path / "whole"), results(tmp_path / "stopped")
    assert whole.keys() == stopped.keys()
    assert_same_records(stopped, whole)
    assert_same_weights(tmp_path / "stopped", tmp_path / "whole")


def results(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """Return all records of a run and those inside it, without what a clock decides."""
    found = {}
    for path in sorted(folder.rglob("metrics.jsonl")):
        records = [json.loads(line) for line in path.read_text().splitlines()]
        found[str(path.relative_to(folder))] = [
            {k: v for k, v in record.items() if not re.search("second|time|folder|path|crc", k)}
            for record in records
        ]
    return found


def assert_same_records(found: Any, expected: Any, place: str = "") -> None:
    if isinstance(expected, dict):
        assert found.keys() == expected.keys(), place
        for key in expected:
            assert_same_records(found[key], expected[key], f"{place}.{key}")
    elif isinstance(expected, list):
        assert len(found) == len(expected), place
        for index, (one, other) in enumerate(zip(found, expected, strict=True)):
            assert_same_records(one, other, f"{place}[{index}]")
    elif isinstance(expected, float):
        close = pytest.approx(expected, rel=RESUMED["rtol"], abs=RESUMED["atol"], nan_ok=True)
        assert found == close, place
    else:
        assert found == expected, place


def assert_same_weights(found: Path, expected: Path) -> None:
    files = [path for path in expected.rglob("*.safetensors") if "checkpoints" not in path.parts]
    assert files
    for path in files:
        own, other = load_file(found / path.relative_to(expected)), load_file(path)
        assert own.keys() == other.keys()
        for name in own:
            torch.testing.assert_close(own[name], other[name], **RESUMED)


# -- help is true ----------------------------------------------------------------------------------

HELPS = [*commands(), *(f"lazy train --task {task}" for task in ("programs", "language"))]


@pytest.mark.parametrize("words", HELPS)
def test_help_names_every_option_and_no_other(
    words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    command = commands()[" ".join(words.split()[:2]) if words not in commands() else words]
    assert main([*words.split(), "--help"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    known = options(_settings_class(command, words.split()[2:]))
    assert known
    for option in known:
        assert f"--{option.name}" in shown
        assert option.text, f"--{option.name} has no text"
        # A long word may be broken where a line ends.
        assert option.help.replace(" ", "") in shown.replace(" ", ""), option.name
    full = {option.name for option in known} | {"help", "config", "task"}
    last = {name.rpartition(".")[2] for name in full}
    named = {name.replace("-", "_") for name in re.findall(r"(?<![\w-])--([a-z][\w.-]*\w)", shown)}
    assert named - full - last == set()

"""Learning to Execute (arXiv 1410.4615): short programs and what they print, as a training task.

Three kinds of programs, of chosen difficulty, drawn from a seed:

- `addition`: `print(48213+905).`, numbers of up to `length` digits.
- `copy`: up to `length` digits, to be repeated.
- `program`: assignments, sums, products with a small number, conditions and loops, nested up to
  `nesting` deep; the numbers in them have up to `length` digits.

As in the paper, a program has one statement per line and ends in `print(...)`; here lines are
joined by `;`, so that a program is one line of text, and a loop of `k` rounds is written as
`for x in range(k):v+=c`. What a program prints is computed along with its text, never by `eval`.
Difficulty is mixed as in the paper's best curriculum: length and nesting of each sample are drawn
up to the limits, not fixed at them. Programs are read character by character.

The text of a program alone decides its split, by a hash, so that no program of the valid or test
split is ever met in training, however many are drawn. Every training batch is drawn anew, as a
function of seed and index; programs of several batches are drawn together and sorted by length, so
that padding costs little.
"""

from __future__ import annotations

import hashlib
import random
import string
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, replace
from typing import Any, NamedTuple

import torch
from accelerate import Accelerator
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from deepenough.config import validate
from deepenough.data.tokenizer import SPECIAL_TOKENS
from deepenough.data.translation import EncodedPairs, Pair, encode_pairs
from deepenough.errors import UserError
from deepenough.lazy.config import (
    MAX_NESTING,
    PROGRAMS,
    BeamSearchConfig,
    ProgramConfig,
    ProgramEvalConfig,
    ProgramTrainConfig,
)
from deepenough.lazy.evaluation import (
    COMPARED_SENTENCES,
    TranslationCandidate,
    keep_record,
    load_translator,
    plain_loss,
    trained_with,
    translate_pairs,
)
from deepenough.lazy.modeling import LazyTransformerForConditionalGeneration
from deepenough.lazy.training import PairsTask, model_identity, new_translator
from deepenough.measurement import ComparedData, ComparedTask, Interval, share_interval
from deepenough.runs import RunFolder
from deepenough.training.config import TrainingConfig, seed_at
from deepenough.training.distributed import make_accelerator
from deepenough.training.trainer import check_folder, training

MAX_ROUNDS = 9
MAX_FACTOR = 9
NAMES = "abcdefghijklmnopqrstuvwyz"
"""Names of variables; x counts the rounds of loops."""
assert len(NAMES) == MAX_NESTING
CHARACTERS = string.digits + string.ascii_lowercase + "()+-*=;:.> "
"""All characters that programs are written in."""
HELD_OUT = ("valid", "test")
HELD_OUT_EVERY = 20
"""One program in so many belongs to the valid split, and one to the test split."""
MAX_DRAWS = 100
"""Draws per held-out program that is asked for, before giving up."""
POOL = 32
"""Batches that are drawn and sorted together."""
EVAL_TOKENS = 8192
"""Tokens of programs measured at once."""

# -- programs --------------------------------------------------------------------------------------


class Program(NamedTuple):
    """A program, what it prints, and how hard it is."""

    source: str
    target: str
    kind: str
    length: int
    """Most digits of its numbers."""
    nesting: int
    """Number of nested operations."""


def make_programs(dataset: ProgramConfig, num: int, seed: int | str) -> Iterator[Program]:
    """Yield `num` programs to train on; the first ones are the same for every `num`."""
    validate(dataset)
    for number in range(num):
        draw = random.Random(f"{seed} {number}")
        program = make_program(dataset, draw)
        for _ in range(MAX_DRAWS):
            if split_of(program) == "train":
                break
            program = make_program(dataset, draw)
        else:
            raise _too_few(dataset, "train")
        yield program


def held_out_programs(dataset: ProgramConfig, split: str, seed: int) -> list[Program]:
    """Return `eval_size` different programs of a held-out split, or as many as are found."""
    validate(dataset)
    if split not in HELD_OUT:
        raise UserError(f"Programs are held out for {' and '.join(HELD_OUT)}: got {split!r}.")
    draw = random.Random(f"{seed_at(seed, 'held out')} {split}")
    found: dict[str, Program] = {}
    for _ in range(MAX_DRAWS * (dataset.eval_size + HELD_OUT_EVERY)):
        program = make_program(dataset, draw)
        if split_of(program) == split:
            found[program.source] = program
            if len(found) == dataset.eval_size:
                break
    if not found:
        raise _too_few(dataset, split)
    return list(found.values())


def split_of(program: Program) -> str:
    """Return the split of a program by a hash of its text, whatever the seed."""
    digest = hashlib.blake2b(program.source.encode(), digest_size=4).digest()
    index = int.from_bytes(digest, "little") % HELD_OUT_EVERY
    return HELD_OUT[index] if index < len(HELD_OUT) else "train"


def _too_few(dataset: ProgramConfig, split: str) -> UserError:
    return UserError(
        f"Among {' and '.join(dataset.kinds)} of length {dataset.length} there is nothing for the "
        f"{split} split: raise dataset.length."
    )


def make_program(dataset: ProgramConfig, draw: random.Random) -> Program:
    """Draw one program of any split."""
    kind = draw.choice(dataset.kinds)
    length = dataset.length if dataset.fixed else draw.randint(1, dataset.length)
    nesting = 1
    if kind == "copy":
        digits = "".join(draw.choice("0123456789") for _ in range(length))
        pair = Pair(digits, digits)
    elif kind == "addition":
        first, second = _number(draw, length), _number(draw, length)
        pair = Pair(f"print({first}+{second}).", str(first + second))
    else:
        nesting = dataset.nesting if dataset.fixed else draw.randint(1, dataset.nesting)
        pair = _ProgramWriter(draw, length).write(nesting)
    answer = pair.target[::-1] if dataset.reverse else pair.target
    return Program(pair.source, f"{answer}.", kind, length, nesting)


class _ProgramWriter:
    """Writes one program: its lines so far, and an expression whose value is known."""

    def __init__(self, draw: random.Random, length: int) -> None:
        self.draw, self.length = draw, length
        self.lines: list[str] = []
        self.names = iter(draw.sample(NAMES, len(NAMES)))

    def write(self, nesting: int) -> Pair:
        text, value = self._constant()
        for _ in range(nesting):
            operation = self.draw.choice((self._add, self._subtract, self._times,
                                          self._choose, self._loop, self._name))  # fmt: skip
            text, value = operation(text, value)
        return Pair(";".join([*self.lines, f"print({text})."]), str(value))

    def _constant(self) -> tuple[str, int]:
        value = _number(self.draw, self.length)
        return str(value), value

    def _add(self, text: str, value: int) -> tuple[str, int]:
        other, amount = self._constant()
        return f"({text}+{other})", value + amount

    def _subtract(self, text: str, value: int) -> tuple[str, int]:
        other, amount = self._constant()
        return f"({text}-{other})", value - amount

    def _times(self, text: str, value: int) -> tuple[str, int]:
        factor = self.draw.randint(2, MAX_FACTOR)
        return f"({text}*{factor})", value * factor

    def _choose(self, text: str, value: int) -> tuple[str, int]:
        (left, a), (right, b), (other, c) = (self._constant() for _ in range(3))
        return f"({text} if {left}>{right} else {other})", value if a > b else c

    def _name(self, text: str, value: int) -> tuple[str, int]:
        name = next(self.names)
        self.lines.append(f"{name}={text}")
        return name, value

    def _loop(self, text: str, value: int) -> tuple[str, int]:
        name, _ = self._name(text, value)
        rounds = self.draw.randint(1, MAX_ROUNDS)
        constant, amount = self._constant()
        self.lines.append(f"for x in range({rounds}):{name}+={constant}")
        return name, value + rounds * amount


def _number(draw: random.Random, length: int) -> int:
    return draw.randint(10 ** (length - 1) if length > 1 else 0, 10**length - 1)


# -- tokens and batches ----------------------------------------------------------------------------


def character_tokenizer() -> Any:
    """Return a tokenizer of single characters; what programs never contain is unknown."""
    pieces = [*SPECIAL_TOKENS.values(), *CHARACTERS]
    vocab = {piece: number for number, piece in enumerate(pieces)}
    backend = Tokenizer(models.WordLevel(vocab, unk_token=SPECIAL_TOKENS["unk"]))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    backend.decoder = decoders.Fuse()
    special = {
        f"{role}_token": AddedToken(piece, normalized=False, special=True)
        for role, piece in SPECIAL_TOKENS.items()
    }
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        clean_up_tokenization_spaces=False,
        model_input_names=["input_ids", "attention_mask"],
        **special,
    )


def encode_programs(programs: Sequence[Program], tokenizer: Any) -> EncodedPairs:
    """Return programs and what they print as ids, whatever their length, with their text."""
    longest = max(max(len(program.source), len(program.target)) for program in programs) + 1
    pairs = (Pair(program.source, program.target) for program in programs)
    return encode_pairs(pairs, tokenizer, longest, "programs", truncate=True)


class ProgramBatches:
    """Training batches of programs, each a function of seed and index."""

    def __init__(self, dataset: ProgramConfig, tokenizer: Any, seed: int) -> None:
        self.dataset, self.tokenizer, self.seed = dataset, tokenizer, seed
        self._pool: tuple[int, EncodedPairs, list[list[int]]] | None = None

    def batch(self, index: int) -> tuple[EncodedPairs, list[int]]:
        """Return the programs of batch `index`: encoded programs, and rows of them."""
        number, position = divmod(index, POOL)
        if self._pool is None or self._pool[0] != number:
            self._pool = number, *self._draw(number)
        return self._pool[1], self._pool[2][position]

    def _draw(self, number: int) -> tuple[EncodedPairs, list[list[int]]]:
        size = self.dataset.batch_size
        seed = f"{self.seed} pool {number}"
        pairs = (
            Pair(program.source, program.target)
            for program in make_programs(self.dataset, POOL * size, seed)
        )
        encoded = encode_pairs(
            pairs, self.tokenizer, self.dataset.max_length, "programs", truncate=False
        )
        order = encoded.source.lengths.argsort(kind="stable").tolist()
        batches = [order[start : start + size] for start in range(0, len(order), size)]
        random.Random(seed).shuffle(batches)
        return encoded, batches


# -- training --------------------------------------------------------------------------------------


def train_programs(config: ProgramTrainConfig) -> RunFolder:
    """Train a model to execute programs and return its run folder."""
    validate(config)
    accelerator = make_accelerator(config.train, may_skip=False)
    check_folder(config, accelerator)
    tokenizer = character_tokenizer()
    torch.manual_seed(config.train.seed)
    model = new_translator(config.model, tokenizer, config.dataset.max_length)
    task = ProgramTask(model, tokenizer, config.dataset, config.train, accelerator)
    with training(config, task, accelerator) as trainer:
        trainer.fit()
    return trainer.run


class ProgramTask(PairsTask):
    """Learning to Execute as a task of the training loop, measured by exact match."""

    def __init__(
        self,
        model: LazyTransformerForConditionalGeneration,
        tokenizer: Any,
        dataset: ProgramConfig,
        train: TrainingConfig,
        accelerator: Accelerator,
    ) -> None:
        super().__init__(model, tokenizer, train, accelerator)
        self.dataset = dataset
        self.batches = ProgramBatches(dataset, tokenizer, train.seed)
        self.held_out = {split: held_out_programs(dataset, split, train.seed) for split in HELD_OUT}

    def pairs_of(self, index: int) -> tuple[EncodedPairs, list[int]]:
        """Return the programs of batch `index`."""
        return self.batches.batch(index)

    def evaluate(self, accelerator: Accelerator, split: str) -> dict[str, float]:
        """Return the plain loss and the share of right answers, of all and of each kind."""
        was_training = self.model.training
        self.model.eval()
        greedy = BeamSearchConfig(beams=1)
        programs = self.held_out[split]
        values = measure_programs(self.model, self.tokenizer, programs, greedy, accelerator)
        self.model.train(was_training)
        return {name: value for name, value in values.items() if isinstance(value, float)}

    def identity(self) -> dict[str, Any]:
        """Return what a run must share with the checkpoint that it continues from."""
        dataset = asdict(self.dataset)
        del dataset["eval_size"]
        return {
            "model": model_identity(self.model.config),
            "data": dataset,
            "train": self.train.identity(),
        }


# -- evaluation ------------------------------------------------------------------------------------


def evaluate_programs(config: ProgramEvalConfig) -> dict[str, Any]:
    """Measure exact match on held-out programs, also by difficulty; record and return it."""
    validate(config)
    translator = load_translator(config.run)
    trained = trained_with(ProgramTrainConfig, config.run)
    dataset = replace(
        trained.dataset,
        length=trained.dataset.length if config.length is None else config.length,
        nesting=trained.dataset.nesting if config.nesting is None else config.nesting,
    )
    programs = held_out_programs(dataset, config.split, trained.train.seed)
    # Longer programs than in training need only more of the same position encodings.
    model_config = translator.model.config
    model_config.max_positions = max(model_config.max_positions, 2 * dataset.max_length + 16)
    values = measure_programs(*translator, programs, config.search)
    values |= {"split": config.split, "length": dataset.length, "nesting": dataset.nesting}
    values |= {"programs": len(programs), "mechanism": model_config.mechanism}
    keep_record(config.run, PROGRAMS, values)
    return values


def measure_programs(
    model: LazyTransformerForConditionalGeneration,
    tokenizer: Any,
    programs: Sequence[Program],
    search: BeamSearchConfig,
    accelerator: Accelerator | None = None,
) -> dict[str, Any]:
    """Return loss, exact match of all and of each kind, and `exact_by`: that of each difficulty."""
    pairs = encode_programs(programs, tokenizer)
    longest = max(int(side.lengths.max()) for side in (pairs.source, pairs.target))
    values: dict[str, Any] = plain_loss(model, pairs, max(EVAL_TOKENS, longest), accelerator)
    answers = translate_pairs(model, tokenizer, pairs, search, accelerator=accelerator)
    right = [answer == program.target for answer, program in zip(answers, programs, strict=True)]
    values["exact"] = _share(right)
    by_kind: dict[str, list[bool]] = defaultdict(list)
    for program, is_right in zip(programs, right, strict=True):
        by_kind[program.kind].append(is_right)
    values |= {f"exact_{kind}": _share(by_kind[kind]) for kind in sorted(by_kind)}
    return values | {"exact_by": exact_by_difficulty(programs, right)}


def exact_by_difficulty(programs: Iterable[Program], right: Iterable[bool]) -> list[dict[str, Any]]:
    """Return the exact match of every kind, nesting and length, easiest first."""
    groups: dict[tuple[str, int, int], list[bool]] = defaultdict(list)
    for program, is_right in zip(programs, right, strict=True):
        groups[program.kind, program.nesting, program.length].append(is_right)
    return [
        {"kind": kind, "nesting": nesting, "length": length, "exact": _share(hits),
         "programs": len(hits)}
        for (kind, nesting, length), hits in sorted(groups.items())
    ]  # fmt: skip


def _share(hits: Sequence[bool]) -> float:
    return sum(hits) / len(hits)


class ProgramCandidate(TranslationCandidate):
    """A program executor in a comparison: an answer is right to the last digit, or wrong."""

    def _open(self, run: str, data: ComparedData) -> tuple[EncodedPairs, ComparedTask]:
        split = data.split or "test"
        trained = trained_with(ProgramTrainConfig, run)
        programs = held_out_programs(trained.dataset, split, trained.train.seed)
        pairs = encode_programs(
            programs[: data.limit or COMPARED_SENTENCES], self.translator.tokenizer
        )
        # There is no file of programs: what they are drawn from identifies them.
        detail = {"programs": len(pairs), "seed": trained.train.seed, **asdict(trained.dataset)}
        task = ComparedTask("execution", PROGRAMS, split, "program", "exact match", True, detail)
        return pairs, task

    def _quality(self, texts: list[str]) -> Interval:
        right = sum(made == told for made, told in zip(texts, self.references, strict=True))
        return share_interval(right, len(texts))

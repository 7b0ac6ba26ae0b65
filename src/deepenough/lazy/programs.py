"""Learning to Execute (arXiv 1410.4615): short programs and what they print, as a training task.

Three kinds of programs, of chosen difficulty, drawn from a seed:

- `addition`: `print(48213+905).`, numbers of up to `length` digits.
- `copy`: up to `length` digits, to be repeated.
- `program`: assignments, sums, products with a small number, conditions and loops, nested up to
  `nesting` deep; the numbers in them have up to `length` digits.

Lines are joined by `;`, a loop of `k` rounds is `for x in range(k):v+=c`, and what a program prints
is computed along with its text, never by `eval`. Difficulty is mixed as in the paper's best
curriculum: length and nesting of each sample are drawn up to the limits. Programs are read
character by character.

The text of a program alone decides its split, by a hash, so that no program of the valid or test
split is ever met in training. Every training batch is drawn anew, as a function of seed and index;
programs of several batches are drawn together and sorted by length, so that padding costs little.
"""

import functools
import hashlib
import random
import string
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, replace
from statistics import fmean
from typing import Any, NamedTuple

import torch
from accelerate import Accelerator
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

from deepenough.config import validate
from deepenough.data.tokenizer import SPECIAL_TOKENS, as_tokenizer
from deepenough.data.translation import EncodedPairs, Pair, encode_pairs
from deepenough.errors import UserError
from deepenough.hf.intercept import eval_mode
from deepenough.lazy.config import (
    MAX_NESTING,
    BeamSearchConfig,
    LazyEvalConfig,
    ProgramConfig,
    ProgramTrainConfig,
)
from deepenough.lazy.inference import plain_loss, trained_with, translate_pairs
from deepenough.lazy.modeling import LazyTransformerForConditionalGeneration
from deepenough.lazy.training import PairsTask, model_identity, new_translator, start_from
from deepenough.runs import RunFolder
from deepenough.training.config import seed_at
from deepenough.training.trainer import begin_run, fit_run

MAX_ROUNDS = 9
MAX_FACTOR = 9
NAMES = "abcdefghijklmnopqrstuvwyz"
"""Names of variables; x counts the rounds of loops."""
assert len(NAMES) == MAX_NESTING
OPERATIONS = ("+", "-", "times", "choose", "loop", "name")
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
        drawn = (make_program(dataset, draw) for _ in range(MAX_DRAWS))
        program = next((each for each in drawn if split_of(each) == "train"), None)
        if program is None:
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
    length = draw.randint(1, dataset.length)
    nesting = 1
    if kind == "copy":
        digits = "".join(draw.choice("0123456789") for _ in range(length))
        pair = Pair(digits, digits)
    elif kind == "addition":
        first, second = _number(draw, length), _number(draw, length)
        pair = Pair(f"print({first}+{second}).", str(first + second))
    else:
        nesting = draw.randint(1, dataset.nesting)
        pair = _write_program(draw, length, nesting)
    answer = pair.target[::-1] if dataset.reverse else pair.target
    return Program(pair.source, f"{answer}.", kind, length, nesting)


def _write_program(draw: random.Random, length: int, nesting: int) -> Pair:
    """Return a program of so many nested operations: lines, then an expression of known value."""
    lines: list[str] = []
    names = iter(draw.sample(NAMES, len(NAMES)))
    value = _number(draw, length)
    text = str(value)
    for _ in range(nesting):
        operation = draw.choice(OPERATIONS)
        if operation in ("loop", "name"):
            name = next(names)
            lines.append(f"{name}={text}")
            text = name
        if operation == "loop":
            rounds, step = draw.randint(1, MAX_ROUNDS), _number(draw, length)
            lines.append(f"for x in range({rounds}):{name}+={step}")
            value += rounds * step
        elif operation == "times":
            factor = draw.randint(2, MAX_FACTOR)
            text, value = f"({text}*{factor})", value * factor
        elif operation == "choose":
            left, right, other = (_number(draw, length) for _ in range(3))
            text = f"({text} if {left}>{right} else {other})"
            value = value if left > right else other
        elif operation in ("+", "-"):
            other = _number(draw, length)
            text = f"({text}{operation}{other})"
            value = value + other if operation == "+" else value - other
    return Pair(";".join([*lines, f"print({text})."]), str(value))


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
    return as_tokenizer(backend, SPECIAL_TOKENS)


def encode_programs(programs: Sequence[Program], tokenizer: Any) -> EncodedPairs:
    """Return programs and what they print as ids, whatever their length, with their text."""
    longest = max(max(len(program.source), len(program.target)) for program in programs) + 1
    pairs = (Pair(program.source, program.target) for program in programs)
    return encode_pairs(pairs, tokenizer, longest, "programs", truncate=True)


def draw_pool(
    dataset: ProgramConfig, tokenizer: Any, seed: int, number: int
) -> tuple[EncodedPairs, list[list[int]]]:
    """Return the programs of pool `number`, and the rows of them that form each of its batches."""
    size = dataset.batch_size
    pool_seed = f"{seed} pool {number}"
    encoded = encode_programs(list(make_programs(dataset, POOL * size, pool_seed)), tokenizer)
    order = encoded.source.lengths.argsort(kind="stable").tolist()
    batches = [order[start : start + size] for start in range(0, len(order), size)]
    random.Random(pool_seed).shuffle(batches)
    return encoded, batches


# -- training --------------------------------------------------------------------------------------


def train_programs(config: ProgramTrainConfig) -> RunFolder:
    """Train a model to execute programs and return its run folder."""
    accelerator = begin_run(config, may_skip=False)
    tokenizer = character_tokenizer()
    torch.manual_seed(config.train.seed)
    model = new_translator(config.model, tokenizer, config.dataset.max_length)
    start_from(model, config.start)
    return fit_run(config, ProgramTask(config, model, tokenizer, accelerator), accelerator)


class ProgramTask(PairsTask):
    """Learning to Execute as a task of the training loop, measured by exact match."""

    def __init__(
        self,
        config: ProgramTrainConfig,
        model: LazyTransformerForConditionalGeneration,
        tokenizer: Any,
        accelerator: Accelerator,
    ) -> None:
        super().__init__(config, model, tokenizer, accelerator)
        self.dataset = config.dataset
        seed = config.train.seed
        self.held_out = {split: held_out_programs(self.dataset, split, seed) for split in HELD_OUT}
        self.pool = functools.lru_cache(1)(
            functools.partial(draw_pool, self.dataset, tokenizer, seed)
        )

    def pairs_of(self, index: int) -> tuple[EncodedPairs, list[int]]:
        """Return the programs of batch `index`: encoded programs, and rows of them."""
        encoded, batches = self.pool(index // POOL)
        return encoded, batches[index % POOL]

    def evaluate(self, accelerator: Accelerator, split: str) -> dict[str, float]:
        """Return the plain loss and the share of right answers, of all and of each kind."""
        greedy, programs = BeamSearchConfig(beams=1), self.held_out[split]
        with eval_mode(self.model):
            values = measure_programs(self.model, self.tokenizer, programs, greedy, accelerator)
        return {name: value for name, value in values.items() if isinstance(value, float)}

    def identity(self) -> dict[str, Any]:
        """Return what a run must share with the checkpoint that it continues from."""
        dataset = asdict(self.dataset)
        del dataset["eval_size"]
        return super().identity() | {"model": model_identity(self.model.config), "data": dataset}


# -- evaluation ------------------------------------------------------------------------------------


def measured_programs(config: LazyEvalConfig) -> tuple[list[Program], ProgramConfig]:
    """Return held-out programs as a run was trained on, or of another difficulty, and its data."""
    trained = trained_with(ProgramTrainConfig, config.run)
    dataset = replace(
        trained.dataset,
        length=config.length or trained.dataset.length,
        nesting=config.nesting or trained.dataset.nesting,
    )
    return held_out_programs(dataset, config.split, trained.train.seed), dataset


def measure_programs(
    model: LazyTransformerForConditionalGeneration,
    tokenizer: Any,
    programs: Sequence[Program],
    search: BeamSearchConfig,
    accelerator: Accelerator | None = None,
) -> dict[str, Any]:
    """Return loss, exact match of all and of each kind, that of each difficulty, and answers."""
    pairs = encode_programs(programs, tokenizer)
    longest = max(int(side.lengths.max()) for side in (pairs.source, pairs.target))
    values: dict[str, Any] = plain_loss(model, pairs, max(EVAL_TOKENS, longest), accelerator)
    answers = translate_pairs(model, tokenizer, pairs, search, accelerator=accelerator)
    right = [answer == program.target for answer, program in zip(answers, programs, strict=True)]
    values["exact"] = fmean(right)
    for kind in sorted({program.kind for program in programs}):
        own = [hit for hit, program in zip(right, programs, strict=True) if program.kind == kind]
        values[f"exact_{kind}"] = fmean(own)
    return values | {"exact_by": exact_by_difficulty(programs, right), "hypotheses": answers}


def exact_by_difficulty(programs: Iterable[Program], right: Iterable[bool]) -> list[dict[str, Any]]:
    """Return the exact match of every kind, nesting and length, easiest first."""
    groups: dict[tuple[str, int, int], list[bool]] = defaultdict(list)
    for program, is_right in zip(programs, right, strict=True):
        groups[program.kind, program.nesting, program.length].append(is_right)
    names = ("kind", "nesting", "length", "exact", "programs")
    return [
        dict(zip(names, (*difficulty, fmean(hits), len(hits)), strict=True))
        for difficulty, hits in sorted(groups.items())
    ]

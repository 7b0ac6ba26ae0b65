"""Block patterns, and the settings of PAR's commands; free of torch.

A pattern is one letter a block: `aadad-` reads attention, attention, dense, attention, dense,
identity. `*` stands for a block that is still being searched; a SuperNet is a pattern of stars.

The config that is saved with a model is `ParConfig`, in `modeling.py`.
"""

from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from deepenough.config import DeviceConfig, PlaceConfig, RunConfig, bounded
from deepenough.data.config import DatasetConfig
from deepenough.errors import UserError
from deepenough.training.config import TrainingConfig

ATTENTION, DENSE, IDENTITY, OPEN = "a", "d", "-", "*"
BRANCHES = (ATTENTION, DENSE, IDENTITY)
"""The order of the branches in every table of probabilities."""

BRANCH_NAMES = {ATTENTION: "attention", DENSE: "dense", IDENTITY: "identity"}


def check_pattern(pattern: str, allow_open: bool = False) -> str:
    """Return the pattern; UserError if a letter is unknown, or no block computes anything."""
    if not isinstance(pattern, str):
        raise UserError(f"A pattern is letters such as aad-d, not {pattern!r:.40}.")
    known = (*BRANCHES, OPEN) if allow_open else BRANCHES
    unknown = sorted(set(pattern) - set(known))
    if unknown:
        raise UserError(
            f"The pattern {pattern!r:.80} has the unknown letter {unknown[0]!r}: "
            "use a for attention, d for dense and - for identity."
        )
    if not set(pattern) - {IDENTITY}:
        raise UserError(
            f"The pattern {pattern!r:.80} has no block: give at least one a (attention) or d "
            "(dense)."
        )
    return pattern


def check_probabilities(rows: Any) -> list[list[float]]:
    """Return the probabilities of the branches, a row a block; ValueError for anything else."""
    if not isinstance(rows, list) or not rows:
        raise ValueError("there is no block")
    for row in rows:
        right = isinstance(row, list) and len(row) == len(BRANCHES)
        if not right or not all(type(p) in (int, float) and 0 <= p <= 1 for p in row):
            raise ValueError(f"a row is not {len(BRANCHES)} probabilities but {row!r:.60}")
        if abs(sum(row) - 1) > 1e-2:  # which forgives values rounded for a file
            raise ValueError(f"the probabilities {row} do not sum to 1")
    return [[float(p) for p in row] for row in rows]


def interleaved(num_blocks: int) -> str:
    """Return the Transformer-XL baseline: attention and dense in turn."""
    return "".join(ATTENTION if i % 2 == 0 else DENSE for i in range(num_blocks))


@dataclass
class ParModelConfig:
    """Model."""

    pattern: str | None = None
    """Blocks: a attention, d dense, - identity, such as adadad; a search leaves it open."""

    num_blocks: int = bounded(6, ge=1)
    """Number of blocks where no pattern is given."""

    d_model: int = bounded(128, ge=1)
    """Width of the hidden states."""

    num_heads: int = bounded(4, ge=1)
    """Attention heads."""

    d_ff: int = bounded(512, ge=1)
    """Inner width of dense blocks."""

    objective: Literal["causal", "masked"] = "causal"
    """What is trained: `causal` predicts the next token from those before it; `masked` fills in
    masked tokens from both sides, as BERT does: an encoder with bidirectional attention."""

    mem_len: int | None = bounded(None, ge=0)
    """Earlier positions that attention sees beyond the segment; by default 32. A masked model reads
    every segment by itself and has none."""

    cutoffs: list[int] | Literal["auto"] = bounded(default_factory=list, ge=1)
    """Cutoffs of the adaptive softmax, without the vocabulary size; auto for three
    clusters that suit the training text; none for an output layer tied to the
    embeddings."""

    div_value: float = bounded(4.0, ge=1)
    """By how much each further cluster of the adaptive softmax is narrower."""

    dropout: float = bounded(0.1, ge=0, lt=1)
    """Dropout on embeddings and on the output of every branch."""

    initializer_range: float | None = bounded(None, gt=0)
    """Standard deviation of new linear weights; by default the inverse root of the width."""

    def check(self) -> None:
        """Refuse a pattern that is none, and sizes that do not fit together."""
        if self.pattern is not None:
            check_pattern(self.pattern, allow_open=True)
        if self.objective == "masked" and self.mem_len:
            raise UserError(
                "A masked model looks both ways within its segment and keeps no memory: leave "
                f"model.mem_len out, which is {self.mem_len}."
            )
        if self.d_model % self.num_heads:
            raise UserError(
                f"{self.num_heads} heads do not divide the width {self.d_model}: "
                "choose num_heads so that d_model is a multiple of it."
            )
        if isinstance(self.cutoffs, str):
            return
        if list(self.cutoffs) != sorted(set(self.cutoffs)):
            raise UserError(
                f"The cutoffs {self.cutoffs} are not sorted and distinct: give them in rising "
                "order."
            )
        if self.cutoffs and self.div_value ** len(self.cutoffs) > self.d_model:
            raise UserError(
                f"{len(self.cutoffs)} cutoffs with a div_value of {self.div_value:g} do not fit "
                f"the width {self.d_model}: choose a div_value that leaves the last cluster a "
                "width of at least 1."
            )


@dataclass
class SearchConfig:
    """Search."""

    tau: Literal["exponential", "linear", "constant", "learned"] = "exponential"
    """How the temperature of the choice goes from tau_start to tau_end; learned makes it a
    parameter."""

    tau_start: float = bounded(1.0, gt=0)
    """Temperature at the first step."""

    tau_end: float = bounded(0.1, gt=0)
    """Temperature at the last step."""

    straight_through: bool = False
    """Use one branch at a time in the forward pass, all of them in the backward pass."""

    optimise: Literal["simultaneous", "alternating"] = "simultaneous"
    """Train weights and choices together, or the choices on held-out training text."""

    held_out: float = bounded(0.2, gt=0, lt=1)
    """Part of the training text for the choices, when alternating."""

    alternate_every: int = bounded(2, ge=1)
    """Steps of the weights for one of the choices, when alternating."""

    alpha_lr: float = bounded(1.0, ge=0)
    """Learning rate of the choices, as a multiple of the weights'."""

    choose_after: float = bounded(0.0, ge=0, lt=1)
    """Share of the search before which only weights are trained: attention learns later than dense
    blocks, and a choice made too early goes against it."""

    cost_weight: float = bounded(0.0, ge=0)
    """Weight of the expected cost in the loss; the cost is relative to the interleaved baseline."""

    cost: Literal["latency", "flops"] = "latency"
    """Cost of a block: measured on this machine at the real shape, or counted."""

    cost_length: int | None = bounded(None, ge=1)
    """Length of segment and memory for which costs hold, where the model will be used with longer
    ones than it is searched with; by default those of the search."""

    budget: float | None = bounded(None, gt=0, le=1)
    """Largest cost of the derived pattern, as a share of the interleaved baseline's: 0.65 or
    65%."""

    budget_weight: float = bounded(0.0, ge=0)
    """Weight in the loss of the squared excess of the expected cost over the budget: blocks then
    compete for the budget while they learn, instead of being cut to it at the end."""

    retrain: Literal["none", "scratch", "supernet"] = "none"
    """Train the derived pattern afterwards, from new weights or from the SuperNet's."""

    def check(self) -> None:
        """Refuse a weight of the budget without a budget, and a temperature that rises."""
        if self.tau in ("exponential", "linear") and self.tau_end > self.tau_start:
            raise UserError(
                f"The temperature of a search falls, but search.tau_end is {self.tau_end:g} and "
                f"search.tau_start {self.tau_start:g}: give a lower tau_end or a higher tau_start."
            )
        if self.budget_weight and self.budget is None:
            raise UserError("search.budget_weight needs a search.budget to keep to.")


@dataclass
class ParRunConfig(DeviceConfig, RunConfig):
    """What a search and a training of a language model share."""

    METHOD: ClassVar[str] = "par"

    data: str = "python"
    """Text: a file, folder or glob, `python` (the prose inside Python), a folder of
    $DEEPENOUGH_DATA, or a `datasets` name (`owner/name`, `hf:name:config:column`; `hf-stream:...`
    keeps no copy of its text)."""

    start: str | None = None
    """Folder of a search or a model from whose weights to start, a search from its choices too; by
    default from new ones. Also written `from`."""

    epochs: float | None = bounded(None, gt=0, unless="train.steps")
    """Rounds over the training text in place of train.steps."""

    dataset: DatasetConfig = field(default_factory=DatasetConfig)
    model: ParModelConfig = field(default_factory=ParModelConfig)
    train: TrainingConfig = field(default_factory=TrainingConfig)


@dataclass
class ParTrainConfig(ParRunConfig):
    """Training of a language model with fixed blocks."""


@dataclass
class ParSearchConfig(ParRunConfig):
    """A search for the blocks of a language model."""

    search: SearchConfig = field(default_factory=SearchConfig)


@dataclass
class ParDeriveConfig:
    """Reading the pattern out of a search."""

    run: str
    """Folder of the search."""

    budget: float | None = bounded(None, gt=0, le=1)
    """Largest cost of the pattern, as a share of the interleaved baseline's: 0.65 or 65%."""

    json: bool = False
    """Print one JSON object instead of a sentence."""


@dataclass
class EvaluationTextConfig:
    """Tokens and batches."""

    cache: str | None = None
    """Folder for prepared tokens; by default $XDG_CACHE_HOME/deepenough or ~/.cache/deepenough."""

    batch_size: int = bounded(32, ge=1)
    """Streams of text read in parallel."""

    length: int | None = bounded(None, ge=1)
    """Tokens of each stream in one batch; by default as in training."""


@dataclass
class ParEvalConfig(PlaceConfig):
    """Measuring a language model on a text."""

    run: str
    """Folder of a finished run, or of a model."""

    data: str = "python"
    """Text to read, named as for training."""

    split: str = "test"
    """Part of the text to read: train, valid or test."""

    mem_len: int | None = bounded(None, ge=0)
    """Tokens of memory before each segment; by default as many as the model was trained with."""

    json: bool = False
    """Print one JSON object instead of a table."""

    dataset: EvaluationTextConfig = field(default_factory=EvaluationTextConfig)


@dataclass
class ParGrid:
    """Operating points of a comparison."""

    mem_len: list[int] | None = bounded(None, ge=0)
    """Language models: tokens of memory before a segment."""


GRID = ParGrid

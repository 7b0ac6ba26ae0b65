"""Configuration of Lazy Transformers and settings of the `deepenough lazy` commands.

Every option of a model is defined once, in `LazyModelConfig`: `LazyTransformerConfig` (what Hugging
Face saves with a model) takes its options and defaults from there, and a training chooses among the
same options under `model:`.
"""

from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Literal

from transformers import PreTrainedConfig

from deepenough.config import (
    ContinueConfig,
    DeviceConfig,
    PlaceConfig,
    RunConfig,
    bounded,
    validate,
)
from deepenough.data.config import DatasetConfig, TranslationDataConfig
from deepenough.errors import UserError
from deepenough.hf.generation import GnmtLengthPenalty
from deepenough.lazy.transition import STATE, UPDATE
from deepenough.training.config import TrainingConfig

LAZY, UNIVERSAL, ACT, TRANSFORMER = "lazy", "universal", "act", "transformer"
GATE, ANGLE = "gate", "angle"
DEFAULT_EPSILONS = {
    STATE: (0.05, 0.075, 0.1),
    UPDATE: (0.15, 0.2, 0.25),
    ANGLE: (0.0035, 0.005, 0.008),
}
"""Epsilons with which tokens of trained translators make about 3/4, 3/5 and half of 8 steps, by
what they are compared with."""

TRANSLATION, PROGRAMS, LANGUAGE = "translation", "programs", "language"
"""What a model can be trained for, and the kinds of the records that its evaluation writes."""
STEPS_RECORD, EPSILONS_RECORD, TOKENS_RECORD = "steps", "epsilons", "lazy_tokens"
"""Kinds of the records of `lazy sweep`, and of the text that `lazy plot` draws."""


@dataclass
class LazyModelConfig:
    """Options of the model."""

    mechanism: Literal["lazy", "universal", "act", "transformer"] = "lazy"
    """lazy; universal, the plain Universal Transformer (arXiv 1807.03819); act, the same with
    Adaptive Computation Time; transformer, with a separate block for every step."""

    d_model: int = bounded(256, ge=1)
    """Width of the hidden states."""

    num_heads: int = bounded(4, ge=1)
    """Attention heads."""

    d_ff: int = bounded(1024, ge=1)
    """Width of the feed-forward network."""

    encoder_steps: int = bounded(6, ge=1)
    """Steps over the source."""

    decoder_steps: int = bounded(6, ge=1)
    """Steps over the target."""

    compare: Literal["state", "update"] = "state"
    """What gates compare a state with: the state that the whole update would produce, or the update
    itself."""

    norm: Literal["final", "every"] = "final"
    """A norm after the last step only, or after every step as in the paper."""

    step_encoding: Literal["none", "sinusoid", "learned"] = "none"
    """Encoding by which the block knows which step it makes; with none, it can make any number of
    steps."""

    max_steps: int = bounded(64, ge=1)
    """Most steps that a step encoding covers."""

    dropout: float = bounded(0.1, ge=0, lt=1)
    """Dropout of embeddings and updates."""

    ff_dropout: float = bounded(0.0, ge=0, lt=1)
    """Dropout inside the feed-forward network."""

    clean_gates: bool = False
    """Remove the noise of dropout from the gates in training, so that they are those of
    inference."""

    label_smoothing: float = bounded(0.0, ge=0, lt=1)
    """Share of the target's probability that is spread over the vocabulary in training."""

    act_cost: float = bounded(0.01, ge=0)
    """Weight of the ponder cost of Adaptive Computation Time (tau)."""

    epsilon: float = bounded(0.0, ge=0, le=1)
    """Gate (or angle, see halt_on) below which a source token halts, outside training; 0 lets none
    halt."""

    decoder_epsilon: float = bounded(0.0, ge=0, le=1)
    """The same for target tokens."""

    patience: int = bounded(1, ge=1)
    """Steps in a row for which it must be below epsilon."""

    halt_on: Literal["gate", "angle"] = "gate"
    """What is compared with epsilon: the gate, or the squared sine of the angle by which a step has
    turned the state. Every call can give it anew."""

    def check(self) -> None:
        """Check what concerns several options."""
        if self.d_model % self.num_heads or self.d_model % 2:
            raise UserError(
                f"The width {self.d_model} must be even and a multiple of the {self.num_heads} "
                "heads: choose another d_model or num_heads."
            )
        for name in ("encoder_steps", "decoder_steps"):
            self.check_steps(getattr(self, name), name)
        for name in ("epsilon", "decoder_epsilon"):
            self.check_epsilon(getattr(self, name), name)

    def check_steps(self, steps: int, name: str) -> None:
        """Raise UserError if the model cannot make so many steps."""
        if steps < 1:
            raise UserError(f"{name} must be at least 1: got {steps}.")
        if self.step_encoding != "none" and steps > self.max_steps:
            raise UserError(
                f"{name} is {steps}, but the step encoding of this model covers {self.max_steps} "
                "steps: ask for fewer, or raise max_steps before training."
            )

    def check_epsilon(self, epsilon: float, name: str) -> None:
        """Raise UserError if tokens of this model cannot halt at this epsilon."""
        if not 0.0 <= epsilon <= 1.0:
            raise UserError(f"{name} must be at least 0 and at most 1: got {epsilon}.")
        if epsilon > 0.0 and self.mechanism != LAZY:
            raise UserError(
                f"Only lazy models have gates that can reach equilibrium: leave {name} at 0 for "
                f"the mechanism {self.mechanism}."
            )

    def check_halt_on(self, halt_on: str | None) -> None:
        """Raise UserError for anything but gate, angle and None."""
        if halt_on not in (None, GATE, ANGLE):
            raise UserError(f"halt_on must be {GATE} or {ANGLE}: got {halt_on!r:.40}.")


class LazyTransformerConfig(PreTrainedConfig, LazyModelConfig):
    """Hugging Face configuration of both Lazy Transformers.

    `max_positions` are those of the longest sequence; `is_encoder_decoder` is False for the causal
    language model. Further arguments are the options of `LazyModelConfig` and `PreTrainedConfig`.
    """

    model_type = "lazy-transformer"
    attribute_map = {  # noqa: RUF012 - the form transformers asks for
        "hidden_size": "d_model",
        "num_hidden_layers": "decoder_steps",
        "num_attention_heads": "num_heads",
        "intermediate_size": "d_ff",
        "max_position_embeddings": "max_positions",
    }
    keys_to_ignore_at_inference = ["past_key_values", "trace"]  # noqa: RUF012

    def __init__(
        self,
        vocab_size: int = 8000,
        max_positions: int = 1024,
        is_encoder_decoder: bool = True,
        **kwargs: Any,
    ) -> None:
        names = {option.name for option in fields(LazyModelConfig)}
        model = LazyModelConfig(**{name: kwargs.pop(name) for name in names & kwargs.keys()})
        validate(model)
        for name, value in (("vocab_size", vocab_size), ("max_positions", max_positions)):
            if value < 1:
                raise UserError(f"{name} must be at least 1: got {value}.")
        vars(self).update(vars(model), vocab_size=vocab_size, max_positions=max_positions)
        kwargs.setdefault("tie_word_embeddings", True)
        for name, number in (("bos", 1), ("eos", 2), ("pad", 3)):
            kwargs.setdefault(f"{name}_token_id", number)
        kwargs.setdefault("decoder_start_token_id", kwargs["bos_token_id"])
        super().__init__(is_encoder_decoder=is_encoder_decoder, **kwargs)

    def get_text_config(self, decoder: Any = None, encoder: Any = None) -> PreTrainedConfig:
        """Return this config: transformers would rename what begins with `decoder_` in a copy."""
        return self

    def default_epsilons(self, halt_on: str | None = None) -> tuple[float, ...]:
        """Return epsilons to begin with, from careful to bold; none for a model without gates."""
        if self.mechanism != LAZY:
            return ()
        return DEFAULT_EPSILONS[ANGLE if (halt_on or self.halt_on) == ANGLE else self.compare]


# -- search ----------------------------------------------------------------------------------------


@dataclass
class HaltingConfig:
    """Steps, and which tokens halt before the last."""

    encoder_steps: int | None = bounded(None, ge=1)
    """Steps over the source; by default those of training."""

    decoder_steps: int | None = bounded(None, ge=1)
    """Steps over the target, or over a language model's text; by default those of training."""

    epsilon: float | None = bounded(None, ge=0, le=1)
    """Gate (or angle, see halt_on) below which a source token halts; 0 lets none halt."""

    decoder_epsilon: float | None = bounded(None, ge=0, le=1)
    """The same for target tokens."""

    patience: int | None = bounded(None, ge=1)
    """Steps in a row for which it must be below epsilon."""

    halt_on: Literal["gate", "angle"] | None = None
    """What is compared with epsilon: the gate, or the angle by which a step turns a state; by
    default what the model says."""

    def check_for(self, model: Any) -> None:
        """Raise UserError if this model cannot do it, before anything is computed."""
        validate(self, "search.")
        has_source = model.config.is_encoder_decoder
        if not has_source and (self.encoder_steps is not None or self.epsilon is not None):
            raise UserError(
                "encoder_steps and epsilon are for the source, which a language model does not "
                "have: give decoder_steps or decoder_epsilon."
            )
        for side in ("encoder", "decoder"):
            if (steps := getattr(self, f"{side}_steps")) is not None:
                getattr(model, side).stack.check_steps(steps, f"{side}_steps")
        for name in ("epsilon", "decoder_epsilon"):
            if (epsilon := getattr(self, name)) is not None:
                model.config.check_epsilon(epsilon, name)

    def halting(self) -> dict[str, Any]:
        """Return the steps and what decides halting, as far as given."""
        chosen = {name: getattr(self, name) for name in CALL_OPTIONS}
        return {name: value for name, value in chosen.items() if value is not None}


CALL_OPTIONS = tuple(option.name for option in fields(HaltingConfig))
"""Options of a model that every call can give anew."""


@dataclass
class BeamSearchConfig(HaltingConfig):
    """Search for a translation."""

    beams: int | None = bounded(None, ge=1)
    """Number of beams, 1 for greedy search; by default 4, and 1 for programs."""

    length_penalty: float = 0.6
    """The alpha of length_formula: more favours longer translations."""

    length_formula: Literal["power", "gnmt"] = "power"
    """What beams divide a translation's log probability by: power, Hugging Face's length ** alpha;
    gnmt, Google's ((5 + length) / 6) ** alpha (arXiv 1609.08144), under which length counts
    less."""

    @property
    def num_beams(self) -> int:
        """Number of beams, the default for translations resolved."""
        return 4 if self.beams is None else self.beams

    def generation(self) -> dict[str, Any]:
        """Return arguments for `generate()`; what is not given is left to the model."""
        search: dict[str, Any] = {"num_beams": self.num_beams, "do_sample": False}
        if self.num_beams > 1:
            is_gnmt = self.length_formula == "gnmt"
            alpha = GnmtLengthPenalty(self.length_penalty) if is_gnmt else self.length_penalty
            search["length_penalty"] = alpha
        return search | self.halting()


# -- training --------------------------------------------------------------------------------------

ProgramKind = Literal["addition", "copy", "program"]
MAX_NESTING = 25
"""As many operations as there are names for variables."""


@dataclass
class ProgramConfig:
    """Programs to execute."""

    kinds: list[ProgramKind] = field(default_factory=lambda: ["addition"])
    """What is drawn from, evenly: addition of two numbers, copy of one, and program, with control
    flow."""

    length: int = bounded(3, ge=1)
    """Most digits of a number."""

    nesting: int = bounded(2, ge=1, le=MAX_NESTING)
    """Most operations nested in a program."""

    reverse: bool = False
    """Write answers last digit first: a carry is then known before the digit that needs it."""

    batch_size: int = bounded(64, ge=1)
    """Programs per batch, over all processes."""

    eval_size: int = bounded(1000, ge=1)
    """Held-out programs to measure, fewer where there are not so many."""

    def check(self) -> None:
        """Check that there is something to draw from."""
        if not self.kinds:
            raise UserError("dataset.kinds is empty: name addition, copy or program.")

    @property
    def max_length(self) -> int:
        """Characters that no program and no answer exceeds."""
        return 32 + self.nesting * (32 + 4 * self.length) + 2 * self.length


@dataclass
class LazyTrainConfig(DeviceConfig, RunConfig):
    """Settings that all tasks share."""

    METHOD: ClassVar[str] = "lazy"

    task: str = TRANSLATION
    """What is learned: translation, programs or language; each has options of its own."""

    start: str | None = None
    """Folder of a finished run whose weights to start from, such as a language model's for a
    translator; its tokenizer is used too. Weights that it lacks are new."""

    model: LazyModelConfig = field(default_factory=LazyModelConfig)
    train: TrainingConfig = field(default_factory=TrainingConfig)


@dataclass
class TranslationTrainConfig(LazyTrainConfig):
    """Train a translator that updates only what still changes."""

    data: str = "multi30k"
    """Parallel text: a folder with files such as train.en and train.de, here or under
    $DEEPENOUGH_DATA, or a `datasets` name (`hf:name`, `hf:name:config`)."""

    dataset: TranslationDataConfig = field(default_factory=TranslationDataConfig)
    model: LazyModelConfig = field(
        default_factory=lambda: LazyModelConfig(
            decoder_steps=4, dropout=0.2, ff_dropout=0.1, label_smoothing=0.1
        )
    )
    train: TrainingConfig = field(
        default_factory=lambda: TrainingConfig(lr=1.5e-3, warmup=0.1, betas=[0.9, 0.98])
    )
    search: BeamSearchConfig = field(default_factory=BeamSearchConfig)
    epochs: float | None = bounded(30.0, gt=0, unless="train.steps")
    """Rounds over the training pairs, where train.steps are not given."""

    fewest_encoder_steps: int | None = bounded(None, ge=1)
    """Let every batch draw its number of encoder steps, from this to most_encoder_steps; by
    default all batches make model.encoder_steps. What was trained with varying steps tolerates
    others better."""

    most_encoder_steps: int | None = bounded(None, ge=1)
    """Most encoder steps that a batch draws, model.encoder_steps by default; may be more."""

    most_epsilon: float = bounded(0.0, ge=0, le=1)
    """Let tokens halt in training too: half of the batches draw an epsilon from 0 to this."""

    def check(self) -> None:
        """Check that the range of encoder steps is one, and that tokens can halt."""
        fewest = self.fewest_encoder_steps
        most = self.most_encoder_steps or self.model.encoder_steps
        if fewest is not None and fewest > most:
            name = "most_encoder_steps" if self.most_encoder_steps else "model.encoder_steps"
            raise UserError(f"fewest_encoder_steps must be at most {name} ({most}): got {fewest}.")
        if fewest is None and self.most_encoder_steps is not None:
            raise UserError(
                "most_encoder_steps needs fewest_encoder_steps, from which batches draw theirs."
            )
        if self.most_epsilon and self.model.mechanism != LAZY:
            raise UserError(f"most_epsilon needs the mechanism {LAZY}, the only one that halts.")


@dataclass
class ProgramTrainConfig(LazyTrainConfig):
    """Train a model that executes programs."""

    task: str = PROGRAMS
    dataset: ProgramConfig = field(default_factory=ProgramConfig)
    model: LazyModelConfig = field(
        default_factory=lambda: LazyModelConfig(
            d_model=128, d_ff=512, encoder_steps=4, decoder_steps=4, dropout=0.0
        )
    )
    train: TrainingConfig = field(
        default_factory=lambda: TrainingConfig(steps=4000, lr=1e-3, warmup=0.1, betas=[0.9, 0.98])
    )


@dataclass
class LanguageTrainConfig(LazyTrainConfig):
    """Train a language model that updates only what still changes."""

    task: str = LANGUAGE
    data: str = "python"
    """Text: `python` (the prose inside Python), a file, folder or glob, a folder of
    $DEEPENOUGH_DATA, or a `datasets` name (`hf:name`, `hf:name:config:column`; `hf-stream:...`
    keeps no copy of its text)."""

    dataset: DatasetConfig = field(default_factory=lambda: DatasetConfig(length=64))
    model: LazyModelConfig = field(
        default_factory=lambda: LazyModelConfig(dropout=0.2, ff_dropout=0.1)
    )


def train_config(task: str | None) -> type[LazyTrainConfig]:
    """Return the settings of a training for a task; None is translation."""
    tasks = (TranslationTrainConfig, ProgramTrainConfig, LanguageTrainConfig)
    known: dict[str, type[LazyTrainConfig]] = {settings.task: settings for settings in tasks}
    name = TRANSLATION if task is None else str(task)
    if name not in known:
        raise UserError(f"There is no task {name!r}: choose {', '.join(known)}.")
    return known[name]


# -- evaluation ------------------------------------------------------------------------------------


@dataclass
class LazyEvalConfig(PlaceConfig):
    """Measure a model at the task it was trained for."""

    run: str
    """Folder of a finished training."""

    split: str = "test"
    """Split to measure on, test or valid: neither is ever trained on."""

    test: str | None = None
    """Translation: other test files of the same folder, such as test_2017_flickr; by default the
    training's."""

    length: int | None = bounded(None, ge=1)
    """Programs: most digits of a number; by default as in training. More measures extrapolation."""

    nesting: int | None = bounded(None, ge=1, le=MAX_NESTING)
    """Programs: most operations nested in one; by default as in training."""

    last_words: str | None = None
    """Language: file of passages, one a line or JSONL with the key `text`, of whose last words the
    share is measured that the model writes itself, given all before them (as in LAMBADA)."""

    search: BeamSearchConfig = field(default_factory=BeamSearchConfig)

    def check(self) -> None:
        """Check that the split and the test files agree."""
        if self.test is not None and self.split != "test":
            raise UserError(
                f"test names other test files, but the {self.split} split was asked for: leave one "
                "of them out."
            )

    def check_task(self, task: str) -> None:
        """Raise UserError for an option of another task than the run's."""
        owners = {"test": TRANSLATION, "length": PROGRAMS, "nesting": PROGRAMS}
        for name, owner in (owners | {"last_words": LANGUAGE}).items():
            if getattr(self, name) is not None and task != owner:
                raise UserError(
                    f"{self.run} was trained on {task}, but {name} is an option of {owner}: leave "
                    "it out."
                )


@dataclass
class SweepConfig(LazyEvalConfig):
    """Measure quality and cost at other steps than those of training, and of tokens that halt."""

    encoder_steps: list[int] | None = bounded(None, ge=1)
    """Encoder steps of the grid, by default 2, 4, 6, 8 and 9, [] for none; only translators."""

    decoder_steps: list[int] = bounded(default_factory=lambda: [2, 3, 4, 5, 6], ge=1)
    """Decoder steps of the grid."""

    epsilons: list[float] | None = bounded(None, ge=0, le=1)
    """Values below which tokens halt, each measured at the steps of training; by default three at
    which, by what the model does with a few texts, they would make about 3/4, 3/5 and half of the
    steps. [] for none."""

    sentences: int | None = bounded(None, ge=1)
    """Sentences or programs to measure on; by default all of the split."""


@dataclass
class TranslateConfig(PlaceConfig):
    """Translate lines of text."""

    run: str
    """Folder of a finished training."""

    file: str | None = None
    """File with a sentence on every line; by default standard input."""

    rows: int = bounded(32, ge=1)
    """Lines translated at once; 1 answers every line as soon as it is read."""

    search: BeamSearchConfig = field(default_factory=BeamSearchConfig)


@dataclass
class LazyGenerateConfig(ContinueConfig):
    """Text from a language model."""

    halting: HaltingConfig = field(default_factory=HaltingConfig)


@dataclass
class LazyPlotConfig(PlaceConfig):
    """Look inside a model and draw how its tokens change."""

    run: str
    """Folder of a finished training."""

    source: str | None = None
    """Sentence, program or text to look at; by default one of the test split."""

    sentence: int = bounded(0, ge=0)
    """Which sentence, program or segment of the test split to look at, without a source; counted
    from 0."""

    epsilon: float | None = bounded(None, gt=0, le=1)
    """Gate (or angle, see halt_on) below which a token is at rest; by default 0.1, where gates
    compare a state with its update 0.25, and of angles 0.008."""

    halt_on: Literal["gate", "angle"] | None = None
    """What is compared with epsilon; by default what the model says."""

    out: str | None = None
    """Folder for the pictures; by default plots in the run."""


@dataclass
class LazyGrid:
    """Operating points of lazy transformers in a comparison."""

    epsilon: list[float] | None = None
    """Lazy transformers: gate below which a token stops being updated; by default 0.05, 0.075 and
    0.1 or, where gates compare a state with its update, 0.15, 0.2 and 0.25."""

    steps: list[int] | None = None
    """Lazy transformers: steps over the source."""


GRID = LazyGrid

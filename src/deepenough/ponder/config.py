"""Settings of pondering: of the models (Hugging Face configs) and of the commands.

`PonderConfig` holds what can be chosen about pondering. Its fields are options of `ponder train`
and, under the same names, attributes of the Hugging Face configs `PonderAlbertConfig` and
`PonderEncoderConfig`, so that a saved model keeps them.
"""

from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar, Literal

from transformers import AlbertConfig, AutoConfig, PreTrainedConfig
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
)

from deepenough.config import DeviceConfig, PlaceConfig, RunConfig, bounded, validate
from deepenough.data.config import REGRESSION, SINGLE_LABEL, ClassificationConfig, ProblemType
from deepenough.errors import UserError
from deepenough.hf.loading import own_class
from deepenough.training.config import TrainingConfig

Exit = Literal["quantile", "sampled", "confidence", "patience", "fixed"]
QUANTILE, CONFIDENCE = 0.5, 0.9
"""Thresholds of the exits of these names where none is given."""
EXITS: dict[Exit, tuple[str, Any]] = {
    "quantile": ("exit_threshold", QUANTILE),
    "confidence": ("exit_threshold", CONFIDENCE),
    "patience": ("exit_patience", 2),
    "fixed": ("exit_pass", None),
    "sampled": ("exit_seed", None),
}
"""The option of `PonderConfig` that is the setting of each exit, and what it is if not given."""


@dataclass
class PonderConfig:
    """Pondering."""

    num_passes: int | None = bounded(None, ge=1)
    """Most passes over the layers; by default as many as the encoder has. A shared layer may be
    applied more often than it was in pretraining."""

    objective: Literal["ponder", "weighted", "last"] = "ponder"
    """What is trained: `ponder` learns when to halt; `weighted` (PABEE) trains an answer at every
    pass, later ones weighing more; `last` trains the answer of the last pass alone."""

    halting_head: Literal["previous", "answer", "second_cls"] = "previous"
    """What the decision to halt is read from: the states of this and the `previous` pass (PALBERT),
    these and by how much the best `answer` leads where one of several labels does, or a
    `second_cls` token that the model puts after the first."""

    pooling: Literal["cls", "mean"] = "cls"
    """What answers are read from: the first token (`cls`) or the `mean` of all."""

    halting_target: float = bounded(0.2, gt=0, lt=1)
    """Halting probability of the geometric prior: about 1 / (passes wanted on average)."""

    kl_weight: float = bounded(0.5, ge=0)
    """Weight (beta) of the divergence from the prior."""

    early_gradient: float = bounded(1.0, ge=0, le=1)
    """Share of the gradient of the heads before the last pass that reaches the encoder. Below 1 the
    last answer suffers less from the early ones, whose heads learn at full rate all the same."""

    distill: float = bounded(0.0, ge=0, le=1)
    """Share of the target of passes before the last that is the last pass's own answer in the place
    of the label (FastBERT): its probabilities say how sure an answer can be."""

    exit: Exit | None = None
    """When to stop in evaluation: once the probability of having halted reaches a threshold
    (`quantile`), by a draw from the halting distribution (`sampled`), once the probability of the
    answer reaches a threshold (`confidence`), when `patience` answers in a row agree (PABEE), or
    after a `fixed` number of passes. By default chosen on the validation split when training ends;
    without one by objective: `quantile`, `patience` (weighted) or `fixed` at all passes (last)."""

    exit_budget: float | None = bounded(None, gt=0, le=1)
    """Most passes on average, as a share of all, that an exit chosen on the validation split may
    make there; by default as few as keep the best accuracy. If `exit` is named, its setting is
    chosen."""

    exit_threshold: float | None = bounded(None, gt=0, le=1)
    """Threshold of the `quantile` exit, by default 0.5, or of the `confidence` exit, by default
    0.9."""

    exit_patience: int = bounded(2, ge=1)
    """How often in a row an answer must be repeated for the `patience` exit."""

    exit_pass: int | None = bounded(None, ge=1)
    """Passes of the `fixed` exit; by default all."""

    exit_seed: int | None = None
    """Seed of the `sampled` exit; a draw is then a function of the seed and the example's number.
    Without one, torch's generator is used."""

    @property
    def exit_kind(self) -> Exit:
        """The exit, or where none is named that of the objective."""
        usual: dict[str, Exit] = {"ponder": "quantile", "weighted": "patience", "last": "fixed"}
        return self.exit or usual[self.objective]

    @property
    def exit_value(self) -> Any:
        """The setting of the exit, the default resolved."""
        option, usual = EXITS[self.exit_kind]
        given = getattr(self, option)
        return usual if given is None else given

    @property
    def exit_setting(self) -> str:
        """The exit and its setting, as people read them."""
        shown = "random" if self.exit_kind == "sampled" else self.exit_value or "all passes"
        return f"{self.exit_kind} at {shown}"

    def check(self) -> None:
        """Refuse exits that need halting probabilities nobody trains."""
        if self.objective != "ponder" and self.exit in ("quantile", "sampled"):
            raise UserError(
                f"A model trained with objective {self.objective!r} has no halting probabilities "
                f"for the exit {self.exit!r}: choose confidence, patience or fixed."
            )
        chosen = self.exit_threshold or self.exit_pass or self.exit_patience != 2
        if self.exit_budget and (chosen or self.objective == "last" or self.exit == "sampled"):
            raise UserError(
                "exit_budget lets training choose the setting of an exit, and here is none to "
                "choose: leave it out, or the exit's setting, and take another objective than last "
                "and another exit than sampled."
            )

    def check_depth(self, depth: int, shared: bool) -> int:
        """Check all settings for an encoder of `depth` layers; return the number of passes.

        `shared` says that they are one layer, which can be applied any number of times.
        """
        validate(self)
        num_passes = depth if self.num_passes is None else self.num_passes
        if num_passes > depth and not shared:
            raise UserError(
                f"num_passes is {num_passes}, but the encoder has {depth} layers, which are not "
                f"shared: give at most {depth}."
            )
        if self.exit_pass is not None and self.exit_pass > num_passes:
            raise UserError(
                f"exit_pass must be at most num_passes, {num_passes}: got {self.exit_pass}."
            )
        if self.exit_budget is not None and self.exit_budget * num_passes < 1:
            raise UserError(
                f"An exit_budget of {self.exit_budget:g} is less than one of {num_passes} passes: "
                f"give at least {1 / num_passes:.3g}."
            )
        return num_passes


OPTIONS = tuple(option.name for option in fields(PonderConfig))
"""Names of the options of pondering, which the Hugging Face configs share."""


# -- commands --------------------------------------------------------------------------------------


@dataclass
class BaseEncoderConfig:
    """Encoder."""

    encoder: str = "minilm"
    """Encoder to start from: minilm, a folder, a hub name, or a config.json for new weights."""

    tokenizer: str | None = None
    """Folder or hub name of the tokenizer, also under $DEEPENOUGH_DATA; by default the encoder's
    own. A folder with only a spiece.model or a vocab.txt is read as ALBERT's or BERT's."""

    revision: str | None = None
    """Branch, tag or commit of a hub name."""

    dropout: float | None = bounded(None, ge=0, lt=1)
    """Dropout inside the encoder; by default its own. Drawing it is slow on a CPU: 0 trains a third
    faster there, and short fine-tunings hardly need it."""


@dataclass
class PonderTrainConfig(DeviceConfig, RunConfig):
    """A classifier that learns when to stop."""

    METHOD: ClassVar[str] = "ponder"

    data: str = "sst2"
    """Labelled texts: a CSV, TSV or JSONL file, a folder of such files named train, dev and test, a
    folder of $DEEPENOUGH_DATA, a task of GLUE (cola sst2 mrpc stsb qqp mnli qnli rte wnli), bAbI
    (`babi`, one task as `babi:7`), or a `datasets` name (`hf:name`, `hf:name:config`)."""

    epochs: float | None = bounded(3.0, gt=0, unless="train.steps")
    """Rounds over the training examples, where train.steps are not given."""

    head_lr: float = bounded(5.0, gt=0)
    """Learning rate of the new heads, as a multiple of the encoder's."""

    dataset: ClassificationConfig = field(default_factory=ClassificationConfig)
    model: BaseEncoderConfig = field(default_factory=BaseEncoderConfig)
    ponder: PonderConfig = field(
        # The classes of the models keep the sources' choices. With these a short training gives
        # early layers an answer: the first token alone learns too late what a text says.
        default_factory=lambda: PonderConfig(pooling="mean", halting_head="answer", distill=0.5)
    )
    train: TrainingConfig = field(
        default_factory=lambda: TrainingConfig(
            lr=1e-4, warmup=0.1, schedule="linear", valid_every=1000, save_every=1000
        )
    )


@dataclass
class ExitConfig:
    """When to stop; by default as chosen when the model was trained."""

    exit: Exit | None = None
    """quantile, sampled, confidence, patience or fixed."""

    threshold: float | None = bounded(None, gt=0, le=1)
    """Probability of having halted at which the quantile exit stops, or of the answer at which the
    confidence exit does."""

    patience: int | None = bounded(None, ge=1)
    """How often an answer is repeated before the patience exit stops."""

    passes: int | None = bounded(None, ge=1)
    """Passes of the fixed exit."""

    seed: int | None = None
    """Seed of the sampled exit."""

    def applied_to(self, trained: PonderConfig) -> PonderConfig:
        """Return a model's options with the exit asked for here in the place of its own."""
        kind = self.exit or trained.exit_kind
        changes: dict[str, Any] = {"exit": kind}
        if kind != trained.exit_kind:  # a threshold chosen for another exit says nothing of this
            changes["exit_threshold"] = None
        for name in ("threshold", "patience", "passes", "seed"):
            option = "exit_pass" if name == "passes" else f"exit_{name}"
            if getattr(self, name) is None:
                continue
            if option != EXITS[kind][0]:
                readers = [each for each, (read, _) in EXITS.items() if read == option]
                raise UserError(
                    f"exit.{name} is an option of the {' or '.join(readers)} exit, not of {kind}: "
                    f"leave it out, or give --exit.exit {readers[0]}."
                )
            changes[option] = getattr(self, name)
        return replace(trained, **changes)


@dataclass
class PonderEvalConfig(PlaceConfig):
    """How well a classifier does, and how many passes it takes."""

    run: str
    """Folder of a finished training."""

    data: str | None = None
    """Labelled texts to measure on, named as for training; by default those it was trained with."""

    split: str | None = None
    """Split of them; by default valid, else test, else train."""

    exit: ExitConfig = field(default_factory=ExitConfig)


@dataclass
class PonderPredictConfig(PlaceConfig):
    """Labels of texts as they come."""

    run: str
    """Folder of a finished training."""

    data: str | None = None
    """File with a text on every line, the second of a pair after a tab; by default standard
    input."""

    batch_size: int = bounded(32, ge=1)
    """Texts in one batch."""

    exit: ExitConfig = field(default_factory=ExitConfig)


# -- Hugging Face configs --------------------------------------------------------------------------

ENCODERS = "such as BERT, RoBERTa, DeBERTa, MPNet or MiniLM"
NOT_LOGITS = ["passes", "halting", "step_logits", "halt_logits", "terms", "trace", "prior"]
SOURCE_NAMES = {"target_halt_probability": "halting_target"}
"""What PonderALBERT's source calls options that have another name here."""
DEPTH = "num_hidden_layers"
LABEL_ARGUMENTS = ("num_labels", "id2label", "label2id", "problem_type")
ARGUMENTS = {*OPTIONS, *SOURCE_NAMES, *LABEL_ARGUMENTS, "classifier_dropout"}
"""What a pondering model is made with besides an encoder."""


class PonderAlbertConfig(AlbertConfig):
    """`AlbertConfig`'s arguments and those of `PonderConfig`.

    `num_hidden_layers` keeps its meaning, the passes of the pretrained model; `num_passes` says how
    many are made here. Given to `from_pretrained`, `num_hidden_layers` says that too.
    """

    model_type = "ponder_albert"
    attribute_map = SOURCE_NAMES
    keys_to_ignore_at_inference = NOT_LOGITS

    def __init__(self, **kwargs: Any) -> None:
        options = _take_options(kwargs)
        super().__init__(**kwargs)
        for name in ("num_hidden_groups", "inner_group_num"):
            if getattr(self, name) != 1:
                raise UserError(
                    f"This ALBERT has {name} = {getattr(self, name)}, and pondering repeats a "
                    "single layer: use a checkpoint in which all passes share one layer, or "
                    "PonderEncoderForSequenceClassification."
                )
        _set_options(self, options, shared=True)

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """Make a config of the values of a saved one and of arguments that change it."""
        asked = {name: kwargs.pop(name) for name in (*OPTIONS, DEPTH) if name in kwargs}
        if DEPTH in asked:
            asked.setdefault("num_passes", asked[DEPTH])
        return super().from_dict(config_dict | asked, **kwargs)

    @classmethod
    def get_config_dict(cls, name: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        """Return the values of a checkpoint's config, which may be that of a plain ALBERT."""
        values, unused = super().get_config_dict(name, **kwargs)
        kind = values.get("model_type")
        if kind not in ("albert", cls.model_type):
            raise UserError(
                f"{name} is a checkpoint of {kind!r}, and this class ponders with ALBERT: give an "
                "ALBERT checkpoint, or use PonderEncoderForSequenceClassification."
            )
        return values | {"model_type": cls.model_type}, unused


class PonderEncoderConfig(PreTrainedConfig):
    """The config of any encoder, as `encoder`, and the arguments of `PonderConfig`."""

    model_type = "ponder_encoder"
    attribute_map = SOURCE_NAMES
    keys_to_ignore_at_inference = NOT_LOGITS
    sub_configs = {"encoder": AutoConfig}  # noqa: RUF012 - the form transformers asks for

    def __init__(
        self,
        encoder: PreTrainedConfig | dict[str, Any] | None = None,
        classifier_dropout: float = 0.1,
        **kwargs: Any,
    ) -> None:
        options = _take_options(kwargs)
        if not isinstance(encoder, PreTrainedConfig):
            values = dict(encoder or {"model_type": "bert"})
            own_class(values)  # by which transformers gets to know an encoder of ours
            encoder = AutoConfig.for_model(values.pop("model_type"), **values)
        check_encoder(encoder)
        self.encoder = encoder
        self.classifier_dropout = classifier_dropout
        super().__init__(**kwargs)
        if not 0.0 <= classifier_dropout < 1.0:
            raise UserError(f"classifier_dropout must be in [0, 1): got {classifier_dropout}.")
        _set_options(self, options, shared=False)

    def get_text_config(self, *args: Any, **kwargs: Any) -> PreTrainedConfig:
        """Return the encoder's config, which transformers changes with the vocabulary."""
        return self.encoder

    @property
    def hidden_size(self) -> int:
        """Width of the encoder."""
        return int(self.encoder.get_text_config().hidden_size)


def check_encoder(config: PreTrainedConfig) -> None:
    """Refuse a model that is no encoder: its first token would see nothing of the text."""
    kind = config.model_type
    if kind in (PonderEncoderConfig.model_type, PonderAlbertConfig.model_type):
        raise UserError(f"A {kind!r} model ponders already: load it with its own class.")
    reads_both_ways = kind in MODEL_FOR_MASKED_LM_MAPPING_NAMES
    has_decoder = kind in MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES
    is_decoder = kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES and not reads_both_ways
    if has_decoder or is_decoder or getattr(config, "is_decoder", False):
        raise UserError(
            f"A model of type {kind!r} has a decoder, which reads from left to right: pondering "
            f"classifiers need an encoder alone, {ENCODERS}."
        )


def pondering_config(
    config: PreTrainedConfig, wanted: Any, options: dict[str, Any]
) -> PonderAlbertConfig | PonderEncoderConfig:
    """Return a checked config of the wanted class; that of a plain encoder becomes one.

    Checked before a model is made, since transformers may have changed it. `options` are those of
    `PonderConfig`, in the place of the config's own.
    """
    if unknown := sorted(options.keys() - ARGUMENTS):
        known = sorted(ARGUMENTS)
        raise UserError(f"A pondering model has no option {unknown[0]!r}: it has {known}.")
    made: Any = config
    if not isinstance(config, wanted):
        if wanted is PonderEncoderConfig:
            names = ("id2label", "label2id", "problem_type")
            kept = {name: getattr(config, name) for name in names}
            made = wanted(encoder=config, **kept | options)
        elif config.model_type == "albert":
            values = config.to_dict()
            values.pop("model_type", None)
            made = wanted(**values | options)
        else:
            raise UserError(
                f"A {type(config).__name__} is none of an ALBERT: give an AlbertConfig, or use "
                "PonderEncoderForSequenceClassification."
            )
    elif options:
        made = wanted.from_dict(config.to_dict(), **options)
    made._name_or_path = config._name_or_path
    ponder = options_of(made)
    ponder.check_depth(_depth(made), isinstance(made, PonderAlbertConfig))
    problem = problem_of(made)
    if problem == REGRESSION and made.num_labels != 1:
        raise UserError(f"A regression has one value: got num_labels {made.num_labels}, not 1.")
    if problem == REGRESSION and ponder.exit == "confidence":
        raise UserError("A value has no probability: choose another exit than confidence.")
    return made  # type: ignore[no-any-return]


def problem_of(config: PreTrainedConfig) -> ProblemType:
    """Return what a model's outputs are; a single one is a value where nothing else is said."""
    problem: ProblemType | None = config.problem_type
    return problem or (REGRESSION if config.num_labels == 1 else SINGLE_LABEL)


def options_of(config: PonderAlbertConfig | PonderEncoderConfig) -> PonderConfig:
    """Return the options of pondering that a model was made with."""
    return PonderConfig(**{name: getattr(config, name) for name in OPTIONS})


def _take_options(kwargs: dict[str, Any]) -> PonderConfig:
    for other, name in SOURCE_NAMES.items():
        if other in kwargs:
            kwargs.setdefault(name, kwargs.pop(other))
    return PonderConfig(**{name: kwargs.pop(name) for name in OPTIONS if name in kwargs})


def _set_options(config: Any, options: PonderConfig, shared: bool) -> None:
    options.num_passes = options.check_depth(_depth(config), shared)
    vars(config).update(vars(options))


def _depth(config: Any) -> int:
    """Return how many layers the encoder applies."""
    encoder = getattr(config, "encoder", config).get_text_config()
    return int(encoder.num_hidden_layers * getattr(encoder, "inner_group_num", 1))


@dataclass
class PonderGrid:
    """Operating points of pondering classifiers in a comparison."""

    threshold: list[float] | None = None
    """Classifiers that ponder: probability of having halted at which they stop."""

    confidence: list[float] | None = None
    """Classifiers that ponder: probability of the answer at which they stop."""

    passes: list[int] | None = None
    """Classifiers that ponder: passes that all examples make."""


GRID = PonderGrid

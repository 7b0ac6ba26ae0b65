"""Settings of the shortcut commands; free of torch."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from deepenough.config import DeviceConfig, PlaceConfig, RunConfig, TrustConfig, bounded
from deepenough.errors import UserError
from deepenough.training.config import TrainingConfig

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


@dataclass
class PretrainedModelConfig:
    """Model."""

    name: str = "smollm2"
    """smollm2 (a real model that comes as a package), a folder, a run, or a name on the hub."""

    kind: Literal["auto", "causal", "masked", "encoder"] = "auto"
    """Which head to load; by default the one the model was saved with."""

    dtype: str = "float32"
    """Number format of the weights."""

    revision: str | None = None
    """Branch, tag or commit on the hub."""

    allow_pickle: bool = False
    """Load pickled weights too, which can run any code: only from people you trust."""

    trust_remote_code: bool = False
    """Run code that comes with the model: only from people you trust."""

    def load(
        self, trust: TrustConfig | None = None, **where: Any
    ) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
        """Return the model and its tokenizer.

        `trust` takes the place of what these settings trust, where they come from a run's folder;
        `where` are device_map and offload_folder, as `load` takes them.
        """
        from deepenough.hf.loading import load

        return load(**vars(self) | ({} if trust is None else vars(trust)), **where)


@dataclass
class TextConfig:
    """Text."""

    split: str = "train"
    """Part of the text."""

    lines: int | None = bounded(2000, ge=1)
    """How many lines to read, those without text not counted; null for all."""

    min_chars: int = bounded(40, ge=0)
    """Lines shorter than this, such as headings, are passed over."""

    def read(self, data: str) -> list[str]:
        """Return the texts of a file, folder or corpus."""
        from deepenough.data.corpus import open_corpus
        from deepenough.training.logging import announce_split

        corpus = open_corpus(data)
        if self.split not in corpus.splits:
            known = ", ".join(corpus.splits)
            raise UserError(f"The text {data} has no split {self.split!r}: it has {known}.")
        long_enough = (x for x in corpus.lines(self.split) if len(x.strip()) >= self.min_chars)
        texts = list(itertools.islice(long_enough, self.lines))
        if not texts:
            raise UserError(
                f"No line of {data} ({self.split}) has {self.min_chars} characters: give another "
                "text or a lower dataset.min_chars."
            )
        if self.split in corpus.held_out:
            announce_split(self.split, f"{len(texts)} lines", data)
        return texts


@dataclass
class MapsConfig:
    """Maps."""

    maps: Literal["linear", "affine", "both"] = "linear"
    """Maps without or with a bias; both adds affine maps to the last layer."""

    positions: Literal["all", "random"] = "all"
    """Use every token of a text, or one drawn at random."""

    targets: Literal["all", "last"] = "all"
    """Map every layer to every later one, or to the last only."""

    ridge: float = bounded(0.0, ge=0)
    """Penalty (scikit-learn's alpha): what is minimised is the sum of squared errors over all
    tokens, plus this times the sum of a map's squared entries. Needed for little text, and the more
    text, the less it counts."""

    window: int | None = bounded(None, ge=2)
    """Longest piece of text in tokens; by default what the model allows, up to 1024."""

    submodules: bool = False
    """Also fit and save linear maps of the parts inside every block: norms, attention,
    feed-forward and residual connections."""

    memory: float | None = bounded(None, ge=0)
    """GB of memory that the sums of a process may take, by default what is free; where they need
    more, they are kept in files in the run's checkpoints."""

    @property
    def folders(self) -> tuple[str, ...]:
        """Names of the folders that maps are saved in: affine ones beside the others if both."""
        return ("shortcuts", "affine") if self.maps == "both" else ("shortcuts",)


@dataclass
class SentencesConfig:
    """Sentences."""

    train: int = bounded(9000, ge=1)
    """How many sentences to fit on."""

    test: int = bounded(3000, ge=1)
    """How many other sentences to measure on."""

    min_words: int = bounded(4, ge=1)
    """Sentences of fewer words, such as headings, are passed over."""

    split: str = "train"
    """Part of the text that they are drawn from."""

    lines: int | None = bounded(None, ge=1)
    """How many lines of it to read; by default all."""

    seed: int = 0
    """Seed of the sample of sentences and of the position in each."""


@dataclass
class ExitSweep:
    """Early exit: a token exits where the gap exceeds 0.9 lambda + 0.1 exp(-4 t / N)."""

    min_layer: int = bounded(1, ge=0)
    """First layer at which a token may exit; 0 is the embeddings."""

    length: Literal["position", "text"] = "position"
    """What N is: the mean position plus one of the tokens measured, as in the code of the paper, or
    the mean length of the texts."""

    mean_length: float | None = bounded(None, gt=0)
    """N itself, in the place of a mean."""

    at_position: int | None = bounded(None, ge=0)
    """t of every token, in the place of its own position; the paper's code for BERT has 3."""

    lambdas: list[float] | None = None
    """Values of lambda, below 0 too; by default 35 from 0 to 10/9."""


#: Those of the paper's code, which has the nine between 1 and 1.112 for `id` alone.
PAPER_LAMBDAS = (
    -1.112,
    *(step / 10 for step in range(11)),
    *(1 + 0.0112 * step for step in range(1, 10)),
    1.112,
)


@dataclass
class TuneConfig:
    """Tuning."""

    batch: int = bounded(256, ge=1)
    """Positions of text in a step, over all processes."""

    top_tokens: int | None = bounded(4096, ge=1)
    """Tokens of the vocabulary that are always in the softmax, the most probable ones; null for the
    whole vocabulary, which is several times slower."""

    sampled_tokens: int = bounded(512, ge=0)
    """Tokens drawn anew at every step to stand for the rest of the vocabulary."""

    layers: list[int] | None = None
    """Layers whose maps are tuned; by default all below the last."""

    held_out: int = bounded(512, ge=1)
    """Positions of held-out text on which progress is measured."""

    memory: float = bounded(4.0, gt=0)
    """GiB in which the states of the text may be kept, over all processes; where all of them need
    more, maps are tuned on a part of the text."""


def tuning_defaults() -> TrainingConfig:
    """Return the training options that tuning starts from."""
    return TrainingConfig(
        steps=300,
        lr=1e-3,
        warmup=0.03,
        weight_decay=0.0,
        clip=0.0,  # the layers are independent: a common limit would tie them together
        precision="fp32",
        log_every=20,
        valid_every=300,
        save_every=100,
        keep=1,
    )


@dataclass
class TuneTrainingConfig(RunConfig):
    """Tuning of the maps of one model."""

    METHOD: ClassVar[str] = "shortcut"

    out: str = ""
    """Folder for everything that the run leaves; by default a temporary one."""

    tune: TuneConfig = field(default_factory=TuneConfig)
    train: TrainingConfig = field(default_factory=tuning_defaults)


@dataclass
class PlanConfig:
    """Plan."""

    dry_run: bool = False
    """Print what the fit would take (bytes, FLOPs, time) and fit nothing; only the config of the
    model is read."""

    rate: float | None = bounded(None, gt=0)
    """dry_run: FLOPs a second of a process; by default what this machine is measured to make."""

    processes: int | None = bounded(None, ge=1)
    """dry_run: processes that share the text; by default those that were started."""

    json: bool = False
    """dry_run: print one JSON object instead."""

    def check(self) -> None:
        """Refuse options of a plan where none is asked for."""
        if not self.dry_run and (self.rate or self.processes or self.json):
            raise UserError("rate, processes and json are options of --dry_run: give that, too.")


@dataclass
class ShortcutFitConfig(DeviceConfig, RunConfig):
    """Fit shortcuts."""

    METHOD: ClassVar[str] = "shortcut"

    out: str = "runs/shortcut"

    data: str = "python"
    """Text to read: python (built in), a file, folder or glob, a folder of $DEEPENOUGH_DATA, or a
    name on the hub."""

    tuned: bool = False
    """Also tune maps to the last layer so that predictions, not states, come out right."""

    device_map: str | None = None
    """How the layers of a model larger than one device are laid over devices, in the place of
    device: auto, balanced, sequential, or a JSON file of devices (and disk) by module."""

    offload_folder: str | None = None
    """Folder for weights that device_map puts on disk."""

    model: PretrainedModelConfig = field(default_factory=PretrainedModelConfig)
    dataset: TextConfig = field(default_factory=TextConfig)
    fit: MapsConfig = field(default_factory=MapsConfig)
    plan: PlanConfig = field(default_factory=PlanConfig)
    tune: TuneConfig = field(default_factory=TuneConfig)
    train: TrainingConfig = field(default_factory=tuning_defaults)


@dataclass
class ShortcutPaperConfig(DeviceConfig, RunConfig):
    """Repeat the paper."""

    METHOD: ClassVar[str] = "shortcut"

    out: str = "runs/shortcut-paper"

    data: str = "python"
    """Text whose sentences are drawn: python (built in), a file, folder or glob, a folder of
    $DEEPENOUGH_DATA, or a name on the hub."""

    model: PretrainedModelConfig = field(default_factory=PretrainedModelConfig)
    sentences: SentencesConfig = field(default_factory=SentencesConfig)
    fit: MapsConfig = field(default_factory=lambda: MapsConfig(positions="random", submodules=True))
    exit: ExitSweep = field(default_factory=lambda: ExitSweep(lambdas=list(PAPER_LAMBDAS)))


@dataclass
class PruneConfig:
    """Pruning."""

    keep: float = bounded(0.8, gt=0, le=1)
    """Share of the cost of the layers to keep."""

    budget: Literal["time", "weights", "flops"] = "time"
    """What cost is: the measured time of a token on this machine, weights, or FLOPs."""

    method: Literal["replace", "influence", "contiguous"] = "replace"
    """Choose among linear maps and removal of parts, or, to compare, remove whole layers: those
    that change states least, one by one (ShortGPT), or the best run of them."""

    refit: bool = True
    """Fit the chosen maps again in order, to make up for the errors of those before them."""

    correct: bool = True
    """With that, also correct the last product of each part that is kept."""

    fit_tokens: int = bounded(40_000, ge=1)
    """Tokens of text to fit maps on."""

    choose_tokens: int = bounded(3_072, ge=1)
    """Other tokens of it to choose by."""


def healing_defaults() -> TrainingConfig:
    """Return the training options that healing starts from."""
    return TrainingConfig(
        steps=60, lr=1e-4, warmup=0.1, log_every=10, valid_every=1000, save_every=50, keep=1
    )


@dataclass
class HealTrainingConfig(RunConfig):
    """Healing of a pruned model."""

    METHOD: ClassVar[str] = "shortcut"

    out: str = ""
    """Folder for records and checkpoints."""

    batch: int = bounded(1024, ge=1)
    """Tokens of text in a batch."""

    trained: Literal["maps", "all"] = "all"
    """What is trained: the maps that were put in and the norms, or all weights."""

    train: TrainingConfig = field(default_factory=healing_defaults)


@dataclass
class ShortcutPruneConfig(DeviceConfig, RunConfig):
    """Prune a model."""

    METHOD: ClassVar[str] = "shortcut"

    out: str = "runs/pruned"

    data: str = "python"
    """Text like that which the model will be used on: python (built in), a file, folder or glob, a
    folder of $DEEPENOUGH_DATA, or a name on the hub."""

    heal_steps: int = bounded(0, ge=0)
    """Steps of a training towards the full model's outputs afterwards; 0 for none."""

    heal: Literal["maps", "all"] = "all"
    """What that trains: the maps that were put in and the norms, or all weights."""

    heal_lr: float = bounded(1e-4, gt=0)
    """Highest learning rate of that."""

    model: PretrainedModelConfig = field(default_factory=PretrainedModelConfig)
    dataset: TextConfig = field(default_factory=lambda: TextConfig(lines=None))
    prune: PruneConfig = field(default_factory=PruneConfig)


@dataclass
class ShortcutImportConfig(RunConfig):
    """Import published matrices."""

    METHOD: ClassVar[str] = "shortcut"

    folder: str = ""
    """Folder of i_j.pickle (and pi_a_b.pickle) files, as the code of the paper writes them."""

    out: str = "runs/imported"

    model: PretrainedModelConfig = field(default_factory=lambda: PretrainedModelConfig("gpt2"))


@dataclass
class ShortcutEvalConfig(PlaceConfig):
    """Measure shortcuts."""

    run: str
    """Run folder that `deepenough shortcut fit` has written."""

    data: str = "python"
    """Text to measure on: python (built in), a file, folder or glob, a folder of $DEEPENOUGH_DATA,
    or a name on the hub."""

    positions: Literal["all", "random"] = "random"
    """Measure every token of a text, or one drawn at random, as the paper does."""

    submodules: bool = False
    """Also replace attention, feed-forward or norms by their own linear fits."""

    exit: ExitSweep = field(default_factory=ExitSweep)
    dataset: TextConfig = field(default_factory=lambda: TextConfig(split="valid", lines=500))
    trust: TrustConfig = field(default_factory=TrustConfig)


@dataclass
class ShortcutLensConfig(PlaceConfig):
    """Lens."""

    run: str
    """Run folder that `deepenough shortcut fit` has written."""

    prompt: str
    """Text to look at."""

    mode: str | None = None
    """Maps to use: id, mat, affine or tuned; by default those of the run."""

    show: Literal["token", "probability", "rank", "entropy", "kl", "cross_entropy"] = "token"
    """What the table shows of every layer: its token and that token's probability, the entropy of
    its distribution and the KL to it from the last layer's in nats, or the rank (from 1) and the
    cross-entropy of the real next token."""

    trust: TrustConfig = field(default_factory=TrustConfig)

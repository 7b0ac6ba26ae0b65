"""Settings of the commands `deepenough decode generate`, `tune`, `export`, `bench`, `calibrate`."""

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from deepenough.config import DeviceConfig, RunConfig, bounded
from deepenough.shortcut.config import PretrainedModelConfig, TextConfig
from deepenough.training.config import TrainingConfig

KVPropagation = Literal["shortcut", "copy", "deferred"]
MIN_PROMPT_TOKENS = 4
"""Shorter prompts say too little about what the model writes."""


def causal_model() -> PretrainedModelConfig:
    """Return the model that decoding commands load by default."""
    return PretrainedModelConfig(kind="causal")


@dataclass
class GenerateConfig(DeviceConfig):
    """Settings of `deepenough decode generate`."""

    model: PretrainedModelConfig = field(default_factory=causal_model)

    prompt: str | None = None
    """Text to continue; by default standard input."""

    mode: Literal["full", "speculative", "early_exit"] = "speculative"
    """full and speculative give the tokens of the model itself; early_exit lets tokens leave
    before the last layer, which may change them."""

    draft_model: str | None = None
    """speculative: folder that deepenough decode tune wrote for this model."""

    shortcuts: str | None = None
    """Folder of the model's shortcuts: needed by early_exit; drafts in mode speculative."""

    guarantee: str | None = None
    """early_exit: folder where deepenough decode calibrate left a threshold; it replaces the
    following options."""

    policy: Literal["gap", "top", "entropy", "layer"] | None = None
    """early_exit: when a token leaves: gap between the two best tokens (the default), probability
    of the best, entropy, or a fixed layer."""

    threshold: float | None = None
    """early_exit: confidence between 0 and 1; for the policy layer, the layer."""

    mean_length: float | None = bounded(None, gt=0)
    """early_exit: tokens over which the policy gap grows less careful, 128 by default."""

    exit_layers: list[int] | None = None
    """early_exit: layers after which a token may leave; by default the one that saves most."""

    kv_propagation: KVPropagation | None = None
    """early_exit: keys and values of skipped layers: predicted by shortcuts (the default), of the
    state copied, or deferred until a later token needs them."""

    exit_vocab: int | None = bounded(None, ge=2)
    """early_exit: check exits on so many tokens with the lowest ids first, before the whole
    vocabulary."""

    max_new_tokens: int = bounded(128, ge=1)
    """Most tokens to generate."""

    chat: bool = False
    """Put the prompt into the model's chat template."""

    against_full: bool = False
    """Also time the model's own generate() on the same prompt, in turns, and compare."""

    rounds: int = bounded(3, ge=1)
    """Turns of each in a comparison; medians are shown."""

    json: bool = False
    """Print one JSON object instead."""


@dataclass
class CalibrateConfig(DeviceConfig):
    """Settings of `deepenough decode calibrate`."""

    shortcuts: str
    """Folder of the model's shortcuts."""

    model: PretrainedModelConfig = field(default_factory=causal_model)

    data: str = "python"
    """Text whose lines are continued: python (built in), a file, folder or glob, a folder of
    $DEEPENOUGH_DATA, or a name on the hub."""

    out: str | None = None
    """Folder for calibration.json; by default that of the shortcuts."""

    dataset: TextConfig = field(default_factory=TextConfig)

    texts: int = bounded(300, ge=1)
    """Lines to continue, drawn at random from those read."""

    max_disagreement: float = bounded(0.05, gt=0, lt=1)
    """Largest share of tokens that may differ from the full model's, on average over texts."""

    confidence: float = bounded(0.95, gt=0, lt=1)
    """Probability with which that must hold."""

    policy: Literal["gap", "top", "entropy"] = "gap"
    """What confidence is: gap between the two best tokens, probability of the best, or entropy."""

    exit_layers: list[int] | None = None
    """Layers after which a token may leave; by default the one that saves most."""

    kv_propagation: KVPropagation = "deferred"
    """Keys and values of skipped layers. With deferred, one run of the model measures all
    thresholds."""

    exit_vocab: int | None = bounded(None, ge=2)
    """Check exits on so many tokens with the lowest ids first, before the whole vocabulary."""

    prompt_tokens: int = bounded(32, ge=MIN_PROMPT_TOKENS)
    """Tokens of a line that are its prompt."""

    new_tokens: int = bounded(64, ge=1)
    """Most new tokens of each text."""

    json: bool = False
    """Print one JSON object instead."""


@dataclass
class SelfGeneratedConfig:
    """Text that the model writes."""

    tokens: int = bounded(150_000, ge=1)
    """New tokens in all; fewer if the corpus runs out."""

    prompt_tokens: int = bounded(32, ge=MIN_PROMPT_TOKENS)
    """Tokens of a line that are its prompt."""

    new_tokens: int = bounded(128, ge=1)
    """Most new tokens of each text."""

    min_chars: int = bounded(40, ge=0)
    """Lines shorter than this are skipped."""

    batch: int = bounded(32, ge=1)
    """Texts written at once."""

    sample_every: int = bounded(8, ge=0)
    """Every so-manyth batch is sampled rather than greedy; 0 for none."""


@dataclass
class BenchConfig(DeviceConfig, RunConfig):
    """Settings of `deepenough decode bench`."""

    METHOD: ClassVar[str] = "decode"

    out: str = "runs/bench"

    model: PretrainedModelConfig = field(default_factory=causal_model)

    data: str = "python"
    """Corpus whose lines are continued: python (built in), a file, folder or glob, a folder of
    $DEEPENOUGH_DATA, or a name on the hub. Every second one is put into the chat format."""

    prompts: int = bounded(8, ge=1)
    """Prompts that are continued."""

    max_new_tokens: int = bounded(128, ge=1)
    """Most new tokens of each."""

    rounds: int = bounded(3, ge=1)
    """Rounds over all prompts; medians are shown, with their range."""

    draft_model: str | None = None
    """Folder that deepenough decode tune wrote for this model, which is measured too."""

    gguf: list[str] | None = None
    """More GGUF files of the model for llama.cpp, say in a format that it is faster with."""

    ours_only: bool = False
    """Leave out other engines, and transformers but for its generate()."""

    leave_out: list[str] | None = None
    """Further ways that are left out, by the names in the table."""

    json: bool = False
    """Print one JSON object instead."""


@dataclass
class DraftHeadConfig:
    """Draft head."""

    texts: int = bounded(8, ge=1)
    """Texts in a step."""

    epochs: float = bounded(4.0, gt=0)
    """Rounds over the texts; they decide train.steps."""

    draft_vocab: int = bounded(4096, ge=2)
    """Tokens that can be drafted, those the model writes most often."""

    hard: float = bounded(0.5, ge=0, le=1)
    """Weight of the best token against the whole distribution."""

    start: str | None = None
    """Folder of an earlier draft model of the same model to continue from, say with more text, with
    its draft vocabulary; by default the head starts as a linear map."""

    held_out: int = bounded(64, ge=1)
    """Texts on which progress is measured, and which are not trained on."""

    patience: int = bounded(5, ge=0)
    """Validations without more accepted drafts after which training ends; 0 for none."""


@dataclass
class DraftTrainConfig(DeviceConfig, RunConfig):
    """Settings of `deepenough decode tune`."""

    METHOD: ClassVar[str] = "decode"

    out: str = "runs/draft_model"

    data: str = "python"
    """Corpus whose lines begin the model's texts: python (built in), a file, folder or glob, a
    folder of $DEEPENOUGH_DATA, or a name on the hub."""

    model: PretrainedModelConfig = field(default_factory=causal_model)
    text: SelfGeneratedConfig = field(default_factory=SelfGeneratedConfig)
    head: DraftHeadConfig = field(default_factory=DraftHeadConfig)

    train: TrainingConfig = field(
        default_factory=lambda: TrainingConfig(
            lr=1e-3,
            warmup=0.05,
            weight_decay=0.05,
            precision="fp32",
            log_every=20,
            valid_every=250,
            save_every=50,
        )
    )


@dataclass
class ExportConfig:
    """Settings of `deepenough decode export`."""

    run: str
    """Folder that deepenough decode tune wrote."""

    to: Literal["vllm", "sglang", "llama.cpp"]
    """Engine that will run the head: vllm (speculators layout), sglang (flat layout) or llama.cpp
    (GGUF)."""

    out: str
    """Folder to write; it must not exist yet."""

    model: str | None = None
    """Model that the head drafts for; by default the one that it was tuned for, by name."""

    gguf: str | None = None
    """llama.cpp: GGUF file of the model, for its tokenizer; by default the one that it comes
    from."""


@dataclass
class DecodeGrid:
    """Operating points of a comparison; one left out is chosen for the run."""

    exit: list[float] | None = bounded(None, ge=0, le=1)
    """Generation: confidence at which a token leaves early."""


GRID = DecodeGrid

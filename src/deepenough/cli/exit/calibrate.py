"""`deepenough exit calibrate`: the fastest exit threshold that keeps its word."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, field
from typing import Literal

from rich.console import Console
from rich.table import Table

from deepenough.cli.parse import parse
from deepenough.shortcut.config import PretrainedModelConfig, TextConfig
from deepenough.training.logging import reading


@dataclass
class ExitCalibrateSettings:
    """Calibrate"""

    shortcuts: str
    """Folder of the model's shortcuts; the guarantee is kept there as exit.json."""

    model: PretrainedModelConfig = field(default_factory=PretrainedModelConfig)

    data: str = "python"
    """Text to read: python (built in), a file, folder or glob, or a name on the hub."""

    dataset: TextConfig = field(default_factory=TextConfig)

    texts: int = 300
    """Lines to continue, drawn at random from those read."""

    max_disagreement: float = 0.05
    """Share of tokens that may be others than the full model's, on average over texts."""

    confidence: float = 0.95
    """How sure that must be."""

    bound: Literal["hoeffding-bentkus", "betting"] = "hoeffding-bentkus"
    """How the risk is bounded; betting needs fewer texts if they are alike."""

    policy: Literal["gap", "top", "entropy"] = "gap"
    """What confidence is: gap between the two best words, probability of the best, or entropy."""

    exits: list[int] | None = None
    """Layers after which a token may leave; by default those that pay."""

    fill: Literal["shortcut", "copy", "deferred"] = "deferred"
    """What later tokens find in skipped layers. With deferred, all thresholds are measured in one
    run of the model."""

    shortlist: int | None = None
    """Test exits on so many words with the lowest ids first, before the whole vocabulary."""

    own_text: bool = False
    """Let the exiting model write the texts, anew for every threshold: slower, and a guarantee of
    what it does when it goes on from its own words."""

    prompt_tokens: int = 32
    """Tokens of a line that are its prompt."""

    new_tokens: int = 64
    """New tokens of each text at most."""

    batch: int = 8
    """Texts side by side."""

    checked: int = 8
    """Texts that are written again by the exiting model itself."""

    seed: int = 0
    """Of the drawing."""

    save: str | None = None
    """Folder for exit.json, if not that of the shortcuts."""

    json: bool = False
    """Print one JSON object instead."""


def main(argv: list[str]) -> int:
    settings = parse(
        "exit calibrate",
        ExitCalibrateSettings,
        argv,
        description="Find the fastest exit threshold whose disagreement with the full model is\n"
        "bounded with the confidence asked for, on texts the model writes itself.",
        example="deepenough exit calibrate smollm2 --shortcuts runs/shortcut/shortcuts \\\n"
        "    --data mytext.txt",
        positional=["model.name"],
    )
    import torch

    from deepenough.decoding.api import early_exit
    from deepenough.decoding.calibration import calibrate
    from deepenough.decoding.early_exit import make_policy
    from deepenough.shortcut.modeling import Shortcuts

    shortcuts = Shortcuts.from_pretrained(settings.shortcuts)
    lines = settings.dataset.read(settings.data)
    random.Random(settings.seed).shuffle(lines)
    model, tokenizer = settings.model.load()
    size = model.config.get_text_config().vocab_size
    words = None if settings.shortlist is None else torch.arange(min(settings.shortlist, size))
    fast = early_exit(
        model,
        shortcuts,
        # Which exits pay is asked at a threshold in the middle, before one is known.
        policy=make_policy(settings.policy, 0.5),
        exit_layers=settings.exits,
        kv_propagation=settings.fill,
        exit_vocab=words,
    )
    with reading("texts") as bar:
        found = calibrate(
            fast,
            tokenizer,
            lines[: settings.texts],
            settings.max_disagreement,
            settings.confidence,
            text="own" if settings.own_text else "full",
            bound=settings.bound,
            prompt_tokens=settings.prompt_tokens,
            new_tokens=settings.new_tokens,
            batch=settings.batch,
            checked=settings.checked,
            progress=lambda what, done, of: bar(done, of) if of else None,
        )
    path = found.save(settings.save or settings.shortcuts)
    if settings.json:
        kept = {**vars(found), "shortlist": settings.shortlist, "file": str(path)}
        print(json.dumps(kept))
        return 0
    table = Table("threshold", "disagreement", "p-value", box=None)
    for threshold, risk, p_value in zip(found.thresholds, found.risks, found.p_values, strict=True):
        table.add_row(f"{threshold:g}", f"{risk:.4f}", f"{p_value:.3g}")
    Console(highlight=False).print(table)
    print(found.holds())
    if found.layers is not None:
        print(f"{found.layers:.1f} of {shortcuts.num_layers} layers a token, exits {found.exits}")
    if found.check is not None:
        print(
            f"Going on from its own words: {found.check['disagreement']:.4f} on "
            f"{found.check['texts']} texts."
        )
    print(path)
    return 0

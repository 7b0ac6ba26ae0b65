"""`deepenough exit generate`: text, how deep each token went for it, and what that took."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, replace
from typing import Any, Literal

from rich.console import Console
from rich.table import Table

from deepenough.cli.exit.shading import legend, shaded
from deepenough.cli.parse import parse
from deepenough.errors import UserError


@dataclass
class ExitGenerateSettings:
    """Generate"""

    prompt: str | None = None
    """Text to go on from; by default standard input."""

    model: str = "smollm2"
    """smollm2, a folder, a run, or a name on the hub."""

    mode: Literal["full", "speculative", "exit"] = "speculative"
    """full and speculative give the tokens of the model itself; exit lets tokens leave early."""

    shortcuts: str | None = None
    """Folder of shortcuts, which leaving early needs."""

    carry: str | None = None
    """Folder of carry maps, for drafts."""

    tuned: str | None = None
    """Folder of deepenough exit tune, for drafts."""

    guarantee: str | None = None
    """Folder where deepenough exit calibrate has left a threshold; instead of the five
    options below."""

    policy: Literal["gap", "top", "entropy", "patience", "layer"] | None = None
    """When a token leaves: gap between the two best words (by default), probability of the best,
    entropy, exits in a row that agree, or a layer."""

    threshold: float | None = None
    """Confidence between 0 and 1; for patience the number of exits, for layer the layer."""

    mean_length: float | None = None
    """Tokens over which the policy gap grows less careful, 128 by default."""

    exits: list[int] | None = None
    """Layers after which a token may leave; by default those that pay."""

    fill: Literal["shortcut", "copy", "deferred"] | None = None
    """What later tokens find in skipped layers: predicted by shortcuts (by default), the state
    copied, or computed later."""

    shortlist: int | None = None
    """Test exits on so many words with the lowest ids first, before the whole vocabulary."""

    max_new_tokens: int = 128
    """Tokens to write at most."""

    chat: bool = False
    """Put the prompt into the model's chat template."""

    against_full: bool = False
    """Let the model's own generate() take turns on the same prompt, and compare."""

    rounds: int = 3
    """Turns of each in a comparison; medians are shown."""

    json: bool = False
    """Print one JSON object instead."""

    dtype: str = "float32"
    """Number format of the weights."""


def main(argv: list[str]) -> int:
    settings = parse(
        "exit generate",
        ExitGenerateSettings,
        argv,
        description="Continue a prompt; tokens are shaded by the layers that ran for them, and\n"
        "speed, layers and FLOPs are told.",
        example='deepenough exit generate "The capital of France is" --against-full',
        positional=["prompt"],
    )
    prompt = sys.stdin.read() if settings.prompt is None else settings.prompt
    from deepenough.decoding.generation import generate_told, prompt_ids
    from deepenough.hf.loading import load

    options = _options(settings)
    model, tokenizer = load(settings.model, "causal", settings.dtype)
    ids = prompt_ids(tokenizer, prompt, settings.chat)
    fast = _accelerated(model, settings, options)
    against = model if settings.against_full else None
    rounds = settings.rounds if settings.against_full else 1
    found = generate_told(fast, ids, settings.max_new_tokens, against, rounds)
    answer = _answer(found, tokenizer, ids, settings)
    if settings.json:
        print(json.dumps(answer))
    else:
        _show(answer, prompt)
    return 0


def _options(settings: ExitGenerateSettings) -> dict[str, Any]:
    """What `early_exit` is given beside model and shortcuts, checked before a model is loaded."""
    from deepenough.decoding.early_exit import ConfidenceGap, make_policy

    options: dict[str, Any] = {}
    leaving = ("guarantee", "policy", "threshold", "mean_length", "exits", "fill", "shortlist")
    for name in leaving:
        if settings.mode != "exit" and getattr(settings, name) is not None:
            raise UserError(f"{name} is of use in mode exit alone: give --mode exit, or leave it.")
    if settings.policy is not None or settings.threshold is not None:
        options["policy"] = make_policy(settings.policy or "gap", settings.threshold)
    if settings.mean_length is not None:
        policy = options.get("policy", make_policy("gap"))
        if not isinstance(policy, ConfidenceGap):
            raise UserError("mean_length is of use with the policy gap alone: leave it out.")
        options["policy"] = replace(policy, mean_length=settings.mean_length)
    given = {"exit_layers": settings.exits, "kv_propagation": settings.fill}
    given |= {"guarantee": settings.guarantee}
    options |= {name: value for name, value in given.items() if value is not None}
    return options


def _accelerated(model: Any, settings: ExitGenerateSettings, options: dict[str, Any]) -> Any:
    import torch

    from deepenough.decoding.api import early_exit, speculate
    from deepenough.decoding.drafters import LinearDrafter
    from deepenough.shortcut.modeling import Shortcuts

    shortcuts = Shortcuts.from_pretrained(settings.shortcuts) if settings.shortcuts else None
    if settings.mode == "exit":
        if shortcuts is None:
            raise UserError("Early exit needs shortcuts: give --shortcuts FOLDER.")
        if settings.shortlist is not None:
            size = model.config.get_text_config().vocab_size
            options["exit_vocab"] = torch.arange(min(settings.shortlist, size))
        return early_exit(model, shortcuts, **options)
    if settings.mode == "full":
        return speculate(model, "none")
    linear = LinearDrafter.from_pretrained(settings.carry) if settings.carry else None
    return speculate(model, draft_model=settings.tuned, linear_drafter=linear, shortcuts=shortcuts)


def _answer(found: Any, tokenizer: Any, ids: Any, settings: ExitGenerateSettings) -> dict[str, Any]:
    from deepenough.decoding.generation import pieces

    fast, full = found.fast, found.full
    texts = pieces(tokenizer, ids[0].tolist(), fast.ids)
    answer: dict[str, Any] = {
        "model": settings.model,
        "mode": settings.mode,
        "text": "".join(texts),
        "tokens": [
            {"id": token, "text": text, "depth": depth, "flops": flops}
            for token, text, depth, flops in zip(
                fast.ids, texts, fast.depths, fast.flops, strict=True
            )
        ],
        "layers": found.num_layers,
        "drafted": found.drafted,
        "accepted": found.accepted,
        "interrupted": fast.interrupted,
        **_spent(fast),
    }
    if full is not None:
        answer["full"] = {"text": tokenizer.decode(full.ids), **_spent(full)}
        answer |= {"times_full": found.ratio, "identical": found.identical}
    return answer


def _spent(told: Any) -> dict[str, Any]:
    return {
        "new_tokens": len(told.ids),
        "seconds": told.seconds,
        "tokens_per_second": told.tokens_per_second,
        "mean_layers": told.mean_layers,
        "flops": sum(told.flops),
    }


def _show(answer: dict[str, Any], prompt: str) -> None:
    console = Console(highlight=False)
    depths = [token["depth"] for token in answer["tokens"]]
    text = shaded([token["text"] for token in answer["tokens"]], depths, answer["layers"])
    console.print(prompt, end="", markup=False, soft_wrap=True)
    console.print(text, soft_wrap=True)
    if console.color_system is not None and not console.no_color:
        console.print(legend(depths, answer["layers"]))
    table = Table("", "tokens", "tokens/s", "layers", "GFLOPs", box=None)
    table.add_row(answer["mode"], *_cells(answer, answer["layers"]))
    if "full" in answer:
        table.add_row("model.generate", *_cells(answer["full"], answer["layers"]))
    console.print(table)
    if "full" in answer:
        same = "the same tokens" if answer["identical"] else "other tokens"
        console.print(f"{answer['times_full']:.2f} times as fast, {same}")
    if answer["drafted"]:
        console.print(f"{answer['accepted']} of {answer['drafted']} guesses confirmed")
    if answer["interrupted"]:
        console.print("interrupted: this is what there was")


def _cells(spent: dict[str, Any], layers: int) -> list[str]:
    return [
        str(spent["new_tokens"]),
        f"{spent['tokens_per_second']:.1f}",
        f"{spent['mean_layers']:.1f} of {layers}",
        f"{spent['flops'] / 1e9:.2f}",
    ]

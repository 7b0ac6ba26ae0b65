"""`deepenough decode`: generate faster, make a draft model, export it, calibrate early exit."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deepenough.config import Command
from deepenough.errors import UserError
from deepenough.measurement import median_interval, share_interval, shown

if TYPE_CHECKING:
    from rich.text import Text

    from deepenough.decoding.calibration import Calibration
    from deepenough.decoding.config import (
        BenchConfig,
        CalibrateConfig,
        DraftTrainConfig,
        ExportConfig,
        GenerateConfig,
    )
    from deepenough.decoding.evaluation import GenerationResult


# -- generate ------------------------------------------------------------------------------------

_TOLD = ("drafted", "accepted", "drafted_at", "accepted_at", "backend", "interrupted")


def generate(config: GenerateConfig) -> None:
    """Continue a prompt; print the text as it comes, or shaded by depth, and what it took."""
    prompt = sys.stdin.read() if config.prompt is None else config.prompt
    from transformers import TextStreamer

    from deepenough.decoding.evaluation import generate_timed, pieces, prompt_ids

    model, tokenizer, fast = _load(config)
    ids = prompt_ids(tokenizer, prompt, config.chat)
    against = model if config.against_full else None
    # Shades are known at the end, and with turns the text would come several times.
    streams = not (config.json or config.against_full or config.mode == "early_exit")
    streamer = None
    if streams:
        streamer = TextStreamer(tokenizer, skip_prompt=config.chat, skip_special_tokens=True)
    result, full = generate_timed(
        fast, ids, config.max_new_tokens, against, config.rounds if against else 1, streamer
    )
    texts = pieces(tokenizer, ids[0].tolist(), result.ids)
    depths, flops = result.trace.depth[0].tolist(), result.trace.flops[0].tolist()
    told = {name: getattr(result.output, name, None) for name in (*_TOLD, "from_draft")}
    drafted = told.pop("from_draft")
    drafts = [False] * len(texts) if drafted is None else drafted[0].tolist()
    rows = zip(result.ids, texts, depths, flops, drafts, strict=True)
    names = ("id", "text", "depth", "flops", "drafted")
    answer: dict[str, Any] = {
        "model": config.model.name,
        "mode": config.mode,
        "text": "".join(texts),
        "tokens": [dict(zip(names, row, strict=True)) for row in rows],
        "layers": fast.decoding_engine.num_layers,
        **told,
        **_spent(result),
    }
    if full is not None:
        answer["full"] = {"text": tokenizer.decode(full.ids), **_spent(full)}
        answer["identical"] = result.ids == full.ids
        answer |= _compared(result, full)
    if config.json:
        print(json.dumps(answer))
    else:
        _show(answer, "" if streams else prompt)


def _load(config: GenerateConfig) -> tuple[Any, Any, Any]:
    """Return a model, its tokenizer, and the model as it decodes by the mode asked for."""
    from deepenough.decoding.api import early_exit, speculate
    from deepenough.decoding.early_exit import ConfidenceGap, make_policy
    from deepenough.shortcut.modeling import Shortcuts

    names = ("policy", "threshold", "mean_length", "exit_layers", "kv_propagation", "exit_vocab")
    options = {name: getattr(config, name) for name in ("guarantee", *names)}
    options = {name: value for name, value in options.items() if value is not None}
    if options and config.mode != "early_exit":
        name = next(iter(options))
        raise UserError(f"{name} is an option of --mode early_exit: give that mode, or none.")
    if options.keys() & {"policy", "threshold", "mean_length"}:
        policy = make_policy(options.pop("policy", "gap"), options.pop("threshold", None))
        if "mean_length" in options:
            if not isinstance(policy, ConfidenceGap):
                raise UserError("mean_length is an option of the policy gap: leave it out.")
            policy = ConfidenceGap(policy.threshold, options.pop("mean_length"))
        options["policy"] = policy
    model, tokenizer = config.model.load()
    folder = config.shortcuts
    shortcuts = None if folder is None else Shortcuts.from_pretrained(folder)
    if config.mode == "full":
        fast = speculate(model, "none")
    elif config.mode == "speculative":
        fast = speculate(model, draft_model=config.draft_model, shortcuts=shortcuts)
    elif shortcuts is None:
        raise UserError("Early exit needs shortcuts: give the folder of the model's.")
    else:
        options["exit_vocab"] = _first_tokens(model, config.exit_vocab)
        fast = early_exit(model, shortcuts, **options)
    return model, tokenizer, fast


def _first_tokens(model: Any, number: int | None) -> Any:
    """Return the ids of the first tokens of a model's vocabulary; None for all of it."""
    import torch

    if number is None:
        return None
    return torch.arange(min(number, model.config.get_text_config().vocab_size))


def _compared(result: GenerationResult, full: GenerationResult) -> dict[str, Any]:
    """Return how much faster one was than the other, turn by turn."""
    pairs = zip(result.turns, full.turns, strict=False)  # Ctrl-C may have ended one earlier
    tokens = len(result.ids) / len(full.ids)
    found = median_interval([tokens * other / own for own, other in pairs])
    return {"speedup": found.value, "speedup_ends": found[1:], "turns": len(full.turns)}


def _speed(compared: dict[str, Any], what: str) -> str:
    """Return in one sentence whether something pays."""
    times = shown(compared["speedup"], compared["speedup_ends"])
    verdict = "" if compared["speedup"] > 1 else f": {what} does not pay here"
    return f"{times} times as fast in {compared['turns']} turns{verdict}"


def _spent(result: GenerationResult) -> dict[str, Any]:
    speed = result.tokens_per_second
    return {
        "new_tokens": len(result.ids),
        "seconds": len(result.ids) / speed.value,
        "tokens_per_second": speed.value,
        "tokens_per_second_ends": speed[1:],
        "mean_layers": result.mean_layers,
        "flops": result.trace.total_flops,
    }


def _show(answer: dict[str, Any], prompt: str) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    layers = answer["layers"]
    depths = [token["depth"] for token in answer["tokens"]]
    if prompt:
        console.print(prompt, end="", markup=False, soft_wrap=True)
        texts = [token["text"] for token in answer["tokens"]]
        console.print(shaded(texts, depths, layers), soft_wrap=True)
    if prompt and console.color_system is not None and not console.no_color:
        known = sorted(set(depths))
        console.print("layers: ", shaded([f" {depth} " for depth in known], known, layers))
    table = Table("", "tokens", "tokens/s", "layers", "GFLOPs", box=None)
    mode = f"{answer['mode']}, {answer['backend']} backend"
    for name, spent in ((mode, answer), ("model.generate", answer.get("full"))):
        if spent is not None:
            table.add_row(
                name,
                str(spent["new_tokens"]),
                shown(spent["tokens_per_second"], spent["tokens_per_second_ends"]),
                f"{spent['mean_layers']:.1f} of {layers}",
                f"{spent['flops'] / 1e9:.2f}",
            )
    console.print(table)
    if "full" in answer:
        same = "the same tokens" if answer["identical"] else "other tokens"
        console.print(f"{same}, {_speed(answer, answer['mode'])}", soft_wrap=True)
    if answer["drafted"]:
        console.print(f"{answer['accepted']} of {answer['drafted']} draft tokens accepted")
        pairs = zip(answer["accepted_at"], answer["drafted_at"], strict=True)
        console.print("by place in the draft: ", ", ".join(f"{a} of {b}" for a, b in pairs))
        drafted = [token["drafted"] for token in answer["tokens"]]
        size = -(-len(drafted) // 4)
        parts = [drafted[start : start + size] for start in range(0, len(drafted), size)]
        shares = ", ".join(f"{sum(part) / len(part):.0%}" for part in parts)
        console.print(f"tokens that were drafted, by quarter of the text: {shares}")
    if answer["interrupted"]:
        console.print("interrupted: this is what was generated so far")


def shade(depth: float, layers: int) -> str:
    """Return a rich style for a depth, darker if deeper; none for a depth that is not known."""
    from matplotlib import colormaps

    if depth < 1:
        return ""
    share = min((depth - 1) / max(layers - 1, 1), 1.0)
    red, green, blue, _ = colormaps["cividis"](1 - share, bytes=True)
    light = 0.299 * red + 0.587 * green + 0.114 * blue
    return f"{'black' if light > 120 else 'white'} on rgb({red},{green},{blue})"


def shaded(texts: Sequence[str], depths: Sequence[int], layers: int) -> Text:
    """Return texts in the shades of their depths; where there is no terminal it prints plain."""
    from rich.text import Text

    text = Text()
    for piece, depth in zip(texts, depths, strict=True):
        text.append(piece, style=shade(depth, layers))
    return text


# -- bench ---------------------------------------------------------------------------------------


def bench(config: BenchConfig) -> None:
    """Measure ways to generate with a model beside each other, print a table and a verdict."""
    from rich.console import Console
    from rich.table import Table

    from deepenough.decoding.bench import FILE, bench_run
    from deepenough.training.logging import reading

    with reading("prompts") as progress:
        found = bench_run(config, progress)
    if config.json:
        print(json.dumps(found))
        return
    table = Table("", "tokens/s", "x generate", "identical", "agreement", "MB", "load s", box=None)
    table.columns[0].no_wrap = True
    for name, row in found["ways"].items():
        rate, times = row["tokens_per_second"], row["times_generate"]
        table.add_row(
            name,
            shown(rate[0], rate[1:]),
            shown(times[0], times[1:]),
            f"{row['identical']} of {found['prompts']}",
            f"{row['agreement']:.1%}",
            f"{row['megabytes']:.0f}",
            f"{row['load_seconds']:.1f}",
        )
    console = Console(highlight=False)
    console.print(table)
    for name, reason in found["left_out"].items():
        console.print(f"not measured: {name} ({reason})", soft_wrap=True, markup=False)
    console.print(found["verdict"], soft_wrap=True)
    print(Path(config.out) / FILE)


# -- tune ----------------------------------------------------------------------------------------


def tune(config: DraftTrainConfig) -> None:
    """Make a draft model and print how often its drafts are right."""
    from deepenough.decoding.training import tune_run
    from deepenough.training.logging import reading

    with reading("tokens") as progress:
        made = tune_run(config, progress)
    print(f"on {made.meta['held_out_tokens']} held-out tokens, of three drafts a pass:")
    for name, values in (("at the start", made.meta["before"]), ("trained", made.meta["after"])):
        shares = "  ".join(f"{values[f'accepted_{place}']:.1%}" for place in (1, 2, 3))
        print(f"  {name:14}{values['accepted']:.2f} accepted; by position {shares}")
    print(f'use it: deepenough.speculate(model, draft_model="{config.out}")')


def _share(share: float, total: int) -> str:
    """Return a share of so many tokens or texts, with its interval."""
    found = share_interval(share * total, total)
    return shown(found.value, found[1:])


# -- export --------------------------------------------------------------------------------------


def export(config: ExportConfig) -> None:
    """Write a draft head in the form that an engine loads, and print how to start that."""
    from deepenough.decoding.draft_model import DraftModel
    from deepenough.decoding.export import export_head
    from deepenough.shortcut.config import PretrainedModelConfig

    draft_model = DraftModel.from_pretrained(config.run)
    tuned_for = draft_model.meta.get("settings", {}).get("model", {})
    name = config.model or tuned_for.get("name")
    if name is None:
        raise UserError(f"{config.run} does not say for which model it was tuned: give --model.")
    model, _ = PretrainedModelConfig(name, kind="causal").load()
    print(export_head(draft_model, model, config.to, Path(config.out), config.gguf))


# -- calibrate -----------------------------------------------------------------------------------


def calibrate(config: CalibrateConfig) -> None:
    """Find the fastest exit threshold whose risk is bounded, save it and print it."""
    import random

    import torch

    from deepenough.decoding.api import early_exit, speculate
    from deepenough.decoding.calibration import INDEX, calibrate
    from deepenough.decoding.early_exit import make_policy
    from deepenough.decoding.evaluation import generate_timed
    from deepenough.decoding.self_generated import prompts_from
    from deepenough.shortcut.modeling import Shortcuts
    from deepenough.training.logging import reading

    shortcuts = Shortcuts.from_pretrained(config.shortcuts)
    lines = config.dataset.read(config.data)
    random.Random(0).shuffle(lines)
    model, tokenizer = config.model.load()
    fast = early_exit(
        model,
        shortcuts,
        # Which exit saves most is decided at a threshold in the middle, before one is known.
        policy=make_policy(config.policy, 0.5),
        exit_layers=config.exit_layers,
        kv_propagation=config.kv_propagation,
        exit_vocab=_first_tokens(model, config.exit_vocab),
    )
    folder = config.out or config.shortcuts
    with reading("texts") as progress:
        found = calibrate(
            fast,
            tokenizer,
            lines[: config.texts],
            config.max_disagreement,
            config.confidence,
            prompt_tokens=config.prompt_tokens,
            new_tokens=config.new_tokens,
            progress=progress,
            resume=folder,
        )
    path = str(Path(folder) / INDEX)
    speed: dict[str, Any] = {}
    if found.threshold is not None:
        prompt = next(prompts_from(tokenizer, lines, config.prompt_tokens))
        timed, full = generate_timed(
            early_exit(model, shortcuts, guarantee=found),
            torch.tensor([prompt]),
            config.new_tokens,
            against=speculate(model, "none"),
            rounds=3,
        )
        speed = {} if full is None else _compared(timed, full)
    if config.json:
        print(json.dumps({**vars(found), "exit_vocab": config.exit_vocab, "file": path, **speed}))
        return
    _show_calibration(found, shortcuts.num_layers)
    if speed:
        print(f"{_speed(speed, 'early exit')} (against all layers in the same loop, one text)")
    print(path)


def _show_calibration(found: Calibration, num_layers: int) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("threshold", "disagreement", "p-value", box=None)
    for threshold, risk, p_value in zip(found.thresholds, found.risks, found.p_values, strict=True):
        table.add_row(f"{threshold:g}", _share(risk, found.texts), f"{p_value:.2g}")
    Console(highlight=False).print(table)
    print(found.verdict())
    if found.layers is not None:
        layers = ", ".join(map(str, found.exit_layers))
        print(f"{found.layers:.1f} of {num_layers} layers a token, exits after layers {layers}")


COMMANDS = (
    Command(
        name="generate",
        help="generate with drafts or early exit, tokens shaded by depth",
        config="deepenough.decoding.config:GenerateConfig",
        run=generate,
        description="Continue a prompt. Tokens are shaded by the layers that ran for them; speed,\n"
        "layers and FLOPs are printed.",
        example='deepenough decode generate smollm2 --prompt "The capital of France is" \\\n'
        "    --against-full",
        positional=("model.name",),
    ),
    Command(
        name="tune",
        help="make a draft model, trained on what the model writes itself",
        config="deepenough.decoding.config:DraftTrainConfig",
        run=tune,
        description="Make a draft model: let the model write, and learn to guess what it will\n"
        "write next. The model itself is not changed.",
        example="deepenough decode tune smollm2 --data mytext.txt --out runs/draft_model",
        positional=("model.name",),
    ),
    Command(
        name="export",
        help="write a draft model's head for vLLM, SGLang or llama.cpp",
        config="deepenough.decoding.config:ExportConfig",
        run=export,
        description="Write the head of a draft model in the form that an inference engine loads,\n"
        "and print what to give to that engine.",
        example="deepenough decode export runs/draft_model --to vllm --out heads/vllm",
        positional=("run",),
    ),
    Command(
        name="bench",
        help="time ways to generate with a model beside each other",
        config="deepenough.decoding.config:BenchConfig",
        run=bench,
        description="Time transformers' generate, all backends and drafters, and other engines\n"
        "that are installed (llama.cpp, ctranslate2), on the same prompts in turns.",
        example="deepenough decode bench smollm2 --prompts 8 --max_new_tokens 128",
        positional=("model.name",),
    ),
    Command(
        name="calibrate",
        help="find the fastest exit threshold whose disagreement is bounded",
        config="deepenough.decoding.config:CalibrateConfig",
        run=calibrate,
        description="Find the fastest exit threshold whose disagreement with the full model is\n"
        "bounded with the confidence asked for, on texts that the model writes itself.",
        goes_on=True,
        example="deepenough decode calibrate smollm2 --shortcuts runs/shortcut/shortcuts \\\n"
        "    --data mytext.txt",
        positional=("model.name",),
    ),
)

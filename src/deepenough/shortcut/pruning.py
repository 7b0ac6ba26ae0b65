"""Prune a pretrained model in minutes: keep a part of a block, make it linear, or leave it out.

`prune` fits maps (`replaceable.py`), finds what parts cost (`pruning_costs.py`), searches for the
choice that changes the output least (`pruning_search.py`), fits again in order (`refitting.py`) and
builds the model (`pruned_model.py`). `compare_outputs` says what it is worth on other text.
"""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from deepenough.artifacts import DamagedError, load_tensors, read_json, save_tensors, write_json
from deepenough.config import validate
from deepenough.devices import exact
from deepenough.errors import UserError
from deepenough.shortcut.config import PruneConfig
from deepenough.shortcut.normal_equations import AffineMap
from deepenough.shortcut.pruned_model import PrunedConfig, PrunedPart, make_pruned
from deepenough.shortcut.pruning_costs import Costs, find_costs, token_seconds
from deepenough.shortcut.pruning_search import GreedySearch, drop
from deepenough.shortcut.reading import batches, make_reading
from deepenough.shortcut.refitting import SequentialFit, parameters_of
from deepenough.shortcut.replaceable import (
    PARTS,
    Block,
    Choice,
    ReplaceableModel,
    last_product,
    prunable,
    run_rows,
    window,
)
from deepenough.shortcut.submodules import Place
from deepenough.training.logging import reading

_FIRST_FIT = 3
"""One in so many batches of text serves for the first fit."""


def build(whole: ReplaceableModel, choice: Choice, report: Mapping[str, Any]) -> PreTrainedModel:
    """Return the model that a choice makes; it shares no weight with the full one."""
    adapter, model = whole.adapter, whole.adapter.model
    names = {module: name for name, module in model.named_modules()}
    layers = names[adapter.layers[0]].rpartition(".")[0]
    kept = [layer for layer in range(adapter.num_layers) if not choice.is_dropped(layer)]
    forms = whole.replacement.forms
    parts: dict[PrunedPart, tuple[Tensor, Tensor] | None] = {}

    def add(
        chain: Sequence[nn.Module], layer: int, found: AffineMap | None, is_layer: bool
    ) -> None:
        old, new = f"{layers}.{layer}", f"{layers}.{kept.index(layer)}"
        first, last = (f"{new}{names[end].removeprefix(old)}" for end in (chain[0], chain[-1]))
        returned = forms.form(chain[0]), forms.form(chain[-1])
        part = PrunedPart(first, last, found is not None, *returned, is_layer=is_layer)
        parts[part] = None
        if found is not None and found.bias is not None:
            parts[part] = found.weight, found.bias

    for place, mode in choice.parts.items():
        if place[1] in kept:
            found = whole.maps[place] if mode == "linear" else None
            add(whole.chains[place], place[1], found, False)
    for run in choice.runs:
        add([adapter.layers[run.first]], run.first, whole.maps[run], True)
    changed: dict[str, Tensor] = {}
    for place, found in whole.corrected.items():
        product = last_product(whole.chains[place])
        assert product is not None
        own = parameters_of(product, found)
        changed |= {f"{names[product]}.{name}": tensor for name, tensor in own.items()}
    return make_pruned(model, kept, layers, parts, report, changed)


def describe(choice: Choice, num_layers: int) -> list[list[str]]:
    """Return what becomes of attention and feed-forward of every layer, in words."""
    rows = []
    for layer in range(num_layers):
        run = next((run for run in choice.runs if run.first <= layer < run.end), None)
        if run is not None:
            word = "one map" if layer == run.first else "in the map"
            rows.append([word, word])
        else:
            rows.append([choice.parts.get((kind, layer, 0), "kept") for kind in PARTS])
    return rows


class PruneCheckpoint:
    """Maps, what single replacements do, and the choice so far, for a search that is interrupted.

    Maps and single replacements serve any budget, the choice one alone.
    """

    def __init__(
        self, folder: Path, whole: ReplaceableModel, config: PruneConfig, every: int
    ) -> None:
        self.maps, self.state = folder / "maps.safetensors", folder / "search.json"
        texts = hashlib.sha256()
        for batch in (*whole.fitted, *whole.held_out):
            texts.update(batch.ids.numpy().tobytes())
        about: dict[str, Any] = {"model": whole.adapter.identity(with_head=True), "every": every}
        about["texts"] = texts.hexdigest()
        self.about = json.dumps(about, sort_keys=True)
        self.config = json.dumps(asdict(config), sort_keys=True)

    def load(self, whole: ReplaceableModel) -> Choice | None:
        """Fill in what there is and return the choice so far, if any."""
        try:
            tensors, header = load_tensors(self.maps)
        except (DamagedError, OSError):
            return None
        if header.get("about") != self.about:
            return None
        for name in (name for name in tensors if name.startswith("A.")):
            bias = tensors[f"b.{name[2:]}"]
            whole.maps[_key(name[2:])] = whole.as_model(AffineMap(tensors[name], bias))
        try:
            saved = read_json(self.state)
        except (UserError, OSError):
            return None
        whole.singles = {(_key(name), mode): kl for name, mode, kl in saved["singles"]}
        if saved["config"] != self.config:
            return None
        parts = {(kind, layer, 0): mode for kind, layer, mode in saved["parts"]}
        return Choice(parts, tuple(Block(*run) for run in saved["runs"]))

    def save_maps(self, whole: ReplaceableModel) -> None:
        """Write all maps."""
        self.maps.parent.mkdir(parents=True, exist_ok=True)
        self.state.unlink(missing_ok=True)
        tensors: dict[str, Tensor] = {}
        for key, found in whole.maps.items():
            assert found.bias is not None
            tensors |= {f"A.{_name(key)}": found.weight, f"b.{_name(key)}": found.bias}
        save_tensors(self.maps, tensors, {"about": self.about})

    def save_choice(self, whole: ReplaceableModel, choice: Choice) -> None:
        """Write the choice so far."""
        parts = [[kind, layer, mode] for (kind, layer, _), mode in choice.parts.items()]
        runs = [list(run) for run in choice.runs]
        singles = [[_name(key), mode, kl] for (key, mode), kl in whole.singles.items()]
        found = {"config": self.config, "parts": parts, "runs": runs, "singles": singles}
        write_json(self.state, found)


def _name(key: Place | Block) -> str:
    return ".".join(map(str, key))


def _key(name: str) -> Place | Block:
    words = name.split(".")
    if len(words) == 2:
        return Block(int(words[0]), int(words[1]))
    return words[0], int(words[1]), int(words[2])


def prune(
    model: PreTrainedModel,
    tokenizer: Any,
    texts: Iterable[str],
    keep: float | None = None,
    config: PruneConfig | None = None,
    *,
    folder: Path | None = None,
    **changes: Any,
) -> PreTrainedModel:
    """Return a smaller model, whose layers cost `keep` of what those of `model` do.

    Args:
        model: A model of transformers with a head for causal or masked tokens, or for classes.
        tokenizer: The model's.
        texts: Text like that which the model will be used on; a part of it is held out.
        keep: Share of the cost of the layers to keep, 0.8 by default; with 1 nothing is changed.
        config: Further options.
        folder: Where to go on from, if interrupted; by default nothing is kept.
        changes: Fields of `PruneConfig` that differ from those of `config`.
    """
    config = replace(config or PruneConfig(), **changes)
    config = validate(config if keep is None else replace(config, keep=keep))
    if config.keep == 1:
        num_layers = prunable(model).num_layers
        layers = describe(Choice(), num_layers)
        same = {**asdict(config), "share": 1.0, "kl": 0.0, "layers": layers, "history": []}
        return make_pruned(model, range(num_layers), "", {}, same)
    started, clock = time.perf_counter(), {}
    whole = ReplaceableModel(model, tokenizer, texts, config.fit_tokens, config.choose_tokens)
    history: list[dict[str, float]] = []
    costs = find_costs(whole, config.budget)
    budget = config.keep * costs.of(Choice())
    if config.method == "replace":
        num_fitted = sum(int(batch.mask.sum()) for batch in whole.fitted)
        every = 1  # maps that are fitted again need less text at first
        if config.refit:
            every = max(1, min(_FIRST_FIT, num_fitted // (8 * whole.adapter.width)))
        checkpoint = PruneCheckpoint(folder, whole, config, every) if folder is not None else None
        start = _fit_or_load(whole, checkpoint, every)
        clock["fit"] = time.perf_counter() - started
        choice = _choose(whole, costs, config, checkpoint, start, history)
        clock["choose"] = time.perf_counter() - started
        if config.refit:
            with reading("layers", "fitting again") as show:
                SequentialFit(whole, choice, config.correct).run(show)
            clock["refit"] = time.perf_counter() - started
    else:
        choice = drop(whole, costs, budget, config.method)
    report: dict[str, Any] = {
        **asdict(config),
        "share": costs.of(choice) / costs.of(Choice()),
        "kl": whole.divergence(choice),
        "layers": describe(choice, whole.adapter.num_layers),
        "corrected": sorted([kind, layer] for kind, layer, _ in whole.corrected),
        "left": costs.left(choice),
        "history": history,
        "evaluations": round(whole.read / sum(int(b.mask.sum()) for b in whole.held_out), 1),
        "seconds": time.perf_counter() - started,
        "stages": clock,
        "model": whole.adapter.identity(with_head=True),
    }
    pruned = build(whole, choice, report)
    both = {"full": model, "pruned": pruned}
    seconds = token_seconds({n: (each, nullcontext) for n, each in both.items()}, whole.held_out)
    report_of(pruned)["token_seconds"] = seconds
    if config.budget == "time":
        # Of what the layers took, the share that is left by the times of whole tokens.
        gone = (seconds["full"] - seconds["pruned"]) / costs.of(Choice())
        report_of(pruned)["measured_share"] = 1 - gone
    return pruned


def _fit_or_load(
    whole: ReplaceableModel, checkpoint: PruneCheckpoint | None, every: int
) -> Choice | None:
    """Fit all maps, or read what was fitted before; return the choice that was reached then."""
    start = checkpoint.load(whole) if checkpoint else None
    if not whole.maps:
        with reading("batches", "fitting maps") as show:
            whole.fit(show, every)
        if checkpoint:
            checkpoint.save_maps(whole)
    return start


def _choose(
    whole: ReplaceableModel,
    costs: Costs,
    config: PruneConfig,
    checkpoint: PruneCheckpoint | None,
    start: Choice | None,
    history: list[dict[str, float]],
) -> Choice:
    """Search for what to replace, with progress; `history` gets the cost and KL of every step."""
    full = costs.of(Choice())
    with reading("% of the saving", "choosing") as show:

        def step(choice: Choice, kl: float) -> None:
            share = costs.of(choice) / full
            history.append({"share": share, "kl": kl})
            done = min(100, round(100 * (1 - share) / (1 - config.keep)))
            show(done, 100, f"{share:.2f} of the cost at KL {kl:.3f}")
            if checkpoint:
                checkpoint.save_choice(whole, choice)

        return GreedySearch(whole, costs, config.keep * full, start, step).run()


def report_of(pruned: PreTrainedModel) -> dict[str, Any]:
    """Return how a model was pruned."""
    own: dict[str, Any] = (
        pruned.config.report
        if isinstance(pruned.config, PrunedConfig)
        else pruned.config.deepenough_pruned
    )
    return own


def model_card(pruned: PreTrainedModel, full_name: str, command: str) -> str:
    """Return the README of a pruned model: how it was made, what is left, what that costs."""
    report = report_of(pruned)
    letters = {"kept": "#", "linear": "L", "removed": ".", "one map": "M", "in the map": "m"}
    lines = [
        f"# {full_name}, pruned",
        f"The layers cost {report['share']:.3f} of what those of {full_name} do "
        f"({report['budget']}). Made with:",
        f"```bash\n{command}\n```",
        "Load it with `deepenough.load(folder)`, or with the `Auto` class of its task after "
        "`import deepenough.shortcut.pruned_model`, which makes it known to transformers."
        if isinstance(pruned.config, PrunedConfig)
        else "It is an ordinary model of its class and needs no deepenough.",
        "## What is left",
        "One letter a layer: kept (#), a linear map (L), removed (.), one map (M) for a run of "
        "layers (m).",
    ]
    rows = zip(("attention", "feed-forward"), zip(*report["layers"], strict=True), strict=True)
    drawn = [f"{name:13}{''.join(letters[word] for word in row)}" for name, row in rows]
    lines.append("\n".join(["```text", *drawn, "```"]))
    if scores := report.get("scores"):
        lines += ["## Quality", "On text that it was not fitted to, beside the full model:"]
        names = ("kl", "agreement", "perplexity", "full_perplexity", "tokens")
        cells = [
            f"| {name.replace('_', ' ')} | {scores[name]:.4g} |" for name in names if name in scores
        ]
        lines.append("\n".join(["| measure | value |", "|---|---|", *cells]))
    if report["history"]:
        lines += [
            "## Quality against size",
            "KL (nats) on held-out text as more was replaced, before maps were fitted again; now "
            f"it is {report['kl']:.3f}.",
        ]
        cells = [f"| {point['share']:.3f} | {point['kl']:.3f} |" for point in report["history"]]
        lines.append("\n".join(["| share of the cost | KL |", "|---|---|", *cells]))
    return "\n\n".join(lines) + "\n"


def compare_outputs(
    model: PreTrainedModel, pruned: PreTrainedModel, tokenizer: Any, texts: Iterable[str]
) -> dict[str, float]:
    """Return how a pruned model does on a text, beside the full one.

    KL in nats, the share of equal first choices, and, for models of tokens, both perplexities.
    """
    return compare_all(model, {"pruned": pruned}, tokenizer, texts)["pruned"]


@torch.no_grad()
def compare_all(
    model: PreTrainedModel,
    pruned: Mapping[str, PreTrainedModel],
    tokenizer: Any,
    texts: Iterable[str],
) -> dict[str, dict[str, float]]:
    """Return what `compare_outputs` does, of several pruned models."""
    adapter = prunable(model)
    sums = {name: dict.fromkeys(("kl", "agreement", "loss"), 0.0) for name in pruned}
    count, known, full_loss = 0, 0, 0.0
    for batch in batches(tokenizer, texts, make_reading(adapter, "all", 0, 512, window(adapter))):
        ids, mask = batch.inputs(adapter)
        expected = run_rows(model, ids, mask, batch).float().log_softmax(-1)
        probabilities, first = expected.exp(), expected.argmax(-1)
        targets = batch.targets().to(first.device)
        if adapter.kind == "encoder":
            targets = torch.full_like(first, -1)
        at = targets >= 0
        rows = targets[at][:, None]
        count, known = count + len(first), known + int(at.sum())
        full_loss -= float(exact(expected[at].gather(1, rows)).sum())
        for name, each in pruned.items():
            own = run_rows(each, ids, mask, batch).float().log_softmax(-1)
            values = {
                "kl": (probabilities * (expected - own)).sum(-1),
                "agreement": (first == own.argmax(-1)).float(),
                "loss": -own[at].gather(1, rows),
            }
            for value, tensor in values.items():
                sums[name][value] += float(exact(tensor).sum())
    found = {}
    for name, own_sums in sums.items():
        scores = {value: own_sums[value] / max(1, count) for value in ("kl", "agreement")}
        if known:
            scores["perplexity"] = math.exp(own_sums["loss"] / known)
            scores["full_perplexity"] = math.exp(full_loss / known)
        found[name] = scores | {"tokens": float(count)}
    return found

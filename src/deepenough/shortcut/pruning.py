"""Prune a pretrained model in minutes: keep a part of a block, make it linear, or leave it out.

What is chosen is decided by what it does to the output. With `p` the output distribution of the
full model and `q` that of a pruned one, each on held-out text, a step of the greedy search takes
the replacement with the smallest

    increase of KL(p || q) / cost that it saves

until the layers cost no more than the budget. The cost of a part is its measured time when one
token is decoded, its weights, or its FLOPs. Increases mostly grow as more is replaced, so an old
one is a lower bound, and only replacements that look best are measured again (lazy greedy).
Parts without which little works, such as those that make massive activations, are never chosen:
they are measured, and their KL is large.
"""

from __future__ import annotations

import hashlib
import heapq
import json
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from deepenough.artifacts import DamagedError, load_tensors, read_json, save_tensors, write_json
from deepenough.config import validate
from deepenough.errors import UserError
from deepenough.hf.adapter import kind_of
from deepenough.hf.intercept import eval_mode
from deepenough.shortcut.config import PruneConfig
from deepenough.shortcut.pruned_model import PrunedConfig, PrunedPart, make_pruned
from deepenough.shortcut.reading import TokenBatch, batches, make_reading
from deepenough.shortcut.replaceable import (
    PARTS,
    Block,
    Choice,
    Mode,
    ReplaceableModel,
    first_of_each_kind,
    prunable,
    run_rows,
    unchanged,
    window,
)
from deepenough.shortcut.statistics import AffineMap
from deepenough.shortcut.submodules import Function, Place
from deepenough.training.logging import reading

_SCREENED = 768
"""Tokens on which replacements are first tried one by one."""
_DECODED = 64
"""Length of the text after which the time of one more token is measured."""


@dataclass(frozen=True)
class Costs:
    """What the layers cost, in the unit of the budget."""

    parts: Mapping[Place, float]
    linear: float
    """A linear map in the place of a part."""
    rest: Sequence[float]
    """What a layer costs beside its two parts."""

    def of(self, choice: Choice) -> float:
        """Return the cost of all layers."""
        cost = self.linear * len(choice.runs)
        for layer, rest in enumerate(self.rest):
            if not choice.in_run(layer) and not choice.is_dropped(layer):
                cost += rest + sum(self._part(choice, (kind, layer, 0)) for kind in PARTS)
        return cost

    def _part(self, choice: Choice, place: Place) -> float:
        mode = choice.parts.get(place)
        return {"linear": self.linear, "removed": 0.0}.get(mode or "", self.parts[place])

    def left(self, choice: Choice) -> list[list[float]]:
        """Return what every layer's attention and feed-forward cost, as shares of what they did."""
        rows = []
        for layer in range(len(self.rest)):
            places = [(kind, layer, 0) for kind in PARTS]
            if choice.in_run(layer):
                run = next(run for run in choice.runs if run.first <= layer < run.end)
                before = sum(self.parts[p] for p in self.parts if run.first <= p[1] < run.end)
                rows.append([self.linear / max(before, 1e-30)] * 2)
            else:
                rows.append([self._part(choice, p) / max(self.parts[p], 1e-30) for p in places])
        return rows


def moves(whole: ReplaceableModel, choice: Choice) -> Iterator[tuple[Choice, int]]:
    """Yield the choices that are one replacement further, and the layer where they begin."""
    protected = first_of_each_kind(whole.adapter)
    for place in whole.chains:
        kind, layer, _ = place
        if kind not in PARTS or choice.in_run(layer):
            continue
        if kind == "attention" and layer in protected:
            continue
        modes: tuple[Mode, ...] = ("linear", "removed")
        for mode in modes:
            if place in whole.maps and choice.parts.get(place) not in (mode, "removed"):
                yield choice.with_part(place, mode), layer
    for run in whole.maps:
        if not isinstance(run, Block) or any(map(choice.in_run, range(*run))):
            continue
        if protected.isdisjoint(range(*run)):
            yield choice.with_run(run), run.first


def choose(
    whole: ReplaceableModel,
    costs: Costs,
    budget: float,
    start: Choice | None = None,
    progress: Callable[[Choice, float], None] | None = None,
) -> Choice:
    """Return the choice that the greedy search ends with, at most `budget` in cost."""
    current = start or Choice()
    whole.settle(current)
    reached = whole.divergence(current) if start else 0.0
    cost = costs.of(current)
    # Estimates of single replacements, by what they replace, which is all that identifies them.
    estimates: dict[Any, float] = {}
    while cost > budget:
        queue = []
        for order, (choice, layer) in enumerate(moves(whole, current)):
            saved = min(cost - costs.of(choice), cost - budget)  # no more counts
            if saved <= 0:
                continue
            key = _difference(current, choice)
            if key not in estimates:
                estimates[key] = whole.divergence(choice, layer, _SCREENED) - reached
            queue.append((estimates[key] / saved, order, key, choice, layer, saved))
        if not queue:
            raise UserError(
                f"The layers cannot cost less than {cost / costs.of(Choice()):.2f} of what "
                "they do: ask to keep more."
            )
        heapq.heapify(queue)
        fresh: set[Any] = set()
        while queue[0][2] not in fresh:
            _, order, key, choice, layer, saved = queue[0]
            estimates[key] = whole.divergence(choice, layer) - reached
            fresh.add(key)
            heapq.heapreplace(queue, (estimates[key] / saved, order, key, choice, layer, saved))
        _, _, key, current, _, _ = queue[0]
        reached += estimates.pop(key)
        cost = costs.of(current)
        whole.settle(current)
        if progress is not None:
            progress(current, reached)
    return current


def _difference(before: Choice, after: Choice) -> Any:
    """Return what identifies a replacement."""
    if len(after.runs) > len(before.runs):
        return after.runs[-1]
    changed = [p for p, mode in after.parts.items() if before.parts.get(p) != mode]
    return changed[0], after.parts[changed[0]]


# -- what parts cost -----------------------------------------------------------------------------


def find_costs(whole: ReplaceableModel, budget: str) -> Costs:
    """Return what the parts of the layers cost: measured time, weights, or FLOPs of a token."""
    adapter = whole.adapter
    chains = {place: chain for place, chain in whole.chains.items() if place[0] in PARTS}
    weights = {place: float(_num_weights(chain)) for place, chain in chains.items()}
    linear = float(adapter.width * (adapter.width + 1))
    num_layers = adapter.num_layers
    if budget == "weights":
        rest = [
            _num_weights([layer]) - sum(weights[kind, number, 0] for kind in PARTS)
            for number, layer in enumerate(adapter.layers)
        ]
        return Costs(weights, linear, rest)
    if budget == "flops":
        attended = 4.0 * _DECODED * adapter.width
        flops = {p: 2 * num + attended * (p[0] == "attention") for p, num in weights.items()}
        return Costs(flops, 2 * linear, [0.0] * num_layers)
    places = {kind: [(kind, layer, 0) for layer in range(1, num_layers)] for kind in PARTS}
    variants: dict[str, tuple[dict[Place, Function], dict[int, Function]]] = {"full": ({}, {})}
    for kind, own in places.items():
        variants[f"{kind} linear"] = {place: whole.maps[place] for place in own}, {}
        variants[f"{kind} removed"] = dict.fromkeys(own, torch.zeros_like), {}
    both = [place for own in places.values() for place in own]
    variants["both removed"] = dict.fromkeys(both, torch.zeros_like), {}
    variants["no layers"] = {}, dict.fromkeys(range(1, num_layers), unchanged)
    model, replacement = adapter.model, whole.replacement
    seconds = token_seconds(
        {name: (model, partial(replacement.placed, *own)) for name, own in variants.items()},
        whole.held_out,
    )
    times: dict[Place, float] = {}
    for kind, own in places.items():
        # Parts of one kind share the time of all of them by their weights.
        total = sum(weights[place] for place in own)
        saved = max(0.0, seconds["full"] - seconds[f"{kind} removed"])
        times |= {p: saved * num / total for p, num in weights.items() if p[0] == kind}
    maps = [seconds[f"{kind} linear"] - seconds[f"{kind} removed"] for kind in PARTS]
    beside = max(0.0, seconds["both removed"] - seconds["no layers"]) / (num_layers - 1)
    return Costs(times, max(0.0, sum(maps) / (2 * (num_layers - 1))), [beside] * num_layers)


@torch.no_grad()
def token_seconds(
    variants: Mapping[str, tuple[Any, Callable[[], AbstractContextManager[None]]]],
    texts: Sequence[TokenBatch],
    rounds: int = 5,
    steps: int = 6,
) -> dict[str, float]:
    """Return the seconds of one more token after a text, by variant: the best of several rounds.

    A variant is a model and what it runs in. Models that do not decode read a batch of texts.
    """
    longest = min(
        getattr(model.config.get_text_config(), "max_position_embeddings", None) or _DECODED + steps
        for model, _ in variants.values()
    )
    length = max(1, min(_DECODED, longest - steps))
    ids = torch.cat([batch.ids.flatten() for batch in texts])[None, :length]
    found = dict.fromkeys(variants, float("inf"))
    for _ in range(rounds):
        for name, (model, context) in variants.items():
            with eval_mode(model), context():
                own: dict[str, Any] = {"input_ids": texts[0].ids, "attention_mask": texts[0].mask}
                if kind_of(model) == "causal":
                    cache = model(input_ids=ids.to(model.device), use_cache=True).past_key_values
                    own = {"input_ids": ids[:, -1:], "past_key_values": cache}
                for tensor in ("input_ids", "attention_mask"):
                    own |= {tensor: own[tensor].to(model.device)} if tensor in own else {}
                for _ in range(steps):
                    started = time.perf_counter()
                    model(**own)
                    found[name] = min(found[name], time.perf_counter() - started)
    return found


def _num_weights(modules: Iterable[nn.Module]) -> int:
    return sum(weight.numel() for module in modules for weight in module.parameters())


# -- the result ----------------------------------------------------------------------------------


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
    return make_pruned(model, kept, layers, parts, report)


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


@torch.no_grad()
def drop(whole: ReplaceableModel, costs: Costs, budget: float, method: str) -> Choice:
    """Return the choice of whole layers to remove, as others do it.

    "influence" removes the layers that change the direction of states least, one by one (ShortGPT,
    arXiv 2403.03853); "contiguous" the run of layers whose ends lie closest by angle (arXiv
    2403.17887).
    """
    states = whole.usual_states()
    num_layers = whole.adapter.num_layers
    protected = first_of_each_kind(whole.adapter)
    free = [layer for layer in range(num_layers) if layer not in protected]

    def distance(first: int, end: int) -> float:
        cosine = nn.functional.cosine_similarity(states[first], states[end], dim=-1)
        return float(cosine.clamp(-1, 1).acos().mean())

    def removed(layers: Iterable[int]) -> Choice:
        places = [(kind, layer, 0) for layer in layers for kind in PARTS]
        return Choice(dict.fromkeys(places, "removed"))

    by_influence = sorted(free, key=lambda layer: distance(layer, layer + 1))
    for count in range(len(free) + 1):
        if method == "influence":
            found = removed(by_influence[:count])
        else:
            firsts = [
                i
                for i in range(num_layers - count + 1)
                if protected.isdisjoint(range(i, i + count))
            ]
            best = min(firsts, key=lambda i: distance(i, i + count)) if count else 0
            found = removed(range(best, best + count))
        if costs.of(found) <= budget:
            return found
    raise UserError(
        f"The layers cannot cost less than {costs.of(found) / costs.of(Choice()):.2f} of what they "
        "do: ask to keep more."
    )


class PruneCheckpoint:
    """The maps and the choice so far, in a folder, for a search that was interrupted."""

    def __init__(self, folder: Path, about: Mapping[str, Any]) -> None:
        self.maps, self.choice = folder / "maps.safetensors", folder / "choice.json"
        self.about = json.dumps(about, sort_keys=True)

    def load(self, whole: ReplaceableModel) -> Choice | None:
        """Fill in the maps and return the choice so far; None where there is nothing of use."""
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
            saved = read_json(self.choice)
        except (UserError, OSError):
            return Choice()
        parts = {(kind, layer, 0): mode for kind, layer, mode in saved["parts"]}
        return Choice(parts, tuple(Block(*run) for run in saved["runs"]))

    def save_maps(self, whole: ReplaceableModel) -> None:
        """Write all maps."""
        self.maps.parent.mkdir(parents=True, exist_ok=True)
        self.choice.unlink(missing_ok=True)
        tensors: dict[str, Tensor] = {}
        for key, found in whole.maps.items():
            assert found.bias is not None
            name = ".".join(map(str, key))
            tensors |= {f"A.{name}": found.weight, f"b.{name}": found.bias}
        save_tensors(self.maps, tensors, {"about": self.about})

    def save_choice(self, choice: Choice) -> None:
        """Write the choice so far."""
        parts = [[kind, layer, mode] for (kind, layer, _), mode in choice.parts.items()]
        write_json(self.choice, {"parts": parts, "runs": [list(run) for run in choice.runs]})


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
        prunable(model)
        return make_pruned(model, range(model.config.num_hidden_layers), "", {}, {"keep": 1.0})
    started = time.perf_counter()
    whole = ReplaceableModel(model, tokenizer, texts, config.fit_tokens, config.choose_tokens)
    identity = whole.adapter.identity(with_head=True)
    checkpoint = None
    if folder is not None:
        texts_read = hashlib.sha256()
        for batch in (*whole.fitted, *whole.held_out):
            texts_read.update(batch.ids.numpy().tobytes())
        digest = texts_read.hexdigest()
        about = {"model": identity, "config": asdict(config), "texts": digest}
        checkpoint = PruneCheckpoint(folder, about)
    start = checkpoint.load(whole) if checkpoint else None
    if start is None:
        with reading("batches", "fitting maps") as show:
            whole.fit(show)
        if checkpoint:
            checkpoint.save_maps(whole)
    costs = find_costs(whole, config.budget)
    full = costs.of(Choice())
    budget = config.keep * full
    history: list[dict[str, float]] = []
    if config.method == "replace":
        with reading("% of the saving", "choosing") as show:

            def step(choice: Choice, kl: float) -> None:
                share = costs.of(choice) / full
                history.append({"share": share, "kl": kl})
                done = min(100, round(100 * (1 - share) / (1 - config.keep)))
                show(done, 100, f"{share:.2f} of the cost at KL {kl:.3f}")
                if checkpoint:
                    checkpoint.save_choice(choice)

            choice = choose(whole, costs, budget, start, step)
        if config.refit:
            with reading("layers", "fitting again") as show:
                whole.refit(choice, show)
    else:
        choice = drop(whole, costs, budget, config.method)
    kl, share = whole.divergence(choice), costs.of(choice) / full
    report: dict[str, Any] = {
        **asdict(config),
        "share": share,
        "kl": kl,
        "layers": describe(choice, whole.adapter.num_layers),
        "left": costs.left(choice),
        "history": history,
        "evaluations": whole.evaluations,
        "seconds": time.perf_counter() - started,
        "model": identity,
    }
    pruned = build(whole, choice, report)
    both = {"full": model, "pruned": pruned}
    seconds = token_seconds({n: (each, nullcontext) for n, each in both.items()}, whole.held_out)
    report_of(pruned)["token_seconds"] = seconds
    return pruned


def report_of(pruned: PreTrainedModel) -> dict[str, Any]:
    """Return how a model was pruned."""
    own: dict[str, Any] = (
        pruned.config.report
        if isinstance(pruned.config, PrunedConfig)
        else pruned.config.deepenough_pruned
    )
    return own


@torch.no_grad()
def compare_outputs(
    model: PreTrainedModel, pruned: PreTrainedModel, tokenizer: Any, texts: Iterable[str]
) -> dict[str, float]:
    """Return how a pruned model does on a text, beside the full one.

    KL in nats, the share of equal first choices, and, for models of tokens, both perplexities.
    """
    adapter = prunable(model)
    sums: dict[str, float] = {}
    count = known = 0
    for batch in batches(tokenizer, texts, make_reading(adapter, "all", 0, 512, window(adapter))):
        ids, mask = batch.inputs(adapter)
        found = [run_rows(each, ids, mask, batch) for each in (model, pruned)]
        expected, own = (each.float().log_softmax(-1) for each in found)
        values = {
            "kl": (expected.exp() * (expected - own)).sum(-1),
            "agreement": (expected.argmax(-1) == own.argmax(-1)).float(),
        }
        count += len(own)
        if adapter.kind != "encoder":
            targets = batch.targets().to(own.device)
            at = targets >= 0
            rows = targets[at][:, None]
            known += int(at.sum())
            values["loss"] = -own[at].gather(1, rows)
            values["full_loss"] = -expected[at].gather(1, rows)
        for name, value in values.items():
            sums[name] = sums.get(name, 0.0) + float(value.sum(dtype=torch.float64))
    result = {name: sums[name] / max(1, count) for name in ("kl", "agreement")}
    if known:
        result["perplexity"] = math.exp(sums["loss"] / known)
        result["full_perplexity"] = math.exp(sums["full_loss"] / known)
    return result | {"tokens": float(count)}

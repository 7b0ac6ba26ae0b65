"""One interface to the layers of any Hugging Face model: `adapt(model)`.

`h_0` is what the first of `L` layers reads, `h_l` what layer `l` returns, and `h_L` is taken before
the final norm, so that `head(final_norm(h_L))` are the model's logits. The model is not changed:
hooks read the states while it runs.

Heads differ: a transform before the projection (BERT), capped logits (Gemma 2), scaled logits
(Granite, Cohere). Instead of a copy of each, the model's own `forward` is run on a shallow copy of
the model in which the trunk hands its `inputs_embeds` on unchanged. Weights are shared, and
gradients flow.

Shapes: B texts, T tokens, D width, V vocabulary.
"""

import copy
import inspect
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_MASKED_LM_MAPPING_NAMES,
)

from deepenough.artifacts import fingerprint
from deepenough.devices import device_of
from deepenough.errors import UserError
from deepenough.hf.generation import AnyOutput
from deepenough.hf.intercept import eval_mode, hidden_input, hidden_output, hooked
from deepenough.hf.layouts import (
    LAYOUTS,
    Layout,
    Path,
    advice,
    candidates,
    find_parts,
    heaviest_list,
    resolve,
)

Kind = Literal["causal", "masked", "encoder"]


@dataclass
class Captured:
    """The states of the latest forward pass, `h_0 ... h_L`, each `[B, T, D]`."""

    states: list[Tensor] = field(default_factory=list)


class Adapter:
    """A model seen as `L` layers between embeddings and a head."""

    def __init__(self, model: PreTrainedModel, layout: Layout) -> None:
        self.model = model
        self.kind: Kind = kind_of(model)
        self.layout = layout
        self.skeleton = self
        """The same layers, which need no weights: of a deferred model, those without."""
        if is_deferred(model):
            self.skeleton = Adapter(vars(model)["deferred_source"].skeleton, layout)
        self.num_layers = len(self.skeleton.layers)
        width = getattr(model.config.get_text_config(), "hidden_size", None)
        if width is None:
            name = type(model).__name__
            raise UserError(f"{name} has no one width (hidden_size): give a language model.")
        self.width: int = width
        self.limit: int | None = None
        """Tokens up to which decoding was tried; None for any number."""

    @cached_property
    def trunk(self) -> Any:
        """The part of the model that holds the layers."""
        return _found(self.model, self.model.base_model, self.layout.trunk, "trunk")

    @cached_property
    def layers(self) -> list[nn.Module]:
        """The layers, first to last."""
        if callable(self.layout.layers):
            return self.layout.layers(self.trunk)
        return list(_found(self.model, self.trunk, self.layout.layers, "layers"))

    @contextmanager
    def capture(self) -> Iterator[Captured]:
        """Collect the states of every forward pass of the model (or its trunk)."""
        captured = Captured()
        shared = self.layers.count(self.layers[0]) > 1

        def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            # A shared layer is entered several times; only the first begins a pass.
            if not shared or len(captured.states) in (0, self.num_layers + 1):
                captured.states = [hidden_input(args, kwargs)]

        def after(_: nn.Module, __: Any, output: Any) -> None:
            captured.states.append(hidden_output(output))

        each = dict.fromkeys(self.layers, after)
        with hooked(before=[(self.layers[0], before)], after=each.items()):
            yield captured

    @torch.no_grad()
    def states(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, **more: Any
    ) -> list[Tensor]:
        """Return `h_0 ... h_L` of a batch; runs the trunk alone, without head or cache."""
        accepted = inspect.signature(self.trunk.forward).parameters
        if "use_cache" in accepted:
            more = {"use_cache": False, **more}
        if "logits_to_keep" in accepted and self.trunk is self.model:
            more = {"logits_to_keep": 1, **more}
        with self.capture() as captured:
            self.trunk(input_ids=input_ids, attention_mask=attention_mask, **more)
        if len(captured.states) != self.num_layers + 1:
            raise UserError(
                f"{type(self.model).__name__} ran {max(0, len(captured.states) - 1)} of its "
                f"{self.num_layers} layers: put it in eval mode, where no layer is skipped."
            )
        return captured.states

    def final_norm(self, hidden: Tensor) -> Tensor:
        """Apply the norm between the last layer and the head; post-norm models have none."""
        return self._apply(self.layout.final_norm, hidden)

    def head(self, normed: Tensor) -> Tensor:
        """Return the logits `[..., V]` of normalised states `[..., D]`, as the model makes them."""
        if self.kind == "encoder":
            raise UserError(
                f"{type(self.model).__name__} has no language-model head: load it with "
                "AutoModelForCausalLM or AutoModelForMaskedLM."
            )
        hidden_BTD = self._apply(self.layout.projection, normed.to(self.model.dtype))
        flat = hidden_BTD.ndim != 3
        if flat:
            hidden_BTD = hidden_BTD.reshape(1, -1, hidden_BTD.shape[-1])
        logits_BTV = self._run_head(hidden_BTD)
        # Not -1 for the last: of no states at all it could be anything.
        return logits_BTV.view(*normed.shape[:-1], logits_BTV.shape[-1]) if flat else logits_BTV

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the model's logits as if `hidden` were the output of its last layer."""
        return self.head(self.final_norm(hidden))

    def _apply(self, path: str | None, hidden: Tensor) -> Tensor:
        module = resolve(self.trunk, path) if path else None
        return hidden if module is None else module(hidden.to(self.model.dtype))

    def _run_head(self, hidden_BTD: Tensor) -> Tensor:
        head = self.layout.head
        logits: Tensor
        if isinstance(head, str):
            logits = _found(self.model, self.model, head, "head")(hidden_BTD)
        elif head is not None:
            logits = head(self.model, hidden_BTD)
        elif self.trunk is self.model:
            # The trunk cannot be told from the head: all there is to go by is the last map.
            logits = self.model.get_output_embeddings()(hidden_BTD)
        else:
            path = ".".join(filter(None, (self.model.base_model_prefix, self.layout.trunk)))
            logits = _run_own_head(self.model, path, hidden_BTD)
        return logits

    def submodules(self, layer: int) -> dict[str, nn.Module | list[nn.Module]]:
        """Return the parts "attention", "feed_forward" and "norms" of a layer, where it has them.

        A list under attention or feed-forward is one part made of several modules, from the input
        of the first to the output of the last. Norms are always a list of single modules.
        """
        block, layout = self.layers[layer], self.layout
        attention, feed_forward, norms = layout.attention, layout.feed_forward, layout.norms
        if not (attention or feed_forward or norms):
            attention, feed_forward, norms = find_parts(block)
        parts: dict[str, nn.Module | list[nn.Module]] = {}
        for name, path in (("attention", attention), ("feed_forward", feed_forward)):
            found = _part(block, path)
            if found:
                parts[name] = found[0] if len(found) == 1 else found
        present = [norm for path in norms if (norm := resolve(block, path)) is not None]
        if present:
            parts["norms"] = present
        return parts

    @property
    def max_length(self) -> int | None:
        """Longest text in tokens, or None where there is no limit."""
        for module in self.skeleton.trunk.modules():
            table = getattr(module, "position_embeddings", None)
            if isinstance(table, nn.Embedding) and table.padding_idx is not None:
                # RoBERTa counts positions from behind the padding's.
                return table.num_embeddings - table.padding_idx - 1
        config = self.model.config.get_text_config()
        names = ("max_position_embeddings", "max_seq_len", "max_target_positions")
        limits = (getattr(config, name, None) for name in names)
        return next((limit for limit in limits if limit and limit > 0), None)

    def identity(self, with_head: bool = False) -> dict[str, Any]:
        """Return what identifies this model: name, revision, shape and a hash of its weights.

        The hash is of embeddings and layers, on which states depend. What also depends on the
        final norm and the head, such as the tokens chosen, is told by one more, of all weights.
        """
        config = self.model.config
        found = {
            "model": config._name_or_path,
            "revision": getattr(config, "_commit_hash", None),
            "architecture": config.model_type,
            "layers": self.num_layers,
            "width": self.width,
            "fingerprint": fingerprint(
                config, self.model.get_input_embeddings(), *dict.fromkeys(self.layers)
            ),
        }
        return found | {"all_weights": fingerprint(config, self.model)} if with_head else found

    def check_made_for(self, made_for: Mapping[str, Any], what: str) -> None:
        """Refuse something that was fitted for another model, or for this one before a change.

        `made_for` is what `identity()` was then. What it lacks is not compared: maps that were
        imported from elsewhere know their shape alone. `what` begins a sentence: "The shortcuts".
        """
        own = self.identity(with_head="all_weights" in made_for)
        checked = ("layers", "width", "fingerprint", "all_weights")
        if any(made_for[name] != own[name] for name in checked if name in made_for):
            raise UserError(
                f"{what} were made for {_described(made_for)}, and this is {_described(own)} with "
                "other weights: give the model they belong to, or make them anew for this one."
            )


def _hand_on(*_: Any, inputs_embeds: Tensor, **__: Any) -> AnyOutput:
    return AnyOutput(last_hidden_state=cast(Any, inputs_embeds))


def _run_own_head(model: PreTrainedModel, trunk: str, hidden_BTD: Tensor) -> Tensor:
    """Return the logits that `model` makes of the output of its trunk, which stands at a path."""
    shell = copy.copy(model)
    if "_hf_hook" in vars(shell):  # accelerate's forward runs the model that it was made for
        del shell.forward
    echo: nn.Module = shell
    for name in trunk.split("."):
        child = copy.copy(getattr(echo, name))
        # A shallow copy still shares its table of children with the original.
        echo._modules = {**echo._modules, name: child}
        echo = child
    echo.forward = _hand_on  # type: ignore[method-assign]
    # Hooks would see, and could change, a pass through the trunk that does not take place.
    echo._forward_hooks, echo._forward_pre_hooks = OrderedDict(), OrderedDict()
    output = shell.forward(inputs_embeds=hidden_BTD)
    logits: Tensor = output.logits if hasattr(output, "logits") else output[0]
    return logits


def adapt(model: PreTrainedModel) -> Adapter:
    """Return the adapter of a model: by its row in `layouts.py`, or else by its structure.

    Refused are encoder-decoders, models whose layers cannot be found, and those whose layers return
    what does not lead to the model's own output.
    """
    config = model.config
    if getattr(config, "is_encoder_decoder", False):
        raise UserError(
            f"{type(model).__name__} is an encoder-decoder ({config.model_type}), which has two "
            "stacks of layers: give a model with one, such as its encoder alone."
        )
    try:
        key = fingerprint(config, model) + str(model.dtype)
    except (AttributeError, TypeError, RuntimeError):  # weights that are no plain tensors
        key = ""
    row = LAYOUTS.get(config.model_type) or _found_before.get(key)
    if row is not None and _found_before.get(key) == row:
        return Adapter(model, row)
    problems: list[str] = []
    for layout in [row] if row else candidates(model):
        adapter = Adapter(model, layout)
        problems.append(find_difference(adapter))
        if not problems[-1]:
            if key:
                _found_before[key] = layout
            return adapter
    raise UserError(
        f"{type(model).__name__} has layers, but no norm or head after them was found that gives "
        f"its own output ({problems[0]}); {advice(model)}"
    )


def adapt_whole(model: PreTrainedModel) -> Adapter:
    """Return the adapter of a model that is run as a whole, for its size and its name alone.

    Where the layers are not found, the heaviest list of modules of the decoder stands for them.
    """
    trunk = "decoder" if hasattr(model.base_model, "decoder") else ""
    try:
        return adapt(model)
    except UserError:
        return Adapter(model, Layout(heaviest_list, trunk=trunk))


#: Layouts that were verified, by the fingerprint and dtype of the model.
_found_before: dict[str, Layout] = {}


@torch.no_grad()
def find_difference(adapter: Adapter) -> str:
    """Return how states differ from what the model computes, on two texts; "" if they do not.

    Every layer must read what the one before it returned, and the last state give the output.
    """
    model = adapter.model
    size = getattr(model.config.get_text_config(), "vocab_size", None) or 16
    ids = torch.arange(3, 13, device=device_of(model)).view(2, 5).remainder(size)
    mask = torch.ones_like(ids)
    mask[1, 3:] = 0
    ids[1, 3:] = getattr(model.config.get_text_config(), "pad_token_id", None) or 0
    read: list[Tensor] = []

    def note(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        read.append(hidden_input(args, kwargs))

    has_head = adapter.kind != "encoder"
    with eval_mode(model):
        try:
            runs: Any = model if has_head else model.base_model
            output = runs(input_ids=ids, attention_mask=mask)
        except Exception as error:  # a model that reads something else than text, in any way
            raise UserError(
                f"{type(model).__name__} does not run on tokens alone, so that its layers could "
                f"not be found ({type(error).__name__}: {error}); {advice(model)}"
            ) from error
        try:
            with hooked(before=dict.fromkeys(adapter.layers, note).items()):
                states = adapter.states(ids, mask)
        except Exception as error:  # a wrong trunk fails in many ways
            return f"its layers cannot be run alone ({type(error).__name__}: {error})"
        for layer, (own, before) in enumerate(zip(read, states, strict=False)):
            if not _is_close(own, before, mask):
                return f"layer {layer + 1} does not read what layer {layer} returned"
        expected = output.logits if has_head else output[0]
        try:
            found = (adapter.logits if has_head else adapter.final_norm)(states[-1])
        except (AttributeError, TypeError, RuntimeError) as error:
            return f"its head does not take its last state ({type(error).__name__}: {error})"
    return "" if _is_close(found, expected, mask) else "its last state gives another output"


def _is_close(found: Tensor | None, expected: Tensor, mask: Tensor) -> bool:
    """Return whether states are the same but for rounding, where there is text."""
    if found is None or found.shape != expected.shape or found.shape[:2] != mask.shape:
        return False
    # Layers may stand on several devices.
    found, expected = found.to(mask.device), expected.to(mask.device)
    seen, largest = mask.bool(), float(expected.nan_to_num(0.0, 0.0, 0.0).abs().max())
    tolerance = torch.finfo(expected.dtype).eps ** 0.5 * max(largest, 1e-3)
    # Weights that are not finite are somebody else's to tell of.
    return torch.allclose(found[seen], expected[seen], 0.0, tolerance, equal_nan=True)


def is_deferred(model: Any) -> bool:
    """Return whether a model's modules have not been asked for yet (`deferred.py`)."""
    source = vars(model).get("deferred_source")
    return source is not None and source.loaded is None


def kind_of(model: PreTrainedModel) -> Kind:
    """Return the kind of a model by its class; without a language-model head it is an encoder."""
    name, config = type(model).__name__, model.config
    # BERT and its kin have a class for each use of one head; without a causal mask it fills gaps.
    sees_all = config.model_type in MODEL_FOR_MASKED_LM_MAPPING_NAMES
    sees_all = sees_all and not getattr(config, "is_decoder", True)
    if _is_listed(name, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) or name.endswith("ForCausalLM"):
        return "masked" if sees_all else "causal"
    if _is_listed(name, MODEL_FOR_MASKED_LM_MAPPING_NAMES) or name.endswith("ForMaskedLM"):
        return "masked"
    return "encoder"


def _described(identity: Mapping[str, Any]) -> str:
    """Return a model's name and shape as people read them."""
    name = identity.get("model") or "a model without a name"
    return f"{name} ({identity.get('layers', '?')} layers, width {identity.get('width', '?')})"


def _is_listed(name: str, table: Any) -> bool:
    listed = ((each,) if isinstance(each, str) else each for each in table.values())
    return any(name in names for names in listed)


def _found(model: PreTrainedModel, root: Any, path: str, what: str) -> Any:
    found = resolve(root, path)
    if found is None:
        raise UserError(
            f"{type(model).__name__} has no {path!r} in its {type(root).__name__}, where the "
            f"{what} should be; {advice(model)}"
        )
    return found


def _part(block: nn.Module, path: Path) -> list[nn.Module]:
    """Return the modules of a part; none unless all are there."""
    modules = [resolve(block, step) for step in ((path,) if isinstance(path, str) else path)]
    return [] if None in modules else modules

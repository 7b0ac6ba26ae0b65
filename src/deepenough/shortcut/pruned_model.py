"""A Hugging Face model with linear maps in the places of some parts of its blocks, or with nothing.

`PrunedForCausalLM` (and its siblings for masked tokens and for classes) holds a model of
transformers with fewer layers than the original one, `kept` being the numbers that they had there.
In some of its layers attention or the feed-forward, or the layer as a whole, is a linear map `y = W
x + b` of what it reads, or returns nothing. Its config says which, so that `save_pretrained`,
`from_pretrained` and the `Auto` classes work as for any model. A model that has lost whole layers
alone is an ordinary one of its own class and needs none of this.

The cache of keys and values has a place for every layer. Where attention is replaced, that place
stays empty; it never is the place that transformers asks for the length of the text, since the
first layer keeps its attention.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    GenerationMixin,
    PreTrainedConfig,
    PreTrainedModel,
)

from deepenough.errors import UserError
from deepenough.hf.intercept import hidden_input, in_form

Form = tuple[bool, ...] | None
"""What a module returns: a tensor (None), or a tuple with tensors in these places."""


@dataclass(frozen=True)
class PrunedPart:
    """A part of a layer, or a whole layer, in whose place something else stands.

    Paths lead from the inner model to the module that reads the part's input and to the one that
    returns its output, mostly the same.
    """

    first: str
    last: str
    is_linear: bool
    """Whether it is a linear map of its input; else it returns zeros, or a layer its input."""
    first_form: Form = None
    last_form: Form = None
    is_layer: bool = False
    """Whether the part is a whole layer."""

    def __post_init__(self) -> None:
        for name in ("first_form", "last_form"):  # lists in a file
            if isinstance(form := getattr(self, name), list):
                object.__setattr__(self, name, tuple(form))


class PrunedConfig(PreTrainedConfig):
    """Config of a pruned model.

    Args:
        text_config: Config of the inner model, with the layers that are left.
        architecture: Name of the inner model's class in transformers.
        parts: What is replaced, the fields of `PrunedPart`.
        kept: Numbers that the layers left have in the original model.
        report: How the choice was made, and what it costs.
    """

    model_type = "deepenough_pruned"
    sub_configs: ClassVar[dict[str, Any]] = {"text_config": AutoConfig}
    text_config: PreTrainedConfig

    def __init__(
        self,
        text_config: Mapping[str, Any] | PreTrainedConfig | None = None,
        architecture: str = "",
        parts: Sequence[Mapping[str, Any]] = (),
        kept: Sequence[int] = (),
        report: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        if not isinstance(text_config, PreTrainedConfig):
            own = dict(text_config or {"model_type": "llama"})
            text_config = AutoConfig.for_model(own.pop("model_type"), **own)
        self.text_config = text_config
        self.architecture = architecture
        self.parts = [dict(part) for part in parts]
        self.kept, self.report = list(kept), dict(report or {})
        for name in ("num_labels", "id2label", "label2id", "problem_type"):
            if (value := getattr(text_config, name, None)) is not None:
                kwargs.setdefault(name, value)
        for name in ("bos_token_id", "eos_token_id", "pad_token_id", "tie_word_embeddings"):
            kwargs.setdefault(name, getattr(text_config, name, None))
        super().__init__(**kwargs)


class LinearPart(nn.Module):
    """What stands in the place of a part: a linear map of what the part reads, or nothing.

    `source` is where the part reads its input, if that is another module.
    """

    def __init__(self, part: PrunedPart, width: int, source: PartInput | None = None) -> None:
        super().__init__()
        self.part = part
        self.sources = () if source is None else (source,)  # a tuple: it is no child of this module
        if part.is_linear:
            self.weight = nn.Parameter(torch.empty(width, width))
            self.bias = nn.Parameter(torch.empty(width))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the map of the input in the form in which the part returns its output."""
        hidden = self.sources[0].read.pop() if self.sources else hidden_input(args, kwargs)
        if self.part.is_linear:
            hidden = F.linear(hidden, self.weight, self.bias)
        elif not self.part.is_layer:
            hidden = torch.zeros_like(hidden)
        return in_form(hidden, self.part.last_form)


class PartInput(nn.Module):
    """Stands where a part of several modules reads its input, and keeps it for the last."""

    def __init__(self, form: Form) -> None:
        super().__init__()
        self.form = form
        self.read: list[Tensor] = []

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Keep the input and return it; nothing uses what is made of it."""
        hidden = hidden_input(args, kwargs)
        self.read[:] = [hidden]
        return in_form(hidden, self.form)


def replace_part(model: nn.Module, part: PrunedPart, width: int) -> LinearPart:
    """Put a linear map, or nothing, in the place of a part of a model, and return it."""
    before = model.get_submodule(part.last)
    source = None
    if part.first != part.last:
        source = PartInput(part.first_form)
        _put(model, part.first, source)
    new = LinearPart(part, width, source)
    if part.is_layer:  # what a model asks of a layer before it calls it, such as its kind
        plain = {n: v for n, v in vars(before).items() if isinstance(v, str | int | float)}
        new.__dict__.update({name: v for name, v in plain.items() if name != "training"})
    new.train(before.training)
    _put(model, part.last, new)
    return new


def _put(model: nn.Module, path: str, module: nn.Module) -> None:
    owner, _, name = path.rpartition(".")
    model.get_submodule(owner)._modules[name] = module


class PrunedModel(PreTrainedModel):
    """A model of transformers, `model`, with parts of its layers replaced as the config says."""

    config_class = PrunedConfig
    config: PrunedConfig
    base_model_prefix = "model"
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_attention_backend = True

    def __init__(self, config: PrunedConfig) -> None:
        super().__init__(config)
        inner = getattr(transformers, config.architecture, None)
        if not (isinstance(inner, type) and issubclass(inner, PreTrainedModel)):
            raise UserError(
                f"The pruned model is of the class {config.architecture!r}, which transformers "
                f"{transformers.__version__} does not have: install one that has it."
            )
        self.model: Any = inner._from_config(config.text_config)
        try:
            parts = [PrunedPart(**part) for part in config.parts]
            for part in parts:
                replace_part(self.model, part, config.text_config.hidden_size)
        except (TypeError, AttributeError) as error:
            raise UserError(
                f"The config of the pruned model names parts that {config.architecture} does not "
                f"have ({error}): prune the model again."
            ) from error
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        """Leave weights alone: they come from the model that was pruned."""

    def get_input_embeddings(self) -> Any:
        """Return the inner model's."""
        return self.model.get_input_embeddings()

    def set_input_embeddings(self, value: Any) -> None:
        """Set the inner model's."""
        self.model.set_input_embeddings(value)

    def get_output_embeddings(self) -> Any:
        """Return the inner model's."""
        return self.model.get_output_embeddings()

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Any = None,
        **kwargs: Any,
    ) -> Any:
        """Return what the inner model returns."""
        given = {"position_ids": position_ids, "past_key_values": past_key_values}
        kwargs |= {name: value for name, value in given.items() if value is not None}
        return self.model(input_ids=input_ids, attention_mask=attention_mask, **kwargs)


class PrunedForCausalLM(PrunedModel, GenerationMixin):
    """A pruned language model."""

    def prepare_inputs_for_generation(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the inner model is called with."""
        return self.model.prepare_inputs_for_generation(*args, **kwargs)


class PrunedForMaskedLM(PrunedModel):
    """A pruned masked language model."""


class PrunedForSequenceClassification(PrunedModel):
    """A pruned classifier."""


AUTO_CLASSES = {
    AutoModelForCausalLM: PrunedForCausalLM,
    AutoModelForMaskedLM: PrunedForMaskedLM,
    AutoModelForSequenceClassification: PrunedForSequenceClassification,
}
AutoConfig.register(PrunedConfig.model_type, PrunedConfig)
for _auto, _model in AUTO_CLASSES.items():
    _auto.register(PrunedConfig, _model)


def pruned_class(model: PreTrainedModel) -> type[PrunedModel]:
    """Return the class of a model after it was pruned."""
    for own in AUTO_CLASSES.values():
        if type(model).__name__.endswith(own.__name__.removeprefix("Pruned")):
            return own
    if hasattr(model, "lm_head"):
        return PrunedForCausalLM  # GPT-2's class is called otherwise
    raise UserError(
        f"{type(model).__name__} has no output by which a pruned model could be judged: load it "
        "with a head for causal or masked tokens, or for classes."
    )


@torch.no_grad()
def make_pruned(
    model: PreTrainedModel,
    kept: Sequence[int],
    layers: str,
    parts: Mapping[PrunedPart, tuple[Tensor, Tensor] | None],
    report: Mapping[str, Any],
    changed: Mapping[str, Tensor] | None = None,
) -> PreTrainedModel:
    """Return a pruned copy of a model, which shares no weight with it.

    Args:
        model: A model of transformers.
        kept: Numbers of the layers that are left, from 0.
        layers: Path of the list of layers in the model.
        parts: What is replaced, by paths in the model that is made, with weight and bias.
        report: What the config keeps of how it was made.
        changed: Weights that are others than the model's, by their name there.
    """
    config = shortened(model.config, kept)
    outer: PreTrainedModel
    if parts:
        described = [asdict(part) for part in parts]
        own = pruned_class(model)
        pruned = PrunedConfig(config, type(model).__name__, described, kept, report)
        outer = own(pruned)
        inner = outer.model
    else:
        outer = inner = type(model)(config)
        config.deepenough_pruned = dict(report) | {"kept": list(kept)}
    weights = {}
    for name, tensor in (model.state_dict() | dict(changed or {})).items():
        if name.startswith(f"{layers}."):
            number, _, rest = name.removeprefix(f"{layers}.").partition(".")
            if int(number) not in kept:
                continue
            name = f"{layers}.{list(kept).index(int(number))}.{rest}"
        weights[name] = tensor
    for part, maps in parts.items():
        weights = {n: t for n, t in weights.items() if not _is_replaced(n, part)}
        if maps is not None:
            weights[f"{part.last}.weight"], weights[f"{part.last}.bias"] = maps
    inner.load_state_dict(weights)
    if getattr(model, "generation_config", None) is not None:
        outer.generation_config = model.generation_config
    moved: PreTrainedModel = outer.to(dtype=model.dtype).to(device=model.device)  # type: ignore[call-arg]
    return moved.eval()


def _is_replaced(name: str, part: PrunedPart) -> bool:
    return name.startswith((f"{part.first}.", f"{part.last}."))


def shortened(config: PreTrainedConfig, kept: Sequence[int]) -> PreTrainedConfig:
    """Return a copy of a config with some of its layers; lists with a value a layer follow."""
    values = config.to_dict()
    own = type(config).from_dict(values)
    number = config.num_hidden_layers
    for name, value in values.items():
        if isinstance(value, list) and len(value) == number and "layer" in name:
            setattr(own, name, [value[layer] for layer in kept])
    own.num_hidden_layers = len(kept)
    own._name_or_path = config._name_or_path
    return own

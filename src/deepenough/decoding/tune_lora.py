"""The first layers of a model, on copies, made to be adapted for drafts (LoRA, by `peft`).

LayerSkip (arXiv 2404.16710) trains a model so that it can be left early: layers are dropped at
random, the later the more often, and exits behind all layers have a loss. Here, of the first `k`
layers,

- every map `W` becomes `W + (alpha / rank) B A` (arXiv 2106.09685), `B` zero at first;
- a text passes layer `l` by with probability `p * (2^((l - 1) / (k - 1)) - 1)`, from 0 to `p`;
- behind every layer stands a map to the last state (`adaptive/exit/adapted.py`), which begins in
  closed form, fitted to the layers as they are.

Departures: the model's weights stay as they are, what is trained serves drafts alone, and the rate
of dropping does not change over time.

Shapes: B texts, T tokens, D width, N positions.
"""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.pytorch_utils import Conv1D

from deepenough.decoding.adapted import Adapted, Change, changeable, guess
from deepenough.decoding.carry_fit import Sums
from deepenough.decoding.first_layers import first_layers
from deepenough.decoding.own_text import Written
from deepenough.decoding.tune_task import read_texts
from deepenough.errors import UserError
from deepenough.hf.adapter import Adapter, adapt
from deepenough.shortcut.partial_run import hidden_of, tensor_of
from deepenough.training.seeds import seed_at

log = logging.getLogger("deepenough")

_RIDGE = 1e-3
"""Of the closed form. Training goes on from it, so that little depends on the best one."""
_FIT_TEXTS = 512
"""Texts to which the closed form is fitted: many more tokens than a map has columns."""


@dataclass
class LoraSettings:
    """Early layers"""

    layers: int | None = None
    """Adapt copies of so many of the first layers, for drafts that run them; by default none. Needs
    peft."""

    rank: int = 8
    """Rank of what is added to each of their maps."""

    alpha: float = 16.0
    """What is added is scaled by alpha / rank."""

    dropout: float = 0.1
    """How often the last of these layers is passed by while training; those before it less."""

    epochs: float = 3.0
    """Rounds over the texts."""

    def check(self) -> None:
        if self.layers is None:
            return
        for name in ("layers", "rank"):
            if getattr(self, name) < 1:
                raise UserError(f"lora.{name} must be at least 1: got {getattr(self, name)}.")
        for name in ("alpha", "epochs"):
            if not getattr(self, name) > 0:
                raise UserError(f"lora.{name} must be above 0: got {getattr(self, name)}.")
        if not 0 <= self.dropout < 1:
            raise UserError(f"lora.dropout must be from 0 to below 1: got {self.dropout}.")
        if importlib.util.find_spec("peft") is None:
            raise UserError("lora.layers needs peft: pip install deepenough[lora].")

    def check_model(self, adapter: Adapter) -> None:
        """Refuse a model whose first layers cannot be adapted."""
        if self.layers is None:
            return
        name = type(adapter.model).__name__
        if self.layers >= adapter.num_layers:
            raise UserError(
                f"lora.layers must be below {adapter.num_layers}, the layers of {name}, or a draft "
                f"would cost what it saves: got {self.layers}."
            )
        if not changeable(adapter.layers[: self.layers]):
            raise UserError(
                f"The layers of {name} have no plain linear maps, so that they cannot be adapted: "
                "leave out lora.layers."
            )


class EarlyLayers(nn.Module):
    """What is trained: the adapters inside the copied layers, and the maps behind them.

    The layers themselves are no part of the module: they are neither trained nor saved, and their
    own dropout stays off.
    """

    def __init__(
        self, adapter: Adapter, start: Adapted, settings: LoraSettings, seed: int = 0
    ) -> None:
        super().__init__()
        number = start.num_layers
        short = adapt(first_layers(adapter, number))
        self._short = (short,)  # a tuple, so that it is not registered
        self.scaling = settings.alpha / settings.rank
        steps = max(number - 1, 1)
        self.rates = [settings.dropout * (2.0 ** (place / steps) - 1) for place in range(number)]
        self._drop_layers(short.layers)
        adapters = _add_adapters(short.layers, settings, seed_at(seed, "lora"))
        self.names = list(adapters)
        """Of the maps that are changed, in the order of `down` and `up`."""
        self.down = nn.ParameterList([down for down, _ in adapters.values()])
        self.up = nn.ParameterList([up for _, up in adapters.values()])
        device = adapter.model.device
        self.matrices = nn.ParameterList([matrix.to(device) for matrix, _ in start.maps])
        self.biases = nn.ParameterList([bias.to(device) for _, bias in start.maps])

    def forward(
        self, ids_BT: Tensor, states_BTD: Tensor, exits: Sequence[int]
    ) -> list[tuple[Tensor, Tensor]]:
        """For every exit, predictions from the states before and from predictions of those.

        `states_BTD`, in units of the scale, are of the same tokens as the ids.
        """
        hidden = _states(self._short[0], ids_BT)
        before_BTD = _shifted(states_BTD)
        found = []
        for layer in exits:
            place = self.matrices[layer - 1], self.biases[layer - 1], hidden[layer].float()
            one = guess(*place, before_BTD)
            found.append((one, guess(*place, _shifted(one))))
        return found

    def adapted(self, start: Adapted) -> Adapted:
        """As it is used, with what is known of how it began."""
        changes = {
            name: Change(down.detach(), self.scaling * up.detach())
            for name, down, up in zip(self.names, self.down, self.up, strict=True)
        }
        pairs = zip(self.matrices, self.biases, strict=True)
        maps = [(matrix.detach(), bias.detach()) for matrix, bias in pairs]
        return Adapted(changes, maps, start.scale, start.meta)

    def _drop_layers(self, layers: Sequence[nn.Module]) -> None:
        def hook(rate: float) -> Any:
            def drop(_: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
                if not (self.training and rate):
                    return output
                hidden = tensor_of(output)
                stays_B11 = torch.rand(len(hidden), 1, 1, device=hidden.device) >= rate
                hidden = torch.where(stays_B11, hidden, hidden_of(args, kwargs))
                return (hidden, *output[1:]) if isinstance(output, tuple) else hidden

            return drop

        for layer, rate in zip(layers, self.rates, strict=True):
            layer.register_forward_hook(hook(rate), with_kwargs=True)


def _add_adapters(
    layers: Sequence[nn.Module], settings: LoraSettings, seed: int
) -> dict[str, tuple[nn.Parameter, nn.Parameter]]:
    """Put adapters into layers; `A` and `B` of each map by its name."""
    from peft import LoraConfig, inject_adapter_in_model

    maps = changeable(layers)
    listed = nn.ModuleList(layers)
    config = LoraConfig(
        r=settings.rank,
        lora_alpha=settings.alpha,  # type: ignore[arg-type]
        target_modules=list(maps),
        fan_in_fan_out=any(isinstance(module, Conv1D) for module in maps.values()),
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        inject_adapter_in_model(config, listed)
    own = dict(listed.named_parameters())
    parts = [[f"{name}.lora_{part}.default.weight" for part in "AB"] for name in maps]
    return {name: (own[down], own[up]) for name, (down, up) in zip(maps, parts, strict=True)}


def fit_start(
    adapter: Adapter, texts: Sequence[Written], scale_D: Tensor, layers: int, batch: int = 16
) -> Adapted:
    """Maps in closed form behind each of the first layers, which are not changed yet."""
    number = len(texts)
    texts = texts[:: -(-number // _FIT_TEXTS)]
    log.info("fitting maps behind the first %d layers to %d texts", layers, len(texts))
    device, width = adapter.model.device, adapter.width
    sums = [Sums.of(1, width, device) for _ in range(layers)]
    short = adapt(first_layers(adapter, layers))
    with torch.no_grad():
        for inputs, targets_ND in _positions(short, texts, scale_D, batch):
            for each, inputs_NZ in zip(sums, inputs, strict=True):
                each.update(inputs_NZ, targets_ND)
    needed = len(sums[0].gram_ZZ)
    if sums[0].count < needed:
        raise UserError(
            f"The model wrote {sums[0].count} usable tokens, and maps of width {width} need "
            f"{needed}: raise text.tokens."
        )
    maps = [each.solve(_RIDGE) for each in sums]
    meta = {"model": adapter.identity(), "fit": {"texts": number, "layers": layers}}
    cpu = [(matrix.cpu(), bias.cpu()) for matrix, bias in maps]
    return Adapted({}, cpu, scale_D.cpu(), meta)


def _positions(
    short: Adapter, texts: Sequence[Written], scale_D: Tensor, size: int
) -> Iterator[tuple[list[Tensor], Tensor]]:
    """Inputs of the map of every layer, with a 1 at the end, and what they should give."""
    for first in range(0, len(texts), size):
        batch = read_texts(texts[first : first + size], scale_D, short.model.device)
        before_ND = _shifted(batch.states_BTD)[batch.chosen_BT]
        inputs = []
        for hidden_BTD in _states(short, batch.ids_BT)[1:]:
            hidden_ND = hidden_BTD[batch.chosen_BT].float()
            parts = F.rms_norm(hidden_ND, hidden_ND.shape[-1:]), before_ND
            inputs.append(F.pad(torch.cat(parts, dim=-1), (0, 1), value=1.0))
        yield inputs, batch.states_BTD[batch.chosen_BT]


def _states(adapter: Adapter, ids_BT: Tensor) -> list[Tensor]:
    """`h_0 ... h_k`, with gradients. Padding stands behind the texts, where no token looks."""
    with adapter.capture() as captured:
        adapter.trunk(input_ids=ids_BT, attention_mask=torch.ones_like(ids_BT), use_cache=False)
    return captured.states


def _shifted(states_BTD: Tensor) -> Tensor:
    """Of the token before; nothing before the first."""
    return F.pad(states_BTD, (0, 0, 1, 0))[:, :-1]

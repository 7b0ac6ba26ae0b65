"""Run only a part of a model: from one of its layers on, and with other functions in its modules.

For the time of a pass the `forward` of a module is exchanged on the instance; the module's hooks,
weights and place in the model stay. The model itself still makes its masks and position codes, so
this holds for every architecture, and what is exchanged is not computed.

Shapes: B texts, T tokens, D width.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.activations import NewGELUActivation

from deepenough.hf.adapter import Adapter

Forward = Callable[..., Any]


def hidden_of(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor:
    """The hidden states among the arguments of a layer or a module in it."""
    if args:
        return args[0]
    if "hidden_states" in kwargs:
        return kwargs["hidden_states"]
    return next(value for value in kwargs.values() if isinstance(value, Tensor))


def tensor_of(output: Any) -> Tensor:
    """The hidden states in what a layer or a module in it returns."""
    return output[0] if isinstance(output, tuple) else output


def in_this_thread(hook: Callable[..., Any]) -> Callable[..., Any]:
    """A hook that leaves alone what other threads do with the same modules."""
    here = threading.get_ident()

    def hook_here(*args: Any) -> Any:
        return hook(*args) if threading.get_ident() == here else None

    return hook_here


@contextmanager
def forwards_replaced(replacements: Mapping[nn.Module, Forward]) -> Iterator[None]:
    """Within, calling one of the modules runs the function given for it."""
    absent = object()
    own = {module: vars(module).get("forward", absent) for module in replacements}
    for module, forward in replacements.items():
        module.forward = forward  # type: ignore[method-assign]
    try:
        yield
    finally:
        for module, before in own.items():
            if before is absent:
                del module.forward
            else:
                module.forward = before  # type: ignore[method-assign]


@contextmanager
def fused_activations(adapter: Adapter) -> Iterator[None]:
    """Within, GPT-2's activation is one kernel of torch instead of eight, the same to rounding."""

    def fused(hidden: Tensor) -> Tensor:
        return F.gelu(hidden, approximate="tanh")

    found = [m for m in adapter.model.modules() if isinstance(m, NewGELUActivation)]
    with forwards_replaced(dict.fromkeys(found, fused)):
        yield


class LayerCounter:
    """Which application of a layer is running: a shared layer (ALBERT) cannot tell by itself.

    `shape` is that of the layer's input: a module inside may see its tokens flattened (OPT).
    """

    def __init__(self, adapter: Adapter) -> None:
        self.adapter = adapter
        self.current = -1
        self.shape = torch.Size()

    @contextmanager
    def counting(self) -> Iterator[None]:
        def restart(*_: Any) -> None:
            self.current = -1

        def advance(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self.current += 1
            self.shape = hidden_of(args, kwargs).shape

        handles = [self.adapter.trunk.register_forward_pre_hook(restart)]
        for layer in dict.fromkeys(self.adapter.layers):
            handles.append(layer.register_forward_pre_hook(advance, with_kwargs=True))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


class OutputForms:
    """What the modules of a model return, a tensor or a tuple around it, seen in a short pass."""

    def __init__(self, adapter: Adapter) -> None:
        self._forms: dict[nn.Module, tuple[bool, ...] | None] = {}

        def note(module: nn.Module, _: Any, output: Any) -> None:
            is_tuple = isinstance(output, tuple)
            form = tuple(isinstance(each, Tensor) for each in output) if is_tuple else None
            self._forms[module] = form

        inside = dict.fromkeys(
            module for layer in adapter.layers for module in (layer, *layer.modules())
        )
        handles = [module.register_forward_hook(note) for module in inside]
        try:
            ids = torch.ones(1, 2, dtype=torch.long, device=adapter.model.device)
            adapter.states(ids, torch.ones_like(ids))
        finally:
            for handle in handles:
                handle.remove()

    def wrap(self, module: nn.Module, tensor: Tensor) -> Any:
        """`tensor` in the form that `module` returns; it also stands for any other tensor there,
        which nobody reads who wants hidden states."""
        form = self._forms.get(module)
        return tensor if form is None else tuple(tensor if each else None for each in form)


@contextmanager
def started_at(
    counter: LayerCounter, forms: OutputForms, layer: int, hidden_BTD: Tensor
) -> Iterator[None]:
    """Within, a pass takes `hidden_BTD` as the input of `layer` and runs no layer before it."""

    def wrapped(module: nn.Module) -> Forward:
        run = module.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            if counter.current < layer:
                return forms.wrap(module, hidden_of(args, kwargs))
            if counter.current == layer and args:
                args = (hidden_BTD, *args[1:])
            elif counter.current == layer:
                kwargs = {**kwargs, "hidden_states": hidden_BTD}
            return run(*args, **kwargs)

        return forward

    layers = dict.fromkeys(counter.adapter.layers)
    with forwards_replaced({module: wrapped(module) for module in layers}):
        yield


@contextmanager
def one_token_fed_forward(counter: LayerCounter, position_B: Tensor) -> Iterator[None]:
    """Within, the feed-forward of the last layer runs at one position of each text.

    Its output `[B, 1, D]` is added to the stream at all positions, so the last state is right at
    that position and nowhere else: a third to two thirds of a layer saved where only one is read.
    """
    last = counter.adapter.num_layers - 1
    part = counter.adapter.submodules(last).get("feed_forward")
    module = part[0] if isinstance(part, list) else part
    if module is None:
        yield
        return
    run = module.forward

    def forward(hidden_BTD: Tensor, *args: Any, **kwargs: Any) -> Any:
        if counter.current == last and hidden_BTD.ndim == 3:
            rows = torch.arange(len(hidden_BTD), device=hidden_BTD.device)
            hidden_BTD = hidden_BTD[rows, position_B][:, None]
        return run(hidden_BTD, *args, **kwargs)

    with forwards_replaced({module: forward}):
        yield

"""The layers of an encoder as single steps, whatever its architecture.

An encoder prepares things for its layers: embeddings, masks, position biases, rotary tables. All of
that is left to the encoder itself. `begin` has it run with its layers standing by: they note what
they are called with and compute nothing, though hooks on a layer see these calls too. `run` then
makes one call with other hidden states. No architecture is known here, and none has to be copied.

When the batch changes, because examples left or others came in, `begin` is asked again for those
now there. That costs the embeddings of the batch, a small part of one layer, and no assumption
about which argument has which axis.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from deepenough.errors import UserError

_standing_by = threading.Lock()


@dataclass
class Calls:
    """What the layers are to be called with; `hidden` is what the first one reads."""

    arguments: list[tuple[tuple[Any, ...], dict[str, Any]]] = field(default_factory=list)

    @property
    def hidden(self) -> Tensor:
        args, kwargs = self.arguments[0]
        first: Tensor = args[0] if args else kwargs["hidden_states"]
        return first


class LayerStack:
    """`layers` in the order they are applied; a shared layer stands there as often as it is."""

    def __init__(self, trunk: nn.Module, layers: list[nn.Module]) -> None:
        self.trunk = trunk
        self.layers = layers
        # One call tells those of a layer that is shared by all passes.
        self._num_calls = 1 if self.shared else len(layers)
        self._returns_tuple: bool | None = None
        self.preparing: list[nn.Linear] = []
        """The linear maps that the encoder applies before its first layer."""

    @property
    def shared(self) -> bool:
        """Whether every pass is over the same layer."""
        return len(set(self.layers)) == 1

    def begin(self, **inputs: Any) -> Calls:
        """Embeddings and all that the layers need for a batch."""
        calls = Calls()
        try:
            with _standing_by, self._stand_by(calls):
                self.trunk(**inputs)
        except _AllNoted:
            return calls
        raise UserError(
            f"{type(self.trunk).__name__} called {len(calls.arguments)} of its {len(self.layers)} "
            "layers: switch off what skips layers (layerdrop)."
        )

    def run(self, index: int, hidden: Tensor, calls: Calls) -> Tensor:
        """The output of layer `index` (from 0) for these hidden states."""
        args, kwargs = calls.arguments[min(index, self._num_calls - 1)]
        if args:
            args = (hidden, *args[1:])
        else:
            kwargs = {**kwargs, "hidden_states": hidden}
        return _first(self.layers[index](*args, **kwargs))

    @contextmanager
    def _stand_by(self, calls: Calls) -> Iterator[None]:
        """Within, the layers note their arguments in `calls` and pass hidden states through."""
        owner = threading.get_ident()
        replaced = {layer: layer.__dict__.get("forward") for layer in self.layers}
        learning = self._returns_tuple is None
        hooks = self._note_preparing() if learning else []

        def stand_in(layer: nn.Module) -> Any:
            compute = layer.forward

            def note(*args: Any, **kwargs: Any) -> Any:
                if threading.get_ident() != owner:  # another thread is really running this layer
                    return compute(*args, **kwargs)
                calls.arguments.append((args, kwargs))
                if self._returns_tuple is None:
                    self._returns_tuple = _returns_tuple(layer, compute, args, kwargs)
                if len(calls.arguments) == self._num_calls:
                    raise _AllNoted
                hidden = args[0] if args else kwargs["hidden_states"]
                return (hidden,) if self._returns_tuple else hidden

            return note

        try:
            for layer in replaced:
                layer.forward = stand_in(layer)
            yield
        finally:
            for layer, own in replaced.items():
                if own is None:
                    del layer.forward
                else:
                    layer.forward = own
            for hook in hooks:
                hook.remove()

    def _note_preparing(self) -> list[Any]:
        inside = {module for layer in set(self.layers) for module in layer.modules()}
        outside = [
            module
            for module in self.trunk.modules()
            if isinstance(module, nn.Linear) and module not in inside
        ]
        self.preparing = []

        def note(module: nn.Module, *_: Any) -> None:
            assert isinstance(module, nn.Linear)
            self.preparing.append(module)

        return [module.register_forward_hook(note) for module in outside]


class _AllNoted(Exception):
    """Ends the encoder's forward pass once the last layer was called."""


@torch.no_grad()
def _returns_tuple(layer: nn.Module, compute: Any, args: Any, kwargs: Any) -> bool:
    """Whether a layer returns a tuple or a tensor: learned once, by running it.

    In evaluation mode: a draw for dropout more or less would change what a training draws next.
    """
    training = layer.training
    layer.eval()
    try:
        return isinstance(compute(*args, **kwargs), tuple)
    finally:
        layer.train(training)


def _first(output: Any) -> Tensor:
    result: Tensor = output[0] if isinstance(output, tuple) else output
    return result

"""An encoder's layers as single steps, so that a caller decides after each one who goes on."""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import Tensor, nn

from deepenough.errors import UserError
from deepenough.hf.intercept import LayerCall, StopForward, hooked, patched_forward

_recording = threading.Lock()


class LayerStack:
    """The layers of an encoder as single steps, whatever its architecture.

    An encoder prepares things for its layers: embeddings, masks, position biases, rotary tables.
    All of that is left to the encoder itself. `begin` has it run with its layers replaced: they
    record what they are called with and compute nothing, though hooks on a layer see these calls
    too. `run` then makes one call with other hidden states.

    When the batch changes, because examples left or others came in, `begin` is asked again for
    those now there. That costs the embeddings of the batch, a small part of one layer, and no
    assumption about which argument has which axis.
    """

    def __init__(self, trunk: nn.Module, layers: list[nn.Module]) -> None:
        """Take `layers` in the order they are applied; a shared layer stands there repeatedly."""
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

    def begin(self, **inputs: Any) -> list[LayerCall]:
        """Return what the layers are to be called with for a batch; the first reads embeddings."""
        calls: list[LayerCall] = []
        recorders = {layer: self._recorder(layer, calls) for layer in dict.fromkeys(self.layers)}
        watched = self._preparing_hooks() if self._returns_tuple is None else []
        try:
            with (
                _recording,
                patched_forward(recorders, this_thread=True),
                hooked(after=watched, this_thread=True),
            ):
                self.trunk(**inputs)
        except StopForward:
            return calls
        raise UserError(
            f"{type(self.trunk).__name__} called {len(calls)} of its {len(self.layers)} layers: "
            "switch off what skips layers (layerdrop)."
        )

    def run(self, index: int, hidden: Tensor, calls: list[LayerCall]) -> Tensor:
        """Return the output of layer `index` (from 0) for these hidden states."""
        return calls[min(index, self._num_calls - 1)].run(self.layers[index], hidden)

    def _recorder(self, layer: nn.Module, calls: list[LayerCall]) -> Any:
        """Return a function that records a call of the layer and passes hidden states through."""
        compute = layer.forward

        def record(*args: Any, **kwargs: Any) -> Any:
            calls.append(LayerCall(args, kwargs))
            if self._returns_tuple is None:
                self._returns_tuple = _returns_tuple(layer, compute, args, kwargs)
            if len(calls) == self._num_calls:
                raise StopForward
            hidden = calls[-1].hidden
            return (hidden,) if self._returns_tuple else hidden

        return record

    def _preparing_hooks(self) -> list[Any]:
        """Return hooks that note in `preparing` which linear maps run outside of the layers."""
        self.preparing = []
        inside = {module for layer in set(self.layers) for module in layer.modules()}

        def note(module: nn.Module, *_: Any) -> None:
            assert isinstance(module, nn.Linear)
            self.preparing.append(module)

        linear = [part for part in self.trunk.modules() if isinstance(part, nn.Linear)]
        return [(module, note) for module in linear if module not in inside]


@torch.no_grad()
def _returns_tuple(layer: nn.Module, compute: Any, args: Any, kwargs: Any) -> bool:
    """Return whether a layer returns a tuple or a tensor: learned once, by running it.

    In evaluation mode: a draw for dropout more or less would change what a training draws next.
    """
    training = layer.training
    layer.eval()
    try:
        return isinstance(compute(*args, **kwargs), tuple)
    finally:
        layer.train(training)

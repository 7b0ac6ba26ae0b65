"""The one way to intercept the layers of a Hugging Face model while it runs.

Everything is a context manager and is undone on leaving it. Weights, the module's other hooks and
its place in the model are never touched, and the model itself still makes its masks and positional
encodings, so this holds for every architecture.

Shapes: B texts, T tokens, D width.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from transformers.activations import NewGELUActivation

from deepenough.errors import UserError
from deepenough.nn.products import processor_has

if TYPE_CHECKING:
    from deepenough.hf.adapter import Adapter

Forward = Callable[..., Any]
#: `(module, args, kwargs) -> None`, or the `(args, kwargs)` to call the module with instead.
BeforeHook = Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], Any]
#: `(module, args, output) -> None`, or the output to return instead.
AfterHook = Callable[[nn.Module, tuple[Any, ...], Any], Any]

_recording = threading.Lock()


# -- the hidden states among a module's arguments and in its output ------------------------------


def hidden_input(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor:
    """Return the hidden states that a layer, or a module inside it, is called with."""
    if args:
        return args[0]
    if "hidden_states" in kwargs:
        return kwargs["hidden_states"]
    return next(value for value in kwargs.values() if isinstance(value, Tensor))


def with_hidden_input(
    args: tuple[Any, ...], kwargs: Mapping[str, Any], hidden: Tensor
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the same arguments of a layer with other hidden states."""
    if args:
        return (hidden, *args[1:]), dict(kwargs)
    return args, {**kwargs, "hidden_states": hidden}


def hidden_output(output: Any) -> Tensor:
    """Return the hidden states in what a layer, or a module inside it, returns."""
    return output[0] if isinstance(output, tuple | list) else output


def with_hidden_output(output: Any, hidden: Tensor) -> Any:
    """Return the same output of a layer with other hidden states."""
    return (hidden, *output[1:]) if isinstance(output, tuple | list) else hidden


# -- the three ways to intercept -----------------------------------------------------------------


@contextmanager
def hooked(
    before: Iterable[tuple[nn.Module, BeforeHook]] = (),
    after: Iterable[tuple[nn.Module, AfterHook]] = (),
    *,
    this_thread: bool = False,
) -> Iterator[None]:
    """Call hooks before and after modules run, which may change what these read and return.

    With `this_thread`, what other threads do with the same modules is left alone.
    """
    handles: list[Any] = []

    def mine(hook: Forward) -> Forward:
        # Either way the function is made in this file, by which `others_hooks` knows it.
        return _here(hook, lambda *args: None if this_thread else hook(*args))

    try:
        for module, hook in before:
            handles.append(module.register_forward_pre_hook(mine(hook), with_kwargs=True))
        for module, hook in after:
            handles.append(module.register_forward_hook(mine(hook)))
        yield
    finally:
        for handle in handles:
            handle.remove()


def others_hooks(module: nn.Module) -> list[int]:
    """Return the ids of a module's hooks, without those made here and transformers' recorders."""
    hooks = {**module._forward_pre_hooks, **module._forward_hooks}
    return [
        number
        for number, hook in hooks.items()
        if not str(getattr(hook, "__module__", "")).startswith((__name__, "transformers."))
    ]


def _here(chosen: Forward, elsewhere: Forward) -> Forward:
    """Return a function that is `chosen` in the present thread, and another one in all others."""
    here = threading.get_ident()

    def call(*args: Any, **kwargs: Any) -> Any:
        return (chosen if threading.get_ident() == here else elsewhere)(*args, **kwargs)

    return call


@contextmanager
def patched_forward(
    replacements: Mapping[nn.Module, Forward], *, this_thread: bool = False
) -> Iterator[None]:
    """Run the given functions in the place of the modules' own `forward`.

    With `this_thread`, other threads run the modules' own.
    """
    absent = object()
    own = {module: vars(module).get("forward", absent) for module in replacements}
    try:
        for module, replacement in replacements.items():
            patch = _here(replacement, module.forward) if this_thread else replacement
            module.forward = patch  # type: ignore[method-assign]
        yield
    finally:
        for module, before in own.items():
            if before is not absent:
                module.forward = before  # type: ignore[method-assign]
            elif "forward" in vars(module):
                del module.forward


@contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """Run a model without dropout; each of its modules is then in training mode again if it was."""
    training = [module for module in model.modules() if module.training]
    try:
        for module in training:
            module.training = False
        yield
    finally:
        for module in training:
            module.training = True


class StopForward(Exception):
    """Ends a forward pass early: raised inside it (by a hook, a patch or a cache).

    `captured` is whatever the raiser hands to the one who catches it.
    """

    def __init__(self, captured: Any = None) -> None:
        super().__init__("a forward pass was stopped, and nobody was waiting for it")
        self.captured = captured


def run_until_stopped(run: Callable[[], Any]) -> Any:
    """Call `run` until something inside raises `StopForward`, and return what that captured."""
    try:
        run()
    except StopForward as stop:
        return stop.captured
    raise RuntimeError("the forward pass ended without reaching the place where it should stop")


class LayerCall(NamedTuple):
    """The arguments a model calls a layer with."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @property
    def hidden(self) -> Tensor:
        """The hidden states among the arguments."""
        return hidden_input(self.args, self.kwargs)

    def run(self, layer: nn.Module, hidden: Tensor) -> Tensor:
        """Return the hidden states that `layer` makes of `hidden`, all other arguments the same."""
        args, kwargs = with_hidden_input(self.args, self.kwargs, hidden)
        return hidden_output(layer(*args, **kwargs))


def first_call(layer: nn.Module, run: Callable[[], Any]) -> LayerCall:
    """Call `run` until it enters `layer`, and return what the layer is called with.

    Neither `layer` nor anything behind it runs. Other threads may use the model meanwhile.
    """

    def stop(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        raise StopForward(LayerCall(args, kwargs))

    with hooked(before=[(layer, stop)], this_thread=True):
        found: LayerCall = run_until_stopped(run)
    return found


# -- a part of a model ---------------------------------------------------------------------------


class LayerCounter:
    """Counts which application of a layer is running: a shared layer (ALBERT) cannot tell.

    `current` is its number, from 0, and `shape` that of its input, of which a module inside may
    see the tokens flattened (OPT).
    """

    def __init__(self, adapter: Adapter) -> None:
        self.adapter = adapter
        self.current = -1
        self.shape = torch.Size()

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Keep `current` and `shape` up to date during forward passes."""

        def restart(*_: Any) -> None:
            self.current = -1

        def advance(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self.current += 1
            self.shape = hidden_input(args, kwargs).shape

        layers = dict.fromkeys(self.adapter.layers, advance)
        with hooked(before=[(self.adapter.trunk, restart), *layers.items()]):
            yield


class OutputForms:
    """What the modules of a model return, a tensor or a tuple around it, seen in a short pass."""

    def __init__(self, adapter: Adapter) -> None:
        self._forms: dict[nn.Module, tuple[bool, ...] | None] = {}

        def note(module: nn.Module, _: Any, output: Any) -> None:
            is_tuple = isinstance(output, tuple | list)
            form = tuple(isinstance(each, Tensor) for each in output) if is_tuple else None
            self._forms[module] = form

        inside = dict.fromkeys(module for layer in adapter.layers for module in layer.modules())
        with hooked(after=[(module, note) for module in inside]):
            ids = torch.ones(1, 2, dtype=torch.long, device=adapter.model.device)
            adapter.states(ids, torch.ones_like(ids))

    def wrap(self, module: nn.Module, tensor: Tensor) -> Any:
        """Return `tensor` in the form in which `module` returns its output.

        It also stands for any other tensor there, which no reader of hidden states looks at.
        """
        return in_form(tensor, self._forms.get(module))

    def form(self, module: nn.Module) -> tuple[bool, ...] | None:
        """Return where a module returns tensors in a tuple; None if it returns one alone."""
        return self._forms.get(module)


def in_form(hidden: Tensor, form: tuple[bool, ...] | None) -> Any:
    """Return a tensor in the form in which a module returns its output (`OutputForms.form`)."""
    return hidden if form is None else tuple(hidden if each else None for each in form)


@contextmanager
def start_at(
    counter: LayerCounter, forms: OutputForms, layer: int, hidden_BTD: Tensor
) -> Iterator[None]:
    """Make forward passes take `hidden_BTD` as the input of `layer` and run no layer before it.

    The counter must be counting.
    """

    def skipping(module: nn.Module) -> Forward:
        run = module.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            if counter.current < layer:
                return forms.wrap(module, hidden_input(args, kwargs))
            if counter.current == layer:
                args, kwargs = with_hidden_input(args, kwargs, hidden_BTD)
            return run(*args, **kwargs)

        return forward

    layers = dict.fromkeys(counter.adapter.layers)
    with patched_forward({module: skipping(module) for module in layers}):
        yield


@contextmanager
def fused_gelu(model: nn.Module) -> Iterator[None]:
    """Run GPT-2's activation as one kernel of torch instead of eight, the same to rounding."""

    def fused(hidden: Tensor) -> Tensor:
        return F.gelu(hidden, approximate="tanh")

    found = [module for module in model.modules() if isinstance(module, NewGELUActivation)]
    with patched_forward(dict.fromkeys(found, fused)):
        yield


class OneDnnProducts(TorchFunctionMode):
    """Within it, torch's products with float32 weights are oneDNN's, where those are faster.

    torch has them made by MKL, which keeps AVX-512 to Intel's processors; with oneDNN, AMD's are
    more than twice as fast at them. The results are the same to rounding. With `in_half`, what is
    multiplied is rounded to bfloat16 first, twice as fast again where the processor has
    instructions for that and good enough for statistics; elsewhere it changes nothing.
    """

    def __init__(self, in_half: bool = False) -> None:
        super().__init__()
        # Virtual machines that announce AMX may lack it, and end the process at such a product.
        self.in_half = in_half and processor_has("avx512_bf16") and not processor_has("amx_bf16")

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run one function of torch."""
        if func in (F.linear, torch.addmm) and not kwargs and (self.in_half or _onednn_is_faster()):
            if func is torch.addmm:
                hidden, weight, bias = args[1], args[2].T, args[0]
            else:
                hidden, weight, bias = (*args, None)[:3]
            tensors = [hidden, weight] if bias is None else [hidden, weight, bias]
            is_plain = all(t.dtype == torch.float32 and t.device.type == "cpu" for t in tensors)
            is_vector = bias is None or bias.ndim == 1
            if is_plain and is_vector and hidden.numel() and not torch.is_grad_enabled():
                if self.in_half:
                    return F.linear(*(tensor.bfloat16() for tensor in tensors)).float()
                return torch.ops.mkldnn._linear_pointwise(hidden, weight, bias, "none", [], "")
        return func(*args, **(kwargs or {}))


@functools.cache
def _onednn_is_faster() -> bool:
    has_it = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    return has_it and processor_has("AuthenticAMD", "avx512f")


# -- layers as single steps ----------------------------------------------------------------------


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
        self._num_returned: int | None = None
        """How long the tuple is that a layer returns; 0 if it returns a tensor alone."""
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
        watched = self._preparing_hooks() if self._num_returned is None else []
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
            if self._num_returned is None:
                self._num_returned = _num_returned(layer, compute, args, kwargs)
            if len(calls) == self._num_calls:
                raise StopForward
            hidden = calls[-1].hidden
            num = self._num_returned
            return (hidden, *[None] * (num - 1)) if num else hidden

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
def _num_returned(layer: nn.Module, compute: Any, args: Any, kwargs: Any) -> int:
    """Return the length of the tuple that a layer returns, 0 for a tensor: learned by running it.

    In evaluation mode: a draw for dropout more or less would change what a training draws next.
    """
    with eval_mode(layer):
        output = compute(*args, **kwargs)
    return len(output) if isinstance(output, tuple | list) else 0

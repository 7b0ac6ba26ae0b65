"""Other devices than the CPU, of which there is none here.

What can be known without one is tested with stand-ins. The device `meta` refuses, as a GPU does, to
mix with tensors on the CPU, and to have its values read; taken for Apple's, it shows where float64
would be made.
"""

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import LlamaConfig, LlamaForCausalLM

import deepenough
from deepenough import LazyTransformerConfig, ParConfig, devices
from deepenough.__main__ import main
from deepenough.cli import commands
from deepenough.config import Command, DeviceConfig, load_place, options
from deepenough.devices import exact, find_device, find_dtype, move_to_device, placed, to_device
from deepenough.errors import UserError
from deepenough.hf.adapter import Adapter
from deepenough.hf.layouts import LAYOUTS
from deepenough.lazy.modeling import (
    LazyTransformerForCausalLM,
    LazyTransformerForConditionalGeneration,
)
from deepenough.par.modeling import new_model
from deepenough.ponder.modeling import PonderEncoderForSequenceClassification
from deepenough.shortcut.normal_equations import NormalEquations
from deepenough.shortcut.statistics import R2, LayerStatistics
from tests.ponder.conftest import a_batch, tiny_encoder

PACKAGE = Path(deepenough.__file__).parent
#: Commands that neither load nor train a model for what they do on a device: they read what is
#: written, write files, or let others do the work.
WITHOUT = {"par derive", "par plot", "ponder plot", "shortcut plot", "report"}
WITHOUT |= {"shortcut import", "decode export", "cutoffs"}
META = torch.device("meta")


# -- what is asked for ---------------------------------------------------------------------------


def settings_of(command: Command) -> type:
    if isinstance(command.config, str):
        return load_place(command.config)  # type: ignore[no-any-return]
    return command.config if isinstance(command.config, type) else command.config([])


def test_every_command_with_a_model_has_a_device_and_a_number_format() -> None:
    table = {name: settings_of(command) for name, command in commands().items()}
    assert table.keys() >= WITHOUT
    with_device = {name for name, each in table.items() if issubclass(each, DeviceConfig)}
    assert with_device == table.keys() - WITHOUT
    for name in with_device - {"demo"}:
        known = [option.name for option in options(table[name])]
        formats = [option for option in known if option.endswith(("dtype", "train.precision"))]
        assert formats, name
        assert [option for option in known if option.endswith("device")] == ["device"], name


def test_what_is_not_there_is_refused_in_a_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    refused = {"cuda": "the CPU alone", "cuda:3": "is not there", "tpu9": "give one of auto, cpu"}
    for name, reason in refused.items():
        with pytest.raises(UserError, match=reason):
            find_device(name)
    with pytest.raises(UserError, match="choose one of float32"):
        find_dtype("int8")
    with pytest.raises(UserError, match="mps has no float64"):
        find_dtype("float64", torch.device("mps"))
    assert main(["decode", "generate", "smollm2", "--prompt", "x", "--device", "cuda"]) == 2
    assert main(["par", "train", "--dtype", "bfloat16"]) == 2
    error = capsys.readouterr().err
    assert "The device cuda is not there" in error and "did you mean --train.precision" in error


def test_a_gpu_that_is_there_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    assert find_device() == find_device("cuda") == torch.device("cuda")
    assert find_device("cpu") == torch.device("cpu")
    assert find_device("cuda:1") == torch.device("cuda", 1)
    with pytest.raises(UserError, match="the CPU and cuda 0 to 1"):
        find_device("cuda:2")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert find_device() == torch.device("cuda", 1)


def test_models_go_where_the_command_says_and_nowhere_else(monkeypatch: Any) -> None:
    model = torch.nn.Linear(2, 2)
    assert move_to_device(model).weight.dtype == torch.float32
    with placed("cpu", "bfloat16"):
        assert move_to_device(model).weight.dtype == torch.bfloat16
        with placed(dtype="float64"):
            assert find_device() == torch.device("cpu")
            assert move_to_device(model).weight.dtype == torch.float64
        assert move_to_device(model).weight.dtype == torch.bfloat16
    assert devices._placement is None

    def lines(config: Any) -> Iterator[str]:
        yield str(devices._placement)

    command = Command("x", "", DeviceConfig, lines, "")
    assert [*command.start(DeviceConfig(device="cpu"))] == [
        "Placement(device=device(type='cpu'), dtype=None)"
    ]
    assert devices._placement is None


@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
def test_a_number_format_holds_for_finished_models(dtype: str, tmp_path: Path) -> None:
    model = LlamaForCausalLM(tiny_llama())
    model.save_pretrained(tmp_path)
    from deepenough.hf.loading import from_pretrained

    with placed("cpu", dtype):
        found = move_to_device(from_pretrained(LlamaForCausalLM, str(tmp_path), "model"))
    assert found.dtype == getattr(torch, dtype)


# -- copies --------------------------------------------------------------------------------------


class FakeBatch:
    """Notes how it is copied."""

    def __init__(self) -> None:
        self.device, self.calls = torch.device("cpu"), list[Any]()

    def pin_memory(self) -> "FakeBatch":
        self.calls.append("pinned")
        return self

    def to(self, device: torch.device, **options: Any) -> "FakeBatch":
        self.calls.append((device.type, options))
        return self


def test_batches_are_pinned_for_cuda_alone() -> None:
    batch: Any = FakeBatch()
    to_device(batch, torch.device("cuda"))
    assert batch.calls == ["pinned", ("cuda", {"non_blocking": True})]
    for other in ("cpu", "mps"):
        batch.calls.clear()
        to_device(batch, torch.device(other))
        assert batch.calls == [(other, {})]


# -- a stand-in for a device ---------------------------------------------------------------------


class WithoutFloat64(TorchDispatchMode):
    """Fails where a tensor of float64 is made on the device `meta`."""

    def __init__(self) -> None:
        super().__init__()
        self.made = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for each in tree_leaves(found):
            if isinstance(each, Tensor) and each.device == META:
                self.made += 1
                assert each.dtype != torch.float64, f"{func} makes float64 on the device"
        return found


@pytest.fixture
def without_float64(monkeypatch: pytest.MonkeyPatch) -> WithoutFloat64:
    """Take the device `meta` for one without float64; what is copied from it becomes zeros."""
    monkeypatch.setattr(devices, "has_float64", lambda device: device.type != "meta")
    monkeypatch.setattr("deepenough.shortcut.statistics.has_float64", devices.has_float64)
    to = Tensor.to

    def copied(self: Tensor, *args: Any, **options: Any) -> Tensor:
        first = args[0] if args else options.get("device")
        if self.device == META and str(first) == "cpu":
            return torch.zeros(self.shape, dtype=self.dtype)
        return to(self, *args, **options)

    monkeypatch.setattr(Tensor, "to", copied)
    return WithoutFloat64()


def shapes_alone() -> FakeTensorMode:
    """Return a mode in which transformers does not look for padding in its masks."""
    return FakeTensorMode(allow_non_fake_inputs=True)


def tiny_llama(**changes: Any) -> LlamaConfig:
    sizes = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 3}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    return LlamaConfig(**(sizes | heads | changes))


def some_ids(device: torch.device = META) -> Tensor:
    return torch.zeros(2, 5, dtype=torch.long, device=device)


def test_the_stand_in_notices(without_float64: WithoutFloat64) -> None:
    values = torch.zeros(3, device=META)
    with without_float64 as mode:
        assert exact(values).device == torch.device("cpu")
        with pytest.raises(AssertionError, match="makes float64"):
            values.double()
        with pytest.raises(RuntimeError, match="not on the expected device"):
            values + torch.zeros(3)
        with pytest.raises(RuntimeError, match="meta"):
            values.sum().item()
    assert mode.made > 0


def test_statistics_are_summed_where_float64_is(without_float64: WithoutFloat64) -> None:
    adapter = Adapter(LlamaForCausalLM(tiny_llama()).to(META).eval(), LAYOUTS["llama"])
    with shapes_alone(), without_float64 as mode:
        states = [state.flatten(0, 1) for state in adapter.states(some_ids())]
    assert {state.device for state in states} == {META} and mode.made > 0
    states = [torch.empty(state.shape, device=META) for state in states]
    with without_float64:
        statistics = LayerStatistics(3, 16, device=META)
        statistics.update(states)
        statistics.flush()
        assert statistics.equations[0].products.device == torch.device("cpu")
        assert statistics.count == 10
        for in_single in (False, True):
            equations = NormalEquations(16, 16, META, in_single)
            equations.update(states[0], states[1])
            equations.flush()
            assert equations.products.device == torch.device("cpu") and equations.count == 10
        table = R2([(0, 1)], lambda hidden, i, j: hidden)
        table.update(states)
        assert table.squares.device == torch.device("cpu")


@pytest.mark.parametrize("trains", [True, False])
def test_a_model_with_memory_runs_on_a_device(
    trains: bool, without_float64: WithoutFloat64
) -> None:
    sizes = {"vocab_size": 40, "d_model": 16, "num_heads": 2, "d_ff": 24, "mem_len": 4, "length": 5}
    model = new_model(ParConfig(**sizes, pattern="dada")).to(META).train(trains)
    with without_float64 as mode:
        targets = some_ids() if trains else None  # with them, an evaluation counts FLOPs by token
        output = model(some_ids(), targets=targets)
        output = model(some_ids(), targets=targets, memories=output.memories)
        if trains:
            output.loss.backward()
        else:
            assert output.logits.device == META
    assert mode.made > 0


@pytest.mark.parametrize("trains", [True, False])
def test_a_lazy_model_runs_on_a_device(trains: bool, without_float64: WithoutFloat64) -> None:
    sizes = {"vocab_size": 40, "d_model": 16, "num_heads": 2, "d_ff": 24}
    config = LazyTransformerConfig(**sizes, encoder_steps=2, decoder_steps=2)
    translator: Any = LazyTransformerForConditionalGeneration(config).to(META).train(trains)
    writer: Any = LazyTransformerForCausalLM(config).to(META).train(trains)
    with without_float64 as mode:
        mask = torch.ones_like(some_ids())
        output = translator(some_ids(), mask, some_ids(), mask)
        assert output.logits.device == writer(some_ids(), mask).logits.device == META
    assert mode.made > 0


def test_a_pondering_model_trains_on_a_device(without_float64: WithoutFloat64) -> None:
    model: Any = PonderEncoderForSequenceClassification.from_encoder(tiny_encoder("bert"))
    batch = a_batch() | {"labels": torch.zeros(9, dtype=torch.long)}
    model(**batch)  # which looks for the layers, and reads values for that
    batch = {name: tensor.to(META) for name, tensor in batch.items()}
    model.to(META).train()
    with shapes_alone(), without_float64 as mode:
        assert model(**batch).loss.device == META
    assert mode.made > 0


def test_float64_is_asked_for_in_one_place() -> None:
    """`Tensor.double` would fail on Apple's GPUs; `devices.exact` knows them."""
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute) and node.attr == "double":
                found.append(path.relative_to(PACKAGE).as_posix())
    assert set(found) == {"nn/products.py"}, "the products of a CPU"

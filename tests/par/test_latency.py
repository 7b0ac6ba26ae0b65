"""Timing: who is called how often, orders that hold on any machine, and where it is kept."""

import time

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from deepenough import ParConfig, ParForCausalLM
from deepenough.par import latency
from deepenough.par.config import with_pattern
from deepenough.par.latency import (
    count_block_costs,
    forward_function,
    interleaved_best,
    measure_block_costs,
    measure_blocks,
)
from deepenough.par.pattern import interleaved


def make_config(**changes) -> ParConfig:
    sizes = {"vocab_size": 50, "d_model": 32, "num_heads": 2, "d_ff": 32, "num_blocks": 2}
    return ParConfig(**(sizes | {"mem_len": 96, "length": 96, "dropout": 0.0} | changes))


@pytest.mark.parametrize(("rounds", "warmup"), [(3, 1), (1, 0), (2, 2)])
def test_functions_take_turns(rounds, warmup):
    calls = []
    functions = {name: lambda name=name: calls.append(name) for name in "abc"}
    seconds = interleaved_best(functions, rounds, warmup)
    assert calls == list("abc") * (rounds + warmup)
    assert list(seconds) == ["a", "b", "c"]
    assert all(0 <= value < 1 for value in seconds.values())


def test_best_round_counts_and_warmup_does_not(monkeypatch):
    clock = iter([0.0, 0.1, 1.0, 1.5, 2.0, 2.3, 3.0, 3.9])  # rounds of 0.1 (warm-up), 0.5, 0.3, 0.9
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock))
    assert interleaved_best({"a": lambda: None}, rounds=3)["a"] == pytest.approx(0.3)


def test_forward_function_runs_one_segment_with_full_memory():
    model = ParForCausalLM(make_config(pattern="ad"))
    seen = []
    model.register_forward_hook(
        lambda _, args, kwargs, output: seen.append((args[0].shape, kwargs["memories"], output)),
        with_kwargs=True,
    )
    forward_function(model, lanes=3)()
    shape, memories, output = seen[0]
    assert shape == (3, 96)
    assert memories[0].shape == (3, 96, 32)
    assert memories[1] is None
    assert output.loss is not None and output.logits is None
    assert not model.training


def test_measured_costs_have_the_order_they_must():
    """192 keys a query against one narrow dense layer; an identity block does nothing at all."""
    costs = measure_block_costs(make_config(), lanes=4, rounds=5)
    assert costs.attention > 2 * costs.dense
    assert costs.attention > costs.identity >= 0
    assert costs.rest > 0
    assert costs.identity < 0.2 * costs.attention


@pytest.mark.parametrize(("whole", "warned"), [(9.0, False), (20.0, True)])
def test_a_busy_machine_is_noticed(monkeypatch, caplog, whole, warned):
    """Parts of 8 seconds in all: two attention, two dense, one identity block, and the rest."""
    times = latency._Times(blocks=[2.0, 1.0, 3.0, 1.0, 0.0], rest=1.0, whole=whole)
    monkeypatch.setattr(latency, "_time_blocks", lambda *_: times)
    costs = measure_block_costs(make_config(num_blocks=4), lanes=1)
    assert (costs.attention, costs.dense, costs.identity, costs.rest) == (2.5, 1.0, 0.0, 1.0)
    assert ("busy" in caplog.text) is warned


@pytest.mark.parametrize("form", [{}, {"cutoffs": [10], "adaptive_input": True}])
def test_counted_costs_add_up_to_the_whole_pass(form):
    config = make_config(num_blocks=4, **form)
    costs = count_block_costs(config, lanes=3)
    model = ParForCausalLM(with_pattern(config, "aad-"))
    counter = FlopCounterMode(display=False)
    backend = torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH)
    run = forward_function(model, lanes=3)
    with backend, counter:
        run()
    assert costs.of("aad-") == pytest.approx(counter.get_total_flops())
    assert costs.identity == 0
    assert costs.relative(interleaved(4)) == 1.0


def test_measured_blocks_go_into_traces():
    model = ParForCausalLM(make_config(pattern="a-d"))
    seconds = measure_blocks(model, lanes=2, rounds=3)
    assert seconds.shape == (3,)
    assert (seconds >= 0).all() and seconds.isfinite().all()
    assert seconds[0] > seconds[1]
    ids = torch.zeros(2, 5, dtype=torch.long)
    trace = model(ids).trace
    assert torch.equal(trace.block_seconds, seconds)
    assert trace.seconds == pytest.approx(float(seconds[0] + seconds[2]))
    assert not any(block._forward_hooks or block._forward_pre_hooks for block in model.blocks)


def test_a_measured_model_can_still_be_trained():
    """Nothing made while measuring, in inference mode, gets in the way of autograd."""
    model = ParForCausalLM(make_config(pattern="ad", length=8, mem_len=8))
    measure_blocks(model, lanes=2, rounds=1)
    model.train()
    ids = torch.zeros(2, 8, dtype=torch.long)
    memories = model(ids, targets=ids).memories
    model(ids, targets=ids, memories=memories).loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())

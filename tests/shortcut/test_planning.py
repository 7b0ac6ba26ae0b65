"""A plan tells what a fit takes, of a model of any size, and allocates nothing for it."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import LlamaConfig, LlamaForCausalLM

from deepenough.__main__ import main
from deepenough.decoding.engine import DecodingCosts
from deepenough.hf.loading import load_skeleton
from deepenough.shortcut import fitting, planning
from deepenough.shortcut.planning import adapt_skeleton, flops_per_token, measure_rate
from deepenough.shortcut.statistics import statistics_bytes
from tests.shortcut.conftest import make_tokenizer

WIDTH, LAYERS, FEED_FORWARD, VOCABULARY, HEADS, KV_HEADS = 8192, 80, 28672, 32000, 64, 8
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "intermediate_size": FEED_FORWARD,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
}
KEYS = WIDTH * KV_HEADS // HEADS
MATRICES = 2 * WIDTH * WIDTH + 2 * WIDTH * KEYS + 3 * WIDTH * FEED_FORWARD
"""Weights of the matrices of one layer."""


class Allocated(TorchDispatchMode):
    """Counts the bytes of tensors that are made where there is memory."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        made = (each for each in tree_leaves(found) if isinstance(each, Tensor))
        self.bytes += sum(each.nbytes for each in made if not each.is_meta)
        return found


@pytest.fixture
def llama_70b(tmp_path: Path) -> str:
    """A folder with a config and no weights."""
    config = LlamaConfig(**SIZES, architectures=["LlamaForCausalLM"])
    config.save_pretrained(tmp_path / "llama-70b")
    return str(tmp_path / "llama-70b")


def test_a_model_of_70_billion_weights_is_adapted_and_counted_without_memory(
    llama_70b: str,
) -> None:
    with Allocated() as allocated:
        model = load_skeleton(llama_70b, dtype="bfloat16")
        adapter = adapt_skeleton(model)
        length = 512
        counted = flops_per_token(adapter, length)
    assert isinstance(model, LlamaForCausalLM) and model.dtype == torch.bfloat16
    assert all(weight.is_meta for weight in model.parameters())
    assert allocated.bytes < 500e6, "and that for a small model of the same kind"
    assert (adapter.num_layers, adapter.width, adapter.kind) == (LAYERS, WIDTH, "causal")
    assert adapter.max_length == model.config.max_position_embeddings
    assert counted == LAYERS * (2 * MATRICES + 4 * length * WIDTH)
    costs = DecodingCosts(adapter)
    assert costs.token(length) == pytest.approx(counted) and costs.head == 2 * VOCABULARY * WIDTH


def test_a_plan_of_a_model_of_70_billion_weights(
    llama_70b: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    free = 64e9
    monkeypatch.setattr(fitting, "free_memory", lambda device: free)
    make_tokenizer(wraps=False).save_pretrained(llama_70b)
    text = tmp_path / "text.txt"
    text.write_text("w1 w2 w3 w4\n" * 100)
    words = ["shortcut", "fit", llama_70b, "--dry-run", "--data", str(text), "--min_chars", "1"]
    words += ["--dataset.split", "train", "--dtype", "bfloat16", "--device", "cpu"]
    words += ["--out", str(tmp_path / "run"), "--rate", "1e15", "--processes", "8"]
    made = []
    plan_fit = planning.plan_fit
    monkeypatch.setattr(
        planning, "plan_fit", lambda *given: made.append(plan_fit(*given)) or made[0]
    )
    assert main([*words, "--targets", "last"]) == 0
    said, plan = capsys.readouterr().out, asdict(made[0])
    weights = LAYERS * (MATRICES + 2 * WIDTH) + 2 * VOCABULARY * WIDTH + WIDTH
    assert (plan["weights"], plan["weight_bytes"]) == (weights, 2 * weights)
    assert plan["texts"] > 50 and plan["positions"] == plan["tokens"] == 4 * plan["texts"]
    assert plan["is_counted"] and plan["passes"] == 1 and plan["processes"] == 8
    last = (2 * LAYERS + 1) * WIDTH * WIDTH * 8
    assert plan["sums_bytes"] == {"all": statistics_bytes(LAYERS, WIDTH), "last": last}
    assert plan["maps_bytes"]["last"] == LAYERS * WIDTH * WIDTH * 4
    assert plan["in_files"] and last > free
    assert plan["buffer_bytes"] <= free / 2
    share = plan["tokens"] / 8
    forward = share * LAYERS * (2 * MATRICES + 4 * 4 * WIDTH)
    assert plan["forward_flops"] == pytest.approx(forward)
    assert plan["sums_flops"] == pytest.approx(share * WIDTH**2 * (LAYERS * 3 + 1))
    assert plan["solve_flops"] == pytest.approx(3 * LAYERS * WIDTH**3)
    total = plan["forward_flops"] + plan["sums_flops"] + plan["solve_flops"]
    assert plan["seconds"] == pytest.approx(total / 1e15)
    assert "80 layers of width 8192, 69 billion weights, 138 GB in bfloat16" in said
    assert "1.78 TB for maps between all pairs of layers, 86.4 GB for those to the last" in said
    assert "memory has room for 64 GB: they are kept in files" in said
    assert "at 1e+15 FLOP/s, as given" in said
    assert not (tmp_path / "run").exists(), "nothing is written"


def test_a_plan_measures_what_it_is_not_given(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 95}
    config = LlamaConfig(**sizes, **heads, architectures=["LlamaForCausalLM"])
    config.save_pretrained(tmp_path / "small")
    words = ["shortcut", "fit", str(tmp_path / "small"), "--dry_run", "--lines", "20"]
    assert main([*words, "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["rate"] > 1e8 and plan["sums_rate"] > 1e8 and plan["seconds"] > 0
    assert not plan["is_counted"] and not plan["in_files"], "there is no tokenizer"
    assert main(["shortcut", "fit", str(tmp_path / "small"), "--rate", "1e9"]) == 2
    assert "are options of --dry_run" in capsys.readouterr().err


def test_a_rate_is_that_of_products() -> None:
    assert measure_rate(torch.float32, torch.device("cpu")) > 1e8

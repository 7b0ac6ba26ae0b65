"""What a token costs beside its bytes: short and long contexts, bf16 weights, a billion weights.

Each variant times single passes of the native backend behind a prompt and compares them with the
floor: the bytes of the weights, and of the keys and values that are attended to, at the rate at
which the same threads read a buffer of that size in the same run. Memory is what the process has
gained by then, keys and values included. `gguf` is SmolLM2 as packaged, `context` the same behind
4,096 tokens, `bf16` SmolLM2 saved in bf16, `1b` Llama-3.2-1B's config with random bf16 weights.
"""

from __future__ import annotations

import ctypes
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from benchmarks.decode_setup import load, save_bf16
from benchmarks.figures import spread
from deepenough.decoding.api import speculate
from deepenough.decoding.native_weights import load_library

QUICK = False
SEEDS = [0]
VARIANTS = {
    "gguf": {"context": 512},
    "context": {"context": 4096},
    "bf16": {"kind": "bf16"},
    "1b": {"kind": "1b", "passes": 20},
}
LLAMA_1B = {
    "vocab_size": 128_256,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "max_position_embeddings": 131_072,
    "tie_word_embeddings": True,
}


def measure(
    kind: str = "gguf", context: int = 128, passes: int = 60, threads: int = 2
) -> dict[str, Any]:
    """Time passes over one token; return them, the floor, and memory and seconds of loading.

    Args:
        kind: gguf (SmolLM2 as packaged), bf16 (SmolLM2 saved in bf16) or 1b.
        context: Tokens before the one that is timed.
        passes: Passes that are timed, of the model itself a tenth.
        threads: Threads of torch and of the native backend.
    """
    torch.set_num_threads(threads)
    with tempfile.TemporaryDirectory() as folder:
        name = "smollm2" if kind == "gguf" else _saved(kind, Path(folder), threads)
        before, began = _resident(), time.perf_counter()
        fast = speculate(name, "none", backend="native")
        engine: Any = fast.decoding_engine
        loading = time.perf_counter() - began
        size = engine.adapter.model.config.vocab_size
        ids = torch.randint(size, (1, context), generator=torch.Generator().manual_seed(0))
        own, found = [], {}
        with torch.inference_mode():
            engine.prefill(ids, None, context + 8)
            for _ in range(passes):
                began = time.perf_counter()
                step = engine.start_step(ids[:, :1])
                found["native"] = engine.head(engine.norm(engine.run_through(step, step.hidden)))
                own.append(1e3 * (time.perf_counter() - began))
            resident = _resident() - before
            engine.release()
            usual, found["generate"] = _of_the_model(name, ids, max(passes // 10, 3))
    library, native = load_library(), engine.native
    config = engine.adapter.model.config
    kv_heads, layers = native.heads[1], config.num_hidden_layers
    weights = library.de_model_bytes(native.handle)
    read = weights + 2 * 4 * layers * kv_heads * native.head_width * context
    rate = library.de_read_rate(ctypes.c_int64(read), threads, 20)
    floor = 1e3 * read / rate
    difference = (found["native"] - found["generate"]).abs().max()
    return {
        "milliseconds": spread(own, "ms"),
        "generate_milliseconds": spread(usual, "ms"),
        "times_generate": spread(usual).value / spread(own).value,
        "floor_milliseconds": floor,
        "times_floor": spread(own).value / floor,
        "weights_megabytes": weights / 1e6,
        "read_megabytes": read / 1e6,
        "gigabytes_per_second": rate / 1e9,
        "loading_seconds": loading,
        "resident_megabytes": resident,
        "largest_difference": float(difference / found["generate"].abs().max()),
        "settings": {"formats": sorted(native.formats), "context": context},
    }


def _of_the_model(name: str, ids: torch.Tensor, passes: int) -> tuple[list[float], torch.Tensor]:
    """Return milliseconds of the model's own passes over one token in fp32, and its logits."""
    model, _ = load(name, torch.get_num_threads())
    cache = model(ids, use_cache=True, logits_to_keep=1).past_key_values
    times = []
    for _ in range(passes):
        began = time.perf_counter()
        logits = model(ids[:, :1], past_key_values=cache).logits
        times.append(1e3 * (time.perf_counter() - began))
        cache.crop(-1)
    return times, logits


def _saved(kind: str, folder: Path, threads: int) -> str:
    """Return a folder with a bf16 checkpoint."""
    if kind == "1b":
        torch.manual_seed(0)
        config = LlamaConfig(
            **LLAMA_1B, rope_parameters={"rope_theta": 5e5, "rope_type": "default"}
        )
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        load("smollm2", threads)[1].save_pretrained(folder)  # any tokenizer: only ids are used
        model.save_pretrained(folder)
    else:
        save_bf16(folder)
    return str(folder)


def _resident() -> float:
    """Return the memory of this process in megabytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS"):
            return int(line.split()[1]) / 1e3
    return 0.0

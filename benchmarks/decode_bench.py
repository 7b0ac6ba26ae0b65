"""SmolLM2 from its GGUF file beside transformers, llama.cpp and other engines, in one run.

This is `deepenough decode bench smollm2`: all ways continue the same prompts greedily in turns,
prefill included. llama.cpp (the package `xllamacpp`) is measured with its best number of threads on
the packaged file and on the same weights in Q4_0, the format that it is fastest with. `avx2` is
`generate`, llama.cpp and the native backend on a processor without AVX-512; `bf16` is SmolLM2 saved
in bf16, beside transformers alone.
"""

from __future__ import annotations

import re
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.decode_setup import save_bf16
from benchmarks.figures import Figure, Unavailable
from deepenough.config import resolve
from deepenough.decoding.bench import BASE, bench_run, times_as_fast
from deepenough.decoding.config import BenchConfig
from deepenough.hf.loading import PACKAGED, load, stored_gguf
from deepenough.nn.products import processor_has
from deepenough.training.trainer import keep_freed_memory

QUICK = False
SEEDS = [0]
VARIANTS = {"": {}, "avx2": {"without_avx512": True}, "bf16": {"bf16": True}}
MODEL = "smollm2"
SLOW = ["transformers early exit", "deepenough general"]
"""No faster than `generate`; they would take most of the time."""
OTHERS = ["transformers prompt lookup", "deepenough torch", "ctranslate2", "OpenVINO GenAI"]


def measure(
    bf16: bool = False,
    without_avx512: bool = False,
    prompts: int = 8,
    new_tokens: int = 128,
    rounds: int = 3,
    threads: int = 2,
    tuned: str = "",
) -> dict[str, Any]:
    """Run the command and return its rates, ratios, equality, memory and load times.

    Args:
        bf16: Measure the model saved in bf16, without other engines.
        without_avx512: Refuse a processor that has AVX-512, and leave out what is slower there.
        prompts: Prompts that are continued.
        new_tokens: New tokens a prompt, at most.
        rounds: Rounds of timing.
        threads: Threads of torch and of the native backend.
        tuned: Folder of `deepenough decode tune`, if its drafts are to be measured.
    """
    if without_avx512 and processor_has("avx512f"):
        raise Unavailable("This processor has AVX-512: leave without_avx512 out.")
    keep_freed_memory()
    torch.set_num_threads(threads)
    with tempfile.TemporaryDirectory() as folder:
        given: dict[str, Any] = {"prompts": prompts, "max_new_tokens": new_tokens}
        given |= {"rounds": rounds, "out": f"{folder}/bench", "data": "wikitext-2-raw"}
        if bf16:
            save_bf16(f"{folder}/model")
            given |= {"model": {"name": f"{folder}/model"}, "ours_only": True}
        else:
            write_q4_0(Path(folder) / "Q4_0.gguf")
            given |= {"model": {"name": MODEL}, "gguf": [f"{folder}/Q4_0.gguf"]}
            given["leave_out"] = [*SLOW, *OTHERS] if without_avx512 else SLOW
        given |= {"draft_model": tuned} if tuned else {}
        found = bench_run(resolve(BenchConfig, overrides=given))
    packaged = f"llama.cpp {Path(PACKAGED[MODEL].gguf).stem}"
    bases = {"plain": "deepenough native", "llama_cpp": packaged, "q4_0": "llama.cpp Q4_0"}
    figures: dict[str, dict[str, Any]] = {}
    for name, row in found["ways"].items():
        rate = row["tokens_per_second"]
        figures[name_of(name)] = {
            "tokens_per_second": Figure(rate[0], "tokens/s", *rate[1:]),
            "times_generate": times(row, found["ways"][BASE]),
            "identical": row["identical"],
            "agreement": row["agreement"],
            "memory_mb": row["megabytes"],
            "load_seconds": row["load_seconds"],
        }
        for base, other in bases.items():
            if other in found["ways"]:
                figures[name_of(name)][f"times_{base}"] = times(row, found["ways"][other])
    if bases["llama_cpp"] in found["ways"]:
        figures["llama_cpp"] = figures.pop(name_of(bases["llama_cpp"]))
    return {
        **figures,
        "settings": {"verdict": found["verdict"], "left_out": found["left_out"]},
    }


def times(row: dict[str, Any], other: dict[str, Any]) -> Figure:
    """Return how many times as fast one way is as another, over all prompts and rounds."""
    value, low, high = times_as_fast(row["rates"], other["rates"])
    return Figure(value, "x", low, high)


def name_of(way: str) -> str:
    """Return a way's name as figures have it."""
    return re.sub(r"\W+", "_", way)


def write_q4_0(path: Path) -> None:
    """Write the packaged weights, dequantised, as a GGUF file whose matrices are Q4_0.

    The embedding, which is the head too, becomes Q8_0, as llama.cpp's own tool leaves it finer.
    """
    from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter, quants

    reader = GGUFReader(str(stored_gguf(load(MODEL)[0])))
    writer = GGUFWriter(str(path), reader.get_field("general.architecture").contents())
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name == "general.architecture":
            continue
        kind = field.types[0]
        inner = field.types[1] if kind == GGUFValueType.ARRAY else None
        writer.add_key_value(name, field.contents(), kind, sub_type=inner)
    for tensor in reader.tensors:
        values = np.asarray(quants.dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
        kind = GGMLQuantizationType.F32
        if values.ndim == 2:
            is_embedding = tensor.name.startswith("token_embd")
            kind = GGMLQuantizationType.Q8_0 if is_embedding else GGMLQuantizationType.Q4_0
            values = quants.quantize(values, kind)
        writer.add_tensor(tensor.name, values, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

"""Inference engines run an exported draft head: same tokens, and as many accepted as predicted.

vLLM (both layouts, speculators and flat) and llama.cpp continue prompts without a head, and with it
as `deepenough decode export` writes it. The prediction is made in torch, from the text that the
engine writes without a head. `make test-serving` installs the engines into environments of their
own and runs this.
"""

from __future__ import annotations

import json
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import torch

from benchmarks.decode_setup import load, make_prompts
from benchmarks.figures import require
from benchmarks.served_engines import NUM_DRAFTS
from deepenough.decoding.backends import make_engine
from deepenough.decoding.draft_model import DraftModel
from deepenough.decoding.engine import Engine
from deepenough.decoding.export import export_head
from deepenough.decoding.self_generated import SelfGenerated, continue_prompts
from deepenough.decoding.training import predict_acceptance
from deepenough.hf.loading import stored_gguf

QUICK = False
SEEDS = [0]
#: By what share drafts that are accepted may differ from the prediction.
TOLERANCE = 0.03
#: Names here, engines of `served_engines`, layouts.
WAYS = {
    "vllm": ("vllm", "vllm"),
    "vllm_flat": ("vllm", "sglang"),
    "llama_cpp": ("llama.cpp", "llama.cpp"),
}


def measure(
    tuned: str = "runs/tuned",
    model: str = "smollm2",
    vllm: str = ".venv/serving/vllm",
    llama_cpp: str = ".venv/serving/llama.cpp",
    prompts: int = 24,
    new_tokens: int = 96,
    threads: int = 1,
    strict: bool = False,
) -> dict[str, Any]:
    """Return, of each engine, texts that are identical, and drafts accepted and predicted.

    `strict` refuses engines that write other texts, or accept other drafts than predicted.
    """
    advice = "make test-serving makes it."
    head = DraftModel.from_pretrained(require(tuned, advice))
    pythons = {"vllm": vllm, "llama.cpp": llama_cpp}
    full, tokenizer = load(model, threads)
    texts = make_prompts(tokenizer, prompts)
    engine = make_engine(full)
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        own = Path(folder) / "model"
        full.save_pretrained(own)
        tokenizer.save_pretrained(own)
        plain: dict[str, list[list[int]]] = {}
        for name, (server, layout) in WAYS.items():
            python = require(pythons[server], advice) / "bin" / "python"
            served = own if server == "vllm" else stored_gguf(full)
            exported = export_head(head, full, layout, Path(folder) / name)
            request = {"model": str(served), "prompts": texts, "threads": threads, "head": None}
            if server not in plain:  # some tokens more, for drafts behind the last
                more = request | {"new_tokens": new_tokens + NUM_DRAFTS}
                plain[server] = _run(python, server, more, folder)["tokens"]
            drafting = request | {"new_tokens": new_tokens, "head": str(exported)}
            answer = _run(python, server, drafting, folder)
            pairs = zip(plain[server], answer["tokens"], strict=True)
            same = sum(one[:new_tokens] == other for one, other in pairs)
            predicted = _predict(head, engine, texts, plain[server])
            found[name] = {
                "identical": same,
                **_rates("accepted", answer["rounds"], *answer["accepted"]),
            }
            found[name] |= _rates("predicted", *predicted)
            found[name]["ratio"] = found[name]["accepted_a_pass"] / found[name]["predicted_a_pass"]
            print(name, found[name], flush=True)
            if strict and (same < len(texts) or abs(found[name]["ratio"] - 1) > TOLERANCE):
                raise RuntimeError(f"{name} does not do with the head what was predicted.")
    return {**found, "settings": {"prompts": len(texts), "new_tokens": new_tokens}}


def _rates(name: str, rounds: float, *accepted: float) -> dict[str, float]:
    """Return rounds, drafts accepted in one, and the share of rounds that accept each draft."""
    own = {f"{name}_rounds": rounds, f"{name}_a_pass": sum(accepted) / rounds}
    if len(accepted) > 1:
        own |= {f"{name}_{place}": each / rounds for place, each in enumerate(accepted, start=1)}
    return own


def _predict(
    head: DraftModel, engine: Engine, prompts: list[list[int]], written: list[list[int]]
) -> list[int]:
    """Return what `predict_acceptance` says of texts that an engine has written."""
    texts = []
    for prompt, tokens in zip(prompts, written, strict=True):
        # Read all but the last token, for the inputs of layers.
        read = continue_prompts(engine, [prompt + tokens[:-1]], 1, layers=head.head.config.layers)[
            0
        ]
        ids_T = torch.tensor(prompt + tokens)
        texts.append(SelfGenerated(ids_T, read.states_TD, len(prompt), read.inputs_TZ))
    return predict_acceptance(head.head, engine.adapter, texts)


def _run(python: Path, server: str, request: dict[str, Any], folder: str) -> dict[str, Any]:
    """Return the answer of `served_engines` in an engine's own environment."""
    script = Path(__file__).with_name("served_engines.py")
    asked, answered = Path(folder) / "request.json", Path(folder) / "answer.json"
    asked.write_text(json.dumps(request))
    command = [str(python), str(script), server, str(asked), str(answered)]
    subprocess.run(command, check=True, cwd=folder)
    answer: dict[str, Any] = json.loads(answered.read_text())
    return answer

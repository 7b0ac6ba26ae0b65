"""Continue prompts in an inference engine, with a draft head or without: run by `decode_served`.

It is run by the Python of the engine's own environment, which holds nothing of this package:

    python served_engines.py vllm REQUEST.json ANSWER.json

A request has `model`, `head` (or null), `prompts` as tokens, `new_tokens` and `threads`; the answer
the new `tokens` of each prompt, and with a head `rounds` of drafting and the drafts `accepted`,
by position where the engine counts them so.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

NUM_DRAFTS = 3


def vllm(request: dict[str, Any]) -> dict[str, Any]:
    """Let vLLM continue the prompts in one batch."""
    os.environ |= {"HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    from vllm import LLM, SamplingParams

    drafts = {"model": request["head"], "num_speculative_tokens": NUM_DRAFTS, "method": "eagle3"}
    engine = LLM(
        model=request["model"],
        dtype="float32",
        enforce_eager=True,
        max_model_len=512,
        disable_log_stats=False,
        speculative_config=drafts if request["head"] else None,
    )
    options = SamplingParams(temperature=0, max_tokens=request["new_tokens"], ignore_eos=True)
    prompts = [{"prompt_token_ids": ids} for ids in request["prompts"]]
    answer = {"tokens": [list(o.outputs[0].token_ids) for o in engine.generate(prompts, options)]}
    for metric in engine.get_metrics():
        if metric.name == "vllm:spec_decode_num_drafts":
            answer["rounds"] = metric.value
        if metric.name == "vllm:spec_decode_num_accepted_tokens_per_pos":
            answer["accepted"] = list(metric.values)
    return answer


def llama_cpp(request: dict[str, Any]) -> dict[str, Any]:
    """Let llama.cpp continue the prompts one by one."""
    import xllamacpp

    kinds = xllamacpp.common_speculative_type
    params = xllamacpp.CommonParams()
    params.model.path = request["model"]
    params.n_ctx, params.n_parallel, params.verbosity, params.port = 1024, 1, 0, 0
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = request["threads"]
    draft = params.speculative.draft
    if request["head"]:
        params.speculative.types = [kinds.COMMON_SPECULATIVE_TYPE_DRAFT_EAGLE3]
        draft.mparams.path = request["head"]
        draft.n_max, draft.n_min, draft.p_min = NUM_DRAFTS, 0, 0.0
        draft.cpuparams.n_threads = draft.cpuparams_batch.n_threads = request["threads"]
    server = xllamacpp.Server(params)
    tokens, accepted = [], 0
    for prompt in request["prompts"]:
        options = {"prompt": prompt, "n_predict": request["new_tokens"], "temperature": 0.0}
        options |= {"ignore_eos": True, "cache_prompt": False, "logprobs": 1}
        found = server.handle_completions(options)
        found = json.loads(found) if isinstance(found, str) else found
        tokens.append([each["id"] for each in found["choices"][0]["logprobs"]["content"]])
        accepted += found["timings"].get("draft_n_accepted", 0)
    # Of each text, the first token comes from the prompt; each round adds one to those accepted.
    rounds = sum(len(each) - 1 for each in tokens) - accepted
    return {"tokens": tokens} | ({"rounds": rounds, "accepted": [accepted]} if accepted else {})


if __name__ == "__main__":
    engines = {"vllm": vllm, "llama.cpp": llama_cpp}
    name, request_path, answer_path = sys.argv[1:]
    answer = engines[name](json.loads(Path(request_path).read_text()))
    Path(answer_path).write_text(json.dumps(answer))

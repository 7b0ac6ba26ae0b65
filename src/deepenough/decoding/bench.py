"""Measure ways to generate with one model beside each other: `deepenough decode bench`.

All ways continue the same prompts greedily, one at a time, and take turns on each prompt, so that
whatever else the machine does hits all of them; a round is all prompts, prefill included. Measured
are tokens a second, what making a way and its first text took in seconds and memory, and whether
its tokens are those of transformers' `generate`. Where they are not, `agreement` is the share of
its tokens that the model itself finds likeliest after the text before them.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from deepenough.artifacts import write_json
from deepenough.config import dump
from deepenough.decoding.api import speculate
from deepenough.decoding.backends import BACKENDS
from deepenough.decoding.config import BenchConfig, SelfGeneratedConfig
from deepenough.decoding.self_generated import make_prompts
from deepenough.errors import UserError
from deepenough.hf.adapter import kind_of
from deepenough.hf.loading import stored_gguf
from deepenough.measurement import Interval, median_interval, shown
from deepenough.runs import RunFolder

BASE, FILE = "transformers generate", "bench.json"
#: Continues a prompt with new tokens; some engines tell them only if asked, which takes time.
Run = Callable[[Sequence[int], bool], list[int]]


def bench_run(
    config: BenchConfig, progress: Callable[[int, int | None], None] | None = None
) -> dict[str, Any]:
    """Measure all ways and return what is written to `bench.json` in the run folder."""
    RunFolder.check(config.out, config.resume, config.overwrite)
    began, before = time.perf_counter(), _resident()
    model, tokenizer = config.model.load()
    if not model.config.is_encoder_decoder and kind_of(model) != "causal":
        raise UserError(
            f"{type(model).__name__} does not generate text: give a causal language model."
        )
    model.generation_config.pad_token_id = model.generation_config.pad_token_id or 0
    prompts = list(
        islice(make_prompts(tokenizer, config.data, SelfGeneratedConfig()), config.prompts)
    )
    if not prompts:
        raise UserError(f"No line of {config.data} can be a prompt: give a longer text.")
    ways: dict[str, Run] = {}
    rows: dict[str, dict[str, Any]] = {}
    left_out: dict[str, str] = {}
    for name, make in _ways(config, model, tokenizer):
        if name in (config.leave_out or ()) and name != BASE:
            continue
        try:
            run = make()
            run(prompts[0], False)
        except Exception as error:  # other engines raise many kinds
            left_out[name] = " ".join(str(error).split())[:200]
            continue
        now, after = time.perf_counter(), _resident()
        ways[name] = run
        rows[name] = {"load_seconds": now - began, "megabytes": after - before}
        began, before = now, after
    turns, written = take_turns(ways, prompts, config.rounds, progress)
    ends = model.generation_config.eos_token_id
    ends = ends if isinstance(ends, list) else [ends]
    rates: dict[str, list[float]] = {}  # of each prompt in each round
    expected: list[list[int]] = []  # what the first way writes
    for name, run in ways.items():
        found = [
            own or run(prompt, True) for prompt, own in zip(prompts, written[name], strict=True)
        ]
        # Without end tokens, which not all engines return.
        texts = [[token for token in text if token not in ends] for text in found]
        expected, lengths = expected or texts, [max(1, len(text)) for text in texts]
        rates[name] = [
            length / seconds
            for turn in turns[name]
            for length, seconds in zip(lengths, turn, strict=True)
        ]
        rounds = [sum(lengths) / sum(turn) for turn in turns[name]]
        rows[name] |= {
            "tokens_per_second": list(median_interval(rounds)),
            "times_generate": list(times_as_fast(rates[name], rates[BASE])),
            "identical": sum(a == b for a, b in zip(texts, expected, strict=True)),
            "agreement": _agreement(model, prompts, texts),
            "rates": rates[name],
        }
    content = {
        "model": config.model.name,
        "prompts": len(prompts),
        "rounds": config.rounds,
        "threads": torch.get_num_threads(),
        "ways": rows,
        "left_out": left_out,
        "verdict": verdict(rows, rates, len(prompts)),
    }
    folder = RunFolder.create(config.out, config.resume, config.overwrite)
    dump(config, folder.config)
    write_json(folder.path / FILE, content)
    return content


def take_turns(
    ways: dict[str, Run],
    prompts: Sequence[Sequence[int]],
    rounds: int,
    progress: Callable[[int, int | None], None] | None = None,
) -> tuple[dict[str, list[list[float]]], dict[str, list[list[int]]]]:
    """Return the seconds of every way, by round and prompt, and what it wrote in the last round."""
    turns: dict[str, list[list[float]]] = {name: [[] for _ in range(rounds)] for name in ways}
    written: dict[str, list[list[int]]] = {name: [[] for _ in prompts] for name in ways}
    order = list(ways)
    for number in range(rounds):
        for place, prompt in enumerate(prompts):
            for name in order:
                began = time.perf_counter()
                written[name][place] = ways[name](prompt, False)
                turns[name][number].append(time.perf_counter() - began)
            order = [*order[1:], order[0]]  # nobody always follows the same
            if progress is not None:
                progress(number * len(prompts) + place + 1, rounds * len(prompts))
    return turns, written


@torch.inference_mode()
def _agreement(model: Any, prompts: Sequence[list[int]], texts: Sequence[list[int]]) -> float:
    """Return the share of tokens that the model finds likeliest after the text before them."""
    right = 0
    for prompt, text in zip(prompts, texts, strict=True):
        ids_1T = torch.tensor([[*prompt, *text]], device=model.device)
        best = model(ids_1T).logits[0, len(prompt) - 1 : -1].argmax(-1).tolist()
        right += sum(a == b for a, b in zip(best, text, strict=True))
    return right / max(1, sum(map(len, texts)))


def verdict(rows: dict[str, Any], rates: dict[str, list[float]], prompts: int) -> str:
    """Say which way is fastest, and whether the next is significantly slower."""
    first, *others = sorted(rates, key=lambda name: -rows[name]["tokens_per_second"][0])
    said = f"{first} is the fastest here"
    if first != BASE:
        times, same = rows[first]["times_generate"], rows[first]["identical"]
        said = f"{first} is {shown(times[0], times[1:])} times as fast as {BASE}, "
        said += f"tokens identical on {same} of {prompts} prompts"
    if others and others[0] != BASE:
        ratio = times_as_fast(rates[first], rates[others[0]])
        if ratio.low > 1:
            said += f", and {shown(ratio.value, ratio[1:])} times as fast as {others[0]}"
        else:
            said += f"; {others[0]} is not significantly slower"
    return said + "."


def times_as_fast(own: Sequence[float], other: Sequence[float]) -> Interval:
    """Return how many times as fast one is, prompt by prompt and round by round."""
    return median_interval([a / b for a, b in zip(own, other, strict=True)])


def _resident() -> float:
    """Return the megabytes of this process that are in memory; 0 where that is not known."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        return 0.0
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


# -- ways ----------------------------------------------------------------------------------------


def _ways(
    config: BenchConfig, model: Any, tokenizer: Any
) -> Iterator[tuple[str, Callable[[], Run]]]:
    """Yield the name of every way and what makes it, which may fail."""
    most = config.max_new_tokens
    yield BASE, partial(_own, model, most)
    for backend in BACKENDS:
        yield f"deepenough {backend}", partial(_ours, model, most, drafter="none", backend=backend)
    yield "deepenough + lookup", partial(_ours, model, most, drafter="lookup")
    if config.draft_model is not None:
        tuned = partial(_ours, model, most, draft_model=config.draft_model)
        yield "deepenough + tuned drafts", tuned
    if config.ours_only:
        return
    yield "transformers prompt lookup", partial(_own, model, most, prompt_lookup_num_tokens=3)
    layer = max(1, int(model.config.get_text_config().num_hidden_layers) // 8)
    yield "transformers early exit", partial(_own, model, most, assistant_early_exit=layer)
    gguf = stored_gguf(model)
    for path in [*([str(gguf)] if gguf else []), *(config.gguf or [])]:
        yield f"llama.cpp {Path(path).stem}", partial(llama_cpp, path, most)
    yield "ctranslate2", partial(_ctranslate2, model, tokenizer, most)
    if gguf:
        yield "OpenVINO GenAI", partial(_openvino, str(gguf), most)


def _own(model: Any, most: int, **options: Any) -> Run:
    def run(prompt: Sequence[int], _: bool) -> list[int]:
        ids_1T = torch.tensor([list(prompt)], device=model.device)
        given = {"attention_mask": torch.ones_like(ids_1T), "do_sample": False, **options}
        output = model.generate(ids_1T, max_new_tokens=most, **given)
        found: list[int] = output[0, len(prompt) :].tolist()
        return found

    return run


def _ours(model: Any, most: int, **options: Any) -> Run:
    fast = speculate(model, **options)
    run = _own(fast, most)

    def fresh(prompt: Sequence[int], tells: bool) -> list[int]:
        fast.free_cache()  # each text is read anew, as by all others
        return run(prompt, tells)

    return fresh


def llama_cpp(path: str, most: int) -> Run:
    """Return llama.cpp with the number of threads that is fastest."""
    import xllamacpp  # type: ignore

    def make(threads: int) -> Run:
        given = xllamacpp.CommonParams()
        given.model.path, given.n_parallel, given.verbosity = path, 1, 0
        given.n_ctx = most + 512
        given.cpuparams.n_threads = given.cpuparams_batch.n_threads = threads
        server = xllamacpp.Server(given)

        def run(prompt: Sequence[int], tells: bool) -> list[int]:
            request = {"prompt": list(prompt), "max_tokens": most, "temperature": 0}
            request |= {"cache_prompt": False, **({"logprobs": 1} if tells else {})}
            answer = server.handle_completions(request)["choices"][0]
            return [each["id"] for each in (answer["logprobs"] or {"content": []})["content"]]

        return run

    threads = [n for n in (1, 2, 4, 8, 16, 32) if n <= (os.cpu_count() or 1)]
    made = {str(n): make(n) for n in threads}
    turns, _ = take_turns(made, [[1, 2, 3]], 2)
    return made[min(turns, key=lambda name: turns[name][1][0])]


def _ctranslate2(model: Any, tokenizer: Any, most: int) -> Run:
    """Return ctranslate2 on the model, converted in a temporary folder."""
    import ctranslate2  # type: ignore

    with tempfile.TemporaryDirectory() as folder:
        for part in (model, tokenizer):
            part.save_pretrained(f"{folder}/model")
        made = ctranslate2.converters.TransformersConverter(f"{folder}/model")
        threads = torch.get_num_threads()
        own = ctranslate2.Generator(made.convert(f"{folder}/made"), intra_threads=threads)
    options = {"max_length": most, "beam_size": 1, "include_prompt_in_result": False}

    def run(prompt: Sequence[int], _: bool) -> list[int]:
        found = own.generate_batch([tokenizer.convert_ids_to_tokens(list(prompt))], **options)
        ids: list[int] = found[0].sequences_ids[0]
        return ids

    return run


def _openvino(path: str, most: int) -> Run:
    """Return OpenVINO GenAI on a GGUF file."""
    import numpy as np
    import openvino  # type: ignore
    import openvino_genai  # type: ignore

    pipeline, given = openvino_genai.LLMPipeline(path, "CPU"), openvino_genai.GenerationConfig()
    given.max_new_tokens, given.do_sample = most, False

    def run(prompt: Sequence[int], _: bool) -> list[int]:
        ids: list[int] = pipeline.generate(openvino.Tensor(np.array([prompt])), given).tokens[0]
        return ids

    return run

"""Measure decoding: one prompt beside the model itself, standard tasks, and candidates to compare.

- `generate_timed`: one prompt continued by an adaptive model and, in turns, by the model itself.
- `evaluate`: tasks of EleutherAI's `lm-eval`. Likelihoods of an exiting model are those of its
  exits (`exit_scoring.py`): every position but the first may leave, whether it belongs to a
  question or to an answer.
- `open_candidate`: a run of `shortcut fit`, `shortcut prune` or `decode tune` as `deepenough
  compare` measures it.
"""

import shlex
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor
from transformers import GenerationConfig

from deepenough.config import resolve
from deepenough.data.tokenizer import check_text
from deepenough.decoding.api import DecodingOutput, early_exit, speculate
from deepenough.decoding.config import DraftTrainConfig
from deepenough.decoding.early_exit import ConfidenceGap, KVPropagation
from deepenough.decoding.engine import DecodingCosts
from deepenough.devices import exact
from deepenough.errors import UserError
from deepenough.hf.adapter import adapt
from deepenough.hf.loading import load
from deepenough.measurement import (
    ComparedData,
    ComparedTask,
    Interval,
    OperatingPoint,
    Sample,
    Scores,
    median_interval,
    share_interval,
)
from deepenough.runs import read_config
from deepenough.shortcut.config import PretrainedModelConfig, TextConfig
from deepenough.shortcut.modeling import Shortcuts
from deepenough.trace import DepthTrace
from deepenough.training.logging import without_bars

#: New tokens of a first, untimed turn, in which everything that is done once is done.
_WARMUP_TOKENS = 4


# -- one prompt ----------------------------------------------------------------------------------


@dataclass
class GenerationResult:
    """What one prompt was continued with, and what that took."""

    ids: list[int]
    """The new tokens."""
    trace: DepthTrace
    """Of these, `[1, T]`; 0 layers for one at which Ctrl-C came."""
    turns: list[float]
    """Seconds of each turn."""
    output: DecodingOutput | None = None
    """What `generate` told beside them; None if it was that of transformers."""

    @property
    def tokens_per_second(self) -> Interval:
        """New tokens a second, over the turns."""
        return median_interval([len(self.ids) / seconds for seconds in self.turns])

    @property
    def mean_layers(self) -> float:
        """Layers of a token, on average over those whose depth is known."""
        known = self.trace.depth > 0
        return float(self.trace.depth.sum()) / max(int(known.sum()), 1)


def prompt_ids(tokenizer: Any, prompt: str, chat: bool = False) -> Tensor:
    """Return the tokens `[1, T]` of a prompt, as it stands or as what a user says in a chat."""
    if not check_text(prompt).strip():
        raise UserError("The prompt is empty: give some text to continue.")
    if chat:
        if not getattr(tokenizer, "chat_template", None):
            raise UserError("This model's tokenizer has no chat template: leave out chat.")
        message = [{"role": "user", "content": prompt}]
        prompt = tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
    # A template has the special tokens in it.
    return torch.tensor([tokenizer(prompt, add_special_tokens=not chat)["input_ids"]])


def generate_timed(
    fast: Any,
    ids_1T: Tensor,
    max_new_tokens: int,
    against: Any = None,
    rounds: int = 1,
    streamer: Any = None,
) -> tuple[GenerationResult, GenerationResult | None]:
    """Continue a prompt and return what came of it, and what came of `against`; Ctrl-C ends it.

    `against`, the model itself, takes turns with `fast`, so that whatever else the machine does
    hits both; its FLOPs are counted as for tokens that run all layers. A `streamer` of transformers
    is told the tokens as they come.
    """
    given = {
        "input_ids": ids_1T.to(fast.device),
        "attention_mask": torch.ones_like(ids_1T).to(fast.device),
        "do_sample": False,
        # Without one, transformers prints a warning that is of no interest here.
        "pad_token_id": fast.generation_config.pad_token_id or 0,
    }
    length = ids_1T.shape[1]
    if against is not None:
        for model in (fast, against):
            model.generate(**given, max_new_tokens=min(_WARMUP_TOKENS, max_new_tokens))
    seconds: list[float] = []
    full_seconds: list[float] = []
    told = {"streamer": streamer, "return_dict_in_generate": True}
    for _ in range(rounds):
        if against is not None:
            fast.free_cache()  # every turn reads the prompt, as the other does
        began = time.perf_counter()
        output = fast.generate(**given, max_new_tokens=max_new_tokens, **told)
        seconds.append(time.perf_counter() - began)
        if against is None or output.interrupted:
            break
        began = time.perf_counter()
        try:
            full = against.generate(**given, max_new_tokens=max_new_tokens)[0, length:].tolist()
        except KeyboardInterrupt:
            output.interrupted = True
            break
        full_seconds.append(time.perf_counter() - began)
    result = GenerationResult(output.sequences[0, length:].tolist(), output.trace, seconds, output)
    if not full_seconds:
        return result, None
    trace = full_trace(fast.decoding_engine.costs, length, len(full))
    return result, GenerationResult(full, trace, full_seconds)


def full_trace(costs: DecodingCosts, prompt: int, new: int) -> DepthTrace:
    """Return the trace `[1, new]` of tokens behind a prompt that run all layers."""
    depth = torch.full((1, new), len(costs.layers))
    flops = [[costs.token(prompt + 1 + n) + costs.head for n in range(new)]]
    ran = torch.ones(1, new, len(costs.layers), dtype=torch.bool)
    return DepthTrace(depth, ran, torch.tensor(flops, dtype=torch.float64))


def pieces(tokenizer: Any, prompt: Sequence[int], new: Sequence[int]) -> list[str]:
    """Return what each new token adds; a character of several tokens comes with its last one."""
    ids = list(prompt)
    shown = tokenizer.decode(ids)
    found: list[str] = []
    for token in new:
        ids.append(token)
        text = tokenizer.decode(ids)
        whole = not text.endswith("\ufffd") or len(found) == len(new) - 1
        found.append(text[len(shown) :] if whole else "")
        shown = text if whole else shown
    return found


# -- standard tasks ------------------------------------------------------------------------------


def evaluate(
    fast: Any,
    tokenizer: Any,
    tasks: list[str],
    include: str | None = None,
    batch_size: int = 8,
    **options: Any,
) -> dict[str, Any]:
    """Return the scores of `lm-eval` tasks by name; those of an exiting model with `mean_layers`.

    `include` is a folder of tasks of your own, instead of the harness's; `options` are those of its
    `simple_evaluate`.
    """
    try:
        from lm_eval.evaluator import simple_evaluate  # type: ignore
        from lm_eval.models.huggingface import HFLM  # type: ignore
        from lm_eval.tasks import TaskManager  # type: ignore
    except ImportError as error:
        raise UserError(
            "Standard tasks need lm-eval: install it with pip install deepenough[eval]."
        ) from error
    depths: list[Tensor] = []

    class AdaptiveLM(HFLM):  # type: ignore[misc]
        """A model of the harness that notes the depth of every position it scores."""

        def _model_call(self, inps: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            logits: Tensor = super()._model_call(inps, *args, **kwargs)
            if fast.exit_rule is not None:
                depths.append(fast.trace.depth[fast.trace.depth > 0])
            return logits

    model = AdaptiveLM(fast, backend="causal", tokenizer=tokenizer, batch_size=batch_size)
    manager = TaskManager(include_path=include, include_defaults=include is None)
    found = simple_evaluate(model, tasks=tasks, task_manager=manager, **options)
    scores = {name: dict(values) for name, values in found["results"].items()}
    if depths:
        for values in scores.values():
            values["mean_layers"] = float(exact(torch.cat(depths)).mean())
    return scores


# -- comparison ----------------------------------------------------------------------------------

PLAIN: Final = "transformers"
FULL: Final = "full"
SPECULATIVE: Final = "speculative"
TUNED: Final = "tuned"
EXIT: Final = "exit"
PRUNED: Final = "pruned"
MECHANISMS = (PLAIN, FULL, SPECULATIVE, TUNED, EXIT, PRUNED)
#: Prompts of a comparison, unless a limit is given.
_NUM_PROMPTS = 8


#: What was generated after each prompt, `[T]` with the prompt, and the trace of the new tokens.
GeneratedTexts = list[tuple[Tensor, DepthTrace]]


class GenerationCandidate:
    """A model that generates, with what was fitted for it: agreement over ways to decode.

    Every way generates greedily after the same prompts, one text at a time: the model's own
    `generate`, our loop without drafts (`full`), with drafts (`speculative`, and `tuned` with a
    draft model), with early exit (`exit`), and the model that was made smaller (`pruned`). A token
    agrees if it is the one that the whole model finds most likely after the text before it, whoever
    wrote that: one early difference does not count for all that follows.
    """

    mechanism = EXIT

    def __init__(
        self,
        run: str,
        name: str,
        data: ComparedData,
        loaded: tuple[Any, Any] | None = None,
        texts: Sequence[str] | None = None,
    ) -> None:
        """Open a run; its model and tokenizer, and texts for prompts, may be in memory already."""
        self.name, self.path, self.grid = name, run, data.grid
        self.asked = data.mechanisms or list(MECHANISMS)
        if unknown := [each for each in self.asked if each not in MECHANISMS]:
            raise UserError(
                f"There is no mechanism {unknown[0]!r} for {run}: choose from "
                f"{', '.join(MECHANISMS)}."
            )
        config = read_config(run)
        tunes = config.get("method") == DraftTrainConfig.METHOD
        self.draft_model = run if tunes else data.tuned
        if self.draft_model is None and TUNED in (data.mechanisms or []):
            raise UserError(
                f"{TUNED} needs drafts: give the folder that deepenough decode tune wrote for the "
                "model, as --tuned."
            )
        self.folder = Path(run) / "shortcuts"
        self.shortcuts = None
        if self.folder.is_dir():
            self.shortcuts = Shortcuts.from_pretrained(self.folder)
        prunes = "prune" in config
        if self.shortcuts is None and not tunes and not prunes:
            raise UserError(
                f"{run} has no maps yet: let deepenough shortcut fit finish (--resume goes "
                "on), or leave it out."
            )
        # Only maps to all layers can fill the KV cache.
        whole = self.shortcuts is not None and self.shortcuts.targets == "all"
        self.kv_propagation: KVPropagation = "shortcut" if whole else "copy"
        pretrained = resolve(PretrainedModelConfig, overrides=config.get("model"))
        self.model_name = pretrained.name
        with without_bars():
            opened: tuple[Any, Any] = loaded or pretrained.load(data.trust)
        self.model, self.tokenizer = opened
        if not self.model.can_generate():
            raise UserError(
                f"{self.model_name} does not write text, so its exits cannot be timed: measure "
                f"it with deepenough shortcut eval {run}."
            )
        self.model.eval()
        self.costs = DecodingCosts(adapt(self.model))
        self.pruned = load(run)[0] if prunes else None
        self.num_prompt, self.num_new = data.prompt_tokens, data.new_tokens
        text, split = data.data or config.get("data", "python"), data.split or "valid"
        number = data.limit or _NUM_PROMPTS
        if texts is None:
            texts = TextConfig(split, lines=None).read(text)
        self.prompts = _prompts(self.tokenizer, texts, f"{text} ({split})", number, self.num_prompt)
        self.models: dict[str, Any] = {}
        sizes = {"prompt_tokens": self.num_prompt, "new_tokens": self.num_new}
        detail = {"model": self.model_name, "prompts": len(self.prompts), **sizes}
        self.task = ComparedTask("writing", text, split, "token", "agreement", True, detail)

    def points(self) -> Sequence[OperatingPoint]:
        """Return the ways to decode that were asked for, the deepest first."""
        command = f"deepenough decode generate {shlex.quote(self.model_name)}"
        command += " --prompt 'Once upon a time'"
        found = [
            OperatingPoint(
                name, {"mode": name}, name, "" if name == PLAIN else f"{command} --mode {name}"
            )
            for name in (PLAIN, FULL, SPECULATIVE)
            if name in self.asked
        ]
        if self.draft_model is not None and TUNED in self.asked:
            drafts = f"--mode speculative --draft_model {shlex.quote(self.draft_model)}"
            found.append(OperatingPoint(TUNED, {"mode": TUNED}, TUNED, f"{command} {drafts}"))
        if self.pruned is not None and PRUNED in self.asked:
            generate = f"deepenough decode generate {shlex.quote(self.path)} --mode full"
            own = f"{generate} --prompt 'Once upon a time'"
            found.append(OperatingPoint(PRUNED, {"mode": PRUNED}, PRUNED, own))
        if self.shortcuts is not None and EXIT in self.asked:
            command += f" --mode early_exit --shortcuts {shlex.quote(str(self.folder))}"
            command += f" --kv_propagation {self.kv_propagation} --max_new_tokens {self.num_new}"
            command += f" --mean_length {self.num_new} --threshold"
            found += [
                OperatingPoint(
                    f"exit {value:g}", {"mode": EXIT, "exit": value}, EXIT, f"{command} {value:g}"
                )
                for value in self.grid.exit or [0.99, 0.9, 0.7, 0.5]
            ]
        for point in found:
            if point.name not in self.models:
                self.models[point.name] = self._model(point)
        return [replace(point, is_counted=self._is_counted(point)) for point in found]

    def _is_counted(self, point: OperatingPoint) -> bool:
        engine = getattr(self.models[point.name], "decoding_engine", None)
        return engine is None or engine.backend != "native"

    def _model(self, point: OperatingPoint) -> Any:
        mode = str(point.settings["mode"])
        if mode == PLAIN:
            return self.model
        if mode == PRUNED and self.pruned is not None:
            return speculate(self.pruned, "none")
        if mode == TUNED:
            return speculate(self.model, draft_model=self.draft_model)
        if mode != EXIT:
            return speculate(self.model, "none" if mode == FULL else None)
        assert self.shortcuts is not None
        policy = ConfidenceGap(float(point.settings["exit"]), float(self.num_new))
        return early_exit(
            self.model, self.shortcuts, policy=policy, kv_propagation=self.kv_propagation
        )

    @torch.inference_mode()
    def run(self, point: OperatingPoint) -> GeneratedTexts:
        """Generate after all prompts; this is what is timed."""
        model = self.models[point.name]
        texts: GeneratedTexts = []
        end = self.model.generation_config.eos_token_id
        # Without the penalties of the model's own config: agreement is with its likeliest token.
        config = GenerationConfig(
            max_new_tokens=self.num_new,
            do_sample=False,
            eos_token_id=end,
            pad_token_id=end[0] if isinstance(end, list) else end,
            repetition_penalty=1.0,
            no_repeat_ngram_size=0,
            return_dict_in_generate=True,
        )
        for prompt in self.prompts:
            if model is not self.model:
                model.free_cache()  # each prompt is read anew, as by the model itself
            output = model.generate(
                prompt[None], attention_mask=torch.ones_like(prompt)[None], generation_config=config
            )
            if getattr(output, "interrupted", False):  # a text that was cut is not measured
                raise KeyboardInterrupt
            ids = output.sequences
            new = ids.shape[1] - len(prompt)
            plain = model is self.model
            trace = full_trace(self.costs, len(prompt), new) if plain else output.trace
            texts.append((ids[0], trace))
        return texts

    @torch.inference_mode()
    def judge(self, point: OperatingPoint, answers: GeneratedTexts) -> Scores:
        """Return how often the tokens are the whole model's, and what they cost."""
        num, agree = self.num_prompt, 0
        for row, _ in answers:
            likeliest = self.model(row[None]).logits[0, num - 1 : -1].argmax(-1)
            agree += int((likeliest == row[num:]).sum())
        trace = DepthTrace.join([trace for _, trace in answers])
        # Prompts run through all layers, whatever the mode.
        flops = trace.total_flops + len(answers) * (num - 1) * self.costs.token(num)
        quality = share_interval(agree, trace.num_units)
        if point.name == PRUNED and self.pruned is not None:
            # Its layers are counted in layers of the full model, by what they cost.
            own = DecodingCosts(adapt(self.pruned))
            flops = trace.total_flops + len(answers) * (num - 1) * own.token(num)
            layers = sum(own.layers) / sum(self.costs.layers) * len(self.costs.layers)
            return Scores(quality, trace.num_units, layers, flops, None)
        sample = self._sample(answers)
        return Scores(quality, trace.num_units, trace.mean_blocks, flops, sample)

    def _sample(self, answers: GeneratedTexts) -> Sample | None:
        """Return the text that saved most, with the layer at which each new token left."""
        row, trace = min(answers, key=lambda each: each[1].mean_depth)
        last = len(self.costs.layers)
        if trace.mean_depth == last:
            return None  # every token went all the way, which needs no picture
        tokens = [str(self.tokenizer.decode([token])) for token in row.tolist()]
        depth = [None] * self.num_prompt + trace.depth[0].tolist()
        return Sample(tokens, depth, last)


open_candidate = GenerationCandidate


def _prompts(
    tokenizer: Any, texts: Sequence[str], source: str, num: int, length: int
) -> list[Tensor]:
    """Return prompts taken evenly from the beginning of a running text."""
    running = "\n".join(line.rstrip("\n") for line in texts)
    # More characters than so many prompts can have.
    ids = tokenizer(running[: num * max(400, 40 * length)])["input_ids"]
    windows = [ids[start : start + length] for start in range(0, len(ids) - length + 1, length)]
    if len(windows) < num:
        raise UserError(
            f"{source} has text for {len(windows)} prompts of {length} tokens, not for {num}: give "
            "a longer text, a lower limit or a lower prompt_tokens."
        )
    return [torch.tensor(windows[place * len(windows) // num]) for place in range(num)]

"""Models that write, with the shortcuts fitted for them, as candidates: agreement, over exits.

Every way writes greedily after the same prompts, one text at a time: the model's own `generate`,
the same faster (`full`), guesses that are verified (`speculative`, and `tuned` where a draft head
was trained), tokens that leave early (`exit`). A token agrees if it is the one that the whole model
finds likeliest after the text that stands before it, whoever wrote that: one early difference does
not count for all that follows.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor
from transformers import GenerationConfig

from deepenough.config import resolve
from deepenough.decoding.api import early_exit, speculate
from deepenough.decoding.early_exit import ConfidenceGap, KVPropagation
from deepenough.decoding.engine import DecodingCosts
from deepenough.errors import UserError
from deepenough.hf.adapter import adapt
from deepenough.measurement import (
    ComparedData,
    ComparedTask,
    Entry,
    OperatingPoint,
    Scores,
    share_interval,
)
from deepenough.runs import read_config
from deepenough.shortcut.config import ShortcutFitConfig, TextConfig
from deepenough.shortcut.modeling import Shortcuts
from deepenough.trace import DepthTrace
from deepenough.training.logging import without_bars

PROMPTS = 8
PLAIN: Final = "transformers"
FULL: Final = "full"
SPECULATIVE: Final = "speculative"
TUNED: Final = "tuned"
EXIT: Final = "exit"
MECHANISMS = (PLAIN, FULL, SPECULATIVE, TUNED, EXIT)
#: A prompt's worth of lines, and more than enough of them.
MIN_CHARS = 400


@dataclass
class Written:
    """One pass over the prompts."""

    rows: list[Tensor] = field(default_factory=list)
    """`[T]`, prompt and what follows it."""
    traces: list[DepthTrace | None] = field(default_factory=list)


class WordsCandidate:
    mechanism = EXIT

    def __init__(self, entry: Entry, name: str, data: ComparedData) -> None:
        self.name, self.entry = name, entry
        self.asked = entry.mechanisms or list(MECHANISMS)
        if unknown := [each for each in self.asked if each not in MECHANISMS]:
            raise UserError(
                f"There is no mechanism {unknown[0]!r} for {entry.run}: choose from "
                f"{', '.join(MECHANISMS)}."
            )
        if entry.tuned is None and TUNED in (entry.mechanisms or []):
            raise UserError(
                f"{TUNED} needs drafts: give the folder that deepenough exit tune wrote for the "
                "model, as --tuned."
            )
        fitted = resolve(ShortcutFitConfig, overrides=_without_provenance(read_config(entry.run)))
        self.folder = Path(entry.run) / "shortcuts"
        if not self.folder.is_dir():
            raise UserError(
                f"{entry.run} has no maps yet: let deepenough shortcut fit finish (--resume goes "
                "on), or leave it out."
            )
        self.shortcuts = Shortcuts.from_pretrained(self.folder)
        self.fill: KVPropagation = "shortcut" if self.shortcuts.targets == "all" else "copy"
        with without_bars():
            self.model, self.tokenizer = fitted.model.load()
        if not self.model.can_generate():
            raise UserError(
                f"{fitted.model.name} does not write text, so its exits cannot be timed: measure "
                f"it with deepenough shortcut eval {entry.run}."
            )
        self.model.eval()
        self.model_name = fitted.model.name
        self.costs = DecodingCosts(adapt(self.model))
        self.num_prompt, self.num_new = data.prompt_tokens, data.new_tokens
        text, split = data.data or fitted.data, data.split or "valid"
        self.prompts = _prompts(self.tokenizer, text, split, data.limit or PROMPTS, self.num_prompt)
        self.models: dict[str, Any] = {}
        detail = {
            "model": fitted.model.name,
            "prompts": len(self.prompts),
            "prompt_tokens": self.num_prompt,
            "new_tokens": self.num_new,
        }
        self.task = ComparedTask("writing", text, split, "token", "agreement", True, detail)

    def points(self) -> Sequence[OperatingPoint]:
        model = f"--model {shlex.quote(self.model_name)}"
        command = f"deepenough exit generate --prompt 'Once upon a time' {model}"
        found = [
            OperatingPoint(
                name, {"mode": name}, name, "" if name == PLAIN else f"{command} --mode {name}"
            )
            for name in (PLAIN, FULL, SPECULATIVE)
            if name in self.asked
        ]
        if self.entry.tuned is not None and TUNED in self.asked:
            drafts = f"--mode speculative --tuned {shlex.quote(self.entry.tuned)}"
            found.append(OperatingPoint(TUNED, {"mode": TUNED}, TUNED, f"{command} {drafts}"))
        command += f" --mode exit --shortcuts {shlex.quote(str(self.folder))} --fill {self.fill}"
        command += f" --max_new_tokens {self.num_new} --mean_length {self.num_new} --threshold"
        values = self.entry.grid.exit or [0.99, 0.9, 0.7, 0.5]
        found += [
            OperatingPoint(
                f"exit {value:g}", {"mode": EXIT, "exit": value}, EXIT, f"{command} {value:g}"
            )
            for value in (values if EXIT in self.asked else [])
        ]
        for point in found:
            if point.name not in self.models:
                self.models[point.name] = self._model(point)
        return found

    def _model(self, point: OperatingPoint) -> Any:
        mode = str(point.settings["mode"])
        if mode == PLAIN:
            return self.model
        if mode == TUNED:
            return speculate(self.model, draft_model=self.entry.tuned)
        if mode != EXIT:
            return speculate(self.model, "none" if mode == FULL else None)
        policy = ConfidenceGap(float(point.settings["exit"]), float(self.num_new))
        return early_exit(self.model, self.shortcuts, policy=policy, kv_propagation=self.fill)

    @torch.inference_mode()
    def run(self, point: OperatingPoint) -> Written:
        model, made = self.models[point.name], Written()
        end = self.model.generation_config.eos_token_id
        pad = end[0] if isinstance(end, list) else end
        # Without the penalties of the model's own config: agreement is with its likeliest word.
        config = GenerationConfig(
            max_new_tokens=self.num_new,
            do_sample=False,
            eos_token_id=end,
            pad_token_id=pad,
            repetition_penalty=1.0,
            no_repeat_ngram_size=0,
        )
        for prompt in self.prompts:
            ids = model.generate(
                prompt[None], attention_mask=torch.ones_like(prompt)[None], generation_config=config
            )
            made.rows.append(ids[0])
            made.traces.append(None if model is self.model else model.trace)
        return made

    @torch.inference_mode()
    def judge(self, point: OperatingPoint, answers: Written) -> Scores:
        num, last = self.num_prompt, len(self.costs.layers)
        agree = units = 0
        flops = layers = 0.0
        for row, trace in zip(answers.rows, answers.traces, strict=True):
            likeliest = self.model(row[None]).logits[0, num - 1 : -1].argmax(-1)
            new = len(row) - num
            agree += int((likeliest == row[num:]).sum())
            units += new
            flops += (num - 1) * self.costs.token(num)  # the prompt, all layers whatever the mode
            if trace is None:
                layers += new * last
                flops += sum(self.costs.token(num + 1 + i) + self.costs.head for i in range(new))
            else:
                layers += float(trace.ran.sum())
                flops += trace.total_flops
        return Scores(
            share_interval(agree, units), units, layers / units, flops, self._sample(answers)
        )

    def _sample(self, answers: Written) -> dict[str, Any] | None:
        """The text that saved most, with the layer at which each of its new tokens left."""
        last = len(self.costs.layers)
        pairs = [(t.mean_depth, n) for n, t in enumerate(answers.traces) if t is not None]
        if not pairs or min(pairs)[0] == last:
            return None  # every token went all the way, which needs no picture
        row, trace = answers.rows[min(pairs)[1]], answers.traces[min(pairs)[1]]
        assert trace is not None
        depth = trace.depth[0, : len(row) - self.num_prompt].tolist()
        tokens = [self.tokenizer.decode([token]) for token in row.tolist()]
        return {"tokens": tokens, "depth": [None] * self.num_prompt + depth, "layers": last}


def _without_provenance(config: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in config.items() if name not in ("method", "provenance")}


def _prompts(tokenizer: Any, text: str, split: str, num: int, length: int) -> list[Tensor]:
    """Beginnings of pieces of running text, evenly taken."""
    pieces = TextConfig(split=split, lines=None, join=True).read(text)
    ids = tokenizer("\n".join(pieces)[: num * max(MIN_CHARS, 40 * length)])["input_ids"]
    windows = [ids[start : start + length] for start in range(0, len(ids) - length + 1, length)]
    if len(windows) < num:
        raise UserError(
            f"{text} ({split}) has text for {len(windows)} prompts of {length} tokens, not for "
            f"{num}: give a longer text, a lower data.limit or a lower data.prompt_tokens."
        )
    return [torch.tensor(windows[place * len(windows) // num]) for place in range(num)]

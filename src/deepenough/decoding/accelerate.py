"""`accelerate(model)`: the same model, with the same `generate()`, spending less time.

What is returned is a model of the same class that shares all its weights with the one given, so
that whatever takes a Hugging Face model takes it: pipelines, chat templates, evaluation harnesses.
Only `generate` is another. transformers still reads its arguments; the loop that follows is ours.

Modes:

- `full`: every token goes through all layers. The tokens are those of the model's own `generate`.
- `speculative`: cheap guesses are verified by the model, several in one pass. Greedily the tokens
  are the same; sampled, they have the same distribution.
- `exit`: a token leaves at a layer whose prediction is trusted, and skips the rest. Tokens may be
  others than the model's own, and so are the logits of a plain call (`scoring.py`).
"""

from __future__ import annotations

import copy
import functools
import os
import threading
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.generation.stopping_criteria import StoppingCriteriaList, StopStringCriteria

from deepenough.decoding.carry import Carry
from deepenough.decoding.decode import decode
from deepenough.decoding.drafts import DraftSource
from deepenough.decoding.early import decode_early
from deepenough.decoding.early_making import Guarantee, make_early
from deepenough.decoding.fastest import find_fastest
from deepenough.decoding.filling import Fill
from deepenough.decoding.leaving import EarlyExit
from deepenough.decoding.making import make_engine
from deepenough.decoding.output import ExitOutput, sequences_of, trace_of
from deepenough.decoding.policies import ExitPolicy
from deepenough.decoding.request import check_prompt, make_request
from deepenough.decoding.scoring import ExitForward
from deepenough.decoding.sources import Workshop, make_drafting
from deepenough.decoding.tuned import Tuned
from deepenough.errors import UserError
from deepenough.shortcut.modeling import Shortcuts
from deepenough.trace import DepthTrace

Mode = Literal["full", "speculative", "exit"]


def accelerate(
    model: PreTrainedModel,
    shortcuts: Shortcuts | None = None,
    mode: Mode = "full",
    *,
    carry: Carry | None = None,
    tuned: Tuned | str | os.PathLike[str] | None = None,
    drafts: str | Sequence[str | DraftSource] | None = None,
    num_drafts: int | None = None,
    draft_layer: int | None = None,
    policy: ExitPolicy | None = None,
    exits: Sequence[int] | None = None,
    fill: Fill | None = None,
    shortlist: Tensor | None = None,
    guarantee: Guarantee | None = None,
    fused: bool = True,
) -> Any:
    """A model that shares `model`'s weights and generates faster.

    `drafts` are the sources of a speculative model, asked in this order until one has a guess:
    "lookup" (how the text went on before), "carry" (with the maps `carry`), "tuned" (a draft head:
    `tuned` is the folder of `deepenough exit tune`), "shortcut" (the first `draft_layer` layers and
    `shortcuts`), or any `DraftSource`. By default they are those that tuning
    has found to be the fastest, or else "lookup" and what else there is that runs no layer; "auto"
    times what there is on this machine, for about a minute. `num_drafts` is how many tokens a
    source that is named guesses at once, 2 by default.

    An exiting model asks `policy` (by default `ConfidenceGap(0.9)`) after the layers `exits` (by
    default those that pay, found in a few seconds), on the words of `shortlist` first, and `fill`
    says what later tokens find in layers that were skipped. `guarantee` gives all of these as they
    were calibrated: what `calibrate` returned, or the folder it was saved in.

    `fused=False` decodes through the model's own layers even where faster ones are known.

    The weights of a Llama-like model are laid out anew, without a second copy: its own parameters
    become views of larger matrices, with the same values.
    """
    if mode not in ("full", "speculative", "exit"):
        raise UserError(f"The mode is full, speculative or exit, not {mode!r}.")
    if mode != "speculative" and (drafts is not None or tuned is not None):
        raise UserError('Drafts are of use in mode="speculative" alone: give that mode, or none.')
    leaving = (policy, exits, fill, shortlist, guarantee)
    if mode != "exit" and any(each is not None for each in leaving):
        raise UserError(
            'policy, exits, fill, shortlist and guarantee are of use in mode="exit" alone: give '
            "that mode, or none of them."
        )
    if isinstance(model, Accelerated):
        raise UserError("The model is accelerated already: give the one it was made of.")
    engine = make_engine(model, fused)
    if shortcuts is not None:
        shortcuts.check_model(engine.adapter)
    source, early = None, None
    if mode == "exit":
        early = make_early(engine, shortcuts, guarantee, policy, exits, fill, shortlist)
    if mode == "speculative":
        if isinstance(tuned, str | os.PathLike):
            tuned = Tuned.from_pretrained(tuned)
        workshop = Workshop(engine, shortcuts, carry, tuned)
        if drafts == "auto":
            drafting = find_fastest(workshop, num_drafts, draft_layer).drafting
        elif isinstance(drafts, str):
            drafting = make_drafting(workshop, [drafts], num_drafts, draft_layer)
        else:
            drafting = make_drafting(workshop, drafts, num_drafts, draft_layer)
        source = workshop.make(drafting)
    fast = copy.copy(model)
    own = type(model)
    # Under the same name: it is what a saved config says the architecture is.
    fast.__class__ = type(
        own.__name__,
        (Accelerated, own),
        {"__module__": own.__module__, "forward": _forward_like(own)},
    )
    fast._exit_engine, fast._exit_source = engine, source  # type: ignore[assignment]
    fast._exit_early = early  # type: ignore[assignment]
    fast._exit_lock = threading.RLock()  # type: ignore[assignment]
    return fast


def _forward_like(own: type[PreTrainedModel]) -> Callable[..., Any]:
    """transformers reads the signature: only a model that takes a mask gets one made of padding."""

    @functools.wraps(own.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return ExitForward.forward(self, *args, **kwargs)

    return forward


class Accelerated(ExitForward):
    """What `accelerate` puts in front of a model's class."""

    _exit_engine: Any
    _exit_source: DraftSource | None
    _exit_early: EarlyExit | None
    _exit_lock: threading.RLock
    """Whoever generates may call the model in between, as guidance does."""
    trace: DepthTrace | None = None
    """Of the last call of `generate`, which returns it itself with `return_dict_in_generate`."""

    def generate(
        self,
        inputs: Tensor | None = None,
        generation_config: Any = None,
        streamer: Any = None,
        **kwargs: Any,
    ) -> ExitOutput | Tensor:
        """As `generate` of transformers, whose arguments it takes."""
        if "custom_generate" in kwargs:
            raise UserError("An accelerated model has its own loop: leave out custom_generate.")
        check_prompt(kwargs.get("input_ids", inputs), kwargs)
        strings = getattr(generation_config, "stop_strings", None)
        kwargs = _with_stop_strings(kwargs, strings or self.generation_config.stop_strings)  # type: ignore[attr-defined]
        engine, source, early = self._exit_engine, self._exit_source, self._exit_early

        def loop(
            model: Any,
            input_ids: Tensor,
            logits_processor: Any,
            stopping_criteria: Any,
            generation_config: Any,
            **model_kwargs: Any,
        ) -> ExitOutput | Tensor:
            request = make_request(
                input_ids.to(model.device),
                logits_processor,
                stopping_criteria,
                generation_config,
                streamer,
                engine.adapter.max_length,
                model_kwargs,
            )
            # There is one cache: a second call, from another thread, waits.
            with self._exit_lock:
                engine.refresh()
                try:
                    if early is None:
                        generated = decode(engine, request, source)
                    else:
                        generated = decode_early(engine, request, early)
                finally:
                    engine.release()
            if streamer is not None:
                streamer.end()
            self.trace = trace_of(generated.rows, engine.num_layers)
            sequences = sequences_of(generated.rows, request.pad, input_ids.device)
            if not generation_config.return_dict_in_generate:
                return sequences
            config = generation_config
            return ExitOutput(
                sequences=sequences,  # type: ignore[arg-type]
                scores=_kept(generated.scores, config.output_scores),  # type: ignore[arg-type]
                logits=_kept(generated.logits, config.output_logits),  # type: ignore[arg-type]
                trace=self.trace,
                passes=generated.passes,
                drafted=generated.drafted,
                accepted=generated.accepted,
                interrupted=generated.interrupted,
            )

        with torch.no_grad():
            return super().generate(  # type: ignore[misc]
                inputs, generation_config, streamer=streamer, custom_generate=loop, **kwargs
            )


def _kept(tensors: list[Tensor], wanted: bool | None) -> tuple[Tensor, ...] | None:
    """Ordinary tensors of those made in inference mode."""
    return tuple(tensor.clone() for tensor in tensors) if wanted else None


def _with_stop_strings(kwargs: dict[str, Any], usual: Any) -> dict[str, Any]:
    """transformers does not hand the tokenizer on to a loop of one's own, which strings need."""
    kwargs = dict(kwargs)
    tokenizer = kwargs.pop("tokenizer", None)
    strings = kwargs.pop("stop_strings", None) or usual
    if not strings:
        return kwargs
    if tokenizer is None:
        raise UserError("stop_strings need the tokenizer: give tokenizer=... as well.")
    kwargs["stop_strings"] = None
    criteria = StoppingCriteriaList(kwargs.get("stopping_criteria") or [])
    kwargs["stopping_criteria"] = StoppingCriteriaList(
        [*criteria, StopStringCriteria(stop_strings=strings, tokenizer=tokenizer)]
    )
    return kwargs

"""`speculate(model)` and `early_exit(model, shortcuts)`: the same model, generating faster.

What is returned is a model of the same class that shares all its weights with the one given, so
whatever takes a Hugging Face model takes it: pipelines, chat templates, evaluation harnesses. Only
`generate` is another, and with exits the logits of a plain call (`exit_scoring.py`). transformers
still reads the arguments; the loop that follows is ours.

The weights of a Llama-like model are laid out anew, without a second copy: its own parameters
become views of larger matrices, with the same values.
"""

from __future__ import annotations

import functools
import inspect
import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.generation.stopping_criteria import StoppingCriteriaList, StopStringCriteria
from transformers.generation.utils import (
    GenerateDecoderOnlyOutput,
    GenerateEncoderDecoderOutput,
)
from transformers.utils.generic import ModelOutput

from deepenough.decoding.backends import make_engine, suited_engine
from deepenough.decoding.draft_model import DraftModel
from deepenough.decoding.drafters import Drafter, LinearDrafter, make_drafter
from deepenough.decoding.early_exit import (
    ExitingDepth,
    ExitPolicy,
    ExitRule,
    KVPropagation,
    make_policy,
)
from deepenough.decoding.engine import Engine, ModelState, is_untouched, row_lengths
from deepenough.decoding.exit_scoring import ExitForwardPass, choose_exits, count_before
from deepenough.decoding.lookup import LookupTable
from deepenough.decoding.request import SequenceState, check_prompt, make_request
from deepenough.decoding.verification import decode
from deepenough.errors import UserError
from deepenough.hf.deferred import load_deferred
from deepenough.hf.loading import load
from deepenough.shortcut.modeling import Shortcuts
from deepenough.trace import DepthTrace

if TYPE_CHECKING:
    from deepenough.decoding.calibration import Calibration


def speculate(
    model: PreTrainedModel | str,
    drafter: str | Drafter | Sequence[str | Drafter] | None = None,
    *,
    num_draft_tokens: int | None = None,
    draft_model: DraftModel | str | os.PathLike[str] | None = None,
    linear_drafter: LinearDrafter | None = None,
    shortcuts: Shortcuts | None = None,
    draft_layer: int | None = None,
    table: LookupTable | str | os.PathLike[str] | None = None,
    backend: str | None = None,
) -> Any:
    """Return a model that shares `model`'s weights and generates the same tokens faster.

    Args:
        model: A causal language model or an encoder-decoder in eval mode, or the name or folder of
            a causal one to load.
        drafter: Who guesses the next tokens; of several, each is asked if those before it have no
            guess. "lookup" (how the text continued before), "linear" (needs `linear_drafter` or
            `draft_model`), "draft_model" (needs `draft_model`), "shortcut" (the first `draft_layer`
            layers and `shortcuts`), or any `Drafter`; "none" drafts nothing. By default lookup and
            the first of a draft model, a linear drafter and shortcuts that is given.
        num_draft_tokens: Tokens guessed in every pass by drafters given by name; by default as many
            as pay, by the time of passes and how often guesses are right.
        draft_model: What `deepenough decode tune` trained, or its folder.
        linear_drafter: What was fitted for this model.
        shortcuts: Maps between the layers of this model.
        draft_layer: Layers that the shortcut drafter runs; by default a quarter of them.
        table: Texts of other requests for "lookup", which adds its own: a `LookupTable`, or the
            folder of one that was saved.
        backend: "native" (compiled code on a CPU), "torch" (fused layers) or "general" (the model's
            own layers, or the model as a whole); by default the first of these that fits.
    """
    if isinstance(model, str):
        model = load_deferred(model) or load(model, "causal")[0]
    engine = make_engine(model, backend, layered=False)
    if isinstance(draft_model, str | os.PathLike):
        draft_model = DraftModel.from_pretrained(draft_model)
    if isinstance(table, str | os.PathLike):
        table = LookupTable.from_pretrained(table)
    names = [drafter] if isinstance(drafter, str | Drafter) else drafter
    if names is not None and not names:
        raise UserError("There is no drafter: give at least one, or drafter='none'.")
    made = make_drafter(
        engine,
        [] if drafter == "none" else names,
        num_draft_tokens,
        draft_model=draft_model,
        linear_drafter=linear_drafter,
        shortcuts=shortcuts,
        layer=draft_layer,
        table=table,
    )
    if made is not None and made.reads_states and not engine.layered:
        raise UserError(
            f"{type(model).__name__} is run as a whole, without states that drafts could be made "
            'of: leave out the drafter, or give "lookup".'
        )
    return _wrapped(model, made, None, backend, engine)


def early_exit(
    model: PreTrainedModel,
    shortcuts: Shortcuts,
    threshold: float | None = None,
    *,
    policy: str | ExitPolicy | None = None,
    exit_layers: Sequence[int] | None = None,
    kv_propagation: KVPropagation | None = None,
    exit_vocab: Tensor | None = None,
    guarantee: Calibration | str | os.PathLike[str] | None = None,
) -> Any:
    """Return a model that shares `model`'s weights and skips layers for tokens that are easy.

    Args:
        model: A causal language model in eval mode.
        shortcuts: Maps between the layers of this model.
        threshold: Confidence from which on a token leaves, between 0 and 1; 0.9 by default.
        policy: How confidence is measured: "gap" (between the two best tokens, the default), "top",
            "entropy", "layer", or any `ExitPolicy`.
        exit_layers: Layers after which exits are checked; by default the one that saves most, found
            in a few seconds.
        kv_propagation: What later tokens find in the layers a token skipped: "shortcut" (the
            default), "copy" or "deferred".
        exit_vocab: Token ids on which a check is made first; None for the whole vocabulary.
        guarantee: All of these as they were calibrated: what `calibrate` returned, or its folder.
    """
    engine = make_engine(model)
    if shortcuts is None:
        raise UserError("Early exit needs shortcuts: give those fitted for the model.")
    engine.adapter.check_made_for(shortcuts.made_for, "These shortcuts")
    if guarantee is not None:
        from deepenough.decoding.calibration import Calibration

        options = (threshold, policy, exit_layers, kv_propagation, exit_vocab)
        if any(option is not None for option in options):
            raise UserError(
                "A guarantee holds for the threshold, policy, exit_layers, kv_propagation and "
                "exit_vocab it was made with: leave them out, or the guarantee."
            )
        if not isinstance(guarantee, Calibration):
            guarantee = Calibration.from_pretrained(guarantee)
        if not all(map(is_untouched, model.modules())):
            raise UserError(
                "The model has hooks, or modules that run another forward, which a guarantee does "
                "not know: remove them, or leave out the guarantee."
            )
        rule = guarantee.exit_rule(shortcuts, engine.adapter)
        rule.check(engine)
        return _wrapped(model, None, rule, None, engine)
    if isinstance(policy, ExitPolicy):
        if threshold is not None:
            raise UserError("The policy has a threshold of its own: leave out threshold.")
    else:
        policy = make_policy(policy or "gap", threshold)
    layers = [1] if exit_layers is None else list(exit_layers)
    rule = ExitRule(shortcuts, policy, layers, kv_propagation or "shortcut", exit_vocab)
    rule.check(engine)
    if exit_layers is None:
        rule.layers = choose_exits(engine, rule)
    return _wrapped(model, None, rule, None, engine)


def _wrapped(
    model: PreTrainedModel,
    drafter: Drafter | None,
    rule: ExitRule | None,
    backend: str | None,
    engine: Engine | None = None,
) -> Any:
    """Return a shallow copy of the model with another `generate` and, with exits, `forward`."""
    engine = make_engine(model, backend, rule is not None) if engine is None else engine
    own = type(model)
    fast: Any = object.__new__(own)
    vars(fast).update(vars(model))  # a shallow copy, which does not load a deferred model

    @functools.wraps(own.forward)  # transformers reads the signature, for the attention mask
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return AdaptiveDecoding.forward(self, *args, **kwargs)

    # Under the same name: it is what a saved config says the architecture is.
    added = {"__module__": own.__module__, "forward": forward}
    fast.__class__ = type(own.__name__, (AdaptiveDecoding, own), added)
    fast.drafter, fast.exit_rule, fast.backend = drafter, rule, backend
    fast.decoding_lock = threading.RLock()
    fast.engine_and_state = engine, ModelState(model)
    return fast


@dataclass
class DecodingOutput(GenerateDecoderOnlyOutput):
    """What `generate` returns: `sequences`, `scores` and `logits` as in transformers, and a trace.

    Attributes:
        trace: Depth and cost of every new token `[B, new tokens]`; zeros where a sequence had
            ended, or an interruption came before a token was accounted for.
        passes: How often the model ran after the prompt.
        drafted: Tokens that were drafted.
        accepted: Drafted tokens that the model confirmed.
        interrupted: Whether Ctrl-C ended the generation early.
        drafted_at: Drafted tokens by their place in the draft.
        accepted_at: Those of them that the model confirmed.
        from_draft: Which new tokens were drafted `[B, new tokens]`.
        reused: Tokens of the prompt whose keys and values were those of the call before.
        past_key_values: Of a single sequence, what stands for its keys and values in a later call.
        backend: What ran the model: "native", "torch" or "general".
    """

    trace: DepthTrace | None = None
    passes: int | None = None
    drafted: int | None = None
    accepted: int | None = None
    drafted_at: list[int] | None = None
    accepted_at: list[int] | None = None
    from_draft: Tensor | None = None
    reused: int | None = None
    interrupted: bool | None = None
    backend: str | None = None


@dataclass
class CachedText:
    """Stands for the keys and values of a text, which the model keeps until its next call.

    Given back as `past_key_values` with a prompt that begins with this text, as transformers takes
    its caches; a call without it finds the common beginning by itself.
    """

    tokens: list[int]
    owner: Any = field(default=None, repr=False)
    """The `Engine.prompt` of its generation; another one there tells that the cache is gone."""

    def get_seq_length(self) -> int:
        """Return how many tokens it stands for."""
        return len(self.tokens)


class AdaptiveDecoding:
    """What `speculate` and `early_exit` put in front of a model's class.

    Attributes:
        drafter: Who drafts; None for nobody.
        exit_rule: How tokens leave; None if all run all layers.
        backend: The one that was asked for; None for the first that fits.
        engine_and_state: The engine, and the model's state that it was made for.
        cached: The text whose keys and values the last call has left; None if they are freed.
        decoding_lock: Held while generating; whoever generates may call the model in between, as
            guidance does.
        trace: That of the last call; `generate` returns it itself with `return_dict_in_generate`.
    """

    drafter: Drafter | None
    exit_rule: ExitRule | None
    backend: str | None
    engine_and_state: tuple[Engine, ModelState]
    decoding_lock: threading.RLock
    cached: CachedText | None = None
    trace: DepthTrace | None = None

    @property
    def decoding_engine(self) -> Engine:
        """The model taken apart, with its KV cache; made anew, or refused, if it was changed."""
        with self.decoding_lock:
            engine, before = self.engine_and_state
            model, rule = engine.adapter.model, self.exit_rule
            now = ModelState(model)
            if now == before:
                return engine
            engine = make_engine(model, self.backend, rule is not None)
            if rule is not None:
                if rule.guaranteed and now.content != before.content:
                    raise UserError(
                        "The model was changed after early_exit(), so its guarantee no longer "
                        "holds: load the model again, or calibrate anew."
                    )
                engine.adapter.check_made_for(rule.shortcuts.made_for, "These shortcuts")
            # The engine may have laid out the weights anew.
            self.engine_and_state = engine, ModelState(model)
            return engine

    def free_cache(self) -> None:
        """Free the keys and values that the last call has left for the next."""
        with self.decoding_lock:
            engine = self.engine_and_state[0]
            for each in filter(None, (engine, engine.whole)):
                each.release()
            self.cached = None

    def __reduce__(self) -> Any:
        """Return what makes this model anew: copies and pickles hold no lock and no cache."""
        model = self.engine_and_state[0].adapter.model
        state = {"generation_config": self.generation_config}  # type: ignore[attr-defined]
        return _wrapped, (model, self.drafter, self.exit_rule, self.backend), state

    def generate(
        self,
        inputs: Tensor | None = None,
        generation_config: Any = None,
        *,
        streamer: Any = None,
        **kwargs: Any,
    ) -> ModelOutput | Tensor:
        """Generate as `generate` of transformers does, whose arguments it takes."""
        ids, past = kwargs.get("input_ids", inputs), kwargs.get("past_key_values")
        is_empty = type(past) is DynamicCache and not past.get_seq_length()
        if is_empty or isinstance(past, CachedText):
            del kwargs["past_key_values"]
        check_prompt(ids, kwargs, self.config.is_encoder_decoder)  # type: ignore[attr-defined]
        if isinstance(past, CachedText):
            given = past.tokens
            if ids is None or len(ids) != 1 or ids[0, : len(given)].tolist() != given:
                raise UserError(
                    f"The prompt does not begin with the {len(given)} tokens of past_key_values: "
                    "give the whole text so far, or leave out past_key_values."
                )
        elif isinstance(past, DynamicCache) and is_empty:
            # It stays empty, for this generate() to take again; nobody shall think it filled.
            vars(past)["update"] = _refuse_update
        usual = self.generation_config.stop_strings  # type: ignore[attr-defined]
        usual = getattr(generation_config, "stop_strings", None) or usual
        kwargs = {name: value for name, value in kwargs.items() if name != "custom_generate"}
        # transformers does not hand the tokenizer on to a custom loop, which stop strings need.
        tokenizer = kwargs.pop("tokenizer", None)
        if strings := kwargs.get("stop_strings") or usual:
            if tokenizer is None:
                raise UserError("stop_strings need the tokenizer: give tokenizer=... as well.")
            kwargs["stop_strings"] = None
            kwargs["stopping_criteria"] = StoppingCriteriaList(
                [*(kwargs.get("stopping_criteria") or []), StopStringCriteria(tokenizer, strings)]
            )
        rule = self.exit_rule
        # Whisper's own generate() goes on with the output, and knows no fields of ours.
        is_read_on = super().generate.__module__.startswith("transformers.models.")  # type: ignore[misc]

        def loop(
            model: Any,
            input_ids: Tensor,
            logits_processor: Any,
            stopping_criteria: Any,
            generation_config: Any,
            **model_kwargs: Any,
        ) -> ModelOutput | Tensor:
            # There is one cache: a second call, from another thread, waits.
            with self.decoding_lock:
                engine = self.decoding_engine
                drafter = self.drafter
                if rule is None and engine.layered and self.backend in (None, "general"):
                    tokens = row_lengths(input_ids, model_kwargs.get("attention_mask"))
                    new_tokens = generation_config.max_length - input_ids.shape[1]
                    engine = suited_engine(engine, tokens, new_tokens)
                if drafter is not None and drafter.reads_states and not engine.layered:
                    drafter = None
                request = make_request(
                    input_ids.to(model.device),
                    logits_processor,
                    stopping_criteria,
                    generation_config,
                    streamer,
                    engine,
                    model_kwargs,
                )
                strategy = drafter if rule is None else ExitingDepth(engine, rule)
                left, self.cached = self.cached, None
                # Exits leave keys and values of their own, and some drafters read whole prompts.
                keeps = rule is None and not (drafter and drafter.reads_prompt)
                keeps = keeps and not model.config.is_encoder_decoder
                known = left.tokens if keeps and left and left.owner is engine.prompt else []
                try:
                    decoded = decode(engine, request, strategy, known)
                    keeps = keeps and len(decoded.rows) == 1 and not decoded.interrupted
                    if keeps:
                        engine.prompt = []  # frees its states, and marks whose cache this is
                        tokens = decoded.rows[0].context[: engine.lengths[0]]
                        self.cached = CachedText(tokens, engine.prompt)
                finally:
                    if self.cached is None:
                        engine.release()
            if streamer is not None:
                streamer.end()
            self.trace = _trace(decoded.rows, engine.num_layers)
            longest = max(len(row.tokens) for row in decoded.rows)
            drafts = _padded([row.from_draft for row in decoded.rows], longest).bool()
            ids = [r.ids + [request.pad] * (longest - len(r.tokens)) for r in decoded.rows]
            sequences = torch.tensor(ids, device=input_ids.device)
            config = generation_config
            if not config.return_dict_in_generate:
                return sequences
            # Made in inference mode: the clones are ordinary tensors.
            scores: Any = tuple(each.clone() for each in decoded.scores)
            logits: Any = tuple(each.clone() for each in decoded.logits)
            usual: Any = {
                "sequences": sequences,
                "scores": scores if config.output_scores else None,
                "logits": logits if config.output_logits else None,
            }
            if is_read_on:
                return GenerateEncoderDecoderOutput(**usual)
            return DecodingOutput(
                **usual,
                trace=self.trace,
                passes=decoded.passes,
                drafted=sum(decoded.drafted_at),
                accepted=sum(decoded.accepted_at),
                drafted_at=decoded.drafted_at,
                accepted_at=decoded.accepted_at,
                from_draft=drafts,
                reused=decoded.reused,
                past_key_values=self.cached,  # type: ignore[arg-type]
                interrupted=decoded.interrupted,
                backend=engine.backend,
            )

        with torch.no_grad():
            args = () if inputs is None else (inputs,)  # models have several names for it
            return super().generate(  # type: ignore[misc]
                *args,
                generation_config=generation_config,
                streamer=streamer,
                custom_generate=loop,
                **kwargs,
            )

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model's own forward; with exits, return the logits of every position's exit."""
        rule = self.exit_rule
        own = super().forward  # type: ignore[misc]
        given = {} if rule is None else inspect.signature(own).bind(*args, **kwargs).arguments
        ids_BT = given.get("input_ids")
        if given.get("inputs_embeds") is not None:
            ids_BT = given["inputs_embeds"][..., 0]  # all that counts is its shape
        if rule is None or ids_BT is None:
            return own(*args, **kwargs)
        cache = given.get("past_key_values")
        past = 0 if cache is None else cache.get_seq_length()
        before_BT = count_before(ids_BT, given.get("attention_mask"), past)
        with self.decoding_lock, torch.no_grad():
            exits = ExitForwardPass(self.decoding_engine, rule, before_BT)
            with exits.patched():
                output = own(*args, **kwargs)
        self.trace = exits.trace(len(ids_BT))
        if torch.is_grad_enabled() and any(p.requires_grad for p in self.parameters()):  # type: ignore[attr-defined]
            for value in output if isinstance(output, tuple) else output.values():
                if isinstance(value, Tensor):
                    value.requires_grad_().register_hook(_refuse_gradient)
        return output


def _refuse_update(*_: Any, **__: Any) -> None:
    raise UserError(
        "This cache has been given to a generate() that keeps keys and values itself and leaves it "
        "empty: go on giving it to that one, or make a new cache for the model's own."
    )


def _refuse_gradient(_: Tensor) -> None:
    raise UserError(
        "There is no gradient through early exits, which choose layers: train the model that was "
        "given to early_exit()."
    )


def _trace(rows: list[SequenceState], num_layers: int) -> DepthTrace:
    """Return every new token's depth and cost; a token runs all layers up to its depth."""
    longest = max(len(row.tokens) for row in rows)
    depth = _padded([row.depths for row in rows], longest).long()
    flops = _padded([row.flops for row in rows], longest)
    ran = torch.arange(num_layers) < depth[..., None]
    return DepthTrace(depth=depth, ran=ran, flops=flops)


def _padded(values: Sequence[Sequence[float]], width: int) -> Tensor:
    """Return rows of numbers as one tensor, zeros behind those that are shorter."""
    padded = [[*row, *[0.0] * (width - len(row))] for row in values]
    return torch.tensor(padded, dtype=torch.float64)

"""Classifiers that ponder: ALBERT, or any encoder, that answers and may halt after each pass.

Training makes all passes and weighs their answers by the halting distribution; evaluation stops
each example where the exit policy says so (`inference.py`).

`PonderAlbertForSequenceClassification` applies one shared layer as often as an example needs
(ALBERT, arXiv 1909.11942; PALBERT, arXiv 2204.03276). Its names are those of
`AlbertForSequenceClassification`, so that its checkpoints, and those of plain ALBERT, load as they
are; only the halting head is new. Because the layer is shared, a model can make more passes than it
was pretrained with, or fewer.

`PonderEncoderForSequenceClassification` runs the layers of any encoder one after the other. Each
pass is another layer with representations of its own, so each has a classifier and a halting head
of its own (but for the baseline of the last pass alone, which trains a single classifier).

Shapes: B examples, R of them running, N passes, T tokens, D width, C labels.
"""

import inspect
import math
from abc import abstractmethod
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    AlbertModel,
    AutoConfig,
    AutoModel,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers import initialization as init

from deepenough.artifacts import verify
from deepenough.data.classification import EncodedExamples
from deepenough.data.config import REGRESSION, SINGLE_LABEL
from deepenough.errors import UserError
from deepenough.hf.adapter import Adapter, adapt
from deepenough.hf.intercept import LayerStack, eval_mode
from deepenough.hf.layouts import LAYOUTS, register
from deepenough.hf.loading import from_pretrained
from deepenough.ponder.config import (
    ARGUMENTS,
    ENCODERS,
    PonderAlbertConfig,
    PonderEncoderConfig,
    check_encoder,
    options_of,
    pondering_config,
    problem_of,
)
from deepenough.ponder.halting import (
    HaltingHead,
    HaltingPolicy,
    PonderLoss,
    answer_loss,
    check_labels,
    fixed_loss,
    log_geometric,
    log_halting,
    make_policy,
    ponder_loss,
)
from deepenough.ponder.inference import (
    NO_LIMIT,
    Inputs,
    PonderOutput,
    Prediction,
    Text,
    as_example,
    predict,
    replay,
    run_batch,
    select_pass,
)
from deepenough.training.checkpoint import WEIGHTS, SealedPreTrainedModel

Texts = Sequence[Text] | tuple[Sequence[str], Sequence[str]]
"""Texts or pairs of texts, or first and second texts as two lists."""

# -- what all architectures have in common ---------------------------------------------------------


def linear_flops(module: nn.Module) -> int:
    """Return the FLOPs of all linear maps in a module, each applied once to one vector."""
    maps = [part for part in module.modules() if isinstance(part, nn.Linear)]
    return 2 * sum(part.weight.numel() for part in maps)


def classifier_head(width: int, num_labels: int, dropout: float) -> nn.Module:
    """Return the classification head of BERT with its pooler, from `[R, D]` to logits `[R, C]`."""
    pooler = {"dense": nn.Linear(width, width), "tanh": nn.Tanh(), "dropout": nn.Dropout(dropout)}
    return nn.Sequential(OrderedDict(pooler, out=nn.Linear(width, num_labels)))


class PonderClassifier(SealedPreTrainedModel):
    """A pondering classifier; subclasses say what its encoder and its classification heads are."""

    config: PonderAlbertConfig | PonderEncoderConfig
    main_input_name = "input_ids"
    supports_gradient_checkpointing = True
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_flex_attn = True
    _supports_attention_backend = True
    accepts_loss_kwargs = False  # the loss is a mean, which a trainer divides when it accumulates

    def __init__(self, config: PreTrainedConfig, tokenizer: Any = None, **options: Any) -> None:
        """Make a model with new weights; arguments as for `pondering_config`.

        The tokenizer is for calls with texts, by default that of the checkpoint.
        """
        config = pondering_config(config, self.config_class, options)
        super().__init__(config)
        self._tokenizer = tokenizer
        assert config.num_labels is not None and config.num_passes is not None
        self.num_labels: int = config.num_labels
        self.num_passes: int = config.num_passes
        self.problem = problem_of(config)
        self.halting = nn.ModuleList()
        self._parts: tuple[Adapter, LayerStack] | None = None

    # -- what architectures differ in --------------------------------------------------------

    @abstractmethod
    def _classifier(self, index: int) -> nn.Module:
        """Return the head from a pooled state `[R, D]` to logits `[R, C]` after pass `index`."""

    def _layers(self, adapter: Adapter) -> list[nn.Module]:
        """Return the layers in the order they are applied, one a pass."""
        return adapter.layers[: self.num_passes]

    # -- the encoder as single steps ---------------------------------------------------------

    @property
    def encoder_model(self) -> PreTrainedModel:
        """The encoder inside."""
        encoder: Any = self.base_model
        return encoder

    @property
    def adapter(self) -> Adapter:
        """The encoder's parts, whatever its architecture."""
        return self._find_parts()[0]

    @property
    def stack(self) -> LayerStack:
        """The encoder's layers as single steps."""
        return self._find_parts()[1]

    def _find_parts(self) -> tuple[Adapter, LayerStack]:
        encoder = self.encoder_model
        if self._parts is None or self._parts[0].model is not encoder:
            adapter = adapt(encoder)
            stack = LayerStack(adapter.trunk, self._layers(adapter))
            _check_steps(adapter, stack)
            self._parts = adapter, stack
        return self._parts

    @property
    def has_halting(self) -> bool:
        """Whether the model has learned when to halt; baselines have not."""
        return self.config.objective == "ponder"

    def _halting_head(self, index: int) -> nn.Module | None:
        """Return the head of pass `index`; the last pass halts whatever a head would say."""
        if not self.has_halting or index == self.num_passes - 1:
            return None
        return self.halting[min(index, len(self.halting) - 1)]

    def pool(self, hidden_RTD: Tensor, mask_RT: Tensor | None) -> Tensor:
        """Return the pooled state of each text, `[R, D]`: of its first token, or the mean."""
        if self.config.pooling == "cls":
            return self.adapter.final_norm(hidden_RTD[:, 0])
        normed = self.adapter.final_norm(hidden_RTD)
        if mask_RT is None:
            return normed.mean(1)
        weights = mask_RT.to(normed.dtype)
        return (normed * weights[..., None]).sum(1) / weights.sum(1, keepdim=True)

    def read(
        self, index: int, hidden_RTD: Tensor, mask_RT: Tensor | None, before_RD: Tensor
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        """Return what the heads say after pass `index`; `before_RD` is pooled before that pass.

        That is logits `[R, C]`; the logit of `lambda_n`, `[R]`, None at the last pass and in models
        that do not halt; and the pooled state `[R, D]`, which is `h_(n-1)` of the next pass.
        """
        now = self.pool(hidden_RTD, mask_RT)
        seen = self._early(index, now)
        logits: Tensor = self._classifier(index)(seen)
        head = self._halting_head(index)
        if head is None:
            return logits, None, now
        if self.config.halting_head == "second_cls":
            seen = self._early(index, self.adapter.final_norm(hidden_RTD[:, 1]))
        return logits, head(seen, self._early(index, before_RD), logits), now

    def _early(self, index: int, state: Tensor) -> Tensor:
        """Return a state through which the heads of pass `index` send back `early_gradient`.

        Only what the heads read: the state that the next pass reads must not be scaled twice.
        """
        share = self.config.early_gradient
        if share == 1 or index == self.num_passes - 1 or not self.training:
            return state
        return share * state + (1 - share) * state.detach()

    def begin_flops(self, length: int) -> int:
        """Return the FLOPs of what the encoder does before its first layer, for one example."""
        return length * 2 * sum(part.weight.numel() for part in self.stack.preparing)

    def pass_flops(self, index: int, num_texts: int, length: int) -> float:
        """Return the FLOPs of pass `index`, for one of several examples padded to a length.

        Matrix products only, in closed form, multiply-adds counting as two: equal to torch's own
        `FlopCounterMode` on the architectures that the tests name. An encoder whose attention does
        more than compare queries with keys (DeBERTa's disentangled terms) costs somewhat more. One
        whose layers differ in kind (PAR) counts them itself, by `layer_flops`.
        """
        heads = [self._classifier(index), self._halting_head(index)]
        of_heads = sum(linear_flops(head) for head in heads if head is not None)
        count: Any = getattr(self.encoder_model, "layer_flops", None)
        if count is not None:
            return count(index, num_texts, length) / num_texts + of_heads
        attention = 4 * length * length * self.adapter.width
        return length * linear_flops(self.stack.layers[index]) + attention + of_heads

    # -- the forward pass --------------------------------------------------------------------

    def forward(
        self,
        input_ids: Tensor | Texts,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        labels: Tensor | Sequence[Any] | None = None,
        policy: HaltingPolicy | None = None,
        all_passes: bool | None = None,
        example_ids: Tensor | None = None,
        return_dict: bool | None = None,
    ) -> PonderOutput | tuple[Any, ...]:
        """Classify texts.

        Args:
            input_ids: Token ids `[B, T]`; or texts, a list of strings or of pairs of strings, or a
                list of first and one of second texts as a tuple: they are tokenized here.
            attention_mask: 0 at padding, `[B, T]`.
            token_type_ids: 1 at the second text of a pair, where the encoder knows that.
            labels: Wanted answers; the output then has a loss.
            policy: Replaces the exit of the config.
            all_passes: Make every pass and return the answers and the loss of all, which training
                does. Else examples stop, and a loss is that of their answers.
            example_ids: Number the examples for draws with a seed; by default from 0.
            return_dict: False returns a tuple, as in transformers.
        """
        if not isinstance(input_ids, Tensor):
            encoded = self._encode(input_ids)
            input_ids, attention_mask = encoded["input_ids"], encoded["attention_mask"]
            token_type_ids = encoded.get("token_type_ids")
        inputs = self.prepare(input_ids, attention_mask, token_type_ids)
        policy = policy or self.exit_policy()
        if policy.needs_labels and self.problem == REGRESSION:
            raise UserError(
                f"{type(policy).__name__} reads the probability of a label, and this model answers "
                "with values: use QuantileExit, PatienceExit or FixedExit."
            )
        if policy.needs_halting and not self.has_halting:
            raise UserError(
                f"This model was made with objective {self.config.objective!r} and has no halting "
                f"probabilities for {type(policy).__name__}: use ConfidenceExit, PatienceExit or "
                "FixedExit."
            )
        if example_ids is None:
            example_ids = torch.arange(len(input_ids), device=input_ids.device)
        if labels is not None:
            labels = torch.as_tensor(labels, device=input_ids.device)
            check_labels(labels, len(input_ids), self.num_labels, self.problem)
        if self.training if all_passes is None else all_passes:
            output = self._run_all(inputs, labels, policy, example_ids)
        else:
            output = run_batch(self, inputs, policy, example_ids)
            if labels is not None and output.logits is not None:
                output.loss = answer_loss(output.logits, labels, self.problem)
        if output.halting is not None:
            target, like = self.config.halting_target, output.halting
            output.prior = log_geometric(target, self.num_passes, like).exp().expand_as(like)
        return output if return_dict is not False else output.to_tuple()

    def predict(
        self, texts: Iterable[Text], tokenizer: Any, **options: Any
    ) -> Iterator[Prediction]:
        """Yield label, probability and passes of each text; see `inference.predict`."""
        return predict(self, texts, tokenizer, **options)

    @property
    def tokenizer(self) -> Any:
        """The tokenizer that texts are read with, by default that of the checkpoint."""
        if self._tokenizer is None:
            place = self.config._name_or_path or self.config.get_text_config()._name_or_path
            if not place:
                raise UserError(
                    "This model has no tokenizer to read texts with: give one when it is made "
                    "(tokenizer=...), or call it with token ids."
                )
            self._tokenizer = from_pretrained(AutoTokenizer, place, "tokenizer", name=place)
        return self._tokenizer

    def _encode(self, texts: Texts) -> Inputs:
        """Return texts as token ids, those that are too long for the model cut."""
        pairs = isinstance(texts, tuple) and len(texts) == 2 and not isinstance(texts[0], str)
        listed: Any = list(zip(*texts, strict=False)) if pairs else texts
        if isinstance(listed, str) or not len(listed) or (pairs and len(texts[0]) != len(texts[1])):
            raise UserError(
                "A pondering model reads a list of texts, at least one, or two lists of as many: "
                "give a list."
            )
        examples = [as_example(text, number) for number, text in enumerate(listed)]
        encoded = EncodedExamples(examples, self.tokenizer, self.max_length or NO_LIMIT)
        return encoded.batch(range(len(examples)), self.device)

    def prepare(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
    ) -> Inputs:
        """Return inputs as the encoder reads them, with the second `[CLS]` where there is one."""
        limit, num_tokens = self.max_length, input_ids.shape[-1]
        if input_ids.ndim != 2 or not input_ids.numel():
            raise UserError(
                "A pondering model needs token ids of shape [examples, tokens], neither of them "
                f"0: got {tuple(input_ids.shape)}."
            )
        if limit is not None and num_tokens > limit:
            raise UserError(
                f"The texts are {num_tokens} tokens long, and the model takes at most {limit}: "
                f"truncate them (truncation=True, max_length={limit})."
            )
        inputs = {"input_ids": input_ids}
        if attention_mask is not None:
            inputs["attention_mask"] = attention_mask
        accepted = inspect.signature(self.adapter.trunk.forward).parameters
        if token_type_ids is not None and "token_type_ids" in accepted:
            inputs["token_type_ids"] = token_type_ids  # else a text is not told from its pair
        if self.config.halting_head == "second_cls":
            return {name: torch.cat([own[:, :1], own], 1) for name, own in inputs.items()}
        return inputs

    @property
    def max_length(self) -> int | None:
        """The longest text in tokens, those that the tokenizer adds included."""
        limit = self.adapter.max_length
        return None if limit is None else limit - (self.config.halting_head == "second_cls")

    def exit_policy(self) -> HaltingPolicy:
        """Return the policy that the config asks for."""
        return make_policy(options_of(self.config))

    def _run_all(
        self, inputs: Inputs, labels: Tensor | None, policy: HaltingPolicy, example_ids: Tensor
    ) -> PonderOutput:
        """Make every pass; return the answers of all, and where the policy would have stopped."""
        calls = self.stack.begin(**inputs)
        hidden, mask = calls[0].hidden, inputs.get("attention_mask")
        before = self.pool(hidden, mask)
        answers: list[Tensor] = []
        halts = [hidden.new_empty(len(hidden), 0, dtype=torch.float32)]
        for index in range(self.num_passes):
            hidden = self.stack.run(index, hidden, calls)
            logits, halt_logit, before = self.read(index, hidden, mask, before)
            answers.append(logits)
            if halt_logit is not None:
                halts.append(halt_logit.float()[:, None])
        step_logits, log_p = torch.stack(answers), None
        output = PonderOutput(step_logits=step_logits)
        if self.has_halting:
            output.halt_logits = torch.cat(halts, -1)
            log_p = log_halting(output.halt_logits, self.num_passes)
            output.halting = log_p.exp()
        if labels is not None:
            terms = self._loss(step_logits, log_p, labels)
            output.loss, output.terms = terms.total, {"task": terms.task, "kl": terms.kl}
        with torch.no_grad():
            halts_BN = output.halt_logits
            output.passes = replay(policy, step_logits, halts_BN, example_ids, self.problem)
        output.logits = select_pass(step_logits, output.passes)
        return output

    def _loss(self, step_logits: Tensor, log_p: Tensor | None, labels: Tensor) -> PonderLoss:
        config = self.config
        how: Any = {"problem": self.problem, "distill": config.distill}
        if log_p is not None:
            target, weight = config.halting_target, config.kl_weight
            return ponder_loss(step_logits, log_p, labels, target, weight, **how)
        weights = torch.arange(1.0, self.num_passes + 1)  # PABEE: later answers weigh more
        if config.objective == "last":
            weights[:-1] = 0.0
        return fixed_loss(step_logits, weights / weights.sum(), labels, **how)

    # -- what transformers asks of a model ---------------------------------------------------

    def _add_halting(self, num_heads: int) -> None:
        kind = self.config.halting_head
        if kind == "answer" and self.problem != SINGLE_LABEL:
            kind = "previous"  # no answer leads
        if self.has_halting:
            width = self.config.hidden_size
            self.halting.extend(HaltingHead(kind, width) for _ in range(num_heads))

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, HaltingHead):
            target = self.config.halting_target
            # A new model halts as the prior does: the divergence starts near 0.
            init.constant_(module.bias, math.log(target) - math.log1p(-target))
            if module.lead is not None:
                init.zeros_(module.lead)


@torch.no_grad()
def _check_steps(adapter: Adapter, stack: LayerStack) -> None:
    """Refuse an encoder that computes something else than its layers do one after the other.

    Seen on a few tokens, one of two texts padded. The first token must see the last one.
    """
    model, wrong = adapter.model, ""
    ids = torch.arange(2, 14, device=model.device).view(2, 6)
    ids %= getattr(model.config, "vocab_size", 14)
    mask, other = torch.ones_like(ids), ids.clone()
    mask[1, 4:], other[0, 5] = 0, ids[0, 1]
    try:
        with eval_mode(model):
            expected = adapter.states(ids, attention_mask=mask)
            if torch.equal(expected[-1][0, 0], adapter.states(other, mask)[-1][0, 0]):
                wrong = "lets its first token see nothing of the text after it"
            calls = stack.begin(input_ids=ids, attention_mask=mask)
            hidden = calls[0].hidden
            for index, state in enumerate(expected[1 : 1 + len(stack.layers)]):
                hidden = stack.run(index, hidden, calls)
                own, found = state[mask.bool()], hidden[mask.bool()]
                allowed = torch.finfo(own.dtype).eps ** 0.5 * float(own.abs().max())
                if not torch.allclose(found, own, rtol=0, atol=allowed, equal_nan=True):
                    wrong = wrong or "does more than run its layers one after the other"
    except Exception as error:  # architectures fail in many ways
        wrong = f"cannot be run layer by layer ({type(error).__name__}: {error})"
    if wrong:
        name = type(adapter.trunk).__name__
        raise UserError(f"{name} {wrong}, so it cannot ponder: use another encoder, {ENCODERS}.")


# -- architectures ---------------------------------------------------------------------------------


class PonderAlbertForSequenceClassification(PonderClassifier):
    """ALBERT that applies its shared layer as often as an example needs."""

    config_class = PonderAlbertConfig
    config: PonderAlbertConfig
    base_model_prefix = "albert"
    adds_heads = True

    def __init__(self, config: PreTrainedConfig, tokenizer: Any = None, **options: Any) -> None:
        super().__init__(config, tokenizer, **options)
        config = self.config
        self.albert = AlbertModel(config)
        self.dropout = nn.Dropout(config.classifier_dropout_prob)
        self.classifier = nn.Linear(config.hidden_size, self.num_labels)
        self._add_halting(1)
        self.post_init()

    def _layers(self, adapter: Adapter) -> list[nn.Module]:
        return [adapter.layers[0]] * self.num_passes

    def _classifier(self, index: int) -> nn.Module:
        pooler, tanh = self.albert.pooler, self.albert.pooler_activation
        return nn.Sequential(pooler, tanh, self.dropout, self.classifier)


class PonderEncoderForSequenceClassification(PonderClassifier):
    """Any encoder that runs as many of its layers as an example needs."""

    config_class = PonderEncoderConfig
    config: PonderEncoderConfig
    base_model_prefix = "trunk"

    def __init__(self, config: PreTrainedConfig, tokenizer: Any = None, **options: Any) -> None:
        super().__init__(config, tokenizer, **options)
        config = self.config
        self.trunk = _without_pooler(AutoModel.from_config(config.encoder))
        num_heads = 1 if config.objective == "last" else self.num_passes
        self.classifiers = nn.ModuleList(
            classifier_head(config.hidden_size, self.num_labels, config.classifier_dropout)
            for _ in range(num_heads)
        )
        self._add_halting(self.num_passes - 1)
        self.post_init()

    def _classifier(self, index: int) -> nn.Module:
        return self.classifiers[min(index, len(self.classifiers) - 1)]

    @classmethod
    def from_encoder(cls, encoder: PreTrainedModel, **options: Any) -> Any:
        """Make a new classifier over an encoder that is already loaded, which becomes part of it.

        `options` are those of `PonderEncoderConfig`. The encoder's weights are trained with the
        rest, and a pooler of its own is dropped.
        """
        base: Any = encoder.base_model
        check_encoder(base.config)
        options = {"attn_implementation": base.config._attn_implementation, **options}
        model: Any = cls(PonderEncoderConfig(encoder=base.config, **options))
        model.trunk = _without_pooler(base).requires_grad_(True)
        return model.to(device=base.device, dtype=base.dtype)

    @classmethod
    def from_pretrained(cls, name: Any, *args: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        """Load a pondering model, or any encoder, by name or folder.

        Arguments of the config change it. Of an encoder, the labels' names are kept if it was a
        classifier.
        """
        verify(Path(str(name)), without=WEIGHTS)  # before a damaged config is read
        kwargs.setdefault("trust_remote_code", False)
        config = kwargs.get("config") or AutoConfig.from_pretrained(name, **kwargs)
        if isinstance(config, PonderEncoderConfig):
            return super().from_pretrained(name, *args, **kwargs)
        check_encoder(config)
        options = {key: kwargs.pop(key) for key in ARGUMENTS & kwargs.keys()}
        labels = {"id2label": config.id2label, "label2id": config.label2id}
        encoder = AutoModel.from_pretrained(name, *args, **kwargs)
        return cls.from_encoder(encoder, **labels | options).eval()


def _without_pooler(encoder: Any) -> Any:
    """Drop the pooler: weights that nothing uses stop distributed training."""
    if getattr(encoder, "pooler", None) is not None:
        encoder.pooler = nn.Identity()  # some encoders call it, whatever it is
    return encoder


register(PonderAlbertConfig.model_type, LAYOUTS["albert"])
for _config, _model in (
    (PonderAlbertConfig, PonderAlbertForSequenceClassification),
    (PonderEncoderConfig, PonderEncoderForSequenceClassification),
):
    AutoConfig.register(_config.model_type, _config)
    AutoModelForSequenceClassification.register(_config, _model)

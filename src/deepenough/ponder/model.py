"""A classifier that ponders: what all architectures have in common.

Training makes all passes and weighs their answers by the halting distribution; evaluation stops
each example where the exit policy says so. What differs between architectures, the encoder and the
classifier, is in `albert.py` and `encoder.py`.

Shapes: B examples, R of them running, N passes, T tokens, D width, C labels.
"""

from __future__ import annotations

import inspect
import math
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers import initialization as init

from deepenough.hf.adapter import Adapter, adapt
from deepenough.ponder import loss as losses
from deepenough.ponder.config import (
    PonderAlbertConfig,
    PonderEncoderConfig,
    check_config,
    options_of,
)
from deepenough.ponder.distribution import log_halting
from deepenough.ponder.flops import StackFlops, linear_flops
from deepenough.ponder.heads import HaltingHead
from deepenough.ponder.inference import answer, check_policy, choose, replay
from deepenough.ponder.inputs import Inputs
from deepenough.ponder.labels import check_labels
from deepenough.ponder.output import PonderOutput
from deepenough.ponder.policies import ExitPolicy, make_policy
from deepenough.ponder.stack import LayerStack
from deepenough.ponder.texts import ReadsTexts


class Reading(NamedTuple):
    """What the heads make of the states after a pass."""

    logits: Tensor
    """`[R, C]`"""
    halt_logit: Tensor | None
    """`[R]`, the logit of `lambda_n`; None at the last pass, and in models that do not halt."""
    summary: Tensor
    """`[R, D]`: what the halting head of the next pass reads as `h_(n-1)`."""


class PonderClassifier(ReadsTexts, PreTrainedModel):
    """Everything but the encoder and the classifier."""

    config: PonderAlbertConfig | PonderEncoderConfig
    main_input_name = "input_ids"
    supports_gradient_checkpointing = True
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_flex_attn = True
    _supports_attention_backend = True
    accepts_loss_kwargs = False  # the loss is a mean, which a trainer divides when it accumulates

    def __init__(self, config: PonderAlbertConfig | PonderEncoderConfig) -> None:
        super().__init__(config)
        check_config(config)
        assert config.num_labels is not None and config.num_passes is not None
        self.num_labels: int = config.num_labels
        self.num_passes: int = config.num_passes
        self.halting = nn.ModuleList()
        self._parts: tuple[Adapter, LayerStack, StackFlops] | None = None

    # -- what architectures differ in --------------------------------------------------------

    @property
    @abstractmethod
    def encoder_model(self) -> PreTrainedModel:
        """The encoder, as the adapter takes it."""

    @abstractmethod
    def _classifier(self, index: int) -> nn.Module:
        """From a pooled state `[R, D]` to logits `[R, C]`, after pass `index` (from 0)."""

    def _layers(self, adapter: Adapter) -> list[nn.Module]:
        """The layers in the order they are applied, one a pass."""
        return adapter.layers[: self.num_passes]

    # -- the encoder as single steps ---------------------------------------------------------

    @property
    def adapter(self) -> Adapter:
        return self._find_parts()[0]

    @property
    def stack(self) -> LayerStack:
        return self._find_parts()[1]

    @property
    def flops(self) -> StackFlops:
        return self._find_parts()[2]

    def _find_parts(self) -> tuple[Adapter, LayerStack, StackFlops]:
        encoder = self.encoder_model
        if self._parts is None or self._parts[0].model is not encoder:
            adapter = adapt(encoder)
            stack = LayerStack(adapter.trunk, self._layers(adapter))
            self._parts = adapter, stack, StackFlops(stack, adapter.width)
        return self._parts

    @property
    def has_halting(self) -> bool:
        """Whether the model has learned when to halt; baselines have not."""
        return self.config.objective == "ponder"

    def _halting_head(self, index: int) -> nn.Module | None:
        """Of pass `index`; the last pass halts whatever a head would say."""
        if not self.has_halting or index == self.num_passes - 1:
            return None
        return self.halting[min(index, len(self.halting) - 1)]

    def summary(self, hidden_RTD: Tensor, mask_RT: Tensor | None) -> Tensor:
        """The states of all tokens as one, `[R, D]`."""
        if self.config.pooling == "cls":
            return self.adapter.final_norm(hidden_RTD[:, 0])
        normed = self.adapter.final_norm(hidden_RTD)
        if mask_RT is None:
            return normed.mean(1)
        weights = mask_RT.to(normed.dtype)
        return (normed * weights[..., None]).sum(1) / weights.sum(1, keepdim=True)

    def read(
        self, index: int, hidden_RTD: Tensor, mask_RT: Tensor | None, before_RD: Tensor
    ) -> Reading:
        """What the heads say after pass `index` (from 0)."""
        share = self.config.early_gradient
        if share < 1 and index < self.num_passes - 1 and self.training:
            hidden_RTD = share * hidden_RTD + (1 - share) * hidden_RTD.detach()
            before_RD = share * before_RD + (1 - share) * before_RD.detach()
        now = self.summary(hidden_RTD, mask_RT)
        logits: Tensor = self._classifier(index)(now)
        head = self._halting_head(index)
        if head is None:
            return Reading(logits, None, now)
        second = self.config.halting_head == "second_cls"
        about = self.adapter.final_norm(hidden_RTD[:, 1]) if second else now
        return Reading(logits, head(about, before_RD, logits), now)

    def head_flops(self, index: int) -> int:
        """Of the heads, for one example after pass `index`."""
        head = self._halting_head(index)
        return linear_flops(self._classifier(index)) + (linear_flops(head) if head else 0)

    # -- the forward pass --------------------------------------------------------------------

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        labels: Tensor | Sequence[Any] | None = None,
        policy: ExitPolicy | None = None,
        all_passes: bool | None = None,
        example_ids: Tensor | None = None,
        return_dict: bool | None = None,
    ) -> PonderOutput | tuple[Any, ...]:
        """`policy` replaces the exit of the config. `all_passes` makes every pass and gives the
        answers and the loss of all, which is what training does; else examples stop, and a loss is
        that of their answers. `example_ids` number the examples for draws with a seed; they are
        numbered from 0 if left out."""
        inputs = self.prepare(input_ids, attention_mask, token_type_ids)
        policy = policy or self.exit_policy()
        check_policy(self, policy)
        if example_ids is None:
            example_ids = torch.arange(len(inputs), device=inputs.input_ids.device)
        problem = None
        if labels is not None:
            labels = torch.as_tensor(labels, device=inputs.input_ids.device)
            problem = self._problem_type(labels)
            check_labels(labels, len(inputs), self.num_labels, problem)
        if all_passes is None:
            all_passes = self.training
        if all_passes:
            output = self._run_all(inputs, labels, problem, policy, example_ids)
        else:
            output = answer(self, inputs, policy, example_ids)
            if labels is not None and problem is not None and output.logits is not None:
                output.loss = losses.answer_loss(output.logits, labels, problem)
        return output if return_dict is not False else output.to_tuple()

    def prepare(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
    ) -> Inputs:
        """Inputs as the encoder reads them, with the second `[CLS]` where there is one."""
        accepted = inspect.signature(self.adapter.trunk.forward).parameters
        if "token_type_ids" not in accepted:
            token_type_ids = None  # the encoder does not tell a text from its pair
        inputs = Inputs(input_ids, attention_mask, token_type_ids)
        inputs.check(self.max_length)
        return inputs.with_second_cls() if self.config.halting_head == "second_cls" else inputs

    @property
    def max_length(self) -> int | None:
        """The longest text in tokens, those that the tokenizer adds included."""
        limit = self.adapter.max_length
        own = self.config.halting_head == "second_cls"
        return None if limit is None else limit - own

    @property
    def pad_token_id(self) -> int:
        return int(getattr(self.encoder_model.config, "pad_token_id", None) or 0)

    def exit_policy(self) -> ExitPolicy:
        """The policy that the config asks for."""
        return make_policy(options_of(self.config), self.config.problem_type)

    def _run_all(
        self,
        inputs: Inputs,
        labels: Tensor | None,
        problem: str | None,
        policy: ExitPolicy,
        example_ids: Tensor,
    ) -> PonderOutput:
        step_logits, halt_logits = self._all_readings(inputs)
        output = PonderOutput(step_logits=step_logits)
        log_p = None
        if halt_logits is not None:
            log_p = log_halting(halt_logits, self.num_passes)
            output.halting = log_p.exp()
            output.halt_probabilities = nn.functional.pad(halt_logits.sigmoid(), (0, 1), value=1.0)
        if labels is not None and problem is not None:
            terms = self._loss(step_logits, log_p, labels, problem)
            output.loss, output.terms = terms.total, {"task": terms.task, "kl": terms.kl}
        with torch.no_grad():
            output.passes = replay(policy, step_logits, halt_logits, example_ids)
        output.logits = choose(step_logits, output.passes)
        return output

    def _all_readings(self, inputs: Inputs) -> tuple[Tensor, Tensor | None]:
        """Logits of every pass, `[N, B, C]`, and of halting at all but the last, `[B, N - 1]`."""
        calls = self.stack.begin(**inputs.as_arguments())
        hidden = calls.hidden
        before = self.summary(hidden, inputs.attention_mask)
        readings: list[Reading] = []
        for index in range(self.num_passes):
            hidden = self.stack.run(index, hidden, calls)
            readings.append(self.read(index, hidden, inputs.attention_mask, before))
            before = readings[-1].summary
        step_logits = torch.stack([reading.logits for reading in readings])
        if not self.has_halting:
            return step_logits, None
        halts = [r.halt_logit.float() for r in readings if r.halt_logit is not None]
        empty = step_logits.new_empty(len(inputs), 0, dtype=torch.float32)
        return step_logits, torch.stack(halts, -1) if halts else empty

    def _loss(
        self, step_logits: Tensor, log_p: Tensor | None, labels: Tensor, problem: str
    ) -> losses.PonderLoss:
        config = self.config
        if log_p is not None:
            return losses.ponder_loss(
                step_logits, log_p, labels, problem, config.halting_target, config.kl_weight
            )
        weights = torch.arange(1.0, self.num_passes + 1)  # PABEE: later answers weigh more
        if config.objective == "last":
            weights[:-1] = 0.0
        return losses.fixed_loss(step_logits, weights / weights.sum(), labels, problem)

    def _problem_type(self, labels: Tensor) -> str:
        """As in transformers, the first labels decide it where the config does not."""
        if self.config.problem_type is None:
            self.config.problem_type = losses.problem_type(labels, self.num_labels)
        return self.config.problem_type

    # -- what transformers asks of a model ---------------------------------------------------

    def _add_halting(self, num_heads: int) -> None:
        if self.has_halting:
            self.halting.extend(
                HaltingHead(self.config.halting_head, self.config.hidden_size)
                for _ in range(num_heads)
            )

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, HaltingHead):
            target = self.config.halting_target
            # A new model halts as the prior does: the divergence starts near 0.
            init.constant_(module.bias, math.log(target) - math.log1p(-target))
            if module.lead is not None:
                init.zeros_(module.lead)

"""What pondering computes, as plain loops over one example: what tests compare it with."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from deepenough.ponder.halting import HaltingPolicy
from deepenough.ponder.inference import Inputs, PonderOutput, run_batch
from deepenough.ponder.modeling import PonderClassifier
from deepenough.trace import DepthTrace


def halting_ref(lambdas: Sequence[float]) -> list[float]:
    """Return `p_n` of one example; the last `lambda` is not used."""
    result, left = [], 1.0
    for halt in lambdas[:-1]:
        result.append(left * halt)
        left *= 1.0 - halt
    return [*result, left]


def geometric_ref(target: float, num_passes: int) -> list[float]:
    """Return the geometric prior, whose `lambda` is the same at every pass."""
    return halting_ref([target] * num_passes)


def kl_ref(p: Sequence[float], q: Sequence[float]) -> float:
    """Return `KL(p || q)`, with `0 log 0 = 0`."""
    return sum(a * math.log(a / b) for a, b in zip(p, q, strict=True) if a > 0)


def ponder_loss_ref(
    step_logits_NBC: Tensor, lambdas_BN: Tensor, labels: Tensor, target: float, beta: float
) -> tuple[float, float, float]:
    """Return total, task and divergence, one example and one pass at a time."""
    step_logits_NBC, lambdas_BN = step_logits_NBC.detach(), lambdas_BN.detach()
    num_passes, num_examples, _ = step_logits_NBC.shape
    task = divergence = 0.0
    for example in range(num_examples):
        p = halting_ref(lambdas_BN[example].tolist())
        for n in range(num_passes):
            log_probabilities = step_logits_NBC[n, example].log_softmax(-1)
            task -= p[n] * float(log_probabilities[labels[example]])
        divergence += kl_ref(p, geometric_ref(target, num_passes))
    task, divergence = task / num_examples, divergence / num_examples
    return task + beta * divergence, task, divergence


def run_batch_ref(
    model: PonderClassifier, inputs: Inputs, policy: HaltingPolicy, example_ids: Tensor
) -> PonderOutput:
    """Run the same one example at a time: nobody ever leaves a batch."""
    outputs = []
    for row in range(len(example_ids)):
        own = {name: tensor[row, None] for name, tensor in inputs.items()}
        outputs.append(run_batch(model, own, policy, example_ids[row, None]))
    joined: dict[str, Any] = {
        name: torch.cat([output[name] for output in outputs])
        for name in ("logits", "passes", "halting")
        if outputs[0][name] is not None
    }
    traces = [output.trace for output in outputs if output.trace is not None]
    return PonderOutput(**joined, trace=DepthTrace.join(traces))


def parity_ref(vector: Sequence[float]) -> int:
    """Return the label of one vector, straight from its definition."""
    label = 0
    for entry in vector:
        if entry == 1:
            label = 1 - label
    return label

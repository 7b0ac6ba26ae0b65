"""Labels of a batch, checked where a wrong one can still be named."""

from __future__ import annotations

from torch import Tensor

from deepenough.errors import UserError
from deepenough.ponder.loss import IGNORED, SINGLE_LABEL


def check_labels(labels: Tensor, num_examples: int, num_labels: int, problem: str) -> None:
    if problem != SINGLE_LABEL:
        if labels.numel() != num_examples * num_labels:
            raise UserError(
                f"{num_examples} examples with {num_labels} target numbers each need labels of "
                f"shape [{num_examples}, {num_labels}]: got {tuple(labels.shape)}."
            )
        return
    if labels.numel() != num_examples:
        raise UserError(f"{num_examples} examples need as many labels: got {tuple(labels.shape)}.")
    if labels.is_floating_point():
        raise UserError(
            f"Labels of a task with one label an example must be whole numbers: got {labels.dtype}."
        )
    if labels.device.type != "cpu":
        return  # looking at them would make the device wait
    wrong = (((labels < 0) | (labels >= num_labels)) & (labels != IGNORED)).view(-1)
    if wrong.any():
        row = int(wrong.nonzero()[0])
        raise UserError(
            f"The label of example {row} is {int(labels.view(-1)[row])}, and the model has labels "
            f"0 to {num_labels - 1}: correct it, or give the model more (num_labels)."
        )

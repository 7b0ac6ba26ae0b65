"""Heal a pruned model: a short training towards the outputs of the full one.

What is minimised is the mean of `KL(p || q)` over the predictions of a batch of text, `p` being the
output distribution of the full model and `q` that of the pruned one. Trained are the linear maps
that were put in and all norms, or all weights. A training that does not bring the outputs nearer
on held-out text is undone.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from transformers import PreTrainedModel

from deepenough.devices import exact
from deepenough.errors import UserError
from deepenough.shortcut.config import HealTrainingConfig
from deepenough.shortcut.pruned_model import LinearPart
from deepenough.shortcut.reading import Tally, TokenBatch, batches, make_reading
from deepenough.shortcut.replaceable import prunable, run_rows, window
from deepenough.training.config import seed_at
from deepenough.training.distributed import make_accelerator, place_among
from deepenough.training.task import BatchLoss, Task
from deepenough.training.trainer import check_folder, training

log = logging.getLogger("deepenough")

HELD_OUT_EVERY = 16
"""One in so many batches of text is held out, up to so many."""
_HELD_OUT = 8


def heal(
    model: PreTrainedModel,
    pruned: PreTrainedModel,
    tokenizer: Any,
    texts: Iterable[str],
    config: HealTrainingConfig,
) -> dict[str, float]:
    """Train a pruned model in place; return its KL on held-out text before and after.

    If it is no smaller after, the weights are those before, and that is said.
    """
    accelerator = make_accelerator(config.train, may_skip=False, may_divide=False)
    check_folder(config, accelerator)
    for each in (model, pruned):
        each.to(accelerator.device)  # type: ignore[arg-type]
    task = HealTask(model, pruned, tokenizer, texts, config, place_among(accelerator))
    before = task.evaluate(accelerator, "valid")["loss"]
    unhealed = {name: weight.detach().clone() for name, weight in pruned.state_dict().items()}
    with training(config, task, accelerator) as trainer:
        trainer.fit()
    pruned.requires_grad_(True).eval()
    after = task.evaluate(accelerator, "valid")["loss"]
    if not after < before:
        pruned.load_state_dict(unhealed)
        log.warning(
            "%d steps of healing did not bring the outputs nearer to the full model's (KL %.3f "
            "before, %.3f after): the weights stay as they were. Try a lower learning rate or "
            "more steps.",
            config.train.steps,
            before,
            after,
        )
        after = before
    return {"before": before, "after": after}


class HealTask(Task):
    """The outputs of the full model, to be met by the pruned one."""

    unit = "tokens"

    def __init__(
        self,
        full: PreTrainedModel,
        pruned: PreTrainedModel,
        tokenizer: Any,
        texts: Iterable[str],
        config: HealTrainingConfig,
        share: tuple[int, int] = (0, 1),
    ) -> None:
        """Read the texts; with a share `(k, n)`, this is process `k` of `n`."""
        self.full, self.model, self.config = full.eval(), pruned, config
        self.adapter, self.tally, self.share = prunable(full), Tally(), share
        how = make_reading(
            self.adapter, "all", config.train.seed, config.batch, window(self.adapter)
        )
        found = list(batches(tokenizer, texts, how, self.tally))
        every = max(1, min(HELD_OUT_EVERY, len(found) // 2))
        self.held_out = found[every - 1 :: every][:_HELD_OUT]
        del found[every - 1 :: every]
        if not found or not self.held_out:
            raise UserError("The text is too short to train on and to hold some out: give more.")
        self.batches = found
        trained = set(self.weights())
        for weight in pruned.parameters():
            weight.requires_grad_(weight in trained)

    def weights(self) -> list[nn.Parameter]:
        """Return maps and norms, or all weights."""
        if self.config.trained == "all":
            return list(self.model.parameters())
        own = [
            module
            for module in self.model.modules()
            if isinstance(module, LinearPart) or "norm" in type(module).__name__.lower()
        ]
        return [weight for module in own for weight in module.parameters(recurse=False)]

    def batches_per_epoch(self) -> int:
        """Return the batches of the text, of all processes."""
        return -(-len(self.batches) // self.share[1])

    def loss(self, model: nn.Module, phase: str, step: int, micro: int) -> BatchLoss:
        """Return the KL of one batch of text."""
        rank, world = self.share
        place = (step * self.config.train.accumulate + micro) * world + rank
        epoch, number = divmod(place, len(self.batches))
        generator = torch.Generator().manual_seed(seed_at(self.config.train.seed, "heal", epoch))
        order = torch.randperm(len(self.batches), generator=generator)
        batch = self.batches[int(order[number])]
        kl = self._divergence(model, batch)
        return BatchLoss(kl.mean(), kl.detach().mean(), len(kl))

    def _divergence(self, model: nn.Module, batch: TokenBatch) -> Tensor:
        ids, mask = batch.inputs(self.adapter)
        expected = run_rows(self.full, ids, mask, batch).float().log_softmax(-1)
        output: Any = model(input_ids=ids, attention_mask=mask)
        found = output.logits if output.logits.ndim == 2 else output.logits[batch.wanted()]
        return (expected.exp() * (expected - found.float().log_softmax(-1))).sum(-1)

    @torch.no_grad()
    def evaluate(self, accelerator: Accelerator, split: str) -> dict[str, float]:
        """Return the KL on held-out text."""
        if split != "valid":
            return {}
        training, _ = self.model.training, self.model.eval()
        kl = torch.cat([self._divergence(self.model, batch) for batch in self.held_out])
        self.model.train(training)
        return {"loss": float(exact(kl).mean())}

    def identity(self) -> dict[str, Any]:
        """Return what a checkpoint must share with the run that goes on from it."""
        return {
            "model": self.adapter.identity()["fingerprint"],
            "texts": self.tally.fingerprint,
            "heal": {"batch": self.config.batch, "trained": self.config.trained},
            "train": self.config.train.identity(),
        }

    def save(self, folder: Path) -> None:
        """Write the pruned model."""
        own: Any = self.model
        own.save_pretrained(folder)

"""A small model of GPT-2's layout, trained here, so that lossless decoding is measured on one.

    python benchmarks/exit_gpt2.py --folder runs/gpt2-small
    deepenough exit tune runs/gpt2-small/model --data wikitext-2-raw --folder runs/gpt2-small-tuned
    python benchmarks/exit_speed.py --model runs/gpt2-small/model --tuned runs/gpt2-small-tuned

GPT-2's own weights would say more; `deepenough exit tune gpt2` takes them where a hub is in reach.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

from deepenough.data.config import DatasetConfig
from deepenough.data.prepare import prepare
from deepenough.training.config import RunSettings, TrainingConfig
from deepenough.training.distributed import make_accelerator
from deepenough.training.language import LanguageTask
from deepenough.training.task import WEIGHTS, BatchLoss
from deepenough.training.trainer import check_folder, training


@dataclass
class Training:
    """A language model of GPT-2's layout."""

    run: RunSettings
    data: DatasetConfig = field(
        default_factory=lambda: DatasetConfig(corpus="wikitext-2-raw", batch_size=8, length=128)
    )
    train: TrainingConfig = field(default_factory=TrainingConfig)


class CausalTask(LanguageTask):
    """Any causal model of transformers; it carries no memory."""

    def loss(self, model: nn.Module, phase: str, step: int, micro: int) -> BatchLoss:
        batches = self.batches[WEIGHTS]
        batch = batches[step % len(batches)]
        logits = model(batch["input_ids"]).logits
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())
        return BatchLoss(loss, loss, batch["labels"].numel())

    def evaluate(self, accelerator: Any, split: str) -> dict[str, float]:
        losses = []
        batches = self._lanes(self.prepared.tokens[split].ids)
        self.model.eval()
        with torch.inference_mode():
            for index in range(min(len(batches), 16)):
                batch = batches[index]
                logits = self.model(batch["input_ids"]).logits.flatten(0, 1)
                losses.append(nn.functional.cross_entropy(logits, batch["labels"].flatten()))
        self.model.train()
        loss = float(torch.stack(losses).mean())
        return {"loss": loss, "perplexity": float(torch.tensor(loss).exp())}

    def identity(self) -> dict[str, Any]:
        return {"model": self.model.config.to_diff_dict(), "train": self.train.identity()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", required=True)
    parser.add_argument("--steps", type=int, default=1200)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    train = TrainingConfig(
        steps=arguments.steps, lr=1e-3, warmup=100, valid_every=300, threads=arguments.threads
    )
    settings = Training(RunSettings(arguments.folder), train=train)
    accelerator = make_accelerator(train)
    check_folder(settings.run, accelerator)
    prepared = prepare(settings.data)
    torch.manual_seed(train.seed)
    tokenizer = prepared.tokenizer
    model: Any = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=len(tokenizer),
            n_positions=512,
            n_embd=256,
            n_layer=6,
            n_head=4,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
        )
    )
    with training(
        settings, CausalTask(model, prepared, settings.data, train, accelerator), accelerator
    ) as trainer:
        trainer.fit()


if __name__ == "__main__":
    main()

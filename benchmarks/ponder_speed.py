"""Pondering takes time in proportion to the passes that examples need, and training adds little.

Inference: ALBERT's base shape (768 wide, 12 passes) on 32 texts of 64 tokens that halt with
probability 0.2 after each pass, passes drawn with fixed seeds. Timed beside it on the same
texts and draws: all 12 passes; stopping when the last example halts, as a batch that cannot shrink
must; transformers' own `AlbertModel` of 12 layers. The same with 12 layers that are not shared.
Training: one step (forward, backward, AdamW) of pondering against the same layers with a classifier
and a loss at each.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AlbertConfig, AlbertModel, BertConfig, BertModel

from benchmarks.figures import interleaved
from deepenough.ponder.config import PonderAlbertConfig
from deepenough.ponder.halting import FixedExit, SampledExit
from deepenough.ponder.modeling import (
    PonderAlbertForSequenceClassification,
    PonderEncoderForSequenceClassification,
)
from deepenough.training.trainer import keep_freed_memory

QUICK = True
SEEDS = [0]
TEXTS, LENGTH, PASSES, HALT = 32, 64, 12, 0.2
SHAPE: dict[str, Any] = {
    "vocab_size": 30000,
    "hidden_size": 768,
    "num_hidden_layers": PASSES,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
}
TRAINING_TEXTS = 16


def measure(rounds: int = 5, batches: int = 4, threads: int = 2) -> dict[str, Any]:
    """Time inference and a training step; return seconds and ratios.

    Args:
        rounds: Rounds in which all that is compared takes turns.
        batches: Batches a round, each with its own draws of when examples halt.
        threads: Threads of torch.
    """
    torch.set_num_threads(threads)
    keep_freed_memory()
    torch.manual_seed(SEEDS[0])
    shared = PonderAlbertForSequenceClassification(PonderAlbertConfig(**SHAPE, exit="sampled"))
    albert = AlbertModel(AlbertConfig(**SHAPE)).eval()
    bert = BertModel(BertConfig(**SHAPE)).eval()
    own = PonderEncoderForSequenceClassification.from_encoder(
        BertModel(BertConfig(**SHAPE)), exit="sampled"
    )
    return {
        "shared_layer": inference(shared, albert, range(batches), rounds),
        "own_layers": inference(own, bert, range(batches), rounds),
        "training": training(rounds),
        "settings": {"rounds": rounds, "texts": TEXTS, "length": LENGTH, "halt": HALT},
    }


def texts(num: int = TEXTS) -> dict[str, Tensor]:
    """Return a batch of random texts without padding."""
    ids = torch.randint(5, SHAPE["vocab_size"], (num, LENGTH))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def halt_with(model: nn.Module, probability: float) -> None:
    """Make every halting head give this probability, whatever it reads."""
    with torch.no_grad():
        for head in model.halting:  # type: ignore[union-attr]
            head.out.weight.zero_()
            head.bias.fill_(math.log(probability) - math.log1p(-probability))


@torch.inference_mode()
def inference(model: Any, encoder: Any, seeds: range, rounds: int) -> dict[str, Any]:
    """Return passes, seconds and ratios of pondering beside the ways that do not stop."""
    model.eval()
    halt_with(model, HALT)
    batch = texts()
    passes = [model(**batch, policy=SampledExit(seed)).passes for seed in seeds]

    @torch.inference_mode()
    def encode() -> None:
        for _ in seeds:
            encoder(**batch)

    @torch.inference_mode()
    def ponder(policies: list[Any]) -> None:
        for policy in policies:
            model(**batch, policy=policy)

    timings = interleaved(
        {
            "pondering": lambda: ponder([SampledExit(seed) for seed in seeds]),
            "until_the_last_halts": lambda: ponder([FixedExit(int(p.max())) for p in passes]),
            "all_passes": lambda: ponder([FixedExit() for _ in seeds]),
            "transformers": encode,
        },
        rounds,
    )
    made = torch.cat(passes).double()
    return {
        "mean_passes": float(made.mean()),
        "mean_passes_of_the_last": float(torch.stack(passes).max(-1).values.double().mean()),
        "seconds_a_batch": {
            name: min(seconds) / len(seeds) for name, seconds in timings.seconds.items()
        },
        "faster_than_all_passes": timings.ratio("all_passes", "pondering"),
        "faster_than_until_the_last_halts": timings.ratio("until_the_last_halts", "pondering"),
        "ratio_to_transformers": timings.ratio("pondering", "transformers"),
        "share_of_passes": float(made.mean()) / PASSES,
    }


def training(rounds: int) -> dict[str, Any]:
    """Return the seconds of a pondering step and of a step with a loss at every layer."""
    sizes = {**SHAPE, "hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1}
    pondering = PonderAlbertForSequenceClassification(PonderAlbertConfig(**sizes)).train()
    plain = AlbertModel(AlbertConfig(**sizes)).train()
    classifier = nn.Linear(SHAPE["hidden_size"], 2)
    batch, labels = texts(TRAINING_TEXTS), torch.arange(TRAINING_TEXTS) % 2

    def optimizer_of(*modules: nn.Module) -> torch.optim.Optimizer:
        parameters = [parameter for module in modules for parameter in module.parameters()]
        return torch.optim.AdamW(parameters, lr=1e-5, fused=True)

    optimizers = optimizer_of(pondering), optimizer_of(plain, classifier)

    def ponder() -> None:
        pondering(**batch, labels=labels).loss.backward()
        optimizers[0].step()
        optimizers[0].zero_grad()

    def loss_at_each() -> None:
        states = plain(**batch, output_hidden_states=True).hidden_states[1:]
        pooled = [plain.pooler_activation(plain.pooler(state[:, 0])) for state in states]
        losses = [F.cross_entropy(classifier(vector), labels) for vector in pooled]
        torch.stack(losses).mean().backward()
        optimizers[1].step()
        optimizers[1].zero_grad()

    timings = interleaved({"pondering": ponder, "a_loss_at_each": loss_at_each}, rounds)
    return {
        "seconds": {name: timings.best(name) for name in timings.seconds},
        "ratio": timings.ratio("pondering", "a_loss_at_each"),
    }

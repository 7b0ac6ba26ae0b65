"""Time of pondering: inference follows the passes that examples need, training adds little.

    python benchmarks/ponder_speed.py [--save]

Inference: ALBERT's base shape (768 wide, 12 passes) on 32 texts of 64 tokens that halt with
probability 0.2 after each pass, passes drawn with fixed seeds. Timed beside it, on the same
texts and draws: all 12 passes; stopping when the last example halts, as a batch that cannot shrink
must; transformers' own `AlbertModel` of 12 layers. The same with 12 layers that are not shared.

Stream: the same examples through a batch whose freed rows are refilled, against batch after batch.

Training: one step (forward, backward, AdamW) of pondering against the same layers with a classifier
and a loss at each. All that is compared takes turns in one run, best of several rounds.
"""

from __future__ import annotations

import argparse
import math
from typing import Any

import torch
import torch.nn.functional as F
from record import save_result
from torch import Tensor, nn
from transformers import AlbertConfig, AlbertModel, BertConfig, BertModel

from deepenough.par.search import interleaved_best
from deepenough.ponder import (
    PonderAlbertConfig,
    PonderAlbertForSequenceClassification,
    PonderEncoderForSequenceClassification,
)
from deepenough.ponder.halting import FixedExit, SampledExit
from deepenough.training.trainer import keep_freed_memory

TEXTS, LENGTH, PASSES, HALT = 32, 64, 12, 0.2
SHAPE: dict[str, Any] = {
    "vocab_size": 30000,
    "hidden_size": 768,
    "num_hidden_layers": PASSES,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
}
TRAINING_TEXTS = 16


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seeds", type=int, default=4, help="batches a round, each with its draws")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--save", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    keep_freed_memory()
    torch.manual_seed(0)
    rounds, seeds = arguments.rounds, range(arguments.seeds)
    shared = PonderAlbertForSequenceClassification(PonderAlbertConfig(**SHAPE, exit="sampled"))
    albert = AlbertModel(AlbertConfig(**SHAPE)).eval()
    result = {
        "threads": arguments.threads,
        "shared_layer": inference(shared, albert, seeds, rounds),
        "stream": stream(shared, rounds),
        "training": training(rounds),
    }
    bert = BertModel(BertConfig(**SHAPE)).eval()
    own = PonderEncoderForSequenceClassification.from_encoder(
        BertModel(BertConfig(**SHAPE)), exit="sampled"
    )
    result["own_layers"] = inference(own, bert, seeds, rounds)
    save_result("ponder_speed", result, arguments.save)


def texts(num: int = TEXTS) -> dict[str, Tensor]:
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

    seconds = interleaved_best(
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
        "mean_of_the_last": float(torch.stack(passes).max(-1).values.double().mean()),
        "seconds_a_batch": {name: value / len(seeds) for name, value in seconds.items()},
        "faster_than_all_passes": seconds["all_passes"] / seconds["pondering"],
        "faster_than_until_the_last_halts": seconds["until_the_last_halts"] / seconds["pondering"],
        "ratio_to_transformers": seconds["pondering"] / seconds["transformers"],
        "share_of_passes": float(made.mean()) / PASSES,
    }


@torch.inference_mode()
def stream(model: Any, rounds: int, num_batches: int = 3) -> dict[str, Any]:
    """Short batches, so that refilling matters: 8 rows."""
    rows = 8
    halt_with(model.eval(), HALT)
    ids = texts(num_batches * rows)["input_ids"]
    policy = SampledExit(0)

    @torch.inference_mode()
    def batch_after_batch() -> None:
        for start in range(0, len(ids), rows):
            numbers = torch.arange(start, start + rows)
            model(ids[start : start + rows], policy=policy, example_ids=numbers)

    def refilled() -> None:
        for _ in model.stream(({"input_ids": row} for row in ids), policy, rows):
            pass

    functions = {"batch_after_batch": batch_after_batch, "refilled": refilled}
    seconds = interleaved_best(functions, rounds)
    return {
        "rows": rows,
        "seconds": seconds,
        "faster": seconds["batch_after_batch"] / seconds["refilled"],
    }


def training(rounds: int) -> dict[str, Any]:
    """A step of pondering, and one of the same layers with a loss at each."""
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

    seconds = interleaved_best({"pondering": ponder, "a_loss_at_each": loss_at_each}, rounds)
    return {"seconds": seconds, "ratio": seconds["pondering"] / seconds["a_loss_at_each"]}


if __name__ == "__main__":
    main()

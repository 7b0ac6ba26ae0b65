"""Tuned maps beside the package tuned-lens: agreement, KL and fitting time, same model, same text.

    pip install --no-deps --target /tmp/tuned-lens \\
        tuned-lens==0.2.0 simple-parsing==0.1.9 flatten-dict==0.5.0 torchdata==0.9.0
    PYTHONPATH=/tmp/tuned-lens ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16 \\
        python benchmarks/shortcut_tuned_lens.py [--save]

One process fits the closed form, tunes it, and has tuned-lens train its own lens: its model code,
its optimiser with its defaults and its training loop, on the same paragraphs, as often. The loop is
written for a GPU and steps of 262,144 tokens; here its steps are as long as `--lens-step` says, so
that it makes enough of them. All maps are then measured by the same code on held-out text, over the
whole vocabulary. The environment variable is for processors that announce bf16 matrix instructions
and cannot run them: tuned-lens always computes in bf16.

Not part of the project's dependencies: tuned-lens needs an old torchdata, which asks for nothing
else here.
"""

from __future__ import annotations

import argparse
import itertools
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from record import save_result
from transformers import PreTrainedModel

from deepenough.data.corpus import open_corpus
from deepenough.hf.adapter import Adapter, adapt
from deepenough.hf.loading import load
from deepenough.shortcut.evaluation import evaluate
from deepenough.shortcut.modeling import Shortcuts
from deepenough.shortcut.tune import tune

CORPUS = "wikitext-2-raw"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--train-tokens", type=int, default=41_000)
    parser.add_argument("--valid-tokens", type=int, default=8_000)
    parser.add_argument("--steps", type=int, default=300, help="steps of our tuning")
    parser.add_argument("--batch", type=int, default=256, help="positions in each of them")
    parser.add_argument("--lr", type=float, default=1e-3, help="learning rate of our tuning")
    parser.add_argument("--lens-step", type=int, default=1024, help="tokens in a tuned-lens step")
    parser.add_argument("--lens-optimizer", choices=["sgd", "adam"], default="sgd")
    parser.add_argument("--run", type=Path, default=None, help="folder for our tuning's records")
    parser.add_argument("--save", action="store_true")
    arguments = parser.parse_args()

    model, tokenizer = load(arguments.model)
    adapter = adapt(model)
    train = paragraphs(tokenizer, "train", arguments.train_tokens)
    valid = paragraphs(tokenizer, "valid", arguments.valid_tokens)
    seconds: dict[str, float] = {}

    def timed(name: str, function: Any, *args: Any, **options: Any) -> Any:
        began = time.perf_counter()
        result = function(*args, **options)
        seconds[name] = round(time.perf_counter() - began, 1)
        print(f"{name}: {seconds[name]} s", flush=True)
        return result

    closed = timed("closed form", Shortcuts.fit, adapter, tokenizer, train, targets="last")
    ours = timed(
        "tuned",
        tune,
        closed,
        adapter,
        tokenizer,
        train,
        run=arguments.run,
        steps=arguments.steps,
        batch=arguments.batch,
        lr=arguments.lr,
    )
    seen = arguments.steps * arguments.batch
    lens = timed(
        "tuned-lens",
        train_lens,
        model,
        tokenizer,
        train,
        seen,
        arguments.lens_step,
        arguments.lens_optimizer,
    )
    theirs = Shortcuts(closed.num_layers, closed.width, closed.maps, tuned=maps_of(lens))
    table = {"mat": quality(adapter, tokenizer, closed, valid, "mat")}
    table["tuned"] = quality(adapter, tokenizer, ours, valid, "tuned")
    table["tuned-lens"] = quality(adapter, tokenizer, theirs, valid, "tuned")
    show(table)
    result = {
        "model": adapter.identity(),
        "positions": {"fit": closed.meta["fit"]["positions"], "seen in tuning": seen},
        "seconds": seconds,
        "layers": table,
    }
    save_result("shortcut_tuned_lens", result, arguments.save)


def paragraphs(tokenizer: Any, split: str, tokens: int) -> list[str]:
    """The first paragraphs of a split, headings passed over, of at least `tokens` tokens in all."""
    found: list[str] = []
    for line in open_corpus(CORPUS).lines(split):
        if tokens <= 0:
            break
        if len(text := line.strip()) >= 40:
            found.append(text)
            tokens -= len(tokenizer(text, verbose=False)["input_ids"])
    return found


def train_lens(
    model: PreTrainedModel,
    tokenizer: Any,
    texts: list[str],
    tokens: int,
    tokens_per_step: int,
    optimizer: str,
) -> Any:
    """A lens that has seen about `tokens` tokens in the loop of tuned-lens itself."""
    warnings.filterwarnings("ignore")  # of what torchdata will drop
    try:
        from tuned_lens import TunedLens
        from tuned_lens.scripts import ingredients, train_loop
    except ImportError as error:
        raise SystemExit(f"{error}: see the top of this file for what to install.") from error

    samples = [tokenizer(text, return_tensors="pt").input_ids for text in texts]
    length = sum(ids.shape[1] for ids in samples) / len(samples)
    samples_per_step = max(1, round(tokens_per_step / length))
    num_steps = max(1, round(tokens / length / samples_per_step))
    lens = TunedLens.from_model(model)
    settings = ingredients.Optimizer(optimizer=ingredients.OptimizerOption(optimizer))
    optim = settings.create_optim([p for p in lens.parameters() if p.requires_grad])
    state = train_loop.State(
        dataloader=shuffled(samples),
        lens=lens,
        opt=optim,
        scheduler=settings.create_scheduler(optim, num_steps),
        wandb_id=None,
        nats_to_bpb=1.0,
    )

    class OwnModelAndText(train_loop.Train):
        """Its loop, given a model and text that are loaded already, with nothing written."""

        def setup(self) -> tuple[Any, Any, int]:
            lens.save = lambda folder: None
            return state, model, samples_per_step

    print(f"tuned-lens: {num_steps} steps of {samples_per_step} texts of {length:.0f} tokens")
    OwnModelAndText(
        model=None,
        data=None,
        opt=settings,
        dist=ingredients.Distributed(),
        output=Path("unused"),
        num_steps=num_steps,
    ).execute()
    return lens


def shuffled(samples: list[torch.Tensor]) -> Any:
    """One text a batch, in a new order every epoch."""
    generator = torch.Generator().manual_seed(0)
    for _ in itertools.count():
        for index in torch.randperm(len(samples), generator=generator).tolist():
            yield {"input_ids": samples[index]}


def maps_of(lens: Any) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
    """A lens adds what it makes of a state to it: `A = I + W`."""
    return {
        layer: (torch.eye(len(each.bias)) + each.weight.detach(), each.bias.detach())
        for layer, each in enumerate(lens)
    }


def quality(
    adapter: Adapter, tokenizer: Any, shortcuts: Shortcuts, texts: list[str], mode: str
) -> dict[int, dict[str, float]]:
    found = evaluate(
        adapter, tokenizer, shortcuts, texts, positions="all", modes=[mode], tables=False
    )
    return {
        record.values["layer"]: {
            "agreement": round(record.values["precision_1"], 4),
            "kl": round(record.values["kl"], 4),
        }
        for record in found.records()
        if record.kind == "layer"
    }


def show(table: dict[str, dict[int, dict[str, float]]]) -> None:
    print("layer" + "".join(f"{name:>22}" for name in table))
    for layer in table["mat"]:
        cells = (rows[layer] for rows in table.values())
        print(f"{layer:>5}" + "".join(f"{c['agreement']:>12.3f} KL{c['kl']:>7.3f}" for c in cells))


if __name__ == "__main__":
    main()

r"""With a minute of CPU, closed-form maps know more than a tuned lens trained on the same text.

    pip install --no-deps --target /tmp/tuned-lens \
        tuned-lens==0.2.0 simple-parsing==0.1.9 flatten-dict==0.5.0 torchdata==0.9.0
    PYTHONPATH=/tmp/tuned-lens ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16 \
        python -m benchmarks shortcut_tuned_lens

One process fits the closed form, tunes it, and has tuned-lens train its own lens: its model code,
its optimiser with its defaults and its training loop, on the same paragraphs, as often. The loop is
written for a GPU and steps of 262,144 tokens; here its steps are as long as `lens_step` says, so
that it makes enough of them. All maps are then measured by the same code on held-out text, over the
whole vocabulary. The environment variable is for processors that announce bf16 matrix instructions
and cannot run them: tuned-lens always computes in bf16. It is not a dependency of this project.
"""

from __future__ import annotations

import itertools
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from deepenough.data.corpus import open_corpus
from deepenough.hf.adapter import Adapter, adapt
from deepenough.hf.loading import load
from deepenough.shortcut.evaluation import evaluate
from deepenough.shortcut.modeling import Shortcuts
from deepenough.shortcut.training import tune

QUICK = False
SEEDS = [0]
CORPUS = "wikitext-2-raw"


def measure(
    model: str = "smollm2",
    train_tokens: int = 12_000,
    valid_tokens: int = 2_000,
    steps: int = 40,
    batch: int = 256,
    lens_step: int = 256,
    threads: int = 1,
) -> dict[str, Any]:
    """Fit and tune here, train a tuned lens, and return agreement, KL and seconds of all three.

    Args:
        model: Name or folder of the model.
        train_tokens: Tokens to fit on, about.
        valid_tokens: Tokens to measure on, about.
        steps: Steps of our tuning.
        batch: Positions in each of them.
        lens_step: Tokens in a step of tuned-lens.
        threads: Threads of torch.
    """
    torch.set_num_threads(threads)
    loaded, tokenizer = load(model)
    adapter = adapt(loaded)
    train = paragraphs(tokenizer, "train", train_tokens)
    valid = paragraphs(tokenizer, "valid", valid_tokens)
    seconds: dict[str, float] = {}

    def timed(name: str, function: Any, *args: Any, **options: Any) -> Any:
        began = time.perf_counter()
        result = function(*args, **options)
        seconds[name] = round(time.perf_counter() - began, 1)
        print(f"{name}: {seconds[name]} s", flush=True)
        return result

    closed = timed("closed_form", Shortcuts.fit, adapter, tokenizer, train, targets="last")
    ours = timed("tuned", tune, closed, adapter, tokenizer, train, steps=steps, batch=batch)
    seen = steps * batch
    lens = timed("tuned_lens", train_lens, loaded, tokenizer, train, seen, lens_step)
    theirs = Shortcuts(closed.num_layers, closed.width, closed.maps, tuned=maps_of(lens))
    return {
        "closed_form": quality(adapter, tokenizer, closed, valid, "mat"),
        "tuned": quality(adapter, tokenizer, ours, valid, "tuned"),
        "tuned_lens": quality(adapter, tokenizer, theirs, valid, "tuned"),
        "seconds": seconds,
        "positions": {"fit": closed.meta["fit"]["positions"], "tuning": seen},
        "settings": {"model": adapter.identity()},
    }


def paragraphs(tokenizer: Any, split: str, tokens: int) -> list[str]:
    """Return the first paragraphs of a split, without headings, of at least so many tokens."""
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
) -> Any:
    """Return a lens that has seen about `tokens` tokens in the loop of tuned-lens itself."""
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
    settings = ingredients.Optimizer()
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
    """Yield one text a batch, in a new order every epoch."""
    generator = torch.Generator().manual_seed(0)
    for _ in itertools.count():
        for index in torch.randperm(len(samples), generator=generator).tolist():
            yield {"input_ids": samples[index]}


def maps_of(lens: Any) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
    """Return the maps of a lens, which adds what it makes of a state to it: `A = I + W`."""
    return {
        layer: (torch.eye(len(each.bias)) + each.weight.detach(), each.bias.detach())
        for layer, each in enumerate(lens)
    }


def quality(
    adapter: Adapter, tokenizer: Any, shortcuts: Shortcuts, texts: list[str], mode: str
) -> dict[str, dict[str, float]]:
    """Return agreement and KL by layer on held-out texts."""
    found = evaluate(adapter, tokenizer, shortcuts, texts, positions="all")
    return {
        f"layer_{record.values['layer']}": {
            "agreement": round(record.values["precision_1"], 4),
            "kl": round(record.values["kl"], 4),
        }
        for record in found.records()
        if record.kind == "layer" and record.values["mode"] == mode
    }

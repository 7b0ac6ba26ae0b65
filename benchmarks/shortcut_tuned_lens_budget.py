r"""tuned-lens trains at its own budget of 250 steps of 262,144 tokens; both curves are shown.

    PYTHONPATH=/tmp/tuned-lens python -m benchmarks shortcut_tuned_lens_budget \
        model=$MODELS/stories260K

The top of `shortcut_tuned_lens.py` says what to install. The model is one that a CPU affords. Its
training text is cut into stretches of 512 tokens, as tuned-lens does, and tuned-lens trains in its
own loop with its defaults. Its curve is the KL on held-out text after every 25 of its steps, ours
that after the closed form and after so many steps of tuning; each point comes with the tokens seen
and the seconds spent. Stopped, the same command goes on: from tuned-lens's own snapshot, and with
the points that are measured already.
"""

from __future__ import annotations

import time
import warnings
from pathlib import Path
from typing import Any

import torch

from benchmarks.shortcut_tuned_lens import maps_of, paragraphs, quality
from deepenough.artifacts import FinishedParts
from deepenough.hf.adapter import adapt
from deepenough.hf.loading import load
from deepenough.shortcut.modeling import Shortcuts
from deepenough.shortcut.training import tune

QUICK = False
SEEDS = [0]


def measure(
    model: str = "stories260K",
    steps: int = 250,
    step_tokens: int = 2**18,
    every: int = 25,
    own_steps: tuple[int, ...] = (50, 100, 200, 400, 800),
    own_batch: int = 1024,
    train_tokens: int = 4_000_000,
    fit_tokens: int = 500_000,
    valid_tokens: int = 20_000,
    out: str = "runs/tuned-lens-budget",
    threads: int = 1,
) -> dict[str, Any]:
    """Train both and return the curves: KL and agreement by layer after so many steps.

    Args:
        model: Name or folder of the model.
        steps: Steps of tuned-lens.
        step_tokens: Tokens in each of them.
        every: Steps of tuned-lens between two points of its curve.
        own_steps: Steps of our tuning at the points of its curve.
        own_batch: Positions in each of them.
        train_tokens: Tokens of the text that tuned-lens reads, as often as it needs, about.
        fit_tokens: Tokens of the beginning of it that we fit and tune on, about.
        valid_tokens: Tokens to measure on, about.
        out: Folder for snapshots and finished points.
        threads: Threads of torch.
    """
    torch.set_num_threads(threads)
    loaded, tokenizer = load(model)
    adapter = adapt(loaded)
    folder = Path(out)
    fit_texts = paragraphs(tokenizer, "train", fit_tokens)
    valid = paragraphs(tokenizer, "valid", valid_tokens)
    settings = (adapter.identity(), step_tokens, own_batch, train_tokens, fit_tokens, valid_tokens)
    parts = FinishedParts(folder, "points", *settings)
    began = time.perf_counter()
    closed = Shortcuts.fit(adapter, tokenizer, fit_texts, targets="last")
    seconds = time.perf_counter() - began

    def point(shortcuts: Shortcuts, mode: str, **about: float) -> dict[str, Any]:
        return {"layers": quality(adapter, tokenizer, shortcuts, valid, mode), **about}

    def tuned(num: int) -> dict[str, Any]:
        start = time.perf_counter()
        found = tune(closed, adapter, tokenizer, fit_texts, steps=num, batch=own_batch)
        spent = seconds + time.perf_counter() - start
        return point(found, "tuned", tokens=num * own_batch, seconds=spent)

    fitted = closed.meta["fit"]["positions"]
    ours = {"0": parts.get("ours-0", lambda: point(closed, "mat", tokens=fitted, seconds=seconds))}
    for num in own_steps:
        ours[str(num)] = parts.get(f"ours-{num}", lambda num=num: tuned(num))
    text = paragraphs(tokenizer, "train", train_tokens)
    spent = train_lens(loaded, tokenizer, text, steps, step_tokens, every, folder)
    theirs = {}
    for num in range(every, steps + 1, every):
        lens = load_lens(loaded, folder / f"snapshot_{num}.pth")
        maps = Shortcuts(closed.num_layers, closed.width, closed.maps, tuned=maps_of(lens))
        about = {"tokens": num * step_tokens, "seconds": spent[num]}
        name = f"theirs-{num}"
        theirs[str(num)] = parts.get(name, lambda m=maps, a=about: point(m, "tuned", **a))
    return {
        "closed_form_and_tuned": ours,
        "tuned_lens": theirs,
        "settings": {"model": adapter.identity(), "steps": steps, "step_tokens": step_tokens},
    }


def train_lens(
    model: Any,
    tokenizer: Any,
    texts: list[str],
    num_steps: int,
    step_tokens: int,
    every: int,
    folder: Path,
) -> dict[int, float]:
    """Train in tuned-lens's own loop, from its last snapshot; return seconds by step."""
    warnings.filterwarnings("ignore")  # of what torchdata will drop
    try:
        from tuned_lens.scripts import ingredients, train_loop
    except ImportError as error:
        raise SystemExit(f"{error}: see the top of shortcut_tuned_lens.py.") from error
    ids = [token for text in texts for token in tokenizer(text, verbose=False)["input_ids"]]
    length, batch = 512, 16
    chunks = torch.tensor(ids[: len(ids) // length * length]).view(-1, length)
    settings = ingredients.Optimizer()

    class Resumed(train_loop.Train):
        """Its loop, given a model and text that are loaded already."""

        def setup(self) -> tuple[Any, Any, int]:
            lens = self.get_lens(model)
            lens.save = lambda folder: None
            optim = settings.create_optim([p for p in lens.parameters() if p.requires_grad])
            scheduler = settings.create_scheduler(optim, num_steps)
            self.state = train_loop.State(Chunks(chunks, batch), lens, optim, scheduler, None, 1.0)
            self.load_recent_snapshot(self.state)
            self.began = time.perf_counter()
            return self.state, model, step_tokens // (length * batch)

        def snapshot(self, state: Any) -> None:
            state.dataloader.seconds += time.perf_counter() - self.began
            self.began = time.perf_counter()
            super().snapshot(state)

    Resumed(
        model=None,
        data=None,
        opt=settings,
        dist=ingredients.Distributed(),
        output=folder,
        num_steps=num_steps,
        tokens_per_step=step_tokens,
        checkpoint_freq=every,
        checkpoint_dir=folder,
    ).execute()
    return {
        num: torch.load(folder / f"snapshot_{num}.pth")["dataloader"]["seconds"]
        for num in range(every, num_steps + 1, every)
    }


class Chunks:
    """Batches of stretches, in a new order every epoch, from where a snapshot stands."""

    def __init__(self, chunks: torch.Tensor, batch: int) -> None:
        self.chunks, self.batch, self.number, self.seconds = chunks, batch, 0, 0.0

    def __iter__(self) -> Any:
        """Yield batches without end."""
        per_epoch = len(self.chunks) // self.batch
        while True:
            epoch, turn = divmod(self.number, per_epoch)
            order = torch.randperm(len(self.chunks), generator=torch.Generator().manual_seed(epoch))
            self.number += 1
            chosen = order[turn * self.batch : (turn + 1) * self.batch]
            yield {"input_ids": self.chunks[chosen]}

    def state_dict(self) -> dict[str, float]:
        """Return how many batches were given, and the seconds that training has taken."""
        return {"number": self.number, "seconds": self.seconds}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Go on from there."""
        self.number, self.seconds = int(state["number"]), float(state["seconds"])


def load_lens(model: Any, path: Path) -> Any:
    """Return the lens of a snapshot."""
    from tuned_lens import TunedLens

    lens = TunedLens.from_model(model)
    lens.load_state_dict(torch.load(path)["lens"])
    return lens

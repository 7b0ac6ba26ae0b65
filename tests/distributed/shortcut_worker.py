"""What the two processes of a test do: fit the same shortcuts together, whole and interrupted."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel

from deepenough.errors import UserError
from deepenough.shortcut.modeling import Shortcuts
from deepenough.shortcut.statistics import LayerStatistics


def tokenizer(texts: list[str], **_: Any) -> dict[str, list[list[int]]]:
    """Characters as ids."""
    ids = [[ord(letter) for letter in text] for text in texts]
    return {"input_ids": ids, "special_tokens_mask": [[0] * len(row) for row in ids]}


def fit(folder: Path | None = None, **options: Any) -> Shortcuts:
    """The fit that one process and two must agree on."""
    torch.manual_seed(0)
    model = GPT2LMHeadModel(
        GPT2Config(vocab_size=128, n_embd=16, n_layer=3, n_head=2, n_positions=64)
    ).eval()
    texts = [f"Text {number}: " + "depth " * (number % 7) for number in range(97)]
    options |= {"affine": True, "batch_tokens": 150}
    return Shortcuts.fit(model, tokenizer, texts, resume=folder, **options)


class Stopped(Exception):
    """Stands for a kill of both processes."""


def stop_after(num: int) -> None:
    """From now on, this process stops when it has run so many batches."""
    update = LayerStatistics.update
    ran = 0

    def counted(self: LayerStatistics, states: Any) -> None:
        nonlocal ran
        ran += 1
        if ran > num:
            LayerStatistics.update = update  # type: ignore[method-assign]
            raise Stopped
        update(self, states)

    LayerStatistics.update = counted  # type: ignore[method-assign]


def main() -> None:
    folder = Path(sys.argv[1])
    rank = int(os.environ["RANK"])
    fit().save_pretrained(folder / f"memory-{rank}")
    # One process alone has no room for its sums.
    fit(memory=1e-6 if rank else None).save_pretrained(folder / f"files-{rank}")
    stop_after(3)
    try:
        fit(folder / "fit", save_every=0.0)
    except Stopped:
        torch.distributed.barrier()
    shortcuts = fit(folder / "fit", save_every=0.0)
    shortcuts.save_pretrained(folder / f"resumed-{rank}")
    said = ""
    try:
        fit(folder / "fit", seed=5)
    except UserError as error:
        said = str(error)
    answer = {"processes": shortcuts.meta["fit"]["processes"], "said": said}
    (folder / f"answer-{rank}.json").write_text(json.dumps(answer))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()

"""A fit that ends itself by a signal when half of it is done: started by a test with a folder."""

import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel

from deepenough.shortcut.modeling import Shortcuts


def tokenizer(texts: list[str], **_: Any) -> dict[str, list[list[int]]]:
    """Characters as ids."""
    ids = [[ord(letter) for letter in text] for text in texts]
    return {"input_ids": ids, "special_tokens_mask": [[0] * len(row) for row in ids]}


def fit(folder: Path, progress: Any = None) -> Shortcuts:
    torch.manual_seed(0)
    model = GPT2LMHeadModel(
        GPT2Config(vocab_size=128, n_embd=16, n_layer=3, n_head=2, n_positions=32)
    ).eval()
    texts = [f"This is text {number} of sixty." for number in range(60)]
    return Shortcuts.fit(
        model,
        tokenizer,
        texts,
        resume=folder,
        batch_tokens=100,
        save_every=0,
        progress=progress,
    )


def kill_half_way(done: int, total: int) -> None:
    if done > total // 2:
        os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    fit(Path(sys.argv[1]), kill_half_way)

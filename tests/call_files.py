"""Which files of the project run in one public call: `python tests/call_files.py`.

Prints, for a fit of shortcuts, a speculative generation and a PAR search, how many files of
`src/deepenough` execute a line (core included, `__init__` excluded, imports done before). A reader
of that call must open these files; `test_call_files.py` keeps their number small.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from pydoc_data.topics import topics
from types import FrameType
from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import deepenough as de
from deepenough.cli import main

PACKAGE = Path(de.__file__).parent


def files_run(call: Callable[[], Any]) -> set[str]:
    """Return the project files, relative to the package, whose functions run during `call`."""
    found: set[str] = set()

    def watch(frame: FrameType, event: str, argument: object) -> None:
        name = frame.f_code.co_filename
        # Code of a module's own level runs at its import, not in the call.
        if event == "call" and name.startswith(str(PACKAGE)) and frame.f_code.co_name != "<module>":
            found.add(str(Path(name).relative_to(PACKAGE)))

    call()  # imports and caches are not counted
    sys.setprofile(watch)
    try:
        call()
    finally:
        sys.setprofile(None)
    return {name for name in found if not name.endswith("__init__.py")}


def small_llama() -> LlamaForCausalLM:
    """Return a Llama of three layers with random weights."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "vocab_size": 64}
    return LlamaForCausalLM(LlamaConfig(num_attention_heads=4, **sizes)).eval()


def words_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer of the words `w3` to `w63`."""
    words = {"[PAD]": 0, "[BOS]": 1, "[EOS]": 2} | {f"w{n}": n for n in range(3, 64)}
    tokenizer = Tokenizer(WordLevel(words, unk_token="[PAD]"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="[PAD]")


def calls(folder: Path) -> dict[str, Callable[[], Any]]:
    """Return the public calls that are watched, by name."""
    model, tokenizer = small_llama(), words_tokenizer()
    rows = torch.randint(3, 64, (40, 24))
    texts = [" ".join(f"w{number}" for number in row) for row in rows.tolist()]
    prompt = rows[:1, :6]
    corpus = folder / "text.txt"
    lines = (line for name in sorted(topics) for line in topics[name].split("\n"))
    corpus.write_text("".join(f"{line}\n" for line in islice(lines, 700)), encoding="utf-8")
    runs = iter(range(100))

    def search() -> None:
        out = folder / str(next(runs))  # with a cache of its own: the text is prepared every time
        words = f"par search --data {corpus} --out {out} --cache {out}-cache --steps 4 --warmup 1"
        words += " --vocab_size 400 --batch_size 4 --length 8 --num_blocks 2 --d_model 16"
        words += " --num_heads 2 --d_ff 32 --mem_len 8 --cost flops"
        assert main(words.split()) == 0

    return {
        "Shortcuts.fit": lambda: de.Shortcuts.fit(model, tokenizer, texts),
        "speculate(model).generate()": lambda: de.speculate(model).generate(
            prompt, max_new_tokens=8, do_sample=False
        ),
        "par search": search,
    }


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        for call_name, call in calls(Path(temporary)).items():
            files = sorted(files_run(call))
            print(f"{call_name}: {len(files)} files: {', '.join(files)}")

"""A tiny language model on disk, which reads any text byte by byte."""

import asyncio
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from deepenough.explorer import language_model
from deepenough.explorer.language_model import LanguageModel
from deepenough.shortcut.modeling import Shortcuts

TEXTS = ["The capital of France is Paris.", "A dog runs on the beach and barks at the sea."] * 4


@pytest.fixture(scope="module", autouse=True)
def loops_are_closed() -> Iterator[None]:
    """Close the event loops that Gradio makes for its locks and leaves behind."""
    made: list[asyncio.AbstractEventLoop] = []
    new_event_loop = asyncio.new_event_loop

    def remember() -> asyncio.AbstractEventLoop:
        made.append(new_event_loop())
        return made[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(asyncio, "new_event_loop", remember)
        yield
    for loop in made:
        if not loop.is_running():
            loop.close()


@pytest.fixture(scope="session")
def free_port() -> Callable[[], int]:
    """Ports that the system picks: two test processes that look for one at once find two."""

    def find() -> int:
        with socket.create_server(("127.0.0.1", 0)) as server:
            return int(server.getsockname()[1])

    return find


@pytest.fixture(scope="session")
def tiny_writer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("writer")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {piece: number for number, piece in enumerate(["<end>", *alphabet])}
    pieces = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    pieces.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    pieces.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=pieces, eos_token="<end>")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(vocabulary),
        hidden_size=32,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=48,
        max_position_embeddings=512,
        initializer_range=0.3,
        bos_token_id=None,
        eos_token_id=None,  # what it writes has no end
        pad_token_id=0,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def writer(tiny_writer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LanguageModel:
    """The model with shortcuts, as it is when the fit is over."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    made = LanguageModel(str(tiny_writer))
    made.shortcuts.found = Shortcuts.fit(made.model, made.tokenizer, TEXTS, targets="last")
    return made


@pytest.fixture
def fits(monkeypatch: pytest.MonkeyPatch, text_file: Path) -> list[list[str]]:
    """Fits run in this process, on little text; the list has the words of each."""
    from deepenough.__main__ import main

    ran: list[list[str]] = []
    text = ("--data", str(text_file), "--lines", "8", "--targets", "last", "--ridge", "0.01")
    monkeypatch.setattr(language_model, "FIT", (*text, "--train.steps", "2"))

    class Process:
        pid, returncode = 0, 0

        def __init__(self, command: list[str], **_: Any) -> None:
            ran.append(command[3:])

        def communicate(self) -> tuple[None, str]:
            self.returncode = main(ran[-1])
            return None, "" if self.returncode == 0 else "first line\nthe reason."

        def poll(self) -> int:
            return self.returncode

    parts = SimpleNamespace(Popen=Process, PIPE=None, DEVNULL=None)
    monkeypatch.setattr(language_model, "subprocess", parts)
    monkeypatch.setattr(language_model, "os", SimpleNamespace())
    return ran

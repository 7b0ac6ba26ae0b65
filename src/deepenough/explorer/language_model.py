"""One causal language model behind the tabs Write and Lens, and the shortcuts between its layers.

Shortcuts are fitted by `deepenough shortcut fit` in a process of its own, into the cache: first
maps in closed form, then tuned ones. Nothing waits for them but early exit and the lenses that
need them.
"""

from __future__ import annotations

import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from operator import eq
from typing import Any

import torch
from torch import Tensor

from deepenough.artifacts import cache_folder, key_of
from deepenough.data.tokenizer import check_text
from deepenough.devices import find_device
from deepenough.errors import UserError
from deepenough.hf.adapter import adapt
from deepenough.hf.loading import load, saved_kind
from deepenough.registry import find_method
from deepenough.runs import read_config

#: What the shortcuts of the cache are fitted with; another choice is another folder.
FIT = ("--data", "python", "--lines", "1000", "--targets", "last", "--ridge", "0.01")
#: Seconds between two looks at what has been written: often enough to see tokens come one by one.
PAUSE = 0.06


class ModelShortcuts:
    """Shortcuts of a model: given, or in the cache, or fitted into it while people are served."""

    def __init__(self, name: str, fingerprint: str, given: Any = None) -> None:
        self.name, self.found = name, given
        self.folder = cache_folder() / "explorer" / key_of(fingerprint, *FIT)
        self.problem = "" if given is None or given.tuned else "These shortcuts have no tuned maps."
        """Why what is missing will not come."""
        self._process: subprocess.Popen[str] | None = None
        self._began, self._ends = 0.0, False

    def start(self) -> None:
        """Read what the cache has, and begin to fit what is missing."""
        self._began = time.monotonic()
        if self.found is None and not self._read():
            threading.Thread(target=self._fit, daemon=True).start()

    def stop(self) -> None:
        """End the fit; the next start goes on with it."""
        self._ends = True
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()
            self._process.wait()

    @property
    def status(self) -> tuple[str, bool]:
        """What is still being made, in a sentence, and whether nothing more will come."""
        if self.problem or (self.found and self.found.tuned):
            return self.problem, True
        what = "Tuned maps" if self.found else "Shortcuts between the layers"
        seconds = time.monotonic() - self._began
        return f"{what} are being fitted, at the first start only: {seconds:.0f} s so far.", False

    def _read(self) -> bool:
        """Read what is fitted so far; return whether nothing is missing."""
        if (self.folder / "shortcuts" / "shortcuts.json").is_file():
            kind = find_method("shortcut").load("modeling", "Shortcuts")
            self.found = kind.from_pretrained(self.folder / "shortcuts")
        return bool(self.found and self.found.tuned)

    def _fit(self) -> None:
        for tuned in ("true",) if self.found else ("false", "true"):
            words = ["shortcut", "fit", self.name, *FIT, "--out", str(self.folder), "--resume"]
            words += ["--device", str(find_device()), "--tuned", tuned]
            command = [sys.executable, "-m", "deepenough", *words]
            pipes: Any = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
            self._process = process = subprocess.Popen(command, **pipes)
            if hasattr(os, "setpriority"):  # whoever is waiting for an answer goes first
                os.setpriority(os.PRIO_PROCESS, process.pid, 10)
            said = process.communicate()[1].strip() or "it was stopped."
            if self._ends:
                return
            if process.returncode:
                self.problem = f"Shortcuts could not be fitted: {said.splitlines()[-1]}"
                return
            self._read()


@dataclass
class Writing:
    """What has been written so far, token by token."""

    tokens: list[int] = field(default_factory=list)
    depths: list[int] = field(default_factory=list)
    """Layers run for each token, as far as they are known."""
    drafted: list[bool] = field(default_factory=list)
    """Whether each token was drafted, as far as it is known."""
    seconds: float = 0.0
    """From the first token to the last."""
    ended: bool = False

    @property
    def rate(self) -> float | None:
        """Tokens a second behind the first, None before there are two."""
        return (len(self.tokens) - 1) / self.seconds if self.seconds > 0 else None


class Cancelled(Exception):
    """Ends a generation nobody waits for any more."""


class TokenStream:
    """A streamer of transformers: puts tokens, and what they took, into a queue."""

    def __init__(self) -> None:
        self.events: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.cancelled = threading.Event()
        self._is_prompt = True

    def put(self, value: Tensor) -> None:
        """Take the prompt, then one token after the other."""
        if self.cancelled.is_set():
            raise Cancelled
        if not self._is_prompt:
            self.events.put((int(value.flatten()[-1]), time.perf_counter()))
        self._is_prompt = False

    def account(self, rows: Sequence[Any]) -> None:
        """Take how deep the tokens of a pass went, and which of them had been drafted."""
        self.events.put((list(rows[0].depths), list(rows[0].from_draft)))

    def end(self) -> None:
        """Do nothing: whoever generates says when it ends."""


class LanguageModel:
    """A causal language model, to be written with in three ways and looked into.

    One request at a time: a model has one cache. All of them compute in one thread of the model's
    own. A thread for each would leave what it has freed with the allocator, which keeps memory for
    every thread apart, and OpenMP would start its threads anew.
    """

    def __init__(self, name: str, is_run: bool = False) -> None:
        """Load a model, or that of a run of `shortcut fit` together with its shortcuts."""
        fitted: dict[str, Any] = read_config(name)["model"] if is_run else {"name": name}
        known = ("name", "kind", "dtype", "revision")
        self.name = str(fitted["name"])
        self.model, self.tokenizer = load(**{key: fitted[key] for key in known if key in fitted})
        if saved_kind(self.model.config) != "causal":
            raise UserError(
                f"{self.name} does not write text: give a causal language model, as smollm2 is, or "
                "a run of ponder, lazy or par."
            )
        decoding, shortcut = find_method("decode"), find_method("shortcut")
        self._early_exit = decoding.load("api", "early_exit")
        self._look, self._maps = (
            shortcut.load("lens", "lens"),
            shortcut.load("modeling", "Shortcuts"),
        )
        self.fast = decoding.load("api", "speculate")(self.model)
        self.adapter = adapt(self.model)
        self.num_layers = self.adapter.num_layers
        given = self._maps.from_pretrained(f"{name}/shortcuts") if is_run else None
        self.shortcuts = ModelShortcuts(self.name, self.adapter.identity()["fingerprint"], given)
        self._exiting: tuple[Any, Any] = None, None
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="model")
        self._streaming: TokenStream | None = None

    def close(self) -> None:
        """End what is being written and fitted, as nobody waits for it any more."""
        if self._streaming is not None:
            self._streaming.cancelled.set()
        self.shortcuts.stop()

    def encode(self, prompt: str, new_tokens: int, limit: int) -> list[int]:
        """Return the ids of a prompt, at most `limit`, with room for the new tokens."""
        if not check_text(prompt).strip():
            raise UserError("The prompt is empty: give a few words to go on from.")
        ids: list[int] = self.tokenizer(prompt, verbose=False)["input_ids"]
        most = min(limit, (self.adapter.max_length or limit + new_tokens) - new_tokens)
        if len(ids) > most:
            raise UserError(f"The prompt has {len(ids)} tokens: shorten it to at most {most}.")
        return ids

    def writer(self, way: str, threshold: float) -> Any:
        """Return what generates in a way: plain, lossless, or exit from a confidence on."""
        if way != "exit":
            return self.model if way == "plain" else self.fast
        maps = self.shortcuts.found
        if maps is None:
            raise UserError(self.shortcuts.status[0])
        wanted = threshold, maps  # which may have been tuned in the meantime
        if self._exiting[0] != wanted:
            self._exiting = None, None  # an engine is large: the one before goes first
            kept = None  # maps between all layers fill the caches of those that are skipped
            if maps.targets != "all":
                kept = "deferred" if self.fast.decoding_engine.takes_groups else "copy"
            made = self._early_exit(self.model, maps, threshold, kv_propagation=kept)
            self._exiting = wanted, made
        return self._exiting[1]

    def stream(self, writer: Any, ids: Sequence[int], new_tokens: int) -> Iterator[Writing]:
        """Yield what a model writes, some times a second; closed, it stops at the next token."""
        stream, writing = TokenStream(), Writing()
        self._streaming = stream
        prompt = torch.tensor([list(ids)], device=self.model.device)
        options = {"attention_mask": torch.ones_like(prompt), "do_sample": False}
        options["pad_token_id"] = self.tokenizer.pad_token_id or self.tokenizer.eos_token_id

        def generate() -> None:
            problem = None
            try:
                writer.generate(prompt, max_new_tokens=new_tokens, streamer=stream, **options)
            except Cancelled:
                pass
            except BaseException as error:
                problem = error
            stream.events.put(problem)

        done = self._thread.submit(generate)
        first = shown = 0.0
        try:
            while not writing.ended:
                match stream.events.get():
                    case BaseException() as problem:
                        raise problem
                    case None:
                        writing.ended = True
                    case (int(token), float(now)):
                        first = first or now
                        writing.tokens.append(token)
                        writing.seconds = now - first
                    case (depths, drafted):
                        writing.depths, writing.drafted = depths, drafted
                now = time.perf_counter()
                if writing.ended or (stream.events.empty() and now - shown > PAUSE):
                    shown = now
                    yield replace(writing, tokens=list(writing.tokens))
        finally:
            stream.cancelled.set()
            done.result()

    def agreement(self, ids: Sequence[int], tokens: Sequence[int], threshold: float) -> float:
        """Return the share of `tokens`, written after `ids`, that early exit writes there too."""
        read = torch.tensor([[*ids, *tokens[:-1]]], device=self.model.device)
        writer = self.writer("exit", threshold)

        @torch.no_grad()
        def choose() -> list[int]:
            logits = writer(read).logits
            return list(logits[0, len(ids) - 1 :].argmax(-1).tolist())

        return sum(map(eq, self._thread.submit(choose).result(), tokens)) / len(tokens)

    def lens(self, prompt: str, mode: str, limit: int) -> dict[str, Any]:
        """Return what every layer predicts at every token of a prompt, by id, linear or tuned."""
        self.encode(prompt, 1, limit)
        maps = self.shortcuts.found
        if mode == "id":
            maps = self._maps(self.num_layers, self.adapter.width, {}, targets="last")
        if maps is None or (mode == "tuned" and not maps.tuned):
            raise UserError(f"{self.shortcuts.status[0]} Choose another map meanwhile.")
        how = maps.mode if mode == "linear" else mode
        look = partial(self._look, self.adapter, self.tokenizer, maps, prompt, how)
        return dict(self._thread.submit(look).result().values)

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
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from deepenough.artifacts import cache_folder, key_of
from deepenough.data.tokenizer import check_text
from deepenough.errors import UserError
from deepenough.hf.adapter import adapt
from deepenough.hf.loading import load, saved_kind
from deepenough.registry import find_method
from deepenough.runs import read_config

#: What the shortcuts of the cache are fitted with; another choice is another folder.
FIT = ("--data", "python", "--lines", "1000", "--targets", "last", "--ridge", "0.01")
#: Seconds between two looks at what has been written: often enough to see tokens come one by one.
PAUSE = 0.06


class BackgroundShortcuts:
    """Shortcuts of a model, from the cache or fitted into it while the explorer is at work."""

    def __init__(self, name: str, fingerprint: str) -> None:
        self.name = name
        self.folder = cache_folder() / "explorer" / key_of(fingerprint, *FIT)
        self.found: Any = None
        self.problem = ""
        """Why there will be none, or no tuned ones."""
        self._process: subprocess.Popen[str] | None = None
        self._began = time.monotonic()
        self._ended = threading.Event()
        if not self._read():
            threading.Thread(target=self._fit, daemon=True).start()

    def _read(self) -> bool:
        """Read what is fitted so far; return whether nothing is missing."""
        if (self.folder / "shortcuts" / "shortcuts.json").is_file():
            cls = find_method("shortcut").load("modeling", "Shortcuts")
            self.found = cls.from_pretrained(self.folder / "shortcuts")
        return bool(self.found and self.found.tuned)

    def _fit(self) -> None:
        for kind in ("false", "true") if self.found is None else ("true",):
            words = ["shortcut", "fit", self.name, *FIT, "--out", str(self.folder), "--resume"]
            command = [sys.executable, "-m", "deepenough", *words, "--tuned", kind]
            self._process = process = subprocess.Popen(
                command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
            )
            if hasattr(os, "setpriority"):  # whoever is waiting for an answer goes first
                os.setpriority(os.PRIO_PROCESS, process.pid, 10)
            _, said = process.communicate()
            if self._ended.is_set():
                return
            if process.returncode:
                reason = (said.strip().splitlines() or ["it was stopped"])[-1]
                self.problem = f"Shortcuts could not be fitted: {reason}"
                return
            self._read()

    @property
    def status(self) -> str:
        """What is still being made, in a sentence; empty once all is there."""
        if self.problem or (self.found and self.found.tuned):
            return self.problem
        what = "Tuned maps" if self.found else "Shortcuts between the layers"
        seconds = time.monotonic() - self._began
        return (
            f"{what} are being fitted in the background, at the first start only: {seconds:.0f} s "
            "so far."
        )

    def stop(self) -> None:
        """End the fit; the next start goes on with it."""
        self._ended.set()
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()
            self._process.wait()


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
    """A causal language model, written with in three ways and looked into; one request at a time.

    Attributes:
        name: What it was loaded by.
        num_layers: How deep it is.
    """

    def __init__(self, name: str, run: str = "") -> None:
        """Load a model, or that of a run of `shortcut fit` together with its shortcuts."""
        options: dict[str, Any] = {"name": name}
        if run:
            fitted = read_config(run)["model"]
            options = {key: fitted[key] for key in ("name", "kind", "dtype", "revision")}
        self.name = str(options["name"])
        self.model, self.tokenizer = load(**options)
        if saved_kind(self.model.config) != "causal":
            raise UserError(
                f"{self.name} does not write text: give a causal language model, as smollm2 is, or "
                "a run of ponder, lazy or par."
            )
        decoding, shortcut = find_method("decode"), find_method("shortcut")
        self._make_policy = decoding.load("early_exit", "make_policy")
        self._choose_exits = decoding.load("exit_scoring", "choose_exits")
        self._early_exit = decoding.load("api", "early_exit")
        self._look = shortcut.load("lens", "lens")
        self._maps = shortcut.load("modeling", "Shortcuts")
        self.fast = decoding.load("api", "speculate")(self.model)
        self.adapter = adapt(self.model)
        self.num_layers, self.limit = self.adapter.num_layers, self.adapter.max_length
        self._exiting: Any = None
        self._exit_layers: dict[float, list[int]] = {}
        self._given = self._maps.from_pretrained(f"{run}/shortcuts") if run else None
        self.background: BackgroundShortcuts | None = None

    @property
    def shortcuts(self) -> Any:
        """The shortcuts there are by now, or None."""
        found = None if self.background is None else self.background.found
        return self._given or found

    @property
    def status(self) -> str:
        """What is still being made, in a sentence; empty once all is there."""
        return "" if self.background is None else self.background.status

    def start(self) -> None:
        """Find the shortcuts, or begin to fit them."""
        if self._given is None:
            fingerprint = self.adapter.identity()["fingerprint"]
            self.background = BackgroundShortcuts(self.name, fingerprint)

    def stop(self) -> None:
        """End what is done in the background."""
        if self.background is not None:
            self.background.stop()

    def encode(self, prompt: str, is_chat: bool, new_tokens: int, limit: int) -> Tensor:
        """Return the ids of a prompt `[1, T]`, at most `limit`, with room for the new tokens."""
        if not check_text(prompt).strip():
            raise UserError("The prompt is empty: give a few words to go on from.")
        if is_chat:
            message = [{"role": "user", "content": prompt}]
            text = self.tokenizer.apply_chat_template(
                message, tokenize=False, add_generation_prompt=True
            )
            ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        else:
            ids = self.tokenizer(prompt, verbose=False)["input_ids"]
        most = limit if self.limit is None else min(limit, self.limit - new_tokens)
        if len(ids) > most:
            raise UserError(f"The prompt has {len(ids)} tokens: shorten it to at most {most}.")
        return torch.tensor([ids], device=self.model.device)

    def exiting(self, threshold: float) -> Any:
        """Return the model with early exits at a threshold, where exits are checked best."""
        if self.shortcuts is None:
            raise UserError(self.status or "There are no shortcuts: early exit needs them.")
        if self._exiting is None:
            self._exiting = self._with_exits(threshold)
        rule = self._exiting.exit_rule
        rule.policy = self._make_policy("gap", threshold)
        if threshold not in self._exit_layers:
            engine = self._exiting.decoding_engine
            self._exit_layers[threshold] = self._choose_exits(engine, rule)
        rule.layers = self._exit_layers[threshold]
        return self._exiting

    def _with_exits(self, threshold: float) -> Any:
        maps = self.shortcuts
        ways = (None,) if maps.targets == "all" else ("deferred", "copy")
        for way in ways[:-1]:
            try:
                return self._early_exit(self.model, maps, threshold, kv_propagation=way)
            except UserError:  # its layers take one token of a sequence at a time
                continue
        return self._early_exit(self.model, maps, threshold, kv_propagation=ways[-1])

    def stream(self, writer: Any, ids: Tensor, new_tokens: int) -> Iterator[Writing]:
        """Yield what a model writes, some times a second; closed, it stops at the next token."""
        stream, writing = TokenStream(), Writing()
        options: dict[str, Any] = {"attention_mask": torch.ones_like(ids), "do_sample": False}
        if self.model.generation_config.pad_token_id is None:
            options["pad_token_id"] = self.tokenizer.eos_token_id

        def generate() -> None:
            problem = None
            try:
                writer.generate(ids, max_new_tokens=new_tokens, streamer=stream, **options)
            except Cancelled:
                pass
            except BaseException as error:
                problem = error
            stream.events.put(problem)

        thread = threading.Thread(target=generate, daemon=True)
        thread.start()
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
            thread.join()

    @torch.no_grad()
    def agreement(self, ids: Tensor, tokens: Sequence[int], threshold: float) -> float:
        """Return how many tokens early exit would write as the full model has, each after its text.

        That is the share of `tokens`, written after `ids`, that it finds likeliest there.
        """
        whole = torch.cat([ids, torch.tensor([list(tokens)], device=ids.device)], dim=1)
        logits = self.exiting(threshold)(whole[:, :-1]).logits
        chosen = logits[0, ids.shape[1] - 1 :].argmax(-1)
        return float((chosen == whole[0, ids.shape[1] :]).double().mean())

    def lens(self, prompt: str, mode: str, limit: int) -> dict[str, Any]:
        """Return what every layer predicts at every token of a prompt, ten tokens deep."""
        self.encode(prompt, False, 1, limit)
        maps = self.shortcuts
        if mode == "id":
            maps = self._maps(self.num_layers, self.adapter.width, {}, targets="last")
        if maps is None or (mode == "tuned" and not maps.tuned):
            raise UserError(
                f"{self.status or 'These shortcuts have no such maps.'} Choose id meanwhile."
            )
        how = maps.mode if mode == "linear" else mode
        values: dict[str, Any] = self._look(
            self.adapter, self.tokenizer, maps, prompt, how, 10
        ).values
        return values

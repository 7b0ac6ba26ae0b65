"""`deepenough demo`: every method in small, on a machine with nothing, into one report.

Needs no data and no network: the text is the prose inside Python, the real model is the one that a
package carries. Each step is a command that anyone can type; it is printed before it runs.
"""

from __future__ import annotations

import shlex
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from deepenough.cli.legacy import find_command, run_command
from deepenough.cli.parse import parse
from deepenough.errors import UserError

PROMPT = "The capital of France is Paris, and the capital of Germany is"


@dataclass
class DemoSettings:
    """Demo"""

    folder: str = "runs/demo"
    """Where everything is written; what an earlier demo wrote there is replaced."""

    model: str = "smollm2"
    """Model whose layers are looked at: a name, a folder, or a name on the hub."""

    scale: float = 1.0
    """How much of the training and measuring is done; less is quicker and shows less."""


def main(argv: list[str]) -> int:
    settings = parse(
        "demo",
        DemoSettings,
        argv,
        description="Every method in small, in a few minutes, without data or network, into one\n"
        "report: shortcuts and lossless speed on a real model, a search for blocks, pondering\n"
        "on parity, a lazy transformer on programs.",
        example="deepenough demo --folder runs/demo",
    )
    if not 0 < settings.scale <= 10:
        raise UserError(f"scale must be above 0 and at most 10: got {settings.scale}.")
    began = time.perf_counter()
    steps = list(demo_steps(settings))
    for number, (what, words) in enumerate(steps, start=1):
        started = time.perf_counter()
        line = shlex.join(["deepenough", *words])
        print(f"\n[{number}/{len(steps)}] {what}\n$ {line}", file=sys.stderr, flush=True)
        _run(words)
        if number == len(steps):  # whose answer, where the report is, is to stand last
            break
        seconds, so_far = time.perf_counter() - started, time.perf_counter() - began
        print(f"  {seconds:.0f} s ({so_far:.0f} s so far)", file=sys.stderr, flush=True)
    return 0


def demo_steps(settings: DemoSettings) -> list[tuple[str, list[str]]]:
    """What is done, and the command that does it; the last one prints the report's path."""

    def at(name: str) -> str:
        return shlex.quote(str(Path(settings.folder) / name))

    def some(number: int, least: int = 1) -> int:
        return max(least, round(number * settings.scale))

    shortcut, par, parity, programs = map(at, ("shortcut", "par", "parity", "programs"))
    writing, reading, executing = map(at, ("writing", "reading", "executing"))
    steps = {
        "Shortcuts: how early does a real model know its answer?":
            f"shortcut fit {shlex.quote(settings.model)} --lines {some(240, 8)} --ridge 0.01 "
            f"--folder {shortcut} --overwrite",
        "what each of its layers knows, on text it was not fitted on":
            f"shortcut eval {shortcut} --lines {some(60, 4)}",
        "the same token by token":
            f"shortcut lens {shlex.quote(PROMPT)} --run {shortcut}",
        "Exit: its own generate(), the same text faster, and text that leaves early":
            f"compare {shortcut} --limit 2 --new_tokens {some(16, 4)} --exit [0.6,0.3] --rounds 6 "
            f"--out {writing}",
        "PAR: which blocks does a language model need?":
            "search --vocab_size 2000 --batch_size 16 --length 64 --num_blocks 6 --d_model 96 "
            "--num_heads 4 --d_ff 384 --mem_len 64 --alpha_lr 10 --choose_after 0.5 --budget 0.9 "
            f"--retrain scratch --steps {some(400, 4)} --lr 0.004 --valid_every {some(200, 4)} "
            f"--warmup {some(40)} --log_every 5 --folder {par} --overwrite",
        "the model it led to, with more and less memory":
            f"compare {par} --limit {some(16, 2)} --rounds 6 --out {reading}",
        "Ponder: a network that thinks longer about harder inputs":
            "ponder parity --size 8 --train_nonzero 5 --max_passes 8 --eval_size 500 "
            f"--steps {some(1200, 4)} --warmup {some(100)} --valid_every {some(600, 2)} "
            f"--folder {parity} --overwrite",
        "Lazy: a transformer that executes programs and updates only what still changes":
            "lazy train --task programs --length 2 --reverse --d_model 64 --num_heads 4 "
            "--d_ff 256 --encoder_steps 4 --decoder_steps 2 "
            f"--steps {some(1600, 4)} --lr 0.005 --warmup {some(100)} "
            f"--valid_every {some(400, 4)} "
            f"--eval_size {some(200, 16)} --folder {programs} --overwrite",
        "which programs it executes":
            f"lazy eval {programs}",
        "how far the states of one of them still move":
            f"lazy plot {programs} --sentence 1 --epsilon 0.15",
        "programs with fewer steps, and with tokens at rest":
            f"compare {programs} --limit {some(48, 8)} --rounds 6 --out {executing}",
        "Report: all of it on one page":
            f"report {writing} {shortcut} {reading} {par} {parity} {executing} {programs} "
            f"--title 'deepenough: a demonstration' --out {at('report.html')}",
    }  # fmt: skip
    return [(what, shlex.split(line)) for what, line in steps.items()]


def _run(words: list[str]) -> None:
    """One command in this process, since loading torch anew for each would take a minute."""
    where = f"The demo stopped at deepenough {shlex.join(words)}"
    try:
        code = run_command(*find_command(words))
    except UserError as error:
        raise UserError(f"{error} {where}.") from error
    if code:
        raise UserError(f"{where}; see above why.")

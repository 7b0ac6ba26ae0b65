"""`deepenough demo`: a real model profiled, every other method beside it, into one page.

Needs no data and no network: the text is the prose inside Python, the real model is the one that a
package carries. Every other method is trained in small, and shown on its trained model that ships
where deepenough-models is installed. Each step is a command that anyone can type; it is printed
before it runs.
"""

import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from deepenough.artifacts import FinishedParts, write_text
from deepenough.config import Command, DeviceConfig, bounded, provenance
from deepenough.errors import UserError
from deepenough.runs import SHIPPED, package_folder

#: Reviews for the classifier that ships, from plain ones to such as leave one in doubt.
REVIEWS = (
    "A wonderful film.",
    "Boring, and far too long.",
    "The jokes are old, but the actors are so good that I laughed at every one of them.",
    "It is not without its charms, though they are few and far between.",
    "I wish that I could say I was disappointed.",
)


@dataclass
class DemoConfig(DeviceConfig):
    """Settings of `deepenough demo`."""

    out: str = "runs/demo"
    """Folder for everything; what an earlier demo wrote there is replaced."""

    model: str = "smollm2"
    """Model whose layers are studied: a name, a folder, or a name on the hub."""

    scale: float = bounded(1.0, gt=0, le=10)
    """Share of the training and measuring that is done; less is quicker and shows less."""


def run_demo(config: DemoConfig) -> None:
    """Run every step, printing its command and the time; then what was found, and the page."""
    from deepenough.cli import run
    from deepenough.report.page import read_report

    began = time.perf_counter()
    shipped = [name for name in SHIPPED if ships(name)]
    steps = demo_steps(config, shipped)

    def make(line: str, words: list[str]) -> dict[str, Any]:
        try:
            # In this process: loading torch anew for each step would take a minute.
            code = run(words)
        except UserError as error:
            raise UserError(f"{error} The demo stopped at {line}.") from error
        if code:
            raise UserError(f"The demo stopped at {line}; see above why.")
        return {}

    with FinishedParts(Path(config.out), "demo", config, shipped, provenance()) as parts:
        if "ponder-sst2" in shipped:
            write_text(Path(config.out) / "reviews.txt", "\n".join(REVIEWS) + "\n")
        for number, (what, words) in enumerate(steps, start=1):
            line = shlex.join(["deepenough", *words])
            print(f"\n[{number}/{len(steps)}] {what}\n$ {line}", file=sys.stderr, flush=True)
            # Unless an interrupted demo has done it.
            parts.get(str(number), partial(make, line, words))
            print(f"  {time.perf_counter() - began:.0f} s so far", file=sys.stderr, flush=True)
    words = steps[-1][1]
    runs, page = words[1 : words.index("--title")], words[-1]
    print("\nWhat it found:")
    for entry in read_report(runs).entries:
        for finding in entry.section.findings:
            print(f"- {entry.title}: {finding}")
    print(f"\npage: {page}")


def ships(name: str) -> bool:
    """Return whether the trained model of this name is installed."""
    package = package_folder("deepenough_models")
    return package is not None and (package / name).is_dir()


def demo_steps(config: DemoConfig, shipped: Sequence[str] = ()) -> list[tuple[str, list[str]]]:
    """Return what is done, and the words of the command that does it.

    Args:
        config: Where to, with which model, and how much of it.
        shipped: Names of the trained models that are installed, which are shown too.
    """

    def at(name: str) -> str:
        return shlex.quote(str(Path(config.out) / name))

    def some(number: int, least: int = 1) -> int:
        return max(least, round(number * config.scale))

    def trained(name: str, steps: dict[str, str]) -> dict[str, str]:
        return steps if name in shipped else {}

    profile, par, parity, programs = map(at, ("profile", "par", "parity", "programs"))
    language, execution = map(at, ("language", "execution"))
    steps = {
        "A real model: how early does it know, and what is that worth here?":
            f"profile {shlex.quote(config.model)} --data python --lines {some(200, 10)} "
            f"--eval_lines {some(30, 10)} --prompts 2 --new_tokens {some(16, 4)} --rounds 6 "
            f"--overwrite --out {profile}",
        "PAR: which blocks does a language model need?":
            "par search --data python --vocab_size 2000 --batch_size 16 --length 64 "
            "--num_blocks 6 --d_model 96 --num_heads 4 --d_ff 384 --mem_len 64 --alpha_lr 10 "
            f"--choose_after 0.5 --budget 0.9 --retrain scratch --steps {some(400, 4)} --lr 0.004 "
            f"--valid_every {some(200, 4)} --warmup {some(40)} --log_every 5 --out {par} "
            "--overwrite",
        "the model it led to, with more and less memory":
            f"compare {par} --limit {some(16, 2)} --rounds 6 --out {language}",
        **trained("par-wikitext2", {
            "the PAR model that ships, trained longer and on WikiText-2: what it writes":
                "par generate par-wikitext2 --prompt 'the city was' --tokens 40 --temperature 0.7",
        }),
        "Ponder: a network that decides itself how long it computes":
            "ponder parity --size 8 --train_nonzero 5 --max_passes 8 --eval_size 500 "
            f"--steps {some(1200, 4)} --warmup {some(100)} --valid_every {some(600, 2)} "
            f"--out {parity} --overwrite",
        **trained("ponder-sst2", {
            "the classifier that ships: how many of its 6 layers a review takes":
                f"ponder predict ponder-sst2 {at('reviews.txt')}",
        }),
        "Lazy: a transformer that executes programs and updates only what still changes":
            "lazy train --task programs --length 2 --reverse --d_model 64 --num_heads 4 "
            "--d_ff 256 --encoder_steps 4 --decoder_steps 2 "
            f"--steps {some(1600, 4)} --lr 0.005 --warmup {some(100)} "
            f"--valid_every {some(400, 4)} "
            f"--eval_size {some(200, 16)} --out {programs} --overwrite",
        "which programs it executes":
            f"lazy eval {programs}",
        "how far the states of one of them still move":
            f"lazy plot {programs} --sentence 1 --epsilon 0.15",
        "programs with fewer steps, and with tokens that stop being updated":
            f"compare {programs} --limit {some(48, 8)} --rounds 6 --out {execution}",
        **trained("lazy-multi30k", {
            "the translator that ships: which words of a sentence still change":
                "lazy plot lazy-multi30k --source 'A dog runs on the beach.'",
        }),
        "Report: all of it on one page":
            f"report {profile} {language} {par} {parity} {execution} {programs} "
            f"{' '.join(shipped)} --title 'deepenough: a demonstration' "
            f"--out {at('report.html')}",
    }  # fmt: skip
    return [(what, shlex.split(line)) for what, line in steps.items()]


DEMO = Command(
    name="demo",
    help="profile a real model and show every method, in a few minutes, without data or network",
    config=DemoConfig,
    run=run_demo,
    description="A real model profiled and every other method in small, in a few minutes,\n"
    "without data or network, into one page: how early layers know, lossless speed, a search\n"
    "for blocks, pondering on parity, a lazy transformer on programs. Where the package\n"
    "deepenough-models is installed, its trained models are shown beside them.",
    goes_on=True,
    example="deepenough demo --out runs/demo",
)

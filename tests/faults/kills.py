"""SIGKILL at random moments: every long command ends as if it had never been killed.

Each command runs once undisturbed. Then it is started again and again in fresh folders, killed at a
moment drawn uniformly over its duration (loading, saving and finishing included), sometimes several
times in a row, and repeated, with `--resume` where it has that option, until it is through. What it
leaves must be what the undisturbed one left: the same records, none lost and none twice, the same
weights to the last bit, the same JSON but for what a clock decides.

Importing torch takes seconds, so most commands run in children that are forked from one process
which has imported everything; one in ten is a process of its own.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import os
import random
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tests.faults.cases import CASES, difference, make_inputs, result_of

FRESH_EVERY = 10
"""One run of so many is a process of its own."""
IN_A_ROW = (1, 1, 1, 2, 3)
"""How many kills come before a command is left alone, drawn from these."""
SAMPLE = {"ponder parity": (4, 13), "compare": (2, 9), "decode calibrate": (20,)}
"""For the short test: at which of its writes a command is killed."""


@dataclass
class Outcome:
    """What became of one command."""

    kills: int = 0
    resumed: int = 0
    """Results that were the undisturbed ones in the end."""
    failures: list[str] = field(default_factory=list)


class Harness:
    """Starts commands in folders of their own, kills them, and compares what they leave."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.inputs = folder, folder / "inputs"
        self.inputs.mkdir(parents=True)
        make_inputs(self.inputs)
        self.expected: dict[str, dict[str, Any]] = {}
        self.seconds: dict[tuple[str, bool], float] = {}
        self._number = 0

    def words(self, name: str, again: bool = False) -> list[str]:
        """Return the words of a case, those of its repetition if `again`."""
        words = shlex.split(CASES[name].words.format(inputs=self.inputs))
        return [*words, "--resume"] if again and CASES[name].resume else words

    def place(self, name: str) -> Path:
        """Return a new folder with what a case needs."""
        self._number += 1
        folder = self.folder / f"{self._number:05d}"
        folder.mkdir()
        for needed in CASES[name].needs:
            shutil.copytree(self.whole(needed), folder, dirs_exist_ok=True)
        return folder

    def whole(self, name: str) -> Path:
        """Return the folder of a case that ran undisturbed."""
        folder = self.folder / name.replace(" ", "-").replace(",", "")
        if name not in self.expected:
            place, began = self.place(name), time.perf_counter()
            code = wait(start(self.words(name), place))
            if code:
                raise SystemExit(f"{name} fails undisturbed:\n{tail(place)}")
            self.seconds[name, False] = time.perf_counter() - began
            place.rename(folder)
            self.expected[name] = result_of(folder, CASES[name].timed)
        return folder

    def duration(self, name: str, fresh: bool) -> float:
        """Return the seconds that a case takes undisturbed."""
        if (name, fresh) not in self.seconds:
            place, began = self.place(name), time.perf_counter()
            assert wait(start(self.words(name), place, fresh)) == 0, tail(place)
            self.seconds[name, fresh] = time.perf_counter() - began
            shutil.rmtree(place)
        return self.seconds[name, fresh]

    def difference(self, name: str, place: Path) -> str | None:
        """Return what differs from the undisturbed result."""
        return difference(self.expected[name], result_of(place, CASES[name].timed))

    def is_done(self, name: str, place: Path) -> bool:
        """Return whether a command without `--resume` was killed when all its work was done.

        To repeat it would be another measurement, recorded beside the first.
        """
        return not CASES[name].resume and self.difference(name, place) is None

    def kill_at_random(self, name: str, draw: random.Random, fresh: bool) -> tuple[int, str | None]:
        """Kill a case some times, let it finish; return the kills and what went wrong."""
        self.whole(name)
        place, again, kills = self.place(name), False, 0
        moments = []
        for _ in range(draw.choice(IN_A_ROW)):
            moment = draw.uniform(0.0, self.duration(name, fresh))
            code = wait(start(self.words(name, again), place, fresh), moment)
            if code != -signal.SIGKILL:  # it was faster
                if code:
                    return kills, f"exit code {code} after {moments}\n{tail(place)}"
                break
            kills, again = kills + 1, True
            moments.append(round(moment, 3))
            if self.is_done(name, place):
                break
        return kills, self.finish(name, place, again, f"after kills at {moments} s", fresh)

    def kill_at_write(self, name: str, number: int) -> tuple[bool, str | None]:
        """Kill a case before one of its writes, let it finish; return what went wrong."""
        self.whole(name)
        place = self.place(name)
        code = wait(start(self.words(name), place, dies_at=number))
        if code != -signal.SIGKILL:
            return False, f"it makes fewer than {number} writes"
        return True, self.finish(name, place, True, f"after a kill at write {number}")

    def finish(
        self, name: str, place: Path, again: bool, when: str, fresh: bool = False
    ) -> str | None:
        again = again and not self.is_done(name, place)
        code = wait(start(self.words(name, again), place, fresh)) if again else 0
        if code:
            return f"{when}: exit code {code} in {place}\n{tail(place)}"
        if found := self.difference(name, place):
            return f"{when}: {found} in {place}"
        shutil.rmtree(place)
        return None


# -- processes -------------------------------------------------------------------------------------


def start(words: list[str], place: Path, fresh: bool = False, dies_at: int | None = None) -> int:
    """Start a command in a folder and return its process, the leader of a group of its own."""
    log = os.open(place / "said.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    try:
        if fresh:
            command = [sys.executable, "-m", "deepenough", *words]
            options: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log}
            process = subprocess.Popen(command, cwd=place, start_new_session=True, **options)
            process.returncode = 0  # waited for by its number, as the others are
            return process.pid
        child = os.fork()
        if child:
            return child
        code = 70
        try:
            os.setsid()
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            os.dup2(log, 1)
            os.dup2(log, 2)
            os.chdir(place)
            code = _run(words, dies_at)
        except BaseException:
            import traceback

            traceback.print_exc()
        finally:
            with contextlib.suppress(Exception):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(code)
    finally:
        os.close(log)


def _run(words: list[str], dies_at: int | None) -> int:
    """Run a command in this process, which kills itself at a write if that is asked for."""
    from deepenough import runs
    from deepenough.cli import main
    from deepenough.shortcut import fitting

    begin = fitting.FitCheckpoint.__init__

    def often(self: Any, *arguments: Any) -> None:
        begin(self, *arguments)
        self.save_every = 0.0  # a fit of seconds would else have no checkpoint but its last

    fitting.FitCheckpoint.__init__ = often  # type: ignore[method-assign]
    written = 0

    def counted(write: Any) -> Any:
        def write_or_die(*arguments: Any, **options: Any) -> Any:
            nonlocal written
            written += 1
            if written == dies_at:
                os.kill(os.getpid(), signal.SIGKILL)
            return write(*arguments, **options)

        return write_or_die

    os.replace = counted(os.replace)
    runs.Metrics.append = counted(runs.Metrics.append)  # type: ignore[method-assign]
    return main(words)


def wait(process: int, kill_after: float | None = None) -> int:
    """Wait for a process, killing its group after so many seconds; return its exit code.

    That of a process that a signal ended is minus the signal.
    """
    began = time.perf_counter()
    while True:
        done, status = os.waitpid(process, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        spent = time.perf_counter() - began
        if kill_after is not None and spent >= kill_after:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process, signal.SIGKILL)
            kill_after = None
        if spent > 600:
            os.killpg(process, signal.SIGKILL)
        time.sleep(0.002)


def tail(place: Path) -> str:
    """Return the end of what the commands in a folder said."""
    return (place / "said.log").read_text(errors="replace")[-2500:]


def import_everything() -> None:
    """Load what commands load, so that forked ones need not."""
    import torch

    torch.set_num_threads(1)
    from deepenough.cli import commands

    commands()
    for name in (
        *("compare.frontier", "compare.protocol", "decoding.api", "decoding.calibration"),
        *("decoding.evaluation", "decoding.training", "lazy.evaluation", "lazy.programs"),
        *("lazy.training", "par.evaluation", "par.training", "ponder.evaluation"),
        *("ponder.parity", "ponder.training", "report.drawing", "report.page"),
        *("shortcut.evaluation", "shortcut.submodules", "shortcut.training"),
    ):
        __import__(f"deepenough.{name}")
    import jsonargparse  # noqa: F401
    import matplotlib.pyplot  # noqa: F401
    from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: F401

    gc.collect()
    gc.freeze()


# -- the command -----------------------------------------------------------------------------------


def main(argv: list[str]) -> int:
    """Run `python -m tests.faults kills` and return its exit code, 1 if anything was lost."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults kills", description=__doc__)
    parser.add_argument("--only", action="append", choices=CASES, help="this command alone")
    parser.add_argument("--kills", type=int, default=320, help="at least so many in all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--writes", action="store_true", help="kill before every write instead of at random"
    )
    parser.add_argument("--sample", action="store_true", help="a few kills at fixed points")
    parser.add_argument("--no-record", action="store_true", help="do not write the result file")
    arguments = parser.parse_args(argv)
    os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "MPLBACKEND": "Agg"}
    os.environ |= {"TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
    folder = Path(tempfile.mkdtemp(prefix="deepenough-kills-"))
    os.environ["XDG_CACHE_HOME"] = str(folder / "cache")
    import_everything()
    began = time.perf_counter()
    outcomes: dict[str, Outcome] = {}
    harness = Harness(folder)
    if arguments.sample or arguments.writes:
        points = (
            SAMPLE if arguments.sample else dict.fromkeys(arguments.only or CASES, range(1, 999))
        )
        for name, numbers in points.items():
            outcome = outcomes[name] = Outcome()
            for number in numbers:
                killed, wrong = harness.kill_at_write(name, number)
                if not killed and not arguments.sample:
                    break
                outcome.kills += killed
                count(outcome, wrong, name)
    else:
        names = arguments.only or list(CASES)
        draw = random.Random(arguments.seed)
        turn = 0
        while sum(outcome.kills for outcome in outcomes.values()) < arguments.kills:
            name = names[turn % len(names)]
            outcome = outcomes.setdefault(name, Outcome())
            fresh = draw.randrange(FRESH_EVERY) == 0 and name != "demo"
            kills, wrong = harness.kill_at_random(name, draw, fresh)
            outcome.kills += kills
            if kills or wrong:  # else it was faster than the kill
                count(outcome, wrong, name)
            turn += 1
            print(f"{sum(o.kills for o in outcomes.values())} kills: {name}", flush=True)
    failures = sum(len(outcome.failures) for outcome in outcomes.values())
    for name, outcome in outcomes.items():
        print(f"{name:26}{outcome.kills:4} kills, {outcome.resumed:4} ends alike", end="")
        print(f", {len(outcome.failures)} NOT" if outcome.failures else "")
    if not (arguments.sample or arguments.writes or arguments.only or arguments.no_record):
        record(outcomes, arguments.kills, arguments.seed, time.perf_counter() - began)
    if not failures:
        shutil.rmtree(folder)
    return 1 if failures else 0


def count(outcome: Outcome, wrong: str | None, name: str) -> None:
    """Add one end to an outcome, and say what was wrong with it."""
    if wrong is None:
        outcome.resumed += 1
    else:
        outcome.failures.append(wrong)
        print(f"FAILED: {name} {wrong}", flush=True)


def record(outcomes: dict[str, Outcome], kills: int, seed: int, seconds: float) -> None:
    """Write the counts as a result file of the benchmarks."""
    import datetime

    from benchmarks.runner import FOLDER, RESULTS, commit, machine, versions, write_result

    rows = {name: asdict(outcome) for name, outcome in outcomes.items()}
    figures: dict[str, Any] = {}
    for kind in ("kills", "resumed"):
        figures[kind] = sum(row[kind] for row in rows.values())
    figures["lost"] = sum(len(row["failures"]) for row in rows.values())
    figures["commands"] = len(rows)
    for name, row in rows.items():
        key = name.replace(", ", "_").replace(" --", "_").replace(" ", "_")
        figures[f"by_command.{key}.kills"] = row["kills"]
        figures[f"by_command.{key}.lost"] = len(row["failures"])
    content = {
        "name": "faults_kills",
        "claim": "Every long command that is killed at any moment and repeated ends as if it had "
        "never been killed.",
        "command": f"python -m tests.faults kills --kills {kills} --seed {seed}",
        "seeds": [seed],
        "date": datetime.date.today().isoformat(),
        "seconds": round(seconds, 1),
        "commit": commit(),
        "machine": machine(),
        "versions": versions(),
        "settings": {"fresh_every": FRESH_EVERY, "in_a_row": list(IN_A_ROW)},
        "figures": {name: {"value": value} for name, value in figures.items()},
    }
    print(f"written: {write_result(content, FOLDER / RESULTS)}")

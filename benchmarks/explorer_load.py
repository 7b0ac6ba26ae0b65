"""Twenty people at once use the explorer: every request is answered or refused with a reason.

Each client asks again and again on loopback, as a browser does: it joins the queue and reads the
events of its session until its request is over. One in four asks for a lens; one in ten of the
texts is left in the middle, as by a closed tab. A request is lost if its events end without an
answer and without a reason. A refused client waits a second before it asks again.

They ask for a minute before it counts, and the maps that the first start fits are waited for before
that, so that memory that still grows is memory that is kept.

The first token of an admitted request is timed apart, with one request in work and one waiting:
from the message that it is being processed to the first tokens.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
import uuid
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import psutil

from benchmarks.figures import Unavailable

QUICK = False
SEEDS = [0]
PROMPTS = ("Once upon a time", "The capital of France is", "A list of words:", "Lily went to the")
SECONDS_TO_START = 300


@dataclass
class Outcome:
    """How one request went, and when: seconds from its beginning."""

    kind: str = "lost"
    """answered, refused, left, or lost."""
    reason: str = ""
    started: float | None = None
    """When it was admitted to the model."""
    first: float | None = None
    """When the first tokens came."""
    ended: float = 0.0
    positions: list[int] = field(default_factory=list)
    """The places in the queue that it was told."""


class Client:
    """One session of the page, by the requests that its script makes."""

    def __init__(self, address: str) -> None:
        self.address = address.rstrip("/")
        with urllib.request.urlopen(f"{self.address}/config", timeout=60) as answer:
            config = json.load(answer)
        self.prefix = self.address + config["api_prefix"]
        self.events = {each.get("api_name"): each["id"] for each in config["dependencies"]}
        self.session = uuid.uuid4().hex

    def join(self, event: str, data: list[Any]) -> None:
        """Ask for something; `urllib.error.HTTPError` if that is refused at once."""
        body = {"data": data, "fn_index": self.events[event], "session_hash": self.session}
        request = urllib.request.Request(
            f"{self.prefix}/queue/join",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        urllib.request.urlopen(request, timeout=60).close()

    def messages(self) -> Iterator[dict[str, Any]]:
        """Yield what the server tells of the session; closed, the connection is given up."""
        address = f"{self.prefix}/queue/data?session_hash={self.session}"
        with urllib.request.urlopen(address, timeout=300) as stream:
            for line in stream:
                if line.startswith(b"data:"):
                    yield json.loads(line[5:])

    def ask(self, event: str, data: list[Any], leaves_after: int | None = None) -> Outcome:
        """Make a request and wait for its end, or leave it after so many messages with tokens."""
        began, outcome, num_tokens = time.perf_counter(), Outcome(), 0

        def passed() -> float:
            return time.perf_counter() - began

        try:
            self.join(event, data)
            for message in self.messages():
                kind = message["msg"]
                if kind == "estimation" and message.get("rank") is not None:
                    outcome.positions.append(message["rank"])
                elif kind == "process_starts":
                    outcome.started = passed()
                elif kind == "process_generating" and "data-figure" in json.dumps(message):
                    outcome.first = outcome.first or passed()
                    num_tokens += 1
                    if num_tokens == leaves_after:
                        outcome.kind = "left"
                        break
                elif kind == "process_completed":
                    outcome.kind = "answered" if message["success"] else "refused"
                    outcome.reason = str((message.get("output") or {}).get("error") or "")
                    if outcome.kind == "refused" and not outcome.reason:
                        outcome.kind = "lost"
                    break
                elif kind == "unexpected_error":
                    outcome.reason = str(message.get("message"))
                    break
        except urllib.error.HTTPError as error:
            said = json.loads(error.read() or b"{}").get("detail")
            outcome.kind, outcome.reason = "refused" if said else "lost", str(said)
        except OSError as error:
            outcome.reason = f"{type(error).__name__}: {error}"
        outcome.ended = passed()
        return outcome


class Server:
    """`deepenough explore` in a process of its own, on a free port."""

    def __init__(self, model: str, *options: str) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.address = f"http://127.0.0.1:{port}"
        words = ["-m", "deepenough", "explore", model, "--port", str(port), *options]
        self.process = subprocess.Popen([sys.executable, *words], stdout=subprocess.DEVNULL)

    def __enter__(self) -> Server:
        """Wait until the page is there."""
        until = time.monotonic() + SECONDS_TO_START
        while time.monotonic() < until and self.process.poll() is None:
            try:
                urllib.request.urlopen(self.address, timeout=5).close()
                return self
            except OSError:
                time.sleep(0.2)
        raise Unavailable("the explorer did not start: pip install 'deepenough[explorer]'")

    def __exit__(self, *_: object) -> None:
        """End the process."""
        self.process.terminate()
        self.process.wait()

    @property
    def memory(self) -> float:
        """Resident megabytes of the server alone, without a fit beside it."""
        return psutil.Process(self.process.pid).memory_info().rss / 1e6


def fitted(server: Server) -> None:
    """Wait until the server has all maps between layers, which it reads when they are fitted."""
    until = time.monotonic() + SECONDS_TO_START
    asked = "lens", [PROMPTS[0], "tuned", "probability"]
    while Client(server.address).ask(*asked).kind != "answered":
        if time.monotonic() > until:
            raise Unavailable(f"the explorer had no tuned maps after {SECONDS_TO_START} s")
        time.sleep(2.0)


def wanted(client: int, number: int, new_tokens: int) -> tuple[str, list[Any], int | None]:
    """Return the event, its data, and after how many messages it is left, of one request."""
    prompt = PROMPTS[(client + number) % len(PROMPTS)]
    if (client + number) % 4 == 3:
        return "lens", [prompt, "id", "probability"], None
    leaves = 2 if (3 * client + number) % 10 == 9 else None
    return "write", [prompt, new_tokens, 0.6, "depth"], leaves


def load(server: Server, clients: int, seconds: float, new_tokens: int) -> tuple[Any, list[float]]:
    """Let clients ask for so many seconds; return all outcomes and the memory over time."""
    outcomes: list[Outcome] = []
    over = time.monotonic() + seconds

    def ask_on(number: int) -> None:
        asked = 0
        while time.monotonic() < over:
            # A session of its own, as that of a tab that is opened anew.
            found = Client(server.address).ask(*wanted(number, asked, new_tokens))
            outcomes.append(found)
            asked += 1
            if found.kind == "refused":
                time.sleep(1.0)

    threads = [threading.Thread(target=ask_on, args=(number,)) for number in range(clients)]
    for thread in threads:
        thread.start()
    memory = []
    while any(thread.is_alive() for thread in threads):
        memory.append(server.memory)
        time.sleep(0.5)
    return outcomes, memory


def first_tokens(server: Server, rounds: int, new_tokens: int) -> list[float]:
    """Return the seconds to the first tokens of admitted requests, each behind one other."""
    found: list[float] = []
    for _ in range(rounds):
        asked = ("write", [PROMPTS[0], new_tokens, 0.6, "depth"])
        others = threading.Thread(target=Client(server.address).ask, args=asked)
        others.start()
        time.sleep(0.2)
        outcome = Client(server.address).ask("write", [PROMPTS[1], new_tokens, 0.6, "depth"])
        others.join()
        if outcome.first is not None and outcome.started is not None:
            found.append(outcome.first - outcome.started)
    return found


def measure(
    model: str = "smollm2",
    clients: int = 20,
    seconds: float = 60.0,
    waiting: int = 8,
    new_tokens: int = 32,
    rounds: int = 5,
) -> dict[str, Any]:
    """Start the explorer, let clients ask, and count what became of their requests."""
    with Server(model, "--waiting", str(waiting)) as server:
        fitted(server)
        # Warm: the first requests load what is needed once.
        for _ in range(2):
            Client(server.address).ask("write", [PROMPTS[0], new_tokens, 0.6, "depth"])
        firsts = first_tokens(server, rounds, new_tokens)
        # Until every buffer has the size that twenty clients want: what grows after that is kept.
        load(server, clients, seconds, new_tokens)
        outcomes, memory = load(server, clients, seconds, new_tokens)
        last = Client(server.address).ask("write", [PROMPTS[0], new_tokens, 0.6, "depth"])
    kinds = Counter(outcome.kind for outcome in outcomes)
    reasons = sorted({outcome.reason for outcome in outcomes if outcome.kind == "refused"})
    quarters = [memory[place * len(memory) // 4 :][: len(memory) // 4 or 1] for place in range(4)]
    first, *_, last_quarter = map(median, quarters)
    return {
        "requests": {kind: kinds[kind] for kind in ("answered", "refused", "left", "lost")},
        "first_token_seconds": {"median": median(firsts), "most": max(firsts)},
        "memory_mb": {
            "first_quarter": first,
            "last_quarter": last_quarter,
            "growth": last_quarter - first,
        },
        "after": {"answered": int(last.kind == "answered")},
        "settings": {
            "model": model,
            "clients": clients,
            "seconds": seconds,
            "waiting": waiting,
            "new_tokens": new_tokens,
            "cores": os.cpu_count(),
            "reasons": reasons,
        },
    }

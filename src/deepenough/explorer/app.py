"""The page: its tabs, who may see it, and what it gives away, which is nothing but answers.

One request at a time has the models: the others wait in Gradio's queue, which tells their place,
and refuses those that find it full. A request that is cancelled, or whose tab is closed, ends at
its next token. Of Gradio's addresses only those that the page needs are served: no file can be
read or sent, and the browser is told to ask no other host for anything.
"""

from __future__ import annotations

import functools
import html
import inspect
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"  # read when Gradio is loaded

import gradio as gr
from starlette.middleware import Middleware

from deepenough import __version__
from deepenough.errors import UserError
from deepenough.explorer import lens, trials, write
from deepenough.explorer.commands import LOCAL, ExploreConfig
from deepenough.explorer.language_model import LanguageModel
from deepenough.explorer.rendering import head, note_html
from deepenough.registry import METHODS
from deepenough.runs import SHIPPED, RunFolder, find_run, read_config

DEFAULT_MODEL = "smollm2"
#: All requests for a model share this queue: a processor has no room for two of them.
BUSY: dict[str, Any] = {"concurrency_limit": 1, "concurrency_id": "model"}
#: Sessions whose last answers are remembered.
SESSIONS = 64
CLOSED = ("/upload", "/file", "/proxy", "/stream", "/component_server", "/deep_link", "/monitoring")
POLICY = (
    "default-src 'self'; script-src 'self' 'unsafe-inline' 'unsafe-eval'; "
    "style-src 'self' 'unsafe-inline'; img-src 'self' data: blob:; font-src 'self' data:; "
    "connect-src 'self'; object-src 'none'; base-uri 'self'"
)
TOGGLE = "() => { document.body.classList.toggle('dark'); }"


def serve(config: ExploreConfig) -> None:
    """Load what is asked for, open the page and serve it until it is stopped."""
    model, runs = open_models(config.models)
    page = build(model, runs, config.max_tokens, config.waiting)
    model.start()
    login = None if config.password is None else (config.user, config.password)
    try:
        launch(page, config.host, config.port, login, config.browser)
        page.block_thread()
    finally:
        page.close(verbose=False)
        model.stop()


def open_models(given: list[str]) -> tuple[LanguageModel, dict[str, list[str]]]:
    """Return the language model, and the runs of other methods by the method's name."""
    runs: dict[str, list[str]] = {tab.method: [] for tab in trials.TABS}
    models: list[tuple[str, str]] = []
    for name in given:
        method = method_of(name)
        if method in runs:
            runs[method].append(name)
        else:
            models.append((name, name if method == "shortcut" else ""))
    if len(models) > 1:
        named = " and ".join(name for name, _ in models)
        raise UserError(f"The explorer writes with one language model: give one of {named}.")
    name, run = models[0] if models else (DEFAULT_MODEL, "")
    print(f"loading {name}", file=sys.stderr, flush=True)
    return LanguageModel(name, run), runs


def method_of(name: str) -> str:
    """Return the method whose run a folder is, or a name that ships; nothing for a model."""
    folder = find_run(name) if name in SHIPPED else Path(name)
    if folder.name == "model" and RunFolder(folder.parent).is_run():
        folder = folder.parent
    if not folder.is_dir() or not RunFolder(folder).config.is_file():
        return ""
    found = str(read_config(str(folder)).get("method"))
    if found not in {method.name for method in METHODS}:
        raise UserError(
            f"{name} is a run of {found}, which the explorer does not show: leave it out."
        )
    return found


def build(
    model: LanguageModel, runs: dict[str, list[str]], max_tokens: int = 256, waiting: int = 16
) -> gr.Blocks:
    """Return the page, ready to be launched."""
    opened = [(tab, *trials.open_runs(tab, runs.get(tab.method, []))) for tab in trials.TABS]
    with gr.Blocks(title="deepenough explorer", analytics_enabled=False, fill_width=True) as page:
        with gr.Row():
            name = html.escape(Path(model.name).name)
            about = f"<p>{name}: {model.num_layers} layers, and as many run as it takes.</p>"
            gr.HTML(f"<h1>deepenough explorer</h1>{about}", min_width=200)
            theme = gr.Button("Light or dark", size="sm", scale=0, min_width=140, elem_id="theme")
            theme.click(None, js=TOGGLE, queue=False)
        status = gr.HTML(elem_id="status")
        timer = gr.Timer(2.0)
        with gr.Tab("Write"):
            write.build(model, max_tokens, guarded, BUSY)
        with gr.Tab("Lens"):
            lens.build(model, max_tokens, guarded, BUSY)
        for tab, found, problem in opened:
            with gr.Tab(tab.title):
                trials.build(tab, found, problem, guarded, BUSY, 8 * max_tokens)

        def tell() -> tuple[str, Any]:
            said, background = model.status, model.background
            is_over = not said or background is None or bool(background.problem)
            return note_html(said) if said else "", gr.Timer(active=not is_over)

        quietly: dict[str, Any] = {"queue": False, "show_progress": "hidden"}
        timer.tick(tell, None, [status, timer], api_visibility="private", **quietly)
    page.queue(max_size=waiting, api_open=False)
    return page


def launch(
    page: gr.Blocks,
    host: str = LOCAL[0],
    port: int | None = None,
    login: tuple[str, str] | None = None,
    browser: bool = False,
) -> str:
    """Serve the page in the background and return its address."""
    plain = ("system-ui", "sans-serif")
    _, address, _ = page.launch(
        server_name=host,
        server_port=port,
        auth=login,
        inbrowser=browser,
        prevent_thread_lock=True,
        share=False,
        quiet=True,
        ssr_mode=False,
        show_error=True,
        enable_monitoring=False,
        state_session_capacity=SESSIONS,
        max_file_size=1,
        footer_links=[],
        app_kwargs={"middleware": [Middleware(OnlyThePage)]},
        theme=gr.themes.Default(font=plain, font_mono=("ui-monospace", "monospace")),
        head=head(),
    )
    print(f"deepenough {__version__}: {address} (Ctrl-C ends it)", flush=True)
    return address


class OnlyThePage:
    """Serves what the page needs; other addresses of Gradio are not there."""

    def __init__(self, app: Any) -> None:
        self.app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer 404 for what is closed, and add the policy to all other answers."""
        path = scope.get("path", "").removeprefix("/gradio_api")
        if scope["type"] == "http" and path.startswith(CLOSED):
            await send({"type": "http.response.start", "status": 404, "headers": []})
            await send({"type": "http.response.body", "body": b""})
            return

        async def add_policy(message: Any) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [
                    *message["headers"],
                    (b"content-security-policy", POLICY.encode()),
                    (b"referrer-policy", b"no-referrer"),
                    (b"x-content-type-options", b"nosniff"),
                ]
            await send(message)

        await self.app(scope, receive, add_policy)


def guarded(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function whose refusals are shown to whoever asked."""

    def refusal(error: UserError) -> gr.Error:
        return gr.Error(str(error), title="Not possible", print_exception=False)

    @functools.wraps(function)
    def once(*args: Any) -> Any:
        try:
            return function(*args)
        except UserError as error:
            raise refusal(error) from error

    @functools.wraps(function)
    def repeated(*args: Any) -> Iterator[Any]:
        try:
            yield from function(*args)
        except UserError as error:
            raise refusal(error) from error

    return repeated if inspect.isgeneratorfunction(function) else once

"""The page: its tabs, who may see it, and what it gives away, which is nothing but answers.

One request at a time has the models: the others wait in Gradio's queue, which tells their place,
and refuses those that find it full. A request that is cancelled, or whose tab is closed, ends at
its next token. Addresses of Gradio that the page does not need are closed: no file can be read or
sent, and the browser is told to ask no other host for anything.
"""

import html
import os
import sys
from pathlib import Path
from typing import Any

os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"  # read when Gradio is loaded

import gradio as gr
from starlette.middleware import Middleware
from starlette.responses import Response

from deepenough.errors import UserError
from deepenough.explorer import lens, trials, write
from deepenough.explorer.commands import USER, ExploreConfig
from deepenough.explorer.language_model import LanguageModel
from deepenough.explorer.rendering import head, note_html
from deepenough.explorer.requests import AT_ONCE
from deepenough.runs import SHIPPED, RunFolder, find_run, read_config

DEFAULT_MODEL = "smollm2"
#: Sessions whose last answers are remembered.
SESSIONS = 64
#: First words of Gradio's addresses that the page needs.
OPEN = {
    *("", "assets", "static", "svelte", "favicon.ico", "theme.css", "manifest.json", "robots.txt"),
    *("config", "info", "app_id", "startup-events", "login", "login_check", "logout", "token"),
    *("user", "run", "queue", "cancel", "reset", "heartbeat"),
}
HEADERS = {
    "content-security-policy": "default-src 'self'; object-src 'none'; base-uri 'self'; "
    "script-src 'self' 'unsafe-inline' 'unsafe-eval'; style-src 'self' 'unsafe-inline'; "
    "img-src 'self' data: blob:; font-src 'self' data:; connect-src 'self'",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}


def serve(config: ExploreConfig) -> None:
    """Load what is asked for, open the page and serve it until it is stopped."""
    model, runs = open_models(config.models)
    page = build(model, runs, config)
    try:
        model.shortcuts.start()
        print(f"deepenough explorer: {launch(page, config)} (Ctrl-C ends it)", flush=True)
        page.block_thread()
    finally:
        page.close(verbose=False)
        model.close()


def open_models(given: list[str]) -> tuple[LanguageModel, dict[str, str]]:
    """Return the language model, and the runs to be tried by their methods."""
    found: dict[str, str] = {}
    for name in given:
        method = method_of(name)
        kind = method if method in {trial.method for trial in trials.TRIALS} else "model"
        if kind in found:
            what = f"run of {kind}" if kind == method else "language model"
            raise UserError(f"{found[kind]} and {name}: give one {what}, not two.")
        found[kind] = name
    name = found.pop("model", DEFAULT_MODEL)
    print(f"loading {name}", file=sys.stderr, flush=True)
    return LanguageModel(name, is_run=method_of(name) == "shortcut"), found


def method_of(name: str) -> str:
    """Return the method whose run a folder is, or a name that ships; nothing for a model."""
    folder = find_run(name) if name in SHIPPED else Path(name)
    return str(read_config(name).get("method")) if RunFolder(folder).config.is_file() else ""


def build(model: LanguageModel, runs: dict[str, str], config: ExploreConfig) -> gr.Blocks:
    """Return the page, ready to be launched."""
    opened = {
        trial: trials.open_trial(trial, runs.get(trial.method, "")) for trial in trials.TRIALS
    }
    with gr.Blocks(title="deepenough explorer", analytics_enabled=False, fill_width=True) as page:
        with gr.Row():
            name = html.escape(Path(model.name).name)
            about = f"<p>{name}: {model.num_layers} layers, and as many run as it takes.</p>"
            with gr.Column(min_width=280):
                gr.HTML(f"<h1>deepenough explorer</h1>{about}")
            theme = gr.Button("Light or dark", size="sm", scale=0, min_width=140, elem_id="theme")
            theme.click(None, js="() => { document.body.classList.toggle('dark'); }", queue=False)
        status, timer = gr.HTML(elem_id="status"), gr.Timer(2.0)
        with gr.Tab("Write"):
            write.build(model, config.max_tokens)
        with gr.Tab("Lens"):
            lens.build(model, config.max_tokens)
        for trial, found in opened.items():
            with gr.Tab(trial.title):
                trials.build(trial, found, 8 * config.max_tokens)

        def tell() -> tuple[str, gr.Timer]:
            said, is_over = model.shortcuts.status
            return note_html(said), gr.Timer(active=not is_over)

        timer.tick(tell, None, [status, timer], **AT_ONCE)
    page.queue(max_size=config.waiting, api_open=False)
    return page


def launch(page: gr.Blocks, config: ExploreConfig) -> str:
    """Serve the page in the background and return its address."""
    fonts = {"font": ("system-ui", "sans-serif"), "font_mono": ("ui-monospace", "monospace")}
    _, address, _ = page.launch(
        server_name=config.host,
        server_port=config.port,
        auth=None if config.password is None else (USER, config.password),
        prevent_thread_lock=True,
        share=False,
        quiet=True,
        ssr_mode=False,
        enable_monitoring=False,
        state_session_capacity=SESSIONS,
        footer_links=[],
        app_kwargs={"middleware": [Middleware(OnlyThePage)]},
        theme=gr.themes.Default(**fonts),
        head=head(),
    )
    return str(address)


class OnlyThePage:
    """Serves what the page needs; other addresses of Gradio are not there."""

    def __init__(self, app: Any) -> None:
        self.app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer 404 for what is not open, and add `HEADERS` to all answers."""

        async def add_headers(message: Any) -> None:
            if message["type"] == "http.response.start":
                added = [(name.encode(), value.encode()) for name, value in HEADERS.items()]
                message["headers"] = [*message["headers"], *added]
            await send(message)

        first = str(scope.get("path", "/")).removeprefix("/gradio_api").split("/")[1:2]
        is_open = scope["type"] == "lifespan" or OPEN.issuperset(first)
        app = self.app if is_open else Response(status_code=404)
        await app(scope, receive, add_headers)

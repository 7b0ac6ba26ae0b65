"""`deepenough explore`: a language model and finished runs, to be tried in a browser."""

from __future__ import annotations

import importlib.util
import os
from dataclasses import dataclass, field

from deepenough.config import Command, PlaceConfig, bounded
from deepenough.errors import UserError

LOCAL = ("127.0.0.1", "localhost", "::1")
USER, PASSWORD = "deepenough", "DEEPENOUGH_PASSWORD"


@dataclass
class ExploreConfig(PlaceConfig):
    """Explore models in a browser."""

    models: list[str] = field(default_factory=list)
    """A causal language model (a name, a folder, a run of shortcut fit, or a name on the hub), by
    default smollm2, and runs of ponder, lazy and par, by default the trained models that ship."""

    host: str = "127.0.0.1"
    """Address to listen on; any but this machine's own needs a password."""

    port: int | None = bounded(None, ge=1, le=65535)
    """Port to listen on; by default the first that is free from 7860 on."""

    password: str | None = None
    """Password to log in with, as deepenough; by default that in $DEEPENOUGH_PASSWORD, or none."""

    waiting: int = bounded(16, ge=1)
    """Requests that may wait for the model; more are refused."""

    max_tokens: int = bounded(256, ge=8)
    """Most tokens that one request may read or write."""


def explore(config: ExploreConfig) -> None:
    """Serve the explorer until it is stopped."""
    if config.password is None:
        config.password = os.environ.get(PASSWORD) or None
    if config.host not in LOCAL and config.password is None:
        raise UserError(
            f"Anyone who reaches {config.host} could use the explorer: set a password with "
            f"--password or ${PASSWORD}, or leave out --host."
        )
    if importlib.util.find_spec("gradio") is None:
        raise UserError("The explorer needs Gradio: pip install 'deepenough[explorer]'.")
    from deepenough.explorer.app import serve

    serve(config)


EXPLORE = Command(
    name="explore",
    help="try models live in a browser: write, look into layers, classify, translate",
    config=ExploreConfig,
    run=explore,
    description="Try models live in a browser: text written plainly, losslessly and with early\n"
    "exits; what every layer predicts; a classifier pass by pass, a translator step by\n"
    "step, and a search for blocks. Needs Gradio: pip install 'deepenough[explorer]'.",
    example="deepenough explore smollm2 runs/ponder --port 7860",
    positional=("models*",),
)

"""What all requests for a model have in common: one queue, and refusals that are shown."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import gradio as gr

from deepenough.errors import UserError

#: Options of every event that needs a model: a processor has no room for two of them at once.
ONE_AT_A_TIME: dict[str, Any] = {"concurrency_limit": 1, "concurrency_id": "model"}
#: Options of events that only draw again what is known.
AT_ONCE: dict[str, Any] = {"queue": False, "show_progress": "hidden", "api_visibility": "private"}


@contextmanager
def refusals() -> Iterator[None]:
    """Show a refusal to whoever asked, without a traceback in the terminal."""
    try:
        yield
    except UserError as error:
        raise gr.Error(str(error), print_exception=False) from error

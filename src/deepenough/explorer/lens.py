"""The tab Lens: what every layer would predict at every token of a text."""

from __future__ import annotations

from typing import Any

import gradio as gr

from deepenough.explorer.language_model import LanguageModel
from deepenough.explorer.rendering import figure_html, note_html
from deepenough.registry import find_method

PROMPT = "The capital of France is Paris, and the capital of Germany is Berlin."
#: Most tokens of a text, each a column of the table.
MAX_TOKENS = 48
MODES = ("id", "linear", "tuned")
NAMES = {
    "probability": "probability",
    "entropy": "entropy",
    "rank of the next token": "target_rank",
    "KL from the last layer": "kl",
    "cross-entropy of the next token": "cross_entropy",
}


def build(model: LanguageModel, max_tokens: int, guard: Any, busy: dict[str, Any]) -> None:
    """Lay out the tab; `guard` shows refusals, `busy` are the options of its queue."""
    draw = find_method("shortcut").load("figures", "lens_grid")

    def look(prompt: str, mode: str, statistic: str) -> tuple[str, dict[str, Any]]:
        values = model.lens(prompt, _known(mode, MODES), min(max_tokens, MAX_TOKENS))
        return show(values, statistic), values

    def show(values: dict[str, Any] | None, statistic: str) -> str:
        if values is None:
            return note_html("Give a text and press Look.")
        return figure_html(draw(values, NAMES[_known(statistic, tuple(NAMES))]))

    values = gr.State(None)
    prompt = gr.Textbox(PROMPT, label="Text", lines=2, max_length=8 * MAX_TOKENS)
    with gr.Row():
        mode = gr.Radio(MODES, value="id", label="Map to the last layer", min_width=220)
        statistic = gr.Radio(list(NAMES), value="probability", label="Colour", min_width=280)
    with gr.Row():
        start = gr.Button("Look", variant="primary", elem_id="look")
        stop = gr.Button("Stop", elem_id="stop-looking")
    table = gr.HTML(elem_id="lens-table")
    asked = [prompt, mode, statistic]
    event = gr.on(
        [start.click, mode.input], guard(look), asked, [table, values], api_name="lens", **busy
    )
    stop.click(None, cancels=[event], queue=False)
    statistic.change(show, [values, statistic], table, queue=False, api_visibility="private")


def _known(given: str, choices: tuple[str, ...]) -> str:
    """Return one of the choices: whoever calls without the page may send anything."""
    return given if given in choices else choices[0]

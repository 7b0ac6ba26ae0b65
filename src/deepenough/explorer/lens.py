"""The tab Lens: what every layer would predict at every token of a text."""

from typing import Any

import gradio as gr

from deepenough.explorer.language_model import LanguageModel
from deepenough.explorer.rendering import figure_html
from deepenough.explorer.requests import AT_ONCE, ONE_AT_A_TIME, refusals
from deepenough.registry import find_method

PROMPT = "The capital of France is Paris, and the capital of Germany is Berlin."
#: Most tokens of a text, each a column of the table.
MAX_TOKENS = 48
COLOURS = {
    "probability": "probability",
    "entropy": "entropy",
    "rank of the next token": "target_rank",
    "KL to the last layer": "kl",
    "loss on the next token": "cross_entropy",
}


def build(model: LanguageModel, max_tokens: int) -> None:
    """Lay out the tab and say what its controls do."""
    draw = find_method("shortcut").load("figures", "lens_grid")

    def look(prompt: str, mode: str, colour: str) -> tuple[str, dict[str, Any]]:
        with refusals():
            values = model.lens(prompt, mode, min(max_tokens, MAX_TOKENS))
        return show(values, colour), values

    def show(values: dict[str, Any] | None, colour: str) -> str:
        return figure_html(draw(values, COLOURS[colour])) if values else ""

    known = gr.State(None)
    prompt = gr.Textbox(PROMPT, label="Text", lines=2, max_length=8 * MAX_TOKENS)
    with gr.Row():
        modes = ["id", "linear", "tuned"]
        mode = gr.Radio(modes, value="id", label="Map to the last layer", min_width=220)
        colour = gr.Radio(list(COLOURS), value="probability", label="Colour", min_width=280)
    with gr.Row():
        start = gr.Button("Look", variant="primary", elem_id="look")
        stop = gr.Button("Stop", elem_id="stop-looking")
    table = gr.HTML(elem_id="lens-table")
    asked, shown = [prompt, mode, colour], [table, known]
    event = gr.on([start.click, mode.input], look, asked, shown, api_name="lens", **ONE_AT_A_TIME)
    stop.click(None, cancels=[event], queue=False)
    colour.change(show, [known, colour], table, **AT_ONCE)

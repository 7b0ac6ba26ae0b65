"""The tabs Classify, Translate and Search: a finished run of a method, tried or shown."""

from dataclasses import dataclass, replace

import gradio as gr

from deepenough.errors import UserError
from deepenough.explorer.rendering import note_html, section_html
from deepenough.explorer.requests import ONE_AT_A_TIME, refusals
from deepenough.figure import Inspector, Section, read_run
from deepenough.registry import find_method
from deepenough.report.page import run_sections
from deepenough.runs import find_run


@dataclass(frozen=True)
class Trial:
    """A tab: its method and title, the trained model that ships, and how to train another."""

    method: str
    title: str
    shipped: str
    command: str


TRIALS = (
    Trial("ponder", "Classify", "ponder-sst2", "ponder train --data reviews.csv"),
    Trial("lazy", "Translate", "lazy-multi30k", "lazy train --config configs/lazy-multi30k.yaml"),
    Trial("par", "Search", "par-wikitext2", "par search --data mytext.txt"),
)


def open_trial(trial: Trial, run: str) -> Inspector | Section | str:
    """Return a run, or the one that ships: to be asked, to be shown, or why it is not there."""
    try:
        folder = find_run(run or trial.shipped)
    except UserError as error:
        return (
            f"{error} Or train your own with deepenough {trial.command} --out RUN, and start "
            "deepenough explore RUN."
        )
    open_inspector = find_method(trial.method).load("inspection", "open_inspector")
    if open_inspector is not None:
        inspector: Inspector = open_inspector(run or trial.shipped)
        return inspector
    sections = run_sections(read_run(folder))
    if not sections:
        raise UserError(f"{run} has recorded nothing that could be shown: give another run.")
    return replace(
        sections[0],
        findings=[finding for section in sections for finding in section.findings],
        figures=[figure for section in sections for figure in section.figures],
    )


def build(trial: Trial, opened: Inspector | Section | str, limit: int) -> None:
    """Lay out the tab and say what its controls do; `limit` is the most characters of a text."""
    if not isinstance(opened, Inspector):
        shown = note_html(opened) if isinstance(opened, str) else section_html(opened)
        gr.HTML(shown, elem_id=f"shown-{trial.method}")
        return

    def look(text: str, value: float) -> str:
        with refusals():
            if len(text) > limit:
                raise UserError(f"The text has {len(text)} characters: shorten it to {limit}.")
            return section_html(opened.look(text, value))

    text = gr.Textbox(opened.example, label="Text", max_length=limit, lines=2)
    dial = gr.Slider(
        opened.low,
        opened.high,
        opened.usual,
        step=opened.low,
        label=opened.dial,
        visible=bool(opened.dial),
    )
    with gr.Row():
        start = gr.Button(trial.title, variant="primary", elem_id=f"start-{trial.method}")
        stop = gr.Button("Stop", elem_id=f"stop-{trial.method}")
    answer = gr.HTML(elem_id=f"shown-{trial.method}")
    event = gr.on(
        [start.click, dial.release],
        look,
        [text, dial],
        answer,
        api_name=trial.title.lower(),
        **ONE_AT_A_TIME,
    )
    stop.click(None, cancels=[event], queue=False)

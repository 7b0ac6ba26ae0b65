"""The tabs Classify, Translate and Search: finished runs of a method, each tried or shown."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import gradio as gr

from deepenough.errors import UserError
from deepenough.explorer.rendering import note_html, section_html
from deepenough.figure import Inspector, distinct_names, read_run
from deepenough.registry import find_method
from deepenough.report.page import run_section
from deepenough.runs import find_run


@dataclass(frozen=True)
class TrialTab:
    """A tab of one method: its name, the trained model that ships, and how to make another."""

    method: str
    title: str
    shipped: str
    command: str


TABS = (
    TrialTab("ponder", "Classify", "ponder-sst2", "ponder train --data reviews.csv"),
    TrialTab(
        "lazy",
        "Translate",
        "lazy-multi30k",
        "lazy train --config configs/lazy-multi30k.yaml",
    ),
    TrialTab("par", "Search", "par-wikitext2", "par search --data mytext.txt"),
)


def open_runs(tab: TrialTab, runs: list[str]) -> tuple[dict[str, Any], str]:
    """Return what the tab shows by name, and why there is nothing where none is installed.

    That is an `Inspector`, or the section of a run that nothing can be asked.
    """
    problem = ""
    if not runs:
        try:
            find_run(tab.shipped)
            runs = [tab.shipped]
        except UserError as error:
            problem = (
                f"{error} Or train your own with deepenough {tab.command} --out RUN, and start "
                "deepenough explore RUN."
            )
    names = runs if len(runs) < 2 else distinct_names(runs)
    return {name: _open(tab, run) for name, run in zip(names, runs, strict=True)}, problem


def _open(tab: TrialTab, run: str) -> Any:
    open_inspector = find_method(tab.method).load("inspection", "open_inspector")
    if open_inspector is not None:
        return open_inspector(run)
    section = run_section(read_run(find_run(run)))
    if section is None:
        raise UserError(f"{run} has recorded nothing that could be shown: give another run.")
    return section


def build(
    tab: TrialTab, found: dict[str, Any], problem: str, guard: Any, busy: dict[str, Any], limit: int
) -> None:
    """Lay out the tab; `limit` is the most characters of a text."""
    if not found:
        gr.HTML(note_html(problem), elem_id=f"missing-{tab.method}")
        return
    first = next(iter(found.values()))

    def look(name: str, text: str, value: float) -> str:
        chosen = found.get(name, first)
        if not isinstance(chosen, Inspector):
            return section_html(chosen)
        if len(text) > limit:
            raise UserError(f"The text has {len(text)} characters: shorten it to {limit}.")
        if chosen.dial and not chosen.low <= value <= chosen.high:
            raise UserError(f"Give a value between {chosen.low:g} and {chosen.high:g}.")
        return section_html(chosen.look(text, value))

    def turn(name: str) -> gr.Slider:
        chosen = found[name]
        return gr.Slider(
            chosen.low,
            chosen.high,
            chosen.usual,
            step=chosen.low,
            label=chosen.dial,
            visible=bool(chosen.dial),
        )

    several = len(found) > 1
    name = gr.Dropdown(list(found), value=next(iter(found)), label="Run", visible=several)
    if not isinstance(first, Inspector):
        shown = gr.HTML(section_html(first), elem_id=f"shown-{tab.method}")
        pick = guard(lambda chosen: look(chosen, "", 0.0))
        name.change(pick, name, shown, api_visibility="private", **busy)
        return
    text = gr.Textbox(first.example, label="Text", max_length=limit, lines=2)
    dial = turn(name.value)
    with gr.Row():
        start = gr.Button(tab.title, variant="primary", elem_id=f"start-{tab.method}")
        stop = gr.Button("Stop", elem_id=f"stop-{tab.method}")
    shown = gr.HTML(elem_id=f"shown-{tab.method}")
    triggers = [start.click, dial.release]
    event = gr.on(
        triggers, guard(look), [name, text, dial], shown, api_name=tab.title.lower(), **busy
    )
    stop.click(None, cancels=[event], queue=False)
    name.change(turn, name, dial, queue=False, api_visibility="private")

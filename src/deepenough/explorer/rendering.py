"""Figures inside the explorer: the report's own scripts draw them, its style made local to them."""

import html
import json
from dataclasses import replace
from importlib import resources

from deepenough import figure as fig
from deepenough.report.page import SCRIPTS, figure_markup, page_file, thinned

#: Pixels of a cell with a text in it.
CELL_WIDTH = 74
OWN = (
    "color: var(--ink); overflow-wrap: anywhere; .panels { min-width: var(--least, 0); } "
    ".tools > * { margin: 0; }"
)


def head() -> str:
    """Return what goes into the head of the page: style and scripts, all of it inline."""
    style = page_file("page.css").replace(':root[data-theme="dark"]', ".dark &")
    glue = (resources.files("deepenough.explorer") / "explorer.js").read_text("utf-8")
    scripts = "\n".join([*map(page_file, SCRIPTS), glue])
    return (
        f"<style>.deepenough.deepenough {{ {OWN} {style.replace(':root', '&')} }}</style>"
        f"<script>(() => {{ {scripts} }})();</script>"
    )


def figure_html(figure: fig.FigureSpec) -> str:
    """Return a figure as markup that the page's script draws, without this machine's paths."""
    small = replace(thinned(figure), command="")
    heats = [panel for panel in small.panels if isinstance(panel, fig.HeatMap) and panel.details]
    width = max((CELL_WIDTH * len(panel.columns) for panel in heats), default=0)
    spelt = html.escape(json.dumps(fig.as_json(small), allow_nan=False))
    markup = figure_markup(small, f'data-figure="{spelt}" style="--least: {width}px"')
    return f'<div class="deepenough">{markup}</div>'


def section_html(section: fig.Section) -> str:
    """Return a section: its sentences, then its figures."""
    about = f"<p>{html.escape(section.about)}</p>" if section.about else ""
    said = "".join(f"<li>{html.escape(finding)}</li>" for finding in section.findings)
    figures = "".join(figure_html(figure) for figure in section.figures)
    return f'<div class="deepenough">{about}<ul class="summary">{said}</ul></div>{figures}'


def note_html(text: str) -> str:
    """Return a sentence that stands in the place of a figure."""
    return f'<div class="deepenough"><p class="caption" role="status">{html.escape(text)}</p></div>'

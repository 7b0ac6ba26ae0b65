"""The tab Write: one text plainly, losslessly and with early exits, each token shaded."""

from collections.abc import Iterator
from typing import Any

import gradio as gr

from deepenough import figure as fig
from deepenough.errors import UserError
from deepenough.explorer.language_model import LanguageModel, Writing
from deepenough.explorer.rendering import figure_html, note_html
from deepenough.explorer.requests import AT_ONCE, ONE_AT_A_TIME, refusals

PROMPT = "The capital of France is Paris, and the capital of Germany is"
WAYS = {
    "plain": ("Plain", "generate() of transformers"),
    "lossless": ("Lossless", "de.speculate(model): drafts that the model checks"),
    "exit": ("Early exit", "de.early_exit(model): sure tokens skip the last layers"),
}
DEPTH, DRAFTED = "depth", "who drafted it"


def build(model: LanguageModel, max_tokens: int) -> None:
    """Lay out the tab and say what its controls do."""
    kept = gr.State(None)
    prompt = gr.Textbox(PROMPT, label="Prompt", lines=3, max_length=8 * max_tokens)
    with gr.Row():
        usual = min(64, max_tokens)
        new_tokens = gr.Slider(8, max_tokens, usual, step=8, label="New tokens", min_width=220)
        threshold = gr.Slider(
            0.05, 1.0, 0.6, step=0.05, label="Threshold of early exit", min_width=220
        )
        shade = gr.Radio([DEPTH, DRAFTED], value=DEPTH, label="Shade tokens by", min_width=220)
    with gr.Row():
        start = gr.Button("Write", variant="primary", elem_id="write")
        stop = gr.Button("Stop", elem_id="stop-writing")
    verdict = gr.HTML(elem_id="verdict")
    with gr.Row():
        panes = {way: column(f"pane-{way}") for way in WAYS}

    def run(way: str, kept: dict[str, Any], threshold: float, shade: str) -> Iterator[str]:
        kept["written"].pop(way, None)
        yield note_html(f"{WAYS[way][0]}: reads the prompt")
        try:
            writer = model.writer(way, threshold)
            for writing in model.stream(writer, kept["ids"], kept["new_tokens"]):
                yield figure_html(pane(model, way, writing, shade))
            kept["written"][way] = writing
        except UserError as error:  # the other ways may do without what this one lacks
            yield note_html(f"{WAYS[way][0]}: {error}")

    def write_all(
        prompt: str, new_tokens: float, threshold: float, shade: str
    ) -> Iterator[dict[Any, Any]]:
        with refusals():
            ids = model.encode(prompt, int(new_tokens), max_tokens)
            known = {"ids": ids, "new_tokens": int(new_tokens), "written": {}}
            waiting = note_html("waits for its turn")
            yield dict.fromkeys(panes.values(), waiting) | {verdict: "", kept: None}
            for way in WAYS:
                for shown in run(way, known, threshold, shade):
                    yield {panes[way]: shown}
            yield {verdict: note_html(compared(model, known, threshold)), kept: known}

    def exit_again(
        known: dict[str, Any] | None, threshold: float, shade: str
    ) -> Iterator[dict[Any, Any]]:
        with refusals():
            for shown in run("exit", known, threshold, shade) if known else ():
                yield {panes["exit"]: shown, verdict: ""}
            if known:
                yield {verdict: note_html(compared(model, known, threshold)), kept: known}

    def shade_again(known: dict[str, Any] | None, shade: str) -> dict[Any, Any]:
        written = known["written"] if known else {}
        return {panes[way]: figure_html(pane(model, way, written[way], shade)) for way in written}

    asked, shown = [prompt, new_tokens, threshold, shade], [*panes.values(), verdict, kept]
    written = start.click(write_all, asked, shown, api_name="write", **ONE_AT_A_TIME)
    known = [kept, threshold, shade]
    again = threshold.release(exit_again, known, shown, api_visibility="private", **ONE_AT_A_TIME)
    stop.click(None, cancels=[written, again], queue=False)
    shade.change(shade_again, [kept, shade], [*panes.values()], **AT_ONCE)


def column(name: str) -> gr.HTML:
    """Return a place beside others, below them where a screen is narrow."""
    with gr.Column(min_width=280):
        return gr.HTML(elem_id=name)


def pane(model: LanguageModel, way: str, writing: Writing, shade: str) -> fig.FigureSpec:
    """Return what was written in one way, its tokens shaded by depth or by who drafted them."""
    tokens = [fig.readable(str(model.tokenizer.decode([token]))) for token in writing.tokens]
    depths, drafted = writing.depths, writing.drafted
    if way == "plain":  # transformers does not tell: all layers, and nothing drafted
        depths, drafted = [model.num_layers] * len(tokens), [False] * len(tokens)
    shades: list[float | None] = list(map(float, depths if shade == DEPTH else drafted))
    # Tokens of a pass that is not over are shown before it is known what they took.
    shades = [*shades, *[None] * len(tokens)][: len(tokens)]
    last, name = float(model.num_layers), "layers run"
    if shade == DRAFTED:
        last, name = 1.0, "drafted (1) or the model's own (0)"
    rate = "…" if writing.rate is None else f"{writing.rate:.1f} tokens a second"
    title, how = WAYS[way]
    caption = f"{how}. {len(tokens)} tokens, {rate}."
    return fig.FigureSpec(way, title, caption, [fig.TokenText(tokens, shades, last, name)])


def compared(model: LanguageModel, kept: dict[str, Any], threshold: float) -> str:
    """Return what the texts of one prompt show, in sentences that hold for them."""
    written: dict[str, Writing] = kept["written"]
    rates = {way: each.rate for way, each in written.items() if each.rate}
    if "plain" not in rates:
        return ""
    said, plain, speed = [], written["plain"].tokens, "times the speed of plain"
    if "lossless" in rates:
        ratio, is_same = rates["lossless"] / rates["plain"], written["lossless"].tokens == plain
        tokens = "the same tokens" if is_same else "but not all tokens are the same"
        said.append(f"Lossless: {ratio:.2f} {speed}, {tokens}.")
    if "exit" in rates:
        ratio, depths = rates["exit"] / rates["plain"], written["exit"].depths
        share = model.agreement(kept["ids"], plain, threshold)
        said.append(
            f"Early exit at {threshold:g}: {ratio:.2f} {speed}, {sum(depths) / len(depths):.1f} of "
            f"{model.num_layers} layers a token, and {share:.0%} of plain's tokens where the text "
            "before them is plain's."
        )
    return " ".join(said)

"""The tab Write: one text plainly, losslessly and with early exits, each token shaded."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import gradio as gr

from deepenough import figure as fig
from deepenough.errors import UserError
from deepenough.explorer.language_model import LanguageModel, Writing
from deepenough.explorer.rendering import figure_html, note_html

PROMPT = "The capital of France is Paris, and the capital of Germany is"
WAYS = {
    "plain": ("Plain", "generate() of transformers"),
    "lossless": ("Lossless", "de.speculate(model): drafts that the model checks"),
    "exit": ("Early exit", "de.early_exit(model): sure tokens skip the last layers"),
}
DEPTH, DRAFTED = "depth", "who drafted it"
#: What is kept of a request between two events: its prompt's ids, and what was written in each way.
Kept = dict[str, Any]


@dataclass(frozen=True)
class WriteTab:
    """What happens in the tab, without its controls."""

    model: LanguageModel
    max_tokens: int

    def write(
        self, prompt: str, is_chat: bool, new_tokens: float, threshold: float, shade: str
    ) -> Iterator[tuple[str, str, str, str, Kept | None]]:
        """Yield the three panes, a verdict and what is kept, while the text is being written."""
        ids = self._encode(prompt, is_chat, new_tokens)
        kept: Kept = {"ids": ids.tolist(), "written": {}}
        panes = dict.fromkeys(WAYS, note_html("waits for its turn"))
        yield *panes.values(), "", None
        for way in WAYS:
            panes[way] = note_html("reads the prompt")
            yield *panes.values(), "", None
            for pane in self._stream(way, ids, int(new_tokens), threshold, shade, kept):
                panes[way] = pane
                yield *panes.values(), "", None
        yield *panes.values(), self._verdict(ids, kept, threshold), kept

    def exit_again(
        self, kept: Kept | None, new_tokens: float, threshold: float, shade: str
    ) -> Iterator[tuple[str, str, Kept | None]]:
        """Yield the pane of early exit and the verdict for the same prompt at another threshold."""
        if kept is None:
            yield note_html("Write a text first."), "", None
            return
        import torch

        ids = torch.tensor(kept["ids"])
        for pane in self._stream("exit", ids, int(new_tokens), threshold, shade, kept):
            yield pane, "", kept
        yield pane, self._verdict(ids, kept, threshold), kept

    def shaded(self, kept: Kept | None, shade: str) -> list[str]:
        """Return the panes of what was written, shaded otherwise."""
        written = {} if kept is None else kept["written"]
        return [
            self._pane(way, written[way], shade) if way in written else gr.skip() for way in WAYS
        ]

    def _encode(self, prompt: str, is_chat: bool, new_tokens: float) -> Any:
        if not 1 <= new_tokens <= self.max_tokens:
            raise UserError(f"Ask for 1 to {self.max_tokens} new tokens, not {new_tokens:g}.")
        return self.model.encode(prompt, is_chat, int(new_tokens), self.max_tokens)

    def _stream(
        self, way: str, ids: Any, new_tokens: int, threshold: float, shade: str, kept: Kept
    ) -> Iterator[str]:
        model = self.model
        try:
            writers: dict[str, Callable[[], Any]] = {
                "plain": lambda: model.model,
                "lossless": lambda: model.fast,
                "exit": lambda: model.exiting(_checked(threshold)),
            }
            for writing in model.stream(writers[way](), ids, new_tokens):
                yield self._pane(way, writing, shade)
        except UserError as error:  # the other ways may do without what this one lacks
            yield note_html(f"{WAYS[way][0]}: {error}")
            return
        kept["written"][way] = writing

    def _pane(self, way: str, writing: Writing, shade: str) -> str:
        tokens = [fig.readable(self.model.tokenizer.decode([token])) for token in writing.tokens]
        # Tokens of a pass that is not over yet are shown before what they took is known.
        last, depths = self.model.num_layers, list(map(float, writing.depths))
        if way == "plain":
            depths = [float(last)] * len(tokens)
        drafted = [float(each) for each in writing.drafted]
        shades, most, name = depths, float(last), "layers run"
        if shade == DRAFTED:
            shades, most = drafted if way == "lossless" else [0.0] * len(tokens), 1.0
            name = "drafted (1) or the model's own (0)"
        shades = shades[: len(tokens)]
        known = [*shades, *[None] * (len(tokens) - len(shades))]
        panel = fig.TokenText(tokens, known, most, name)
        title, how = WAYS[way]
        rate = "…" if writing.rate is None else f"{writing.rate:.1f} tokens a second"
        caption = f"{how}. {len(tokens)} tokens, {rate}."
        return figure_html(fig.FigureSpec(way, title, caption, [panel], wide=True))

    def _verdict(self, ids: Any, kept: Kept, threshold: float) -> str:
        """Return what the three texts show, in sentences that hold for them."""
        written: dict[str, Writing] = kept["written"]
        plain = written.get("plain")
        if plain is None or not plain.rate:
            return ""
        said = []
        if (lossless := written.get("lossless")) is not None and lossless.rate:
            same = lossless.tokens == plain.tokens
            said.append(
                f"Lossless: {lossless.rate / plain.rate:.2f} times the speed of plain, "
                + (
                    "the same tokens."
                    if same
                    else "other tokens, where two are equally likely but for rounding."
                )
            )
        if (early := written.get("exit")) is not None and early.rate:
            share = self.model.agreement(ids, plain.tokens, threshold)
            layers = sum(early.depths) / max(1, len(early.depths))
            said.append(
                f"Early exit at {threshold:g}: {early.rate / plain.rate:.2f} times the speed of "
                f"plain with {layers:.1f} of {self.model.num_layers} layers a token; "
                f"{share:.0%} of plain's tokens stay the same."
            )
        return note_html(" ".join(said))


def _checked(threshold: float) -> float:
    if not 0 <= threshold <= 1:
        raise UserError(f"The threshold lies between 0 and 1: got {threshold:g}.")
    return round(threshold, 2)


def build(model: LanguageModel, max_tokens: int, guard: Any, busy: dict[str, Any]) -> None:
    """Lay out the tab; `guard` shows refusals, `busy` are the options of its queue."""
    tab = WriteTab(model, max_tokens)
    kept = gr.State(None)
    prompt = gr.Textbox(PROMPT, label="Prompt", lines=3, max_length=8 * max_tokens)
    with gr.Row():
        usual = min(64, max_tokens)
        new_tokens = gr.Slider(8, max_tokens, usual, step=8, label="New tokens", min_width=220)
        threshold = gr.Slider(
            0.05, 1.0, 0.6, step=0.05, min_width=220, label="Early exit: threshold of confidence"
        )
        shade = gr.Radio([DEPTH, DRAFTED], value=DEPTH, label="Shade tokens by", min_width=220)
        has_chat = bool(getattr(model.tokenizer, "chat_template", None))
        is_chat = gr.Checkbox(False, label="As a chat message", visible=has_chat, min_width=160)
    with gr.Row():
        start = gr.Button("Write", variant="primary", elem_id="write")
        stop = gr.Button("Stop", elem_id="stop-writing")
    verdict = gr.HTML(elem_id="verdict")
    with gr.Row():
        panes = [gr.HTML(min_width=280, elem_id=f"pane-{way}") for way in WAYS]
    options = [new_tokens, threshold, shade]
    written = start.click(
        guard(tab.write), [prompt, is_chat, *options], [*panes, verdict, kept], **busy
    )
    again = threshold.release(
        guard(tab.exit_again), [kept, *options], [panes[-1], verdict, kept], **busy
    )
    stop.click(None, cancels=[written, again], queue=False)
    shade.change(tab.shaded, [kept, shade], panes, queue=False, api_visibility="private")

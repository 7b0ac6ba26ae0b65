"""Draw the pictures that explain each method's idea: `python docs/ideas.py`.

They show made-up examples, not measurements; those are in results.md.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

IMAGES = Path(__file__).resolve().parent / "images"

# Colours of Okabe and Ito, which all readers can tell apart; white is what does not run.
INK, GREY, WHITE = "#1a1a1a", "#8a8a8a", "#ffffff"
BLUE, ORANGE, GREEN, SKY = "#0072b2", "#d55e00", "#009e73", "#cfe6f5"

plt.rcParams.update({"svg.hashsalt": "deepenough", "font.size": 11, "font.family": "DejaVu Sans"})


def box(
    ax: Axes, x: float, y: float, text: str = "", color: str = SKY, w: float = 0.8, h: float = 0.6
) -> None:
    """Draw a rounded box around its centre, dashed where nothing runs."""
    nothing = color == WHITE
    ax.add_patch(
        FancyBboxPatch(
            (x - w / 2, y - h / 2),
            w,
            h,
            boxstyle="round,pad=0,rounding_size=0.08",
            facecolor=color,
            edgecolor=GREY if nothing else INK,
            linestyle="--" if nothing else "-",
            linewidth=1,
        )
    )
    dark = color in (BLUE, ORANGE, GREEN)
    ax.text(x, y, text, ha="center", va="center", color=WHITE if dark else INK, fontsize=10)


def arrow(
    ax: Axes,
    start: tuple[float, float],
    end: tuple[float, float],
    bend: float = 0,
    color: str = INK,
) -> None:
    """Draw an arrow; a positive `bend` curves it upwards from left to right."""
    style = f"arc3,rad={-bend}"
    ax.add_patch(
        FancyArrowPatch(
            start, end, connectionstyle=style, arrowstyle="-|>", mutation_scale=12, color=color
        )
    )


def say(ax: Axes, x: float, y: float, text: str, color: str = INK, at: str = "center") -> None:
    """Write a note."""
    ax.text(x, y, text, ha=at, va="center", color=color, fontsize=10)


def shortcut(ax: Axes) -> None:
    """Draw layers whose states, taken to the last by one linear map, already have an answer."""
    guesses = ["“the”", "“a”", "“London”", "“Paris”", "“Paris”", "“Paris”"]
    for layer, guess in enumerate(guesses):
        box(ax, layer * 1.3, 0, f"layer {layer}", w=1.0)
        right = guess == guesses[-1]
        say(ax, layer * 1.3, -0.75, guess, GREEN if right else GREY)
        if layer:
            arrow(ax, (layer * 1.3 - 0.8, 0), (layer * 1.3 - 0.5, 0))
    box(ax, 8.1, 0, "head", "#f0f0f0", w=1.0)
    arrow(ax, (7.0, 0), (7.6, 0))
    arrow(ax, (3 * 1.3, 0.3), (8.1, 0.35), bend=0.28, color=BLUE)
    say(ax, 5.9, 1.45, "one linear map, fitted in closed form", BLUE)
    say(ax, 4.0, -1.3, "“The capital of France is”: what each layer would answer", GREY)
    ax.set(xlim=(-0.8, 8.9), ylim=(-1.6, 1.8))


def decoding(ax: Axes) -> None:
    """Draw a draft of four tokens and the one pass that checks all of it."""
    say(ax, -1.5, 1.2, "a cheap drafter", ORANGE, "left")
    say(ax, -1.5, 0.1, "the model, one pass", BLUE, "left")
    say(ax, -1.5, -1.0, "written", INK, "left")
    drafts = ["the", "tower", "of", "Paris"]
    found = ["the", "tower", "of", "London"]
    for place, (draft, true) in enumerate(zip(drafts, found, strict=True)):
        x = 2.2 + place * 1.35
        right = draft == true
        box(ax, x, 1.2, draft, ORANGE if right else WHITE, w=1.15)
        arrow(ax, (x, 0.88), (x, 0.42))
        box(ax, x, 0.1, true, BLUE, w=1.15)
        arrow(ax, (x, -0.22), (x, -0.68))
        box(ax, x, -1.0, true, GREEN if right else SKY, w=1.15)
    say(ax, 7.6, 1.2, "wrong: dropped", GREY, "left")
    say(ax, 7.6, -1.0, "four tokens for\nthe price of one pass", GREEN, "left")
    ax.set(xlim=(-1.7, 10), ylim=(-1.6, 1.7))


def prune(ax: Axes) -> None:
    """Draw layers whose parts are kept, replaced by a linear map, or removed."""
    attention, dense = "kkllk--kkk", "kklkkklkkk"
    looks = {"k": (BLUE, ""), "l": (ORANGE, "A"), "-": (WHITE, "")}
    for row, choices in ((0.45, attention), (-0.35, dense)):
        for place, choice in enumerate(choices):
            color, text = looks[choice]
            box(ax, place * 0.85, row, text, color, w=0.7)
    say(ax, -0.7, 0.45, "attention", at="right")
    say(ax, -0.7, -0.35, "feed-forward", at="right")
    legend = ((BLUE, "kept"), (ORANGE, "one linear map A instead"), (WHITE, "removed"))
    for place, (color, text) in zip((0, 1.9, 5.9), legend, strict=True):
        box(ax, place, -1.2, "", color, w=0.4, h=0.35)
        say(ax, place + 0.35, -1.2, text, at="left")
    ax.set(xlim=(-2.5, 8.4), ylim=(-1.6, 1.0))


def par(ax: Axes) -> None:
    """Draw blocks that weigh attention, dense and nothing, and what they become."""
    chances = [
        (0.1, 0.8, 0.1),
        (0.85, 0.1, 0.05),
        (0.6, 0.3, 0.1),
        (0.1, 0.75, 0.15),
        (0.2, 0.2, 0.6),
        (0.1, 0.85, 0.05),
    ]
    colors, letters = (BLUE, ORANGE, GREY), "ad-"
    for block, chance in enumerate(chances):
        left = block * 1.5
        for place, (share, color) in enumerate(zip(chance, colors, strict=True)):
            ax.bar(left + place * 0.35, share, 0.3, color=color)
        best = max(range(3), key=chance.__getitem__)
        arrow(ax, (left + 0.35, -0.08), (left + 0.35, -0.4))
        color = (BLUE, ORANGE, WHITE)[best]
        box(ax, left + 0.35, -0.62, letters[best], color, w=0.7, h=0.36)
    names = ("attention", "dense", "nothing")
    for name, color, x in zip(names, colors, (0.2, 2.4, 4.1), strict=True):
        say(ax, x, 1.1, name, color, "left")
    say(ax, -0.4, -1.1, "the pattern that is trained: d a a d - d", at="left")
    ax.set(xlim=(-0.7, 8.9), ylim=(-1.3, 1.25))


def ponder(ax: Axes) -> None:
    """Draw an easy text that stops early, and a hard one that goes on."""
    rows = (("“A joy from start to end.”", 2), ("“Not exactly what one would\ncall a failure.”", 5))
    for row, (text, stop) in enumerate(rows):
        y = 0.8 - row * 1.1
        say(ax, -0.8, y, text, at="right")
        for step in range(1, 7):
            ran = step <= stop
            color = GREEN if step == stop else BLUE if ran else WHITE
            box(ax, (step - 1) * 1.05, y, str(step) if ran else "", color)
        say(ax, 6.0, y, f"positive, after {stop} of 6 layers", GREEN, "left")
    say(ax, 2.6, -1.05, "after every layer: an answer, and a probability of stopping here", GREY)
    ax.set(xlim=(-5.3, 9.6), ylim=(-1.4, 1.4))


def lazy(ax: Axes) -> None:
    """Draw tokens that are left alone once they hardly change."""
    words = ["A", "dog", "runs", "on", "the", "beach", "."]
    steps = [2, 5, 6, 3, 2, 4, 2]
    for place, (word, last) in enumerate(zip(words, steps, strict=True)):
        say(ax, place * 1.05, -0.75, word)
        for step in range(6):
            color = BLUE if step < last else WHITE
            box(ax, place * 1.05, step * 0.48, "", color, w=0.85, h=0.36)
    say(ax, -0.8, 0.0, "step 1", at="right")
    say(ax, -0.8, 2.4, "step 6", at="right")
    for y, color, text in (
        (2.0, BLUE, "updated"),
        (1.4, WHITE, "hardly changing:\nnothing computed"),
    ):
        box(ax, 7.8, y, "", color, w=0.5, h=0.36)
        say(ax, 8.25, y, text, at="left")
    ax.set(xlim=(-2.0, 11.2), ylim=(-1.1, 2.8))


def draw(name: str, picture: Callable[[Axes], None], size: Sequence[float]) -> None:
    """Write one picture as SVG, the same bytes every time."""
    figure, ax = plt.subplots(figsize=size)
    picture(ax)
    ax.axis("off")
    ax.set_aspect("auto")
    figure.subplots_adjust(0.01, 0.02, 0.99, 0.98)
    figure.savefig(IMAGES / f"idea-{name}.svg", facecolor="white", metadata={"Date": None})
    plt.close(figure)


SIZES = {
    shortcut: (8.6, 2.9),
    decoding: (8.6, 2.9),
    prune: (8.6, 2.2),
    par: (8.0, 2.8),
    ponder: (9.4, 2.3),
    lazy: (8.6, 2.8),
}

if __name__ == "__main__":
    for picture, size in SIZES.items():
        draw(picture.__name__, picture, size)

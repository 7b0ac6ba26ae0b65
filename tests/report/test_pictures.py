"""Texts, lenses and diagrams: every token readable in its place, whatever the tokens are."""

import numpy as np
import pytest
from matplotlib.figure import Figure

from deepenough.figure import Diagram, FigureSpec, LensTable, Panel, TokenText, visible
from deepenough.report import drawing, style
from deepenough.report.pictures import MAX_LENS_TOKENS

ODD = [
    "</script><script>alert(1)</script>", "<b>bold</b>", "a&amp;b", "%{x}", "$x^2$", "\n", "\t",
    "    ", "", "\x00", "\x1b[31m", "\u202etext", "\u0301", "\ud800", "\ufffd", "中文", "日本語",
    "العربية", "हिन्दी", "🙂", "naïve", "Ω≈ç", "Ж", '"', "'", "\\", "{", "a" * 500,
]  # fmt: skip


def draw(panel: Panel) -> Figure:
    ((_, figure),) = drawing.draw(FigureSpec("name", "x" * 90, "", [panel]))
    with style.applied():
        figure.draw_without_rendering()
    return figure


def lens_text(num_layers: int, tokens: list[str], words: list[str]) -> TokenText:
    """Return a lens in which the later layers agree, and are surer of it."""
    rng = np.random.default_rng(0)
    depth = rng.integers(0, num_layers + 1, len(tokens))
    layers = np.arange(num_layers + 1)[:, None]
    agrees = layers >= depth
    picks = rng.integers(len(words), size=agrees.shape)
    picks = np.where(agrees, picks[-1], picks)
    lens = LensTable(
        list(range(num_layers + 1)),
        [[visible(words[i]) for i in row] for row in picks],
        np.broadcast_to(layers / num_layers, agrees.shape).tolist(),
    )
    return TokenText([visible(t) for t in tokens], depth.tolist(), num_layers, "layer", lens)


def test_every_cell_has_its_prediction_and_a_frame_where_it_stays() -> None:
    text = lens_text(5, ["The", " capital", " of"], [" city", " a", "\n"])
    assert text.lens is not None
    axes = draw(text).axes[0]
    written = {t.get_position(): t.get_text() for t in axes.texts}
    for i, row in enumerate(text.lens.predictions):
        for j, word in enumerate(row):
            assert written[j, i] == word
    frames = {(round(p.get_center()[0]), round(p.get_center()[1])) for p in axes.patches}
    assert frames == {(j, row) for j, row in enumerate(text.depth) if row < 5}
    assert [label.get_text() for label in axes.get_xticklabels()] == ["The", "␣capital", "␣of"]


def test_predictions_stay_in_their_cells() -> None:
    long = [" a", " incomprehensibilities", "n" * 60, "中" * 4]
    axes = draw(lens_text(6, [" t"] * 9, long)).axes[0]
    for text in axes.texts:
        box, column = text.get_window_extent(), text.get_position()[0]
        left, right = axes.transData.transform([(column - 0.5, 0), (column + 0.5, 0)])[:, 0]
        assert left <= box.x0
        assert box.x1 <= right


@pytest.mark.parametrize(
    "text",
    [
        lens_text(1, ["Hello"], ["a"]),
        lens_text(12, ODD, ODD),
        lens_text(70, [" word"] * 45, [" a", " understanding"]),
    ],
    ids=["one token", "odd tokens", "deep and long"],
)
def test_any_lens_fits_its_figure(text: TokenText) -> None:
    figure = draw(text)
    box = figure.get_tightbbox()
    assert box.x0 >= 0
    assert box.x1 <= figure.get_figwidth() + 0.01
    assert box.y1 <= figure.get_figheight() + 0.01


def test_a_long_prompt_keeps_its_end_and_says_so() -> None:
    axes = draw(lens_text(3, [f" t{i}" for i in range(300)], ["a"])).axes[0]
    labels = [label.get_text() for label in axes.get_xticklabels()]
    assert labels[-1] == "␣t299" and len(labels) == MAX_LENS_TOKENS
    assert f"the last {MAX_LENS_TOKENS} of 300 tokens" in axes.get_title(loc="left")


def test_tokens_of_a_text_are_shaded_and_do_not_overlap() -> None:
    tokens = [f" word{i}" for i in range(60)]
    figure = draw(TokenText(tokens, [None, *range(1, 60)], 60, "layers run"))
    axes = figure.axes[0]
    assert len(axes.patches) == 59  # the prompt is not shaded
    boxes = [t.get_window_extent() for t in axes.texts]
    for i, box in enumerate(boxes):
        assert box.count_overlaps(boxes[i + 1 :]) == 0
        assert box.x1 <= figure.bbox.width
        assert box.y0 >= 0


def test_odd_tokens_can_be_drawn() -> None:
    draw(TokenText([visible(t) for t in ODD], [1.0] * len(ODD), 2, "layers run"))


def test_a_character_without_a_glyph_is_a_sign() -> None:
    assert style.drawable("a\U00012000\n") == "a\N{REPLACEMENT CHARACTER}\N{REPLACEMENT CHARACTER}"


def test_installed_fonts_help_out(monkeypatch: pytest.MonkeyPatch) -> None:
    beyond_dejavu = "a\u20dd"
    cached = (style.families, style._glyphs)
    try:
        before = style.drawable(beyond_dejavu)
        monkeypatch.setattr(style, "MORE_FONTS", ("No Such Font", "STIXGeneral"))
        for each in cached:
            each.cache_clear()
        assert style.families()[1:] == ("STIXGeneral",)
        assert style.drawable(beyond_dejavu) == beyond_dejavu != before
        with style.applied():
            draw(lens_text(2, ["a"], [beyond_dejavu]))
    finally:
        monkeypatch.undo()
        for each in cached:
            each.cache_clear()


KINDS = {"a": "attention", "d": "dense", "-": "identity"}


def diagram(pattern: str) -> Figure:
    return draw(Diagram([KINDS[letter] for letter in pattern], pattern))


def test_every_block_is_drawn_in_its_shape() -> None:
    axes = diagram("aadad-").axes[0]
    shapes = [
        type(t.get_bbox_patch().get_boxstyle()).__name__ for t in axes.texts if t.get_bbox_patch()
    ]
    assert shapes == ["Round", "Round", "Square", "Round", "Square", "Square"]
    written = [text.get_text() for text in axes.texts]
    labels = [t for t in written if t in KINDS.values()]
    assert labels == ["attention", "attention", "dense", "attention", "dense", "identity"]
    assert [t for t in written if t.isdigit()] == ["1", "2", "3", "4", "5", "6"]


@pytest.mark.parametrize("pattern", ["-", "-a-", "d" * 10, "d" * 12 + "-" + "a" * 11, "a" * 100])
def test_everything_stays_inside_the_figure_and_no_text_overlaps(pattern: str) -> None:
    figure = diagram(pattern)
    texts = [text for text in figure.axes[0].texts if text.get_text()]
    boxes = [(t.get_bbox_patch() or t).get_window_extent() for t in texts]
    width, height = figure.bbox.width, figure.bbox.height
    assert all(b.x0 >= 0 and b.y0 >= 0 and b.x1 <= width and b.y1 <= height for b in boxes)
    for i, box in enumerate(boxes):
        assert box.count_overlaps(boxes[i + 1 :]) == 0

"""The lens: the words, shades and agreements that were recorded, whatever the words are."""

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from deepenough.errors import UserError
from deepenough.report import Run, lens_page, lens_words, write_figures
from deepenough.report.lens import write_lens
from deepenough.report.lens_source import Lens, lenses, read_lens
from deepenough.report.lens_table import MAX_ROWS, MAX_WIDTH, draw_lens, lens_table
from deepenough.report.lens_words import drawable, shorten, visible
from deepenough.runs import Record

PROMPT = "The capital of France is the city of Paris, which lies on the"
ODD = [
    "</script><script>alert(1)</script>", "<b>bold</b>", "a&amp;b", "%{x}", "$x^2$", "\n", "\t",
    "    ", "", "\x00", "\x1b[31m", "\u202etext", "\u0301", "\ud800", "\ufffd", "中文", "日本語",
    "العربية", "हिन्दी", "🙂", "naïve", "Ω≈ç", "Ж", '"', "'", "\\", "{", "a" * 500,
]  # fmt: skip


def lens_values(
    num_layers: int = 30, tokens: list[str] | None = None, words: list[str] | None = None
) -> dict[str, Any]:
    """A lens in which the later layers agree, and are surer of it."""
    tokens = tokens or re.findall(r" ?\w+|,", PROMPT)
    say = words or [" capital", " city", " of", " a", "\n", " located", " the", " Seine", "-"]
    rng = np.random.default_rng(0)
    shape = (num_layers + 1, len(tokens))
    last = [say[i] for i in rng.integers(len(say), size=len(tokens))]
    depth = np.linspace(0, 1, num_layers + 1)[:, None]
    sure = rng.uniform(0.2, 0.9, len(tokens))
    agrees = depth >= sure
    other = rng.integers(len(say), size=shape)
    rows = [
        [last[j] if agrees[i, j] else say[other[i, j]] for j in range(shape[1])]
        for i in range(shape[0])
    ]
    rows[-1] = last
    agrees[-1] = True
    probability = np.clip(0.9 * depth**2 + rng.uniform(0, 0.1, shape), 0, 1)
    return {
        "prompt": "".join(tokens),
        "mode": "mat",
        "tokens": tokens,
        "layers": list(range(num_layers + 1)),
        "words": rows,
        "probability": probability.tolist(),
        "agrees": agrees.tolist(),
    }


def lens_run(*values: dict[str, Any]) -> Run:
    return Run("jumps", [Record(0, "lens", v, 0.0) for v in values or (lens_values(),)])


class Tags(HTMLParser):
    """The tags of a page, their attributes, and what its scripts hold."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.texts: list[str] = []
        self.scripts: list[str] = []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs

    def handle_data(self, data: str) -> None:
        in_script = bool(self.tags) and self.tags[-1] == "script"
        (self.scripts if in_script else self.texts).append(data)


def page_of(*values: dict[str, Any]) -> str:
    page = lens_page.lens_page(lens_run(*values))
    assert page is not None
    return page.content


def plotted(page: str, number: int = 1) -> list[dict[str, Any]]:
    """The traces that the page hands to Plotly for its lens of that number."""
    script = next(s for s in Tags(page).scripts if f'"lens-{number}",' in s)
    start = script.index("[", script.index("Plotly.newPlot"))
    traces: list[dict[str, Any]] = json.JSONDecoder().raw_decode(script[start:])[0]
    return traces


def words_in(lens: Lens) -> list[list[tuple[str, bool]]]:
    """The words written in a drawing of the lens, each with whether it is bold."""
    figure = lens_table(lens)
    written = {t.get_position(): t for t in figure.axes[0].texts}
    return [
        [
            (written[j, i].get_text(), written[j, i].get_fontweight() == "bold")
            for j in range(tokens)
        ]
        for i, tokens in enumerate(map(len, lens.words))
    ]


def read(values: dict[str, Any]) -> Lens:
    lens = read_lens(values)
    assert lens is not None
    return lens


def test_every_cell_has_its_word_in_bold_where_it_agrees() -> None:
    values = lens_values(5)
    expected = [
        [(visible(word), agrees) for word, agrees in zip(*row, strict=True)]
        for row in zip(values["words"], values["agrees"], strict=True)
    ]
    assert words_in(read(values)) == expected
    (heat, _) = plotted(page_of(values))
    page_words = [[w.removeprefix("<b>").removesuffix("</b>") for w in r] for r in heat["text"]]
    assert page_words == [[word for word, _ in row] for row in expected]
    bold = [[word.startswith("<b>") for word in row] for row in heat["text"]]
    assert bold == values["agrees"]


def test_known_from_is_where_the_agreement_no_longer_breaks() -> None:
    agrees = [[1, 0, 0], [0, 0, 0], [1, 1, 0], [1, 1, 0], [1, 1, 1]]
    values = lens_values(4, tokens=["a", "b", "c"])
    lens = read(values | {"agrees": [[bool(v) for v in row] for row in agrees]})
    assert lens.known_from().tolist() == [2, 2, 4]


@pytest.mark.parametrize(
    ("token", "shown"),
    [
        (" the", "␣the"), ("\n", "↵"), ("\t", "⇥"), ("", "∅"), ("\x00", "\\x00"),
        ("\x1b[0m", "\\x1b[0m"), ("\u202e", "\\u202e"), ("\u200b", "\\u200b"),
        ("\ud800", "\\ud800"), ("\u0301", "◌\u0301"), ("中文", "中文"), ("naïve", "naïve"),
    ],
)  # fmt: skip
def test_every_character_of_a_token_can_be_seen(token: str, shown: str) -> None:
    assert visible(token) == shown


def test_a_character_without_a_glyph_is_a_sign() -> None:
    assert drawable("a\ue123") == "a\\ue123"
    no_font_has_it = "\U00012000"
    assert drawable(no_font_has_it) == "\N{REPLACEMENT CHARACTER}"


def test_installed_fonts_help_out(monkeypatch: pytest.MonkeyPatch) -> None:
    beyond_dejavu = "\u20dd"
    assert visible(beyond_dejavu).endswith(beyond_dejavu)
    for cached in (lens_words.families, lens_words._glyphs):
        cached.cache_clear()
    try:
        before = drawable(f"a{beyond_dejavu}")
        monkeypatch.setattr(lens_words, "MORE_FONTS", ("No Such Font", "STIXGeneral"))
        for cached in (lens_words.families, lens_words._glyphs):
            cached.cache_clear()
        assert lens_words.families()[1:] == ("STIXGeneral",)
        assert drawable(f"a{beyond_dejavu}") == f"a{beyond_dejavu}" != before
        values = lens_values(2, words=[f"a{beyond_dejavu}"])
        lens_table(read(values)).draw_without_rendering()
    finally:
        monkeypatch.undo()
        for cached in (lens_words.families, lens_words._glyphs):
            cached.cache_clear()


def test_shorten_keeps_the_longest_beginning() -> None:
    assert shorten("abcdef", lambda text: len(text) <= 6) == "abcdef"
    assert shorten("abcdef", lambda text: len(text) <= 4) == "abc…"
    assert shorten("abcdef", lambda text: False) == "…"


def test_words_stay_in_their_cells() -> None:
    long = [" a", " incomprehensibilities", "W" * 60, "中" * 9]
    figure = lens_table(read(lens_values(6, words=long)))
    figure.draw_without_rendering()
    axes = figure.axes[0]
    for text in axes.texts:
        box, column = text.get_window_extent(), text.get_position()[0]
        left, right = axes.transData.transform([(column - 0.5, 0), (column + 0.5, 0)])[:, 0]
        assert left <= box.x0
        assert box.x1 <= right


@pytest.mark.parametrize(
    "values",
    [
        lens_values(1, tokens=["Hello"]),
        lens_values(12, tokens=ODD, words=ODD),
        lens_values(70, tokens=[" word"] * 45, words=[" a", " understanding"]),
    ],
    ids=["one token", "odd words", "deep and long"],
)
def test_any_lens_fits_its_figure(values: dict[str, Any]) -> None:
    figure = draw_lens(lens_run(values))
    assert figure is not None
    figure.draw_without_rendering()
    assert figure.get_figwidth() <= MAX_WIDTH
    assert len(figure.axes[0].get_yticks()) <= MAX_ROWS + 1
    box = figure.get_tightbbox()
    assert box.x0 >= 0
    assert box.x1 <= figure.get_figwidth() + 0.01
    assert box.y1 <= figure.get_figheight() + 0.01


def test_a_long_prompt_keeps_its_end_and_says_so() -> None:
    figure = lens_table(read(lens_values(3, tokens=[f" t{i}" for i in range(300)])))
    labels = [label.get_text() for label in figure.axes[0].get_xticklabels()]
    assert labels[-1] == "␣t299"
    assert f"tokens {301 - len(labels)} to 300 of 300" in figure.axes[0].get_title(loc="left")


def test_the_page_needs_no_network_and_runs_no_word() -> None:
    page = page_of(lens_values(3, tokens=ODD, words=ODD))
    found = Tags(page)
    assert {name for name, _ in found.attributes}.isdisjoint({"src", "href"})
    in_head = {"html", "head", "meta", "title", "style", "script"}
    assert set(found.tags) == in_head | {"body", "h1", "h2", "p", "section", "div"}
    assert found.tags.count("script") == 2
    assert "default-src 'none'" in page
    (heat, line) = plotted(page)
    assert line["type"] == "scatter"
    assert "&lt;b&gt;bold&lt;/b&gt;" in {w for row in heat["customdata"] for w in row}
    assert not any("<" in word for row in heat["customdata"] for word in row)
    assert "alert(1)" in "".join(found.texts)


def test_the_page_opens_with_the_latest_lens_and_keeps_one_of_a_kind() -> None:
    first, second = lens_values(2, tokens=["one"]), lens_values(2, tokens=["two"])
    again = first | {"prompt": "one", "words": [["x"], ["y"], ["z"]]}
    assert [lens.prompt for lens in lenses(lens_run(first, second))] == ["two", "one"]
    kept = lenses(lens_run(first, second, again, again | {"mode": "id"}))
    assert [(lens.prompt, lens.mode) for lens in kept] == [
        ("one", "id"), ("one", "mat"), ("two", "mat"),
    ]  # fmt: skip
    page = page_of(first, second, again)
    assert page.index(">one</h2>") < page.index(">two</h2>")
    assert plotted(page)[0]["customdata"] == [["x"], ["y"], ["z"]]
    assert plotted(page, 2)[0]["customdata"][-1] == [visible(second["words"][-1][0])]


def test_a_huge_lens_stays_a_small_page() -> None:
    tokens = ["中文" * 40] * 600
    values = lens_values(48, tokens=tokens, words=["語" * 100, "é" * 90])
    page = page_of(lens_values(48), values)
    assert len(page.encode()) <= lens_page.MAX_BYTES
    assert "of 600" in page
    assert lens_page.MAX_BYTES <= 6_000_000


def test_a_missing_probability_leaves_the_word() -> None:
    values = lens_values(2, tokens=["a", "b"])
    values["probability"][1] = [None, float("nan")]
    values["probability"][2] = [7.0, 0.5]
    lens = read(values)
    assert np.isnan(lens.probability).tolist() == [[False, False], [True, True], [True, False]]
    assert all(word for row in words_in(lens) for word, _ in row)
    assert np.isnan(read(values | {"probability": None}).probability).all()


def test_agreement_and_layers_that_were_not_recorded_follow_from_the_words() -> None:
    values = lens_values(2, tokens=["a"]) | {"words": [["x"], ["y"], ["y"]]}
    lens = read(values | {"agrees": None, "layers": None})
    assert lens.agrees.tolist() == [[False], [True], [True]]
    assert lens.layers == (0, 1, 2)


@pytest.mark.parametrize(
    "broken",
    [{"tokens": []}, {"tokens": None}, {"tokens": [1]}, {"words": []}, {"words": [["a", "b"]]},
     {"words": "abc"}, {"words": [[None]]}],
)  # fmt: skip
def test_a_broken_lens_is_none(broken: dict[str, Any], tmp_path: Path) -> None:
    run = lens_run(lens_values(2, tokens=["a"]) | broken)
    assert lenses(run) == []
    with pytest.raises(UserError, match="no lens"):
        write_lens(run, tmp_path)


def test_the_figures_of_a_run_include_its_lens(tmp_path: Path) -> None:
    written = write_figures(lens_run(lens_values(2, tokens=["a", "b"])), tmp_path)
    assert [path.name for path in written] == ["lens.png", "lens.pdf", "lens.html"]


def test_the_lens_leaves_a_page_and_a_picture(tmp_path: Path) -> None:
    written = write_lens(lens_run(lens_values(2, tokens=ODD[:6])), tmp_path / "new")
    assert [path.name for path in written] == ["lens.html", "lens.png", "lens.pdf"]
    assert all(path.stat().st_size for path in written)
    again = write_lens(lens_run(lens_values(2, tokens=ODD[:6])), tmp_path / "again")
    assert [p.read_bytes() for p in written] == [p.read_bytes() for p in again]

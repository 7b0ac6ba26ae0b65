"""Figures in the explorer: markup that holds data, none that holds markup."""

from deepenough import figure as fig
from deepenough.explorer.rendering import figure_html, head, note_html, section_html

EVIL = "\"'><script>alert(1)</script>"


def test_texts_are_never_markup():
    panel = fig.TokenText([EVIL], [1.0], 2.0, EVIL)
    figure = fig.FigureSpec("name", EVIL, EVIL, [panel], EVIL, "/home/me/secret")
    section = fig.Section(EVIL, EVIL, [EVIL], [figure])
    for shown in (figure_html(figure), section_html(section), note_html(EVIL)):
        assert "<script" not in shown and "&lt;script&gt;" in shown
    assert "/home/me" not in figure_html(figure)


def test_a_table_with_words_is_as_wide_as_they_need():
    axis = fig.Axis("a", low=0.0, high=1.0)
    panel = fig.HeatMap(["r"], ["c"] * 20, [[0.5] * 20], axis, axis, axis, details=[["d"] * 20])
    assert "--least: 1480px" in figure_html(fig.FigureSpec("n", "t", "c", [panel]))


def test_the_style_of_the_report_is_local_and_asks_no_host():
    made = head()
    assert made.startswith("<style>.deepenough.deepenough {") and ":root" not in made
    assert "start();" not in made and "http" not in made.replace("http://www.w3.org/2000/svg", "")

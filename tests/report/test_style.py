"""The look: readable text on any colour, names that cannot break a figure, no state left behind."""

from pathlib import Path

import matplotlib
import matplotlib.pyplot as plt
import pytest

from deepenough.errors import UserError
from deepenough.report import draw_architecture, save, style


def test_ink_is_readable_on_every_colour_of_the_scale() -> None:
    assert style.ink_on("white") == style.ink_on(style.YELLOW) == "#000000"
    assert style.ink_on("black") == style.ink_on("#00204C") == "#FFFFFF"

    def luminance(color: object) -> float:
        rgb = matplotlib.colors.to_rgb(color)
        red, green, blue = (
            c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in rgb
        )
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    scale = matplotlib.colormaps[style.PROBABILITY_SCALE]
    for i in range(101):
        pair = sorted([luminance(scale(i / 100)), luminance(style.ink_on(scale(i / 100)))])
        assert (pair[1] + 0.05) / (pair[0] + 0.05) > 4.5  # the WCAG's AA


def test_long_names_lose_their_middle_and_odd_characters_are_replaced() -> None:
    assert style.shown("plain-name_1") == "plain-name_1"
    assert style.shown("a" * 50 + "b" * 50, 11) == "aaaaa…bbbbb"
    assert len(style.shown("x" * 1000)) == 40
    assert style.shown("a\nb\t\0\udc80中") == "a�b����"


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (0.35, "0.35"), (999, "999"), (1500, "1.5k"), (12e6, "12M"), (2e9, "2B")],
)
def test_short_numbers(value: float, text: str) -> None:
    assert style.short_number(value) == text


def test_drawing_leaves_no_global_state_and_ignores_the_users_settings(tmp_path: Path) -> None:
    figures_before = plt.get_fignums()
    plain = save(draw_architecture("ad-", title="a $x$ b"), tmp_path / "plain")
    with matplotlib.rc_context({"font.size": 30, "lines.linewidth": 9, "figure.dpi": 20}):
        before = dict(matplotlib.rcParams)
        other = save(draw_architecture("ad-", title="a $x$ b"), tmp_path / "other")
        assert dict(matplotlib.rcParams) == before
    assert [p.read_bytes() for p in plain] == [p.read_bytes() for p in other]
    assert plt.get_fignums() == figures_before


def test_a_folder_that_cannot_be_written_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(UserError, match="Cannot write pictures"):
        save(draw_architecture("a"), tmp_path / "file" / "a")

"""Text for a study of a model's layers: line by line, or as running text."""

import pytest

from deepenough import UserError
from deepenough.shortcut.config import TextConfig

LINES = ["= A heading =", "", *(f"Line {n} says that {n} is a number." for n in range(4000))]


@pytest.fixture
def corpus(tmp_path):
    for split in ("train", "valid", "test"):
        (tmp_path / f"{split}.txt").write_text("\n".join(LINES) + "\n", encoding="utf-8")
    return str(tmp_path)


def test_lines_are_texts_of_their_own(corpus):
    texts = TextConfig(lines=10, min_chars=20).read(corpus)
    assert [text.strip() for text in texts] == LINES[2:12]


def test_text_without_a_long_line_is_refused(corpus):
    with pytest.raises(UserError, match="has 500 characters"):
        TextConfig(min_chars=500).read(corpus)

"""Real prose and tokenizers trained on it, shared by the tests of this folder."""

from itertools import islice
from pathlib import Path
from pydoc_data.topics import topics

import pytest
from transformers import PreTrainedTokenizerBase

from deepenough.data.tokenizer import train_tokenizer


@pytest.fixture(scope="session")
def prose() -> list[str]:
    """A few thousand lines of the Python reference."""
    lines = (line for name in sorted(topics) for line in topics[name].split("\n"))
    return list(islice(lines, 4000))


@pytest.fixture(scope="session")
def tokenizer(prose: list[str]) -> PreTrainedTokenizerBase:
    return train_tokenizer(prose, 800)


@pytest.fixture(scope="session")
def lower_tokenizer(prose: list[str]) -> PreTrainedTokenizerBase:
    return train_tokenizer(prose, 600, lowercase=True)


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No test reads or fills the user's cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "deepenough"

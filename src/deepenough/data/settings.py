"""What text to use and how to cut it into tokens and batches."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class DataSettings:
    """Text and batches"""

    corpus: str = "python"
    """Text to use: `python` (the prose inside Python), a file, folder or glob, a folder of
    $DEEPENOUGH_DATA, or a `datasets` name (`hf:name`, `hf:name:config:column`)."""

    tokenizer: str | None = None
    """A SentencePiece .model file or a folder with a Hugging Face tokenizer; by default one is
    trained on the training split."""

    vocab_size: int = 8000
    """Number of pieces of a tokenizer that is trained."""

    lowercase: bool = False
    """Lower the case of all text; saved with the tokenizer."""

    symbols: list[str] = field(default_factory=list)
    """Strings that a trained tokenizer always keeps as one piece."""

    end_of_line: bool | None = None
    """Whether the tokenizer's end token follows each line; by default it does for a tokenizer
    trained here and does not for a given one."""

    valid_fraction: float = 0.05
    """Share of the lines held out for validation where the corpus has no valid split."""

    test_fraction: float = 0.05
    """Share of the lines held out for testing where the corpus has no test split."""

    cache: str | None = None
    """Folder for prepared tokens and tokenizers; by default $XDG_CACHE_HOME/deepenough or
    ~/.cache/deepenough."""

    batch_size: int = 32
    """Lanes of text read in parallel, over all processes."""

    length: int = 32
    """Tokens of each lane in one batch."""

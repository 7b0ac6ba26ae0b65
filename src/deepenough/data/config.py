"""How a text is split, tokenized and cut into batches; which text it is, a command says itself."""

from __future__ import annotations

from dataclasses import dataclass, field

from deepenough.config import bounded


@dataclass
class DatasetConfig:
    """Tokens and batches."""

    tokenizer: str | None = None
    """A SentencePiece .model file or a folder with a Hugging Face tokenizer; by default one is
    trained on the training split."""

    vocab_size: int = bounded(8000, ge=1)
    """Number of pieces of a tokenizer that is trained."""

    lowercase: bool = False
    """Lower the case of all text; saved with the tokenizer."""

    symbols: list[str] = field(default_factory=list)
    """Strings that a trained tokenizer always keeps as one piece."""

    end_of_line: bool | None = None
    """Whether the tokenizer's end token follows each line; by default it does for a tokenizer
    trained here and does not for a given one."""

    valid_fraction: float = bounded(0.05, ge=0, lt=1)
    """Share of the lines held out for validation where the text has no valid split."""

    test_fraction: float = bounded(0.05, ge=0, lt=1)
    """Share of the lines held out for testing where the text has no test split."""

    cache: str | None = None
    """Folder for prepared tokens and tokenizers; by default $XDG_CACHE_HOME/deepenough or
    ~/.cache/deepenough."""

    batch_size: int = bounded(32, ge=1)
    """Streams of text read in parallel, over all processes."""

    length: int = bounded(32, ge=1)
    """Tokens of each stream in one batch."""

    @property
    def ends_lines(self) -> bool:
        """Return whether line ends are tokens, the default resolved."""
        return self.tokenizer is None if self.end_of_line is None else self.end_of_line

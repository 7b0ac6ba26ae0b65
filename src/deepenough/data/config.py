"""How texts are split, tokenized and cut into batches; which text it is, a command says itself."""

from dataclasses import dataclass, replace
from typing import Literal, Self

from deepenough.config import bounded
from deepenough.errors import UserError

ProblemType = Literal["single_label_classification", "multi_label_classification", "regression"]
SINGLE_LABEL: ProblemType = "single_label_classification"
MULTI_LABEL: ProblemType = "multi_label_classification"
REGRESSION: ProblemType = "regression"
"""What labels and a model's outputs are, by the names that transformers has for them."""


@dataclass
class TokenizerConfig:
    """Tokenizer."""

    tokenizer: str | None = None
    """A SentencePiece .model file or a folder with a Hugging Face tokenizer; by default one is
    trained on the training text, of both languages where there are two."""

    vocab_size: int = bounded(8000, ge=1)
    """Number of pieces of a tokenizer that is trained."""

    lowercase: bool = False
    """Lower the case of all text; saved with the tokenizer."""

    cache: str | None = None
    """Folder for prepared tokens and tokenizers; by default $XDG_CACHE_HOME/deepenough or
    ~/.cache/deepenough."""


@dataclass
class DatasetConfig(TokenizerConfig):
    """Tokens and batches."""

    end_of_line: bool | None = None
    """Whether the tokenizer's end token follows each line; by default it does for a tokenizer
    trained here and does not for a given one."""

    valid_fraction: float = bounded(0.05, ge=0, lt=1)
    """Share of the lines held out for validation where the text has no valid split."""

    test_fraction: float = bounded(0.05, ge=0, lt=1)
    """Share of the lines held out for testing where the text has no test split."""

    batch_size: int = bounded(32, ge=1)
    """Streams of text read in parallel, over all processes."""

    length: int = bounded(32, ge=1)
    """Tokens of each stream in one batch."""

    workers: int | None = bounded(None, ge=1)
    """Processes that encode a text that is not in the cache yet; by default one for each core, and
    one alone for a text of few megabytes. The tokens are the same."""

    @property
    def ends_lines(self) -> bool:
        """Return whether line ends are tokens, the default resolved."""
        return self.tokenizer is None if self.end_of_line is None else self.end_of_line


@dataclass
class TranslationDataConfig(TokenizerConfig):
    """Parallel text and batches."""

    source: str = "en"
    """Language to translate from: the ending of its files, or its column."""

    target: str = "de"
    """Language to translate into."""

    test: str | None = None
    """Name of the test files without their ending, where a folder has several; by default the
    first by name."""

    max_length: int = bounded(128, ge=2)
    """Most tokens of a sentence: longer pairs are left out of training, longer sources are cut
    when translating."""

    batch_tokens: int = bounded(2048, ge=2)
    """Most tokens of a batch, on the longer side and with padding, over all processes."""

    def check(self) -> None:
        """Check that a batch holds a sentence and that there are two languages."""
        if self.batch_tokens < self.max_length:
            raise UserError(
                f"A batch of {self.batch_tokens} tokens cannot hold a sentence of "
                f"{self.max_length}: raise dataset.batch_tokens or lower dataset.max_length."
            )
        if self.source == self.target:
            raise UserError(
                f"dataset.source and dataset.target are both {self.source!r}: name two languages."
            )


@dataclass
class ClassificationConfig:
    """Examples and batches."""

    text_column: str | None = None
    """Column of the text; by default the first that is called text, sentence, premise, ..."""

    pair_column: str | None = None
    """Column of the second text of a pair; by default one called sentence2, hypothesis, ..., if the
    text's column was not named either."""

    label_column: str | None = None
    """Column of the label; by default label, class or target."""

    problem_type: ProblemType | None = None
    """What a label is: one of several, any number of them (a list, or names with commas between
    them), or a number. By default what the GLUE task of that name has, else one of several."""

    valid_fraction: float = bounded(0.05, ge=0, lt=1)
    """Share of the training examples held out for validation where there is no such split."""

    limit: int | None = bounded(None, ge=1)
    """Use only so many training examples."""

    max_length: int = bounded(128, ge=1)
    """Tokens at which texts are cut."""

    batch_size: int = bounded(32, ge=1)
    """Examples in one batch, over all processes."""

    def token_limit(self, model_limit: int | None) -> int:
        """Return where texts are cut: as asked for, but no more than the model can read."""
        return min(self.max_length, model_limit or self.max_length)

    def for_other_data(self) -> Self:
        """Return the same settings for examples that are not trained on: all of them are used."""
        return replace(self, valid_fraction=0.0, limit=None)

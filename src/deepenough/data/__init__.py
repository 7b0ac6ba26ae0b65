"""Text to batches of tokens: corpora, tokenizers, token files, context batches."""

from deepenough.data.config import DatasetConfig
from deepenough.data.corpus import Corpus, open_corpus
from deepenough.data.prepare import Prepared, prepare
from deepenough.data.tokenizer import load_tokenizer, save_tokenizer, train_tokenizer
from deepenough.data.tokens import Batch, ContextBatches, TokenFile, token_file

__all__ = [
    "Batch",
    "ContextBatches",
    "Corpus",
    "DatasetConfig",
    "Prepared",
    "TokenFile",
    "load_tokenizer",
    "open_corpus",
    "prepare",
    "save_tokenizer",
    "token_file",
    "train_tokenizer",
]

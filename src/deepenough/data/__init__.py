"""Text to batches of tokens: corpora, tokenizers, token files, batches."""

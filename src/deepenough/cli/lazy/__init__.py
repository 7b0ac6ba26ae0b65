"""`deepenough lazy ...`: translators that update only what still changes."""

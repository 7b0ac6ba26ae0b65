"""Shortcut: linear maps between the layers of a model (Jump to Conclusions, arXiv 2303.09435)."""

"""Ponder: classifiers that think as long as the input needs (PonderNet, arXiv 2107.05407)."""

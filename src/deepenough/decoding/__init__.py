"""Decoding that is really faster, lossless or leaving early, behind the same `generate()`."""

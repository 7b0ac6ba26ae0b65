"""Decoding that is really faster, lossless or leaving early, behind the model's own `generate()`."""

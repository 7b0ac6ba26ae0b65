"""Decoding that is really faster: lossless, with the model's own `generate()` call."""

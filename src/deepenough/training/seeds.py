"""Seeds as a function of place: what is drawn at a step never depends on what was drawn before."""

from __future__ import annotations

import hashlib


def seed_at(*place: int | str) -> int:
    """A seed for a place in a run, such as (seed, step, process)."""
    digest = hashlib.blake2b(repr(place).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1  # torch takes signed numbers

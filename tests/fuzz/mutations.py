"""Bad values, and bad files made of good ones.

Every function takes its choices from a `random.Random`, so that one generator serves plain random
numbers, hypothesis (which shrinks its choices) and atheris (which learns them from coverage).
"""

from __future__ import annotations

import json
import random
from typing import Any

TEXTS = (
    "",
    " ",
    "\0",
    "a\0b",
    "\ud800",
    "half\udfffcharacter",
    "\udc80",
    "\n",
    "\r\n\t",
    "\x1b[31mred",
    "\u202edesrever",
    "\ufeff",
    "\u0301",
    "naïve 日本語 🙂",
    "</script><script>alert(1)</script>",
    "<img src=x onerror=alert(1)>",
    '"><svg onload=alert(1)>',
    "<!--",
    "]]>",
    "&amp;&#0;&nosuch;",
    "javascript:alert(1)",
    "{0.__class__}",
    "{unit!r:>99999999}",
    "%s%n",
    "$title ${title} $",
    "$(touch /tmp/ran)",
    "../../etc/passwd",
    "/dev/zero",
    "C:\\con",
    "nan",
    "inf",
    "-inf",
    "1e999",
    "-1",
    "0x10",
    "1_000",
    "٣",
    "null",
    "true",
    "NaN",
    "[1,2",
    "{",
    "---",
    "- a: &a [*a]",
    "!!python/object/apply:os.system [id]",
    "=1+1",
    "'",
    '"',
    "\\",
    "x" * 5000,
    "<" * 3000,
    "e\u0301" * 500,
)
NUMBERS: tuple[Any, ...] = (
    *(0, 1, 2, 3, -1, -2, 7, 255, 1000, 2**31, 2**53 + 1, 2**63, -(2**63), 2**64, 10**30, 10**400),
    *(0.0, -0.0, 0.5, 1.0, -0.5, 1e-320, 1e-9, 1e9, 1e300, 1.7e308, -1e308),
    *(float("nan"), float("inf"), float("-inf")),
)
WORDS = (
    "name",
    "points",
    "task",
    "step",
    "kind",
    "loss",
    "pi",
    "tokens",
    "table",
    "x",
    "__class__",
)


def text(rng: random.Random) -> str:
    """Return a text that somewhere is no good text."""
    if rng.random() < 0.75:
        return rng.choice(TEXTS)
    letters = [
        chr(rng.choice((rng.randrange(128), rng.randrange(0x3000), rng.randrange(0x110000))))
        for _ in range(rng.randrange(12))
    ]
    return "".join(letters)


def scalar(rng: random.Random) -> Any:
    """Return a number, a text, a truth value or nothing."""
    which = rng.random()
    if which < 0.15:
        return rng.choice((None, True, False))
    if which < 0.55:
        return rng.choice(NUMBERS)
    if which < 0.65:
        return rng.randrange(-5, 20)
    if which < 0.75:
        return rng.uniform(-2.0, 2.0)
    return text(rng)


def value(rng: random.Random, depth: int = 3) -> Any:
    """Return any value that JSON can hold."""
    which = rng.random()
    if depth == 0 or which < 0.6:
        return scalar(rng)
    number = rng.randrange(5)
    if which < 0.8:
        return [value(rng, depth - 1) for _ in range(number)]
    if which < 0.82:
        return nested(rng.choice((30, 300)))
    keys = [rng.choice(WORDS) if rng.random() < 0.6 else text(rng) for _ in range(number)]
    return {key: value(rng, depth - 1) for key in keys}


def nested(depth: int) -> Any:
    """Return lists in lists, so deep."""
    found: Any = []
    for _ in range(depth):
        found = [found]
    return found


def mutate(rng: random.Random, tree: Any) -> Any:
    """Return a copy of a tree of JSON values in which one to three places are changed."""
    changed = {"root": json.loads(json.dumps(tree))}
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        places = list(_places(changed))
        container, key = rng.choice(places)
        _change(rng, container, key)
    return changed["root"]


def _places(tree: Any) -> Any:
    """Yield every place of a tree as its container and its key."""
    waiting = [tree]
    while waiting:
        container = waiting.pop()
        keys = list(container) if isinstance(container, dict) else range(len(container))
        for key in keys:
            yield container, key
            if isinstance(container[key], dict | list):
                waiting.append(container[key])


def _change(rng: random.Random, container: Any, key: Any) -> None:
    old, which = container[key], rng.random()
    if which < 0.45:
        container[key] = value(rng)
    elif which < 0.6:
        del container[key]
        if not container and isinstance(container, dict):
            container["root"] = None
    elif which < 0.7:
        container[key] = rng.choice(([old], {"x": old}, str(old), [old, old], [], {}))
    elif which < 0.8 and isinstance(old, list) and old:
        container[key] = rng.choice((old[:-1], old + old[:1], old[::-1], old * 2, old[1:]))
    elif which < 0.85 and isinstance(old, dict):
        old[text(rng)] = value(rng, 1)
    elif isinstance(old, int | float) and not isinstance(old, bool):
        factor = rng.choice((-1, 0, 2, 1000, 0.5, 1e20, float("nan")))
        container[key] = old * factor if abs(old) < 1e200 else scalar(rng)
    elif isinstance(old, str):
        container[key] = rng.choice((old + text(rng), old[:-1], old.upper(), text(rng)))
    else:
        container[key] = scalar(rng)


def spell(rng: random.Random, tree: Any) -> bytes:
    """Return a tree as the bytes of a JSON file, now and then damaged after that."""
    spelt = json.dumps(tree).encode()
    which = rng.random()
    if which < 0.04:
        return damage(rng, spelt)
    if which < 0.05:
        deep = rng.choice((b"[" * 5000, b'{"a":' * 3000, b"[" * 100_000))
        return spelt.replace(rng.choice((b"1", b"0", b"null", b"[")), deep, 1)
    return spelt


def damage(rng: random.Random, content: bytes) -> bytes:
    """Return bytes with one to four places flipped, cut, doubled, moved or overwritten."""
    changed = bytearray(content)
    for _ in range(rng.randrange(1, 5)):
        place = rng.randrange(len(changed) + 1)
        length = rng.choice((1, 1, 2, 4, 8, 30))
        part, which = changed[place : place + length], rng.random()
        if which < 0.3 and part:
            changed[place] ^= 1 << rng.randrange(8)
        elif which < 0.4:
            del changed[place : place + length]
        elif which < 0.5:
            changed[place:place] = part * rng.choice((1, 2, 50))
        elif which < 0.6:
            del changed[place:]
        elif which < 0.8:
            bad = (
                b"\0",
                b"\xff",
                b"\xef\xbb\xbf",
                b"\xff\xfe",
                b"\n",
                b'"',
                b",",
                b"\t",
                b"-",
                b"9",
            )
            changed[place:place] = rng.choice(bad) * rng.choice((1, 1, 3, 40))
        elif which < 0.9:
            changed[place : place + length] = bytes(rng.randrange(256) for _ in range(len(part)))
        else:
            changed[place:place] = text(rng).encode("utf-8", "surrogatepass")
    return bytes(changed)

"""Labels as they stand in files, numbers or names, made the numbers 0 to C - 1.

What the first label is, the others must be: a file whose labels begin with numbers is not allowed a
word among them, because that word is a mistake and would silently become a class of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from deepenough.errors import UserError

#: A highest label this far above the number of different ones is a slip of the pen.
GAPS_PER_LABEL = 2
GAPS_ALLOWED = 8


def find_labels(raw: Iterable[tuple[str, Any]], num_labels: int | None = None) -> tuple[str, ...]:
    """The names of all labels of a training set, from (place, label) pairs.

    Numbers are named by their digits, and there are as many as the highest one asks for.
    """
    pairs = list(raw)
    if not pairs:
        raise UserError("There are no training examples: give a file with at least one row.")
    if as_number(pairs[0][1]) is None:
        names = sorted({_name(value, place) for place, value in pairs})
        num_found = len(names)
    else:
        values = {_number(value, place) for place, value in pairs}
        highest, num_found = max(values), len(values)
        if num_labels is None and highest > GAPS_PER_LABEL * len(values) + GAPS_ALLOWED:
            place = next(place for place, value in pairs if as_number(value) == highest)
            raise UserError(
                f"The label {highest} in {place} is far above the number of different labels, "
                f"{len(values)}: correct it, or give data.num_labels."
            )
        names = [str(number) for number in range(num_labels or highest + 1)]
    if num_labels is not None and len(names) != num_labels:
        raise UserError(
            f"data.num_labels is {num_labels}, but the training examples have {len(names)} labels."
        )
    if num_found < 2:
        raise UserError("All training examples have the same label: there is nothing to learn.")
    return tuple(names)


def label_number(value: Any, place: str, names: Sequence[str]) -> int:
    """The number of a label; UserError, naming the place, if it is none of the names."""
    if _missing(value):
        raise UserError(f"The label is missing in {place}: add it or remove the row.")
    if isinstance(value, str) and value.strip() in names:
        return list(names).index(value.strip())
    if as_number(value) is None and any(as_number(name) is None for name in names):
        shown = ", ".join(list(names)[:8]) + (", ..." if len(names) > 8 else "")
        raise UserError(f"The label {value!r} in {place} is none of those known: {shown}.")
    number = _number(value, place)
    if number >= len(names):
        raise UserError(
            f"The label {number} in {place} is out of range: labels go from 0 to {len(names) - 1}."
        )
    return number


def as_number(value: Any) -> int | None:
    """A whole number however it is written, or None."""
    if isinstance(value, bool | int):
        return int(value)
    if isinstance(value, float):
        return int(value) if value.is_integer() else None
    try:
        return int(str(value).strip())
    except ValueError:
        return None


def _number(value: Any, place: str) -> int:
    if _missing(value):
        raise UserError(f"The label is missing in {place}: add it or remove the row.")
    number = as_number(value)
    if number is None:
        raise UserError(
            f"The label {value!r} in {place} is not a whole number: labels are either all whole "
            "numbers from 0 or all names."
        )
    if number < 0:
        raise UserError(f"The label {number} in {place} is out of range: labels begin with 0.")
    return number


def _name(value: Any, place: str) -> str:
    if _missing(value):
        raise UserError(f"The label is missing in {place}: add it or remove the row.")
    try:
        float(value)
    except (TypeError, ValueError):
        return str(value).strip()
    if as_number(value) is not None:
        raise UserError(
            f"The label {value!r} in {place} is a number, while the first one is a name: labels "
            "are either all whole numbers from 0 or all names."
        )
    return str(_number(value, place))  # a number that is not whole, which is refused there


def _missing(value: Any) -> bool:
    return value is None or (isinstance(value, str) and not value.strip())

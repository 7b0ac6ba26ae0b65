"""How similarities look in every figure of Lazy Transformers."""

from __future__ import annotations

import numpy as np

Values = np.ndarray | float


def _forward(similarity: Values) -> np.ndarray:
    return 1.0 - np.sqrt(np.clip(1.0 - np.asarray(similarity), 0.0, 1.0))


def _backward(place: Values) -> np.ndarray:
    return 1.0 - (1.0 - np.asarray(place)) ** 2


#: A scale, and its inverse, on which a similarity, the squared cosine of an angle, stands as far
#: from 1 as the sine of that angle: states that hardly turn any more are still told apart.
BY_ANGLE = (_forward, _backward)
TICKS = (0.0, 0.5, 0.8, 0.9, 0.97, 0.99, 0.999, 1.0)

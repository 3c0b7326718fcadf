"""Lists in sentences."""

from __future__ import annotations

from collections.abc import Sequence

LARGER = "a larger micro-batch comes nearer, and only the whole batch in one part gives its gradient"
"""The way out where parts cannot be exact."""

_ROUNDING = 1e-12


def numbers(values: Sequence[float]) -> str:
    """Numbers, to four digits; rounding is zero.

    >>> numbers([0.5, 1 / 3]), numbers([-2e-16, 1.0])
    ('0.5 and 0.3333', '0 and 1')
    """
    least = _ROUNDING * max((abs(value) for value in values), default=0.0)
    words = [f"{0.0 if abs(value) <= least else value:.4g}" for value in values]
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"

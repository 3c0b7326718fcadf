"""Lists in sentences."""

from __future__ import annotations

from collections.abc import Sequence

from autoaccum.accumulation.company.findings import ITSELF

LARGER = "a larger micro-batch comes nearer, and only the whole batch in one part gives its gradient"
"""The way out where parts cannot be exact."""

_SHOWN = 5
_ROUNDING = 1e-12


def listed(names: Sequence[str]) -> str:
    """The first names, and how many more there are.

    >>> listed(["a", "b"]), listed([f"layer{index}" for index in range(7)])
    ('a and b', 'layer0, layer1, layer2, layer3, layer4 and 2 more')
    """
    shown, more = list(names[:_SHOWN]), len(names) - _SHOWN
    if more > 0:
        shown.append(f"{more} more")
    return shown[0] if len(shown) == 1 else f"{', '.join(shown[:-1])} and {shown[-1]}"


def modules(names: Sequence[str]) -> str:
    """Modules by name.

    >>> modules(["0"]), modules(["0", "2"])
    ('module 0', 'modules 0 and 2')
    """
    if list(names) == [ITSELF]:
        return ITSELF
    return f"module{'s' * (len(names) > 1)} {listed(names)}"


def numbers(values: Sequence[float]) -> str:
    """Numbers, to four digits; rounding is zero.

    >>> numbers([0.5, 1 / 3]), numbers([-2e-16, 1.0])
    ('0.5 and 0.3333', '0 and 1')
    """
    least = _ROUNDING * max((abs(value) for value in values), default=0.0)
    words = [f"{0.0 if abs(value) <= least else value:.4g}" for value in values]
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"

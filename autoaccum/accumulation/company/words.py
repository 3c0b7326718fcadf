"""Lists of names in sentences."""

from __future__ import annotations

from collections.abc import Sequence

ITSELF = "the model itself"
"""What the outermost module is called."""

COMPARED = (
    "the loss compares samples with each other (in-batch negatives?) and sees one micro-batch at a time, so that the"
    " gradient is not the full batch's: `autoaccum verify` tells by how much"
)
"""Where a table of samples by samples is seen on the way to the loss."""

_SHOWN = 5


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
    inner = [name for name in names if name != ITSELF]
    if not inner:
        return ITSELF
    outer = f", and {ITSELF}" if len(inner) < len(names) else ""
    return f"module{'s' * (len(inner) > 1)} {listed(inner)}{outer}"

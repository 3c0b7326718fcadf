"""By how much memory may grow before a guard says no."""

from __future__ import annotations

import re
from dataclasses import dataclass

from autoaccum.errors import UsageError
from autoaccum.units import format_bytes, parse_size

_SHARE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*%\s*", re.ASCII)
_NOTHING = re.compile(r"\s*0+(?:\.0+)?\s*[KMGT]?i?B\s*", re.ASCII | re.IGNORECASE)
_LONGEST_SHOWN = 40


@dataclass(frozen=True)
class Tolerance:
    """A share of what there was, or bytes.

    Attributes:
        fraction: Such as 0.01 of 1 %; None: `bytes` tells.
        bytes: Whatever there was; None: `fraction` tells.
    """

    fraction: float | None = 0.01
    bytes: int | None = None

    def __str__(self) -> str:
        """As it is written in sentences."""
        return f"{100 * (self.fraction or 0):g} %" if self.bytes is None else format_bytes(self.bytes)

    def allowed_bytes(self, before_bytes: int) -> int:
        """By how many bytes `before_bytes` may grow, or have to shrink to be told."""
        return int(before_bytes * (self.fraction or 0)) if self.bytes is None else self.bytes

    def allows(self, before_bytes: int, now_bytes: int, spread_bytes: int = 0) -> bool:
        """Whether `now_bytes` is no more than what may have become of `before_bytes`.

        Args:
            before_bytes: What there was.
            now_bytes: What there is.
            spread_bytes: How far apart equal runs are, on top of the tolerance.
        """
        return now_bytes - before_bytes <= self.allowed_bytes(before_bytes) + spread_bytes


def parse_tolerance(text: str) -> Tolerance:
    """Read `1%`, `0.5 %` or `50MiB`; `0%` and `0B` allow nothing.

    Raises:
        UsageError: It is neither a share up to 100 % nor a size.

    >>> parse_tolerance("0.5 %").fraction, parse_tolerance("50MiB").bytes, str(parse_tolerance("1%"))
    (0.005, 52428800, '1 %')
    """
    share = _SHARE.fullmatch(text) if isinstance(text, str) else None
    if share is not None and float(share[1]) <= 100:
        return Tolerance(fraction=float(share[1]) / 100)
    if isinstance(text, str) and _NOTHING.fullmatch(text):
        return Tolerance(fraction=None, bytes=0)
    try:
        if share is None and isinstance(text, str):
            return Tolerance(fraction=None, bytes=parse_size(text).bytes)
    except UsageError:
        pass
    shown = repr(text) if len(repr(text)) <= _LONGEST_SHOWN else f"{repr(text)[:_LONGEST_SHOWN]}..."
    raise UsageError(
        f"the tolerance {shown} is neither a share up to 100% nor a size", hint="write such as 1%, 0.5% or 50MiB"
    )

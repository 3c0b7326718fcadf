"""Sizes of memory: read `10GiB` or `80%` from the user, show bytes and percentages."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from autoaccum.errors import UsageError

KIB = 1024
MIB = 1024**2
GIB = 1024**3

_UNITS = {
    "B": 1,
    "KIB": KIB,
    "MIB": MIB,
    "GIB": GIB,
    "TIB": 1024**4,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
}
_SHOWN_UNITS = ("TiB", "TB", "GiB", "GB", "MiB", "MB", "KiB", "KB", "B")
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]+|%)\s*", re.ASCII)
_MOST_BYTES = 1024**6
_LEAST_PERCENT = 0.001
_ONE_DIGIT_PERCENT = 0.05


@dataclass(frozen=True)
class MemorySize:
    """An amount of memory as the user gives it: bytes, or a fraction of a total that is known later."""

    bytes: int | None = None
    fraction: float | None = None

    def __str__(self) -> str:
        """Return the size as `parse_size` reads it.

        >>> str(parse_size("10GiB")), str(parse_size("24GB")), str(parse_size("80%"))
        ('10GiB', '24GB', '80%')
        """
        if self.bytes is None:
            return f"{100 * (self.fraction or 0):.12g}%"
        unit = next(unit for unit in _SHOWN_UNITS if self.bytes % _UNITS[unit.upper()] == 0)
        return f"{self.bytes // _UNITS[unit.upper()]}{unit}"

    def resolve(self, total_bytes: int) -> int:
        """Return the amount in bytes on a device of `total_bytes`."""
        if self.bytes is not None:
            return self.bytes
        assert self.fraction is not None
        return int(total_bytes * self.fraction)


def parse_size(text: str) -> MemorySize:
    """Read `10GiB`, `24GB`, `512MiB` or `80%`.

    Raises:
        UsageError: The text is not a positive size with a unit, or a percentage outside (0, 100].

    >>> parse_size("80%").resolve(1000)
    800
    """
    hint = "write a number and a unit, such as 10GiB, 24GB, 512MiB, or a share of the total such as 80%"
    match = _SIZE.fullmatch(text)
    if match is None:
        raise UsageError(f"{text!r} is not a memory size", hint=hint)
    number, unit = float(match[1]), match[2].upper()
    if unit == "%":
        if not 0 < number <= 100:
            raise UsageError(f"{text!r} is not a share between 0% and 100%", hint=hint)
        return MemorySize(fraction=number / 100)
    if unit not in _UNITS:
        raise UsageError(f"{text!r} has the unknown unit {match[2]!r}", hint=hint)
    size = number * _UNITS[unit]
    if not 1 <= size <= _MOST_BYTES:
        raise UsageError(f"{text[:40]!r} is not a possible size of memory", hint=hint)
    return MemorySize(bytes=int(size))


def format_bytes(count: int) -> str:
    """Format `count` bytes in a binary unit, such as GiB, that keeps the number short.

    >>> format_bytes(22_870_000_000)
    '21.3 GiB'
    >>> format_bytes(157_286_400)
    '150 MiB'
    """
    magnitude = abs(count)
    if magnitude >= 10 * 1024 * GIB:
        return f"{count / 1024 / GIB:.1f} TiB"
    if magnitude >= GIB:
        return f"{count / GIB:.1f} GiB"
    if magnitude >= 100 * MIB:
        return f"{count / MIB:.0f} MiB"
    if magnitude >= MIB:
        return f"{count / MIB:.1f} MiB"
    if magnitude >= KIB:
        return f"{count / KIB:.1f} KiB"
    return f"{count} B"


def precise_bytes(count: int) -> str:
    """Format `count` bytes as `format_bytes` does, but GiB with two digits, so that one percent is visible.

    >>> precise_bytes(15 * GIB + GIB // 4), precise_bytes(157_286_400)
    ('15.25 GiB', '150 MiB')
    """
    return f"{count / GIB:.2f} GiB" if GIB <= abs(count) < 10 * 1024 * GIB else format_bytes(count)


def signed_bytes(count: int) -> str:
    """Format a change in bytes, with its sign, as `precise_bytes` does.

    >>> signed_bytes(2 * GIB), signed_bytes(-MIB), signed_bytes(0)
    ('+2.00 GiB', '-1.0 MiB', '0 B')
    """
    return f"+{precise_bytes(count)}" if count > 0 else precise_bytes(count)


def percent(part: float, whole: float, *, sign: bool = False) -> str:
    """Format `part` as a percentage of `whole`, never rounding a change to 0; with `sign`, a plus is shown too.

    >>> percent(83, 1000), percent(83, 1000, sign=True), percent(-2, 100_000, sign=True)
    ('8.3 %', '+8.3 %', '-0.002 %')
    >>> percent(-1, 10**9), percent(1, 0)
    ('-<0.001 %', 'from 0')
    """
    if not whole:
        return "from 0"
    share = 100 * part / whole
    before, size = "-" if share < 0 else "+" if sign and share else "", abs(share)
    if 0 < size < _LEAST_PERCENT:
        return f"{before}<{_LEAST_PERCENT} %"
    digits = ".1g" if 0 < size < _ONE_DIGIT_PERCENT else ".1f" if size < 1000 else ".0f"
    return f"{before}{size:{digits}} %"


def format_parts(parts: Sequence[int]) -> str:
    """Write parts as a sum, in which equal ones are counted if there are more than four parts.

    >>> format_parts((86, 85, 85))
    '86 + 85 + 85'
    >>> format_parts((3,) * 86 + (2,))
    '86 x 3 + 2'
    """
    if len(parts) <= 4:
        return " + ".join(str(part) for part in parts)
    runs = [(len(list(equal)), part) for part, equal in groupby(parts)]
    return " + ".join(f"{count} x {part}" if count > 1 else f"{part}" for count, part in runs)


def format_rate(rate: float | None) -> str:
    """Write samples per second in three digits or more; a dash if they are not known.

    >>> format_rate(1234.5), format_rate(1.2345), format_rate(None)
    ('1,234', '1.23', '-')
    """
    return "-" if rate is None else f"{rate:,.0f}" if rate >= 100 else f"{rate:.3g}"


def format_overrides(overrides: Mapping[str, object]) -> str:
    """Write values that were set by name as they are given.

    >>> format_overrides({"lora": 16, "length": "2048"})
    'lora=16 length=2048'
    """
    return " ".join(f"{name}={value}" for name, value in overrides.items())

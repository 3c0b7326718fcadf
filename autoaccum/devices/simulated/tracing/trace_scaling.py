"""Extrapolate traces: the trace at any micro-batch, from the traces of a few small ones.

The size of every block must be an affine function of the micro-batch, with a whole-number slope and intercept; this is
checked at every size that was traced. A kernel's workspace may be rounded: its numbers are affine, and its rule rounds
them. Any other size, such as the B x B scores of a contrastive loss or rows padded to a multiple of 8 samples, raises
`NotAffineError`. Choose sizes without a common factor: padding to a divisor of all of them would go unnoticed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import NamedTuple

from autoaccum.devices.simulated.trace import Trace, Workspace
from autoaccum.errors import AutoaccumError


class NotAffineError(AutoaccumError):
    """Traces of a few sizes do not tell those of others: each has to be traced."""


_HINT = "trace that size"


class _Line(NamedTuple):
    """`base + slope * size`."""

    base: int
    slope: int

    def at(self, size: int) -> int:
        return self.base + self.slope * size


@dataclass(frozen=True)
class AffineTrace:
    """Traces of one rehearsal at any micro-batch.

    Attributes:
        sizes: The micro-batches that were traced, ascending: the first is the least it can tell.
        model: The trace of the smallest.
    """

    sizes: tuple[int, ...]
    model: Trace
    _lines: tuple[tuple[_Line, ...], ...]

    def at(self, size: int) -> Trace:
        """The trace at a micro-batch of `size` samples."""
        if size < self.sizes[0]:
            raise NotAffineError(
                f"{size} samples are fewer than {self.sizes[0]}, from where on sizes follow", hint=_HINT
            )
        grown = []
        for block, (lines, known) in enumerate(zip(self._lines, self.model.sizes, strict=True)):
            numbers = tuple(line.at(size) for line in lines)
            if any(number < 0 and line.slope for line, number in zip(lines, numbers, strict=True)):
                raise NotAffineError(f"block {block} would take {min(numbers)} at {size} samples", hint=_HINT)
            grown.append(Workspace(known.rule, numbers) if isinstance(known, Workspace) else numbers[0])
        return replace(self.model, parts=(size,) * len(self.model.parts), sizes=tuple(grown))


def fit_affine_trace(traces: Sequence[Trace]) -> AffineTrace:
    """Make a family of traces of the same number of equal parts, at two sizes or more.

    Raises:
        NotAffineError: They are not alike, or a size is no whole multiple of the batch and a rest.
        ValueError: There are fewer than two sizes, or the parts of a trace are not equal.
    """
    by_size = {trace.parts[0]: trace for trace in traces}
    if len(by_size) < 2 or any(set(trace.parts) != {trace.parts[0]} for trace in traces):
        raise ValueError(f"a family needs equal parts at two sizes, not {[trace.parts for trace in traces]}")
    sizes = tuple(sorted(by_size))
    ordered = [by_size[size] for size in sizes]
    for other in ordered[1:]:
        _check_alike(ordered[0], other)
    lines = tuple(_lines_of(block, ordered) for block in range(len(ordered[0].sizes)))
    return AffineTrace(sizes, ordered[0], lines)


def grows_quadratically(traces: Sequence[Trace]) -> bool:
    """Return whether some block grows with the square of the micro-batch, as a table of samples by samples does."""
    sizes = [trace.parts[0] for trace in traces]
    rows = zip(*(trace.sizes for trace in traces), strict=False)
    return len(set(sizes)) > 2 and any(_is_square(sizes, [n for n in row if isinstance(n, int)]) for row in rows)


def _is_square(sizes: Sequence[int], values: Sequence[int]) -> bool:
    return len(values) == len(sizes) and all(
        value > 0 and value * sizes[0] ** 2 == values[0] * size**2 for size, value in zip(sizes, values, strict=True)
    )


def _check_alike(one: Trace, other: Trace) -> None:
    sizes = f"at {one.parts[0]} and {other.parts[0]} samples"
    if len(one.parts) != len(other.parts):
        raise NotAffineError(f"{len(one.parts)} parts and {len(other.parts)} parts make no family")
    for index, (event, another) in enumerate(zip_longest(one.events, other.events)):
        if event != another:
            raise NotAffineError(f"event {index} of the step is another {sizes}")
    if (one.phases, one.last_update) != (other.phases, other.last_update):
        raise NotAffineError(f"the phases of the step are not in the same places {sizes}")
    for block, (size, another) in enumerate(zip(one.sizes, other.sizes, strict=True)):
        if _rule(size) != _rule(another):
            raise NotAffineError(f"block {block} is of another kind {sizes}")


def _rule(size: int | Workspace) -> tuple[str, int]:
    return (size.rule, len(size.numbers)) if isinstance(size, Workspace) else ("", 1)


def _lines_of(block: int, traces: Sequence[Trace]) -> tuple[_Line, ...]:
    rows = [size.numbers if isinstance(size, Workspace) else (size,) for size in (one.sizes[block] for one in traces)]
    sizes = [trace.parts[0] for trace in traces]
    lines = []
    for column in zip(*rows, strict=True):
        line = _line(sizes, column)
        if line is None:
            raise NotAffineError(f"block {block} takes {_list(column)} at {_list(sizes)} samples")
        lines.append(line)
    return tuple(lines)


def _line(sizes: Sequence[int], values: Sequence[int]) -> _Line | None:
    """The line through all points, with whole numbers; None where there is none."""
    slope, rest = divmod(values[-1] - values[0], sizes[-1] - sizes[0])
    line = _Line(values[0] - slope * sizes[0], slope)
    if rest or any(line.at(size) != value for size, value in zip(sizes, values, strict=True)):
        return None
    return line


def _list(values: Sequence[int]) -> str:
    return ", ".join(map(str, values))

"""Extrapolate traces: the trace at any micro-batch, from the traces of a few small ones.

The size of every block must be an affine function of the micro-batch, with a whole-number slope and intercept; this is
checked at every size that was traced. A kernel's workspace may be rounded: its numbers are affine, and its rule rounds
them. Any other size, such as the B x B scores of a contrastive loss or rows padded to a multiple of 8 samples, raises
`NotAffineError`. Choose sizes without a common factor: padding to a divisor of all of them would go unnoticed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby, zip_longest
from typing import NamedTuple

from autoaccum.errors import AutoaccumError
from autoaccum.simulation.trace_records import Trace, Workspace

_HINT = "trace this size"


class NotAffineError(AutoaccumError):
    """The traces are not affine in the micro-batch, so each size has to be traced."""


class _Affine(NamedTuple):
    """The affine function `intercept + slope * size`."""

    intercept: int
    slope: int

    def at(self, size: int) -> int:
        return self.intercept + self.slope * size


@dataclass(frozen=True)
class AffineTrace:
    """The trace of a trial run as a function of the micro-batch.

    Attributes:
        sizes: The micro-batches that were traced, ascending; `at` takes none below the first.
        smallest: The trace of the first.
        of_second: The growing blocks whose sizes are by the second of two parts; None: not known (`tell_parts_apart`).
    """

    sizes: tuple[int, ...]
    smallest: Trace
    _functions: tuple[tuple[_Affine, ...], ...]
    _host: _Affine | None = None
    of_second: frozenset[int] | None = None

    @cached_property
    def _growing(self) -> dict[tuple[tuple[_Affine, ...], str, bool], list[int]]:
        """The blocks whose sizes are not the same in all traces, by functions, rule, and whether they are `of_second`.

        Layers are alike, so that many blocks are computed as one.
        """
        alike: dict[tuple[tuple[_Affine, ...], str, bool], list[int]] = {}
        for block, functions in enumerate(self._functions):
            if any(function.slope for function in functions):
                rule, _ = _kind(self.smallest.sizes[block])
                alike.setdefault((functions, rule, block in (self.of_second or ())), []).append(block)
        return alike

    def at(self, first: int, second: int | None = None) -> Trace:
        """Return the trace at micro-batches of `first` samples; or at two parts, if they were told apart."""
        least = first if second is None else min(first, second)
        if least < self.sizes[0]:
            raise NotAffineError(
                f"{least} samples are fewer than {self.sizes[0]}, the smallest size traced", hint=_HINT
            )
        if second is not None and self.of_second is None:
            raise NotAffineError(f"{first} and {second} samples were not told apart", hint=_HINT)
        sizes = list(self.smallest.sizes)
        for (functions, rule, is_second), blocks in self._growing.items():
            size = second if second is not None and is_second else first
            numbers = tuple([intercept + slope * size for intercept, slope in functions])
            if min(numbers) < 0 and any(function.slope and function.at(size) < 0 for function in functions):
                raise NotAffineError(f"block {blocks[0]} would take {min(numbers)} at {size} samples", hint=_HINT)
            taken = Workspace(rule, numbers) if rule else numbers[0]
            for block in blocks:
                sizes[block] = taken
        host_bytes = None if self._host is None else self._host.at(first)
        parts = (first,) * len(self.smallest.parts) if second is None else (first, second)
        return replace(self.smallest, parts=parts, sizes=tuple(sizes), host_bytes=host_bytes)


def fit_affine_trace(traces: Sequence[Trace]) -> AffineTrace:
    """Fit traces of the same number of equal parts, at two sizes or more.

    Raises:
        NotAffineError: The traces have different events or phases, or a size is not affine in the micro-batch.
        ValueError: There are fewer than two sizes, or the parts of a trace are not equal.
    """
    by_size = {trace.parts[0]: trace for trace in traces}
    if len(by_size) < 2 or any(set(trace.parts) != {trace.parts[0]} for trace in traces):
        raise ValueError(f"traces must have equal parts and two sizes, not {[trace.parts for trace in traces]}")
    sizes = tuple(sorted(by_size))
    ordered = [by_size[size] for size in sizes]
    for other in ordered[1:]:
        _check_same_events(ordered[0], other)
    fitted: dict[tuple[int | Workspace, ...], tuple[_Affine, ...]] = {}
    rows = list(zip(*(trace.sizes for trace in ordered), strict=True))
    for block, row in enumerate(rows):
        if row not in fitted:
            fitted[row] = _fit_block(block, ordered)
    on_host = [trace.host_bytes for trace in ordered if trace.host_bytes is not None]
    host = _fit(sizes, on_host) if len(on_host) == len(sizes) else None
    return AffineTrace(sizes, ordered[0], tuple(fitted[row] for row in rows), host)


def tell_parts_apart(affine: AffineTrace, mixed: Trace) -> AffineTrace:
    """Tell by a trace of two parts of different sizes which blocks are of which, so that any pair can be extrapolated.

    Raises:
        NotAffineError: The trace has other events, or a block that is of neither part alone.
    """
    _check_same_events(affine.smallest, mixed)
    of_second = []
    pair = zip(affine.at(mixed.parts[0]).sizes, affine.at(mixed.parts[1]).sizes, strict=True)
    for block, (size, (first, second)) in enumerate(zip(mixed.sizes, pair, strict=True)):
        if size not in (first, second):
            raise NotAffineError(f"block {block} takes {size} at {_list(mixed.parts)} samples")
        if size != first:
            of_second.append(block)
    return replace(affine, of_second=frozenset(of_second))


def grows_quadratically(traces: Sequence[Trace]) -> bool:
    """Return whether some block grows with the square of the micro-batch, as a matrix of samples by samples does."""
    sizes = [trace.parts[0] for trace in traces]
    rows = zip(*(trace.sizes for trace in traces), strict=False)
    return len(set(sizes)) > 2 and any(_is_square(sizes, [n for n in row if isinstance(n, int)]) for row in rows)


def _is_square(sizes: Sequence[int], values: Sequence[int]) -> bool:
    return len(values) == len(sizes) and all(
        value > 0 and value * sizes[0] ** 2 == values[0] * size**2 for size, value in zip(sizes, values, strict=True)
    )


def _check_same_events(first: Trace, other: Trace) -> None:
    sizes = f"at {first.parts[0]} and {other.parts[0]} samples"
    if len(first.parts) != len(other.parts):
        raise NotAffineError(f"{len(first.parts)} parts and {len(other.parts)} parts cannot be compared")
    if first.events != other.events:
        for index, (event, another) in enumerate(zip_longest(_in_order(first), _in_order(other))):
            if event != another:
                raise NotAffineError(f"event {index} of the step differs {sizes}")
    if (first.phases, first.last_update) != (other.phases, other.last_update):
        raise NotAffineError(f"the phases of the step differ {sizes}")
    for block, (size, another) in enumerate(zip(first.sizes, other.sizes, strict=True)):
        if _kind(size) != _kind(another):
            raise NotAffineError(f"block {block} is of different kinds {sizes}")


def _in_order(trace: Trace) -> list[int]:
    """Return the events with frees in a row in the order of their blocks.

    Whichever comes first, they leave the same memory; and autograd lets go of some tensors in an order that varies.
    """
    ordered: list[int] = []
    for update in (trace.events[: trace.last_update], trace.events[trace.last_update :]):
        for are_frees, row in groupby(update, lambda event: event < 0):
            events = list(row)
            ordered += sorted(events) if are_frees else events
    return ordered


def _kind(size: int | Workspace) -> tuple[str, int]:
    return (size.rule, len(size.numbers)) if isinstance(size, Workspace) else ("", 1)


def _fit_block(block: int, traces: Sequence[Trace]) -> tuple[_Affine, ...]:
    taken = [trace.sizes[block] for trace in traces]
    rows = [size.numbers if isinstance(size, Workspace) else (size,) for size in taken]
    sizes = [trace.parts[0] for trace in traces]
    functions = []
    for column in zip(*rows, strict=True):
        function = _fit(sizes, column)
        if function is None:
            raise NotAffineError(f"block {block} takes {_list(column)} at {_list(sizes)} samples")
        functions.append(function)
    return tuple(functions)


def _fit(sizes: Sequence[int], values: Sequence[int]) -> _Affine | None:
    """Return the affine function with whole numbers through all points; None if there is none."""
    slope, remainder = divmod(values[-1] - values[0], sizes[-1] - sizes[0])
    function = _Affine(values[0] - slope * sizes[0], slope)
    if remainder or any(function.at(size) != value for size, value in zip(sizes, values, strict=True)):
        return None
    return function


def _list(values: Sequence[int]) -> str:
    return ", ".join(map(str, values))

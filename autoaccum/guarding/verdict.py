"""Judge one case: whether memory grew more than the tolerance, for what and in which modules, and what still fits."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from autoaccum.checks import join_words
from autoaccum.devices.explanation import Holding
from autoaccum.errors import NotMeasuredError
from autoaccum.guarding.cases import Case
from autoaccum.guarding.guard_result import Growth, Measurement, Verdict
from autoaccum.simulation.allocator.caching_allocator import LARGE_SEGMENT_BYTES
from autoaccum.simulation.trace_records import CATEGORIES, Category
from autoaccum.sources.module_names import compact_names, mask_numbers
from autoaccum.units import MemorySize, percent, precise_bytes, signed_bytes

_ROUNDING: Final = 1e-9
_SHORT: Final = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "float64": "fp64"}
_PERSISTENT: Final[tuple[Category, ...]] = ("parameters", "gradients", "optimizer_state", "averages")
_LITTLE: Final = 0.1
"""A module with no more than this share of the changes is counted with the others."""
_MOST: Final = 3
"""More modules than this are named by the modules that contain them; and so many causes are named."""


def compare(case: Case, before: Measurement, now: Measurement, tolerance: MemorySize, *, command: str = "") -> Verdict:
    """Compare what a case takes now with a lock or another revision, and return the verdict.

    `command` writes what was measured to the lock; empty where there is no lock.
    """
    verdict = Verdict(case=case, outcome="passed", before=before, now=now, warnings=now.warnings)
    if unlike := tuple(_incomparable(before, now)):
        hint = "compare with a revision by --baseline REV, or lock anew on a branch that is right"
        failed: dict[str, Any] = {"outcome": "unmeasured", "exit_code": NotMeasuredError.exit_code, "hint": hint}
        return dataclasses.replace(verdict, reasons=unlike, command=command, **failed)
    change = _Comparison(before, now, tolerance)
    sign = 1 if change.reasons or (change.peak or change.held or change.least) >= 0 else -1
    growths = find_growths(before, now, sign)
    verdict = dataclasses.replace(verdict, growths=growths, explanation=change.explain(case, growths, sign))
    if not change.reasons:
        return verdict
    hint = "if it is meant, lock it in" if command else ""
    return dataclasses.replace(
        verdict, outcome="regressed", exit_code=1, reasons=change.reasons, hint=hint, command=command
    )


def _incomparable(before: Measurement, now: Measurement) -> Iterator[str]:
    """Say why two measurements cannot be compared: another schedule, card, version or setting."""
    if before.micro_batches != now.micro_batches:
        was, is_now = (" + ".join(map(str, measured.micro_batches)) for measured in (before, now))
        yield f"the earlier measurement has micro-batches of {was}, this one has {is_now}"
    if before.card != now.card:
        yield f"the lock was measured on {before.card}, this is {now.card}"
    for name in sorted({*before.environment, *now.environment}):
        was, is_now = (measured.environment.get(name, "not set") for measured in (before, now))
        if was != is_now:
            yield f"the lock was written with {name} {was}, here it is {is_now}"


class _Comparison:
    """What changed in the memory of an update, in bytes, and the reasons why it regressed.

    There are three quantities: the memory that the allocator reserves without a limit (`peak`), the most that tensors
    hold (`held`), and the smallest budget at which the update still runs (`least`). A single one may change only
    because blocks happen to be packed in another way.
    """

    def __init__(self, before: Measurement, now: Measurement, tolerance: MemorySize) -> None:
        self._before, self._now, self._tolerance = before, now, tolerance
        self.peak = now.peak_bytes - before.peak_bytes
        self.held = now.held_bytes - before.held_bytes
        self.least = now.min_budget_bytes - before.min_budget_bytes
        self.reasons = tuple(self._reasons())

    def _reasons(self) -> Iterator[str]:
        """Say what regressed, the most important first."""
        before, now = self._before, self._now
        if before.fits and not now.fits:
            yield now.shortfall.replace("does not fit", "does not fit any more")
        if now.largest < before.largest - self._samples_allowed:
            yield f"the largest micro-batch that fits fell from {before.largest} to {now.largest}"
        regressed = self._regressed()
        if regressed is not None:
            name, grown, was = regressed
            yield f"{name} grew by {precise_bytes(grown)} ({percent(grown, was)}), {self._tolerance} is allowed"

    def _regressed(self) -> tuple[str, int, int] | None:
        """Return the quantity that regressed, if any: its name, its growth, and what it was.

        It is the peak if another one grew too or by a whole segment, else what is held. Where both peaks are above the
        budget, the smallest budget counts in place of the peak.
        """
        before, allowed = self._before, self._tolerance.resolve
        held = self.held > allowed(before.held_bytes)
        least = self.least > allowed(before.min_budget_bytes)
        name, growth, was = "the peak", self.peak, before.peak_bytes
        if all(measured.peak_bytes > measured.limit_bytes for measured in (before, self._now)):
            name, growth, was = "the smallest budget", self.least, before.min_budget_bytes
        if growth > allowed(was) and (growth >= LARGE_SEGMENT_BYTES or held or least):
            return name, growth, was
        return ("what is held at the peak", self.held, before.held_bytes) if held and self.least >= 0 else None

    @property
    def _samples_allowed(self) -> int:
        """How much the largest micro-batch may fall, in samples: by the tolerance's share of it."""
        largest, peak_bytes = self._before.largest, max(self._before.peak_bytes, 1)
        share = self._tolerance.fraction
        share = (self._tolerance.bytes or 0) / peak_bytes if share is None else share
        return math.floor(largest * min(share, 1.0) + _ROUNDING)

    def explain(self, case: Case, growths: Sequence[Growth], sign: int) -> str:
        """Say in one line what grew (by `sign` -1: shrank), for what, and what fits now; empty for no change."""
        before, now = self._before, self._now
        changes = (
            (self.peak, before.peak_bytes, ""),
            (self.held, before.held_bytes, " held at the peak"),
            (self.least, before.min_budget_bytes, " of the smallest budget"),
        )
        # One that changed in the direction of `sign`, else any.
        most = max((change for change in changes if change[0]), key=lambda change: change[0] * sign > 0, default=None)
        text = ""
        if most is not None:
            growth, was, name = most
            text = f"{signed_bytes(growth)} ({percent(growth, was, sign=True)}){name}"
        text = ": ".join(filter(None, (text, ", ".join(_causes(before, now, growths, sign)))))
        if before.largest == now.largest:
            return text
        fits = f"{case.options.gpu} now holds {now.largest or 'none'} instead of {before.largest}"
        return "; ".join(filter(None, (text, fits)))


def _causes(before: Measurement, now: Measurement, growths: Sequence[Growth], sign: int) -> Iterator[str]:
    """Name the largest growths, another phase of the peak, and changed settings of the update."""
    most = max((sign * growth.bytes for growth in growths), default=0)
    large = [growth for growth in growths if sign * growth.bytes > _LITTLE * most]
    for growth in sorted(large, key=lambda growth: growth.category == "unused")[:_MOST]:
        yield f"{growth.what} {signed_bytes(growth.bytes)}{f' ({growth.change})' if growth.change else ''}"
    if before.phase and now.phase and before.phase != now.phase:
        yield f"the peak moved from {before.phase} to {now.phase}"
    for name in now.update:
        if before.update.get(name) != now.update[name]:
            yield f"{name} {before.update.get(name)} -> {now.update[name]}"


_Changes = Sequence[tuple[Holding, int]]
"""What is held before, each with -1, and what is held now, each with 1."""


def find_growths(before: Measurement, now: Measurement, sign: int = 1) -> tuple[Growth, ...]:
    """Return what grew and shrank; all of it adds up to the growth of the peak.

    What grew comes first, or by a `sign` of -1 what shrank. A module with another name is another module.
    """
    changes = [(holding, side) for side, measured in ((-1, before), (1, now)) for holding in measured.holdings]
    growths = [
        growth
        for category in CATEGORIES
        for growth in _by_module([change for change in changes if change[0].category == category])
    ]
    unused = (now.peak_bytes - now.held_bytes) - (before.peak_bytes - before.held_bytes)
    growths.append(Growth(category="unused", module="", bytes=unused))
    return tuple(sorted((growth for growth in growths if growth.bytes), key=lambda growth: -sign * growth.bytes))


def _by_module(changes: _Changes) -> Iterator[Growth]:
    """Name the growth of a category by modules, as deep as at most three of them have nearly all of it.

    Persistent memory is that of a single module, or of the model. Modules that differ only in numbers are one. What is
    left is one growth without a module.
    """
    modules: dict[tuple[str, bool], list[tuple[Holding, int]]] = defaultdict(list)
    for holding, side in changes:  # The model itself has an empty name and a kind; what is in no module has neither.
        modules[holding.module, not holding.module and bool(holding.kind)].append((holding, side))
    yield from (_growth("", group) for (name, _), group in modules.items() if not name)
    inside = {name: group for (name, _), group in modules.items() if name and _net(group)}
    most = 1 if changes and changes[0][0].category in _PERSISTENT else _MOST
    named = set[str]()
    for depth in range(max((name.count(".") + 1 for name in inside), default=0), 0, -1):
        groups: dict[str, list[str]] = defaultdict(list)
        for name in inside:
            groups[mask_numbers(_cut(name, depth))].append(name)
        sizes = {pattern: sum(_net(inside[name]) for name in names) for pattern, names in groups.items()}
        little = _LITTLE * sum(map(abs, sizes.values()))
        large = {pattern: names for pattern, names in groups.items() if abs(sizes[pattern]) > little}
        if not 0 < len(large) <= most:
            continue
        for pattern, names in large.items():
            alike = {_cut(name, depth): None for name in names}
            is_named = len(alike) == 1 or bool(pattern.strip("*."))  # Several numbers alone name nothing.
            module = join_words(word for word, _ in compact_names(alike)) if is_named else ""
            yield _growth(module, [change for name in names for change in inside[name]])
            named.update(names)
        break
    if rest := [change for name, group in inside.items() if name not in named for change in group]:
        yield _growth("", rest)


def _cut(module: str, depth: int) -> str:
    """Return the module of this depth that a module lies in."""
    return ".".join(module.split(".")[:depth])


def _growth(module: str, changes: _Changes) -> Growth:
    what = _what_changed(module, changes)
    return Growth(category=changes[0][0].category, module=module, bytes=_net(changes), change=what)


def _what_changed(module: str, changes: _Changes) -> str:
    """Describe a change as a phrase, `bf16 -> fp32` or `new, aten.cat in fp32`; empty where only the size changed."""
    before, now = ([holding for holding, side in changes if side == wanted] for wanted in (-1, 1))
    last = (now or before)[0]
    is_persistent = last.category in _PERSISTENT
    where = ""
    if not module and not is_persistent:
        is_several = any(holding.module for holding, _ in changes)
        where = "in several modules" if is_several else "in the model itself" if last.kind else "in no module"
    if not now:
        return ", ".join(filter(None, ("gone", where)))
    ops, dtypes = Counter[str](), Counter[str]()
    for holding, side in changes:
        ops[holding.op] += side * holding.bytes
        dtypes[_SHORT.get(holding.dtype, holding.dtype)] += side * holding.bytes
    what = _moved(dtypes) or ("" if is_persistent else _moved(ops))
    op, dtype = max(ops, key=ops.__getitem__), max(dtypes, key=dtypes.__getitem__)
    is_new_op = op not in {holding.op for holding in before} and not (is_persistent and not before)
    if is_new_op and not what and where != "in several modules":
        what = f"{op} in {dtype}" if dtype else op
    return ", ".join(filter(None, ("" if before else "new", what, where)))


def _moved(change: Mapping[str, int]) -> str:
    """Name what shrank most and what grew most, where memory moved from one to the other."""
    grown, shrunk = max(change, key=change.__getitem__), min(change, key=change.__getitem__)
    moved = min(change[grown], -change[shrunk])
    is_much = moved * 8 >= max(change[grown], -change[shrunk])
    return f"{shrunk} -> {grown}" if moved > 0 and is_much and grown and shrunk else ""


def _net(changes: _Changes) -> int:
    return sum(side * holding.bytes for holding, side in changes)

"""Judge one case: whether memory grew more than the tolerance, for what and in which modules, and what still fits."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from autoaccum.devices.explanation import Holding
from autoaccum.errors import NotMeasuredError
from autoaccum.guarding.cases import Case
from autoaccum.guarding.guard_result import Growth, Measurement, Outcome, Tolerance, Verdict
from autoaccum.guarding.measuring import describe_shortfall
from autoaccum.simulation.allocator.caching_allocator import LARGE_SEGMENT_BYTES
from autoaccum.simulation.trace_records import CATEGORIES, Category
from autoaccum.sources.module_names import common_name, compact_names, mask_numbers
from autoaccum.units import percent, precise_bytes, signed_bytes

_ROUNDING: Final = 1e-9
_HINTS: Final[Mapping[Outcome, str]] = {"regressed": "if it is meant, lock it in", "improved": "lock it in"}
_SHORT: Final = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "float64": "fp64"}
_PERSISTENT: Final[tuple[Category, ...]] = ("parameters", "gradients", "optimizer_state", "averages")
_LITTLE: Final = 0.1
"""A module with no more than this share of the changes is counted with the others."""
_MOST: Final = 3
"""More modules than this are named by the modules that contain them; and so many causes are named."""


@dataclass(frozen=True)
class _Figure:
    """A quantity before and now."""

    name: str
    before_bytes: int
    now_bytes: int
    tolerance: Tolerance

    @property
    def growth_bytes(self) -> int:
        return self.now_bytes - self.before_bytes

    @property
    def grew(self) -> bool:
        return not self.tolerance.allows(self.before_bytes, self.now_bytes)

    @property
    def shrank(self) -> bool:
        return not self.tolerance.allows(self.now_bytes, self.before_bytes)

    @property
    def change(self) -> str:
        return f"{signed_bytes(self.growth_bytes)} ({percent(self.growth_bytes, self.before_bytes, sign=True)})"


class _Comparison:
    """The memory of an update, before and now.

    It has three quantities: the memory that the allocator reserves without a limit (`peak`), the most that
    tensors hold (`held`), and the smallest budget at which the update still runs (`least`). A single one may change
    only because blocks happen to be packed in another way. Where both peaks are above the budget, the least budget is
    compared instead.
    """

    def __init__(self, before: Measurement, now: Measurement, tolerance: Tolerance) -> None:
        self.before, self.now, self.tolerance = before, now, tolerance
        self.held = _Figure("what is held at the peak", before.held_bytes, now.held_bytes, tolerance)
        self.least = _Figure("the least budget", before.least_bytes, now.least_bytes, tolerance)
        peak = _Figure("the peak", before.peak_bytes, now.peak_bytes, tolerance)
        is_above = all(measured.peak_bytes > measured.limit_bytes for measured in (before, now))
        self.peak = self.least if is_above else peak
        self.figures = (self.peak, self.held, self.least)

    @property
    def worse(self) -> _Figure | None:
        """The quantity that regressed, if any: the peak if another one grew too or by a whole segment, else `held`."""
        is_large = self.peak.growth_bytes >= LARGE_SEGMENT_BYTES
        if self.peak.grew and (is_large or self.held.grew or self.least.grew):
            return self.peak
        return self.held if self.held.grew and self.least.growth_bytes >= 0 else None

    @property
    def fell(self) -> bool:
        """True if the largest micro-batch that fits fell by more than is allowed."""
        return self.now.largest < self.before.largest - self._samples_allowed

    @property
    def passing_outcome(self) -> Outcome:
        """The outcome where nothing regressed; a peak has to shrink by a whole segment to be an improvement."""
        before, now = self.before, self.now
        equal = [(each.largest, each.fits, each.categories, each.peak_bytes) for each in (before, now)]
        if equal[0] == equal[1] and not self.least.growth_bytes:
            return "unchanged"
        is_less = self.peak.shrank and -self.peak.growth_bytes >= LARGE_SEGMENT_BYTES
        fits_more = now.largest > before.largest + self._samples_allowed or (now.fits and not before.fits)
        improved = is_less or self.held.shrank or self.least.shrank or fits_more
        return "improved" if improved and not any(figure.grew for figure in self.figures) else "within"

    @property
    def _samples_allowed(self) -> int:
        """The change of the largest micro-batch, in samples, that counts as no change: the tolerance's share of it."""
        largest, peak_bytes = self.before.largest, max(self.before.peak_bytes, 1)
        share = self.tolerance.fraction
        share = (self.tolerance.bytes or 0) / peak_bytes if share is None else share
        return math.floor(largest * min(share, 1.0) + _ROUNDING)


def compare(case: Case, before: Measurement, now: Measurement, tolerance: Tolerance, *, command: str = "") -> Verdict:
    """Compare what a case takes now with a lock or another revision, and return the verdict.

    `command` writes what was measured to the lock; empty where there is no lock.
    """
    verdict = Verdict(case=case, outcome="unmeasured", before=before, now=now, warnings=now.warnings)
    unlike = tuple(_incomparable(before, now))
    if unlike:
        hint = "compare with a revision by --baseline REV, or lock anew on a branch that is right"
        exit_code = NotMeasuredError.exit_code
        return dataclasses.replace(verdict, exit_code=exit_code, reasons=unlike, hint=hint, command=command)
    comparison = _Comparison(before, now, tolerance)
    reasons = tuple(_reasons(comparison))
    outcome: Outcome = "regressed" if reasons else comparison.passing_outcome
    grown = (now.peak_bytes - before.peak_bytes) or comparison.held.growth_bytes
    sign = {"regressed": 1, "improved": -1}.get(outcome, -1 if grown < 0 else 1)
    growths = find_growths(before, now, sign)
    budgets = [precise_bytes(measured.limit_bytes) for measured in (before, now)]
    return dataclasses.replace(
        verdict,
        outcome=outcome,
        exit_code=1 if reasons else 0,
        reasons=reasons,
        hint=_HINTS.get(outcome, "") if command else "",
        command=command if outcome in _HINTS else "",
        explanation="" if outcome == "unchanged" else _explain(case, comparison, growths, sign),
        growths=growths,
        notes=() if budgets[0] == budgets[1] else (f"the budget was {budgets[0]}, it is {budgets[1]} now",),
    )


def _incomparable(before: Measurement, now: Measurement) -> Iterator[str]:
    """Say why two measurements cannot be compared: another schedule, card, versions or settings."""
    if before.micro_batches != now.micro_batches:
        was, is_now = (" + ".join(map(str, measured.micro_batches)) for measured in (before, now))
        yield f"the earlier measurement has micro-batches of {was}, this one has {is_now}"
    if before.card != now.card:
        yield f"the lock was measured on {before.card}, this is {now.card}"
    for were, are in ((before.versions, now.versions), (before.settings, now.settings)):
        for name in sorted({*were, *are}):
            if were.get(name) != are.get(name):
                was, is_now = were.get(name, "not set"), are.get(name, "not set")
                yield f"the lock was written with {name} {was}, here it is {is_now}"


def _reasons(comparison: _Comparison) -> Iterator[str]:
    """Say what regressed, the most important first."""
    before, now, worse = comparison.before, comparison.now, comparison.worse
    if before.fits and not now.fits:
        yield f"micro-batch {now.micro_batch} does not fit any more: {describe_shortfall(now)}"
    if comparison.fell:
        yield f"the largest micro-batch that fits fell from {before.largest} to {now.largest}"
    if worse is not None:
        grown = f"{precise_bytes(worse.growth_bytes)} ({percent(worse.growth_bytes, worse.before_bytes)})"
        yield f"{worse.name} grew by {grown}, {comparison.tolerance} is allowed"


def _explain(case: Case, comparison: _Comparison, growths: Sequence[Growth], sign: int) -> str:
    """Say in one line what grew (by `sign` -1: shrank), by how much, for what, and what fits now; empty for nothing."""
    before, now = comparison.before, comparison.now
    peak = dataclasses.replace(comparison.peak, before_bytes=before.peak_bytes, now_bytes=now.peak_bytes)
    figures = {"": peak, " held at the peak": comparison.held, " of the least budget": comparison.least}
    changed = {name: figure for name, figure in figures.items() if figure.growth_bytes}
    name = next((name for name, figure in changed.items() if sign * figure.growth_bytes > 0), next(iter(changed), ""))
    text = f"{changed[name].change}{name}" if changed else ""
    causes = ", ".join(_causes(before, now, growths, sign))
    text = f"{text}: {causes}" if text and causes else text or causes
    if before.largest != now.largest:
        fits = f"{case.options.gpu} now holds {now.largest or 'none'} instead of {before.largest}"
        text = f"{text}; {fits}" if text else fits
    return text


def _causes(before: Measurement, now: Measurement, growths: Sequence[Growth], sign: int) -> Iterator[str]:
    """Name the largest growths, another phase of the peak, and changed settings of the update."""
    most = max((sign * growth.bytes for growth in growths), default=0)
    large = [growth for growth in growths if sign * growth.bytes > _LITTLE * most]
    for growth in sorted(large, key=lambda growth: growth.category == "unused")[:_MOST]:
        yield f"{growth.what} {signed_bytes(growth.bytes)}{f' ({growth.change})' if growth.change else ''}"
    if before.phase and now.phase and before.phase != now.phase:
        yield f"the peak moved from {before.phase} to {now.phase}"
    for name in ("precision", "optimizer", "batchnorm", "coupled", "savers", "parameters"):
        was, is_now = (_setting(getattr(measured, name)) for measured in (before, now))
        if was != is_now:
            yield f"{name} {was} -> {is_now}"


def _setting(value: object) -> str:
    if isinstance(value, tuple):
        return " + ".join(value) or "none"
    return f"{value:,}" if isinstance(value, int) else str(value or "no")


@dataclass(frozen=True)
class _Difference:
    """The holdings of one module in one category, before and now; the path of the model itself is empty."""

    category: Category
    module: str
    before: tuple[Holding, ...]
    now: tuple[Holding, ...]

    @property
    def bytes(self) -> int:
        return sum(holding.bytes for holding in self.now) - sum(holding.bytes for holding in self.before)

    def within(self, depth: int) -> str:
        """Return the module of this depth that it lies in."""
        return ".".join(self.module.split(".")[:depth])


def find_growths(before: Measurement, now: Measurement, sign: int = 1) -> tuple[Growth, ...]:
    """Return what grew and shrank; all of it adds up to the growth of the peak.

    What grew comes first, or by a `sign` of -1 what shrank. A module with another name is another module.
    """
    differences = _differences(before.holdings, now.holdings)
    growths = [
        growth
        for category in CATEGORIES
        for growth in _by_module([each for each in differences if each.category == category])
    ]
    unused = (now.peak_bytes - now.held_bytes) - (before.peak_bytes - before.held_bytes)
    growths.append(Growth(category="unused", module="", bytes=unused))
    return tuple(sorted((growth for growth in growths if growth.bytes), key=lambda growth: -sign * growth.bytes))


def _differences(before: Iterable[Holding], now: Iterable[Holding]) -> list[_Difference]:
    """Pair what is held before and now by category and module; the model itself and no module apart."""
    sides: dict[tuple[Category, str, bool], tuple[list[Holding], list[Holding]]] = {}
    for side, holdings in enumerate((before, now)):
        for holding in holdings:
            key = holding.category, holding.module, not holding.module and bool(holding.kind)
            sides.setdefault(key, ([], []))[side].append(holding)
    return [_Difference(*key[:2], tuple(was), tuple(is_now)) for key, (was, is_now) in sides.items()]


def _by_module(differences: Sequence[_Difference]) -> Iterator[Growth]:
    """Name the growth of a category by modules, as deep as at most three of them have nearly all of it.

    Persistent memory is that of a single module, or of the model. Modules that differ only in numbers are one. What is
    left is one growth without a module.
    """
    most = 1 if differences and differences[0].category in _PERSISTENT else _MOST
    yield from (_growth("", [each]) for each in differences if not each.module)
    inside = [each for each in differences if each.module and each.bytes]
    for depth in range(max((each.module.count(".") + 1 for each in inside), default=0), 0, -1):
        groups: dict[str, list[_Difference]] = defaultdict(list)
        for each in inside:
            groups[mask_numbers(each.within(depth))].append(each)
        little = _LITTLE * sum(abs(_net(group)) for group in groups.values())
        large = {name: group for name, group in groups.items() if abs(_net(group)) > little}
        if 0 < len(large) <= most:
            break
    else:
        large = {}
    for name, group in large.items():
        alike = {each.within(depth) for each in differences if mask_numbers(each.within(depth)) == name}
        yield _growth(_name({each.within(depth): None for each in group}, alike), group)
    named = {each.module for group in large.values() for each in group}
    if rest := [each for each in inside if each.module not in named]:
        yield _growth("", rest)


def _name(names: Iterable[str], alike: set[str]) -> str:
    """Name several modules, by `*` for numbers that stand for all that are alike; empty for numbers alone."""
    names = list(names)
    patterns = [pattern for pattern, _ in compact_names(names)]
    name = patterns[0] if alike.difference(names) and len(patterns) == 1 else common_name(names)
    return name if name.strip("*.") else ""


def _growth(module: str, differences: Sequence[_Difference]) -> Growth:
    category, size = differences[0].category, _net(differences)
    return Growth(category=category, module=module, bytes=size, change=_what_changed(module, differences))


def _what_changed(module: str, differences: Sequence[_Difference]) -> str:
    """Describe a change as a phrase, `bf16 -> fp32` or `new, aten.cat in fp32`; empty where only the size changed."""
    before = [holding for difference in differences for holding in difference.before]
    now = [holding for difference in differences for holding in difference.now]
    is_persistent = (now or before)[0].category in _PERSISTENT
    where = ""
    if not module and not is_persistent:
        is_several, is_model = any(each.module for each in differences), (now or before)[0].kind
        where = "in several modules" if is_several else "in the model itself" if is_model else "in no module"
    if not now:
        return ", ".join(filter(None, ("gone", where)))
    ops, dtypes = Counter[str](), Counter[str]()
    for holdings, sign in ((before, -1), (now, 1)):
        for holding in holdings:
            ops[holding.op] += sign * holding.bytes
            dtypes[_SHORT.get(holding.dtype, holding.dtype)] += sign * holding.bytes
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


def _net(differences: Iterable[_Difference]) -> int:
    return sum(each.bytes for each in differences)

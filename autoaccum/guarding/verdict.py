"""Judge one case: whether memory grew more than the tolerance, and whether what fitted still fits."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from autoaccum.devices.simulated.allocator.caching_allocator import LARGE_SEGMENT_BYTES
from autoaccum.errors import NotMeasuredError
from autoaccum.guarding.cases import Case
from autoaccum.guarding.growth import find_growths
from autoaccum.guarding.guard_result import Growth, LostSavers, Measurement, Outcome, Tolerance, Verdict
from autoaccum.guarding.measuring import describe_shortfall
from autoaccum.options import RECOMPUTE
from autoaccum.units import percent, precise_bytes, signed_bytes
from autoaccum.workload.module_names import compact_names, expand_name

_ROUNDING = 1e-9
_MOST_CAUSES, _LITTLE = 3, 0.1
_UNMEASURED = NotMeasuredError.exit_code
_LOST = "take it again (in the workload, or by --savers); if it is meant, lock it in"
_HINTS: dict[Outcome, str] = {"regressed": "if it is meant, lock it in", "improved": "lock it in"}


@dataclass(frozen=True)
class _Quantity:
    """One quantity before and now, 0 where it is not known; `spread_bytes` is the spread of equal runs."""

    name: str
    before_bytes: int
    now_bytes: int
    tolerance: Tolerance
    spread_bytes: int = 0

    @property
    def growth_bytes(self) -> int:
        return self.now_bytes - self.before_bytes

    @property
    def grew(self) -> bool:
        return not self.tolerance.allows(self.before_bytes, self.now_bytes, self.spread_bytes)

    @property
    def shrank(self) -> bool:
        return not self.tolerance.allows(self.now_bytes, self.before_bytes, self.spread_bytes)


class _Comparison:
    """The memory of an update, before and now.

    A prediction has three quantities: the memory that the allocator reserves without a limit (`peak`), the most that
    tensors hold (`held`), and the smallest budget at which the update still runs (`least`). A single one may change
    only because blocks happen to be packed in another way. Where both peaks are above the budget, the least budget is
    compared instead.
    """

    def __init__(self, before: Measurement, now: Measurement, tolerance: Tolerance) -> None:
        self.before, self.now, self.tolerance = before, now, tolerance
        self.spread_bytes = before.spread_bytes + now.spread_bytes
        self.held = self._predicted("what is held at the peak", before.held_bytes, now.held_bytes)
        self.least = self._predicted("the least budget", before.least_bytes, now.least_bytes)
        peak = _Quantity("the peak", before.peak_bytes, now.peak_bytes, tolerance, self.spread_bytes)
        is_above = all(each.peak_bytes > each.limit_bytes for each in (before, now))
        self.peak = self.least if self.least.before_bytes and is_above else peak
        self.grew = any(figure.grew for figure in (self.peak, self.held, self.least))

    @property
    def worse(self) -> _Quantity | None:
        """The quantity that regressed, if any: the peak if another one grew too or by a whole segment, else `held`."""
        peak, held, least = self.peak, self.held, self.least
        alone = peak.growth_bytes >= LARGE_SEGMENT_BYTES or not held.before_bytes
        if peak.grew and (alone or held.grew or least.grew):
            return peak
        return held if held.grew and least.growth_bytes >= 0 else None

    @property
    def improved(self) -> bool:
        """True if something shrank and nothing grew; a peak has to shrink by a whole segment."""
        less = self.held.shrank or self.least.shrank
        peak_less = self.peak.shrank and (not self.held.now_bytes or -self.peak.growth_bytes >= LARGE_SEGMENT_BYTES)
        return not self.grew and (less or peak_less)

    @property
    def fell(self) -> bool:
        """True if the largest micro-batch that fits fell by more than is allowed."""
        return self.now.largest < self.before.largest - self.samples_allowed

    @property
    def samples_allowed(self) -> int:
        """The change of the largest micro-batch, in samples, that counts as no change.

        It is the tolerance's share of it; for runs on a device, plus what their spread and another budget explain.
        """
        largest, peak_bytes = self.before.largest, max(self.before.peak_bytes, 1)
        share = self.tolerance.fraction
        share = (self.tolerance.bytes or 0) / peak_bytes if share is None else share
        allowed = math.floor(largest * min(share, 1.0) + _ROUNDING)
        if self.before.kind == "predicted":
            return allowed
        differs_bytes = self.spread_bytes + abs(self.before.limit_bytes - self.now.limit_bytes)
        return allowed - (-largest * differs_bytes // peak_bytes)

    def _predicted(self, name: str, was: int | None, is_now: int | None) -> _Quantity:
        if was is None or is_now is None:
            return _Quantity(name, 0, 0, self.tolerance)
        return _Quantity(name, was, is_now, self.tolerance)


def compare(
    case: Case,
    before: Measurement,
    now: Measurement,
    tolerance: Tolerance,
    *,
    command: str = "",
    lost: LostSavers | None = None,
) -> Verdict:
    """Compare what a case takes now with a lock or another revision, and return the verdict.

    For runs on a real device their spread is added to the tolerance. `command` writes what was measured to the lock;
    empty where there is no lock. `lost` are the savers that may explain a regression, with what they saved; None: as
    `find_lost` finds them.
    """
    verdict = Verdict(case=case, outcome="unmeasured", before=before, now=now, warnings=now.warnings)
    unlike = tuple(_incomparable(before, now))
    if unlike:
        torch = before.versions.get("torch")
        install = f"install torch {torch}, " if torch != now.versions.get("torch") else ""
        hint = f"{install}compare with a revision by --baseline REV, or lock anew on a branch that is right"
        return dataclasses.replace(verdict, exit_code=_UNMEASURED, reasons=unlike, hint=hint, command=command)
    comparison = _Comparison(before, now, tolerance)
    reasons = tuple(_reasons(comparison))
    outcome: Outcome = "regressed" if reasons else _passing_outcome(comparison)
    lost = (lost or find_lost(before, now)) if reasons else None
    if lost is not None and lost.saved_bytes is not None and lost.saved_bytes <= 0:
        lost = None
    budgets = [precise_bytes(each.limit_bytes) for each in (before, now)]
    more = {"regressed": True, "improved": False}.get(outcome)
    found = find_growths(before, now, more=more)
    return dataclasses.replace(
        verdict,
        outcome=outcome,
        exit_code=1 if reasons else 0,
        reasons=reasons if lost is None else (*reasons, str(lost)),
        hint=(_HINTS.get(outcome, "") if lost is None else _LOST) if command else "",
        command=command if outcome in _HINTS else "",
        explanation=_add_least_budget(comparison, explain(case, before, now, found, more=more)),
        growths=found,
        lost=lost,
        notes=() if budgets[0] == budgets[1] else (f"the budget was {budgets[0]}, it is {budgets[1]} now",),
    )


def _incomparable(before: Measurement, now: Measurement) -> Iterator[str]:
    """Say why two measurements cannot be compared: another schedule, card, versions or settings."""
    if before.kind != now.kind:
        yield f"the earlier measurement was {before.kind}, this one is {now.kind}"
    if before.micro_batches != now.micro_batches:
        was, is_now = (" + ".join(map(str, each.micro_batches)) for each in (before, now))
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
        spread = f", plus {precise_bytes(worse.spread_bytes)} for the spread of runs" if worse.spread_bytes else ""
        yield f"{worse.name} grew by {grown}, {comparison.tolerance} is allowed{spread}"


def _passing_outcome(comparison: _Comparison) -> Outcome:
    before, now = comparison.before, comparison.now
    if _signature(before) == _signature(now):
        return "unchanged"
    fits_more = now.largest > before.largest + comparison.samples_allowed or (now.fits and not before.fits)
    return "improved" if comparison.improved or (fits_more and not comparison.grew) else "within"


def _signature(measurement: Measurement) -> tuple[object, ...]:
    held = {category: count for category, count in measurement.categories.items() if count}
    least_bytes, runs_in = measurement.least_bytes, (measurement.largest, measurement.fits)
    return measurement.peak_bytes, measurement.held_bytes, least_bytes, runs_in, held


def _add_least_budget(comparison: _Comparison, grown: str) -> str:
    """Add the change of the least budget where growth alone does not explain why less fits, or nothing grew."""
    least = comparison.least
    untold = comparison.fell and not (comparison.peak.grew or comparison.held.grew) and least.growth_bytes > 0
    if not least.growth_bytes or (grown and not untold):
        return grown
    closely = "less" if least.growth_bytes > 0 else "more"
    change = _change(least.growth_bytes, least.before_bytes)
    text = f"least budget {change}: the allocator packs it {closely} closely"
    return "; ".join(filter(None, (text, grown)))


def explain(
    case: Case, before: Measurement, now: Measurement, growths: Sequence[Growth], *, more: bool | None = None
) -> str:
    """Say in one line how much the peak grew, for what, and what fits now; empty where nothing changed.

    `more`: name what grew (True) or what shrank (False); None: as the peak did, or the memory held at it.
    """
    grown, held = now.peak_bytes - before.peak_bytes, (now.held_bytes or 0) - (before.held_bytes or 0)
    sign = (-1 if (grown or held) < 0 else 1) if more is None else 1 if more else -1
    causes = list(_cause_phrases(before, now, growths, sign))
    fits = ""
    if before.largest != now.largest:
        fits = f"{case.device_name} now holds {now.largest or 'none'} instead of {before.largest}"
    if not (grown or causes or held):
        return fits
    text = _change(grown, before.peak_bytes) if grown else "the peak is unchanged"
    if sign * held > 0 >= sign * grown:
        other = f"a peak that is {precise_bytes(abs(grown))} {'lower' if grown < 0 else 'higher'}"
        text = f"{_change(held, before.held_bytes or 0)} of {other if grown else 'the same peak'} are held"
    return "; ".join(part for part in (f"{text}: {', '.join(causes)}" if causes else text, fits) if part)


def _cause_phrases(before: Measurement, now: Measurement, growths: Sequence[Growth], sign: int) -> Iterator[str]:
    """Name the largest growths, the largest in the other direction, and changed settings of the update."""
    moved = bool(before.phase and now.phase and before.phase != now.phase)
    relevant = [growth for growth in growths if not (growth.is_unused and moved)]
    relevant.sort(key=lambda growth: -sign * growth.bytes)
    most = max((sign * growth.bytes for growth in relevant), default=0)
    shown = [growth for growth in relevant if sign * growth.bytes >= max(_LITTLE * most, 1)][:_MOST_CAUSES]
    against = [growth for growth in relevant if -sign * growth.bytes >= max(0.5 * most, 1) and not growth.is_unused]
    for growth in sorted([*shown, *against[-1:]], key=lambda growth: growth.is_unused):
        yield f"{growth.what} {signed_bytes(growth.bytes)}{f' ({growth.change})' if growth.change else ''}"
    if moved:
        yield f"the peak moved from {before.phase} to {now.phase}"
    for name in ("precision", "optimizer", "batchnorm", "coupled"):
        was, is_now = (getattr(each, name) or "no" for each in (before, now))
        if was != is_now:
            yield f"{name} {was} -> {is_now}"
    if before.savers != now.savers:
        was, is_now = (" + ".join(each.savers) or "none" for each in (before, now))
        yield f"savers {was} -> {is_now}"
    if before.parameters != now.parameters:
        yield f"parameters {before.parameters:,} -> {now.parameters:,}"
    state, state_now = (each.categories.get("optimizer_state", 0) for each in (before, now))
    if state and state == state_now and not all(growth.is_unused for growth in shown):
        yield "optimizer unchanged"


def _change(grown: int, before: int) -> str:
    return f"{signed_bytes(grown)} ({percent(grown, before, sign=True)})"


def find_lost(before: Measurement, now: Measurement) -> LostSavers | None:
    """Return what took less memory before and is not in use now, or for fewer blocks; None if nothing is lost."""
    savers = [word for word in before.savers if word not in now.savers]
    if _recomputed_blocks(before.savers) <= _recomputed_blocks(now.savers):
        savers = [word for word in savers if not word.startswith(RECOMPUTE)]
    were, are = ([name for one in each.recomputed for name in expand_name(one)] for each in (before, now))
    # Where as many run again as before, they have other names.
    is_own = len(are) < len(were) and not any(word.startswith(RECOMPUTE) for word in savers)
    modules = [name for name in were if name not in are] if is_own else []
    if not savers and not modules:
        return None
    return LostSavers(savers=tuple(savers), modules=tuple(pattern for pattern, _ in compact_names(modules)))


def _recomputed_blocks(savers: Iterable[str]) -> float:
    """Return how many blocks are recomputed: 0 for none, infinity for all."""
    numbers = [word.partition("=")[2] for word in savers if word.startswith(RECOMPUTE)]
    return max((int(number) if number else math.inf for number in numbers), default=0)

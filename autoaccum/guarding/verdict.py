"""The outcome of one case: whether memory grew more than it may, and whether what fitted still does."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from autoaccum.devices.simulated.allocator.caching_allocator import LARGE_SEGMENT_BYTES
from autoaccum.errors import NotMeasuredError
from autoaccum.guarding.cases import Case
from autoaccum.guarding.growth import find_growths
from autoaccum.guarding.guard_result import Growth, Measurement, Outcome, Tolerance, Verdict
from autoaccum.guarding.measuring import describe_shortfall
from autoaccum.units import percent, precise_bytes, signed_bytes

_ROUNDING = 1e-9
_MOST_CAUSES, _LITTLE = 3, 0.1
_UNMEASURED = NotMeasuredError.exit_code
_HINTS: dict[Outcome, str] = {"regressed": "if it is meant, lock it in", "improved": "lock it in"}


@dataclass(frozen=True)
class _Figure:
    """A figure before and now, 0 where it is not known; `spread_bytes` is how far apart equal runs are."""

    name: str
    before_bytes: int
    now_bytes: int
    tolerance: Tolerance
    spread_bytes: int = 0

    @property
    def more_bytes(self) -> int:
        return self.now_bytes - self.before_bytes

    @property
    def grew(self) -> bool:
        """Whether by more than is allowed."""
        return not self.tolerance.allows(self.before_bytes, self.now_bytes, self.spread_bytes)

    @property
    def shrank(self) -> bool:
        """Whether that would be too much of a growth the other way round."""
        return not self.tolerance.allows(self.now_bytes, self.before_bytes, self.spread_bytes)

    @property
    def change(self) -> str:
        """By how much it is another, with a sign."""
        return percent(self.more_bytes, self.before_bytes, sign=True)


class _Figures:
    """What an update takes, before and now.

    Of a prediction three figures tell: what the allocator gets of the card where nothing limits it (`peak`), what
    tensors hold at most (`held`), and the smallest budget at which the update still runs (`least`). One may follow from
    the way blocks happen to be packed, and contradict the others. Of peaks that both lie above the budget, so that no
    card holds them, the least budget tells in place.
    """

    def __init__(self, before: Measurement, now: Measurement, tolerance: Tolerance) -> None:
        self.before, self.now, self.tolerance = before, now, tolerance
        self.spread_bytes = before.spread_bytes + now.spread_bytes
        self.held = self._predicted("what is held at the peak", before.held_bytes, now.held_bytes)
        self.least = self._predicted("the least budget", before.least_bytes, now.least_bytes)
        peak = _Figure("the peak", before.peak_bytes, now.peak_bytes, tolerance, self.spread_bytes)
        is_above = all(each.peak_bytes > each.limit_bytes for each in (before, now))
        self.peak = self.least if self.least.before_bytes and is_above else peak
        self.grew = any(figure.grew for figure in (self.peak, self.held, self.least))

    @property
    def worse(self) -> _Figure | None:
        """What regressed: the peak, if another figure says so too or a whole segment; or what is held; or nothing."""
        peak, held, least = self.peak, self.held, self.least
        alone = peak.more_bytes >= LARGE_SEGMENT_BYTES or not held.before_bytes
        if peak.grew and (alone or held.grew or least.grew):
            return peak
        return held if held.grew and least.more_bytes >= 0 else None

    @property
    def improved(self) -> bool:
        """Whether something is less, and nothing more: a part of a segment is no news here either."""
        less = self.held.shrank or self.least.shrank
        peak_less = self.peak.shrank and (not self.held.now_bytes or -self.peak.more_bytes >= LARGE_SEGMENT_BYTES)
        return not self.grew and (less or peak_less)

    @property
    def fell(self) -> bool:
        """Whether the largest micro-batch that fits is smaller than it may be."""
        return self.now.largest < self.before.largest - self.samples_allowed

    @property
    def samples_allowed(self) -> int:
        """By how many samples the largest micro-batch may fall, or has to rise to be told.

        The tolerance's share of it; of runs, what their spread and another budget explain, on top.
        """
        largest, peak_bytes = self.before.largest, max(self.before.peak_bytes, 1)
        share = self.tolerance.fraction
        share = (self.tolerance.bytes or 0) / peak_bytes if share is None else share
        allowed = math.floor(largest * min(share, 1.0) + _ROUNDING)
        if self.before.kind == "predicted":
            return allowed
        differs_bytes = self.spread_bytes + abs(self.before.limit_bytes - self.now.limit_bytes)
        return allowed - (-largest * differs_bytes // peak_bytes)

    def _predicted(self, name: str, was: int | None, is_now: int | None) -> _Figure:
        if was is None or is_now is None:
            return _Figure(name, 0, 0, self.tolerance)
        return _Figure(name, was, is_now, self.tolerance)


def compare(case: Case, before: Measurement, now: Measurement, tolerance: Tolerance, *, command: str = "") -> Verdict:
    """Judge what a case takes now by what it took: as a lock has it, or another revision.

    Of runs on a real device, how far apart they are comes on top of the tolerance. `command` locks in what was
    measured; empty where there is no lock.
    """
    judged = Verdict(case=case, outcome="unmeasured", before=before, now=now, warnings=now.warnings)
    unlike = tuple(_unlike(before, now))
    if unlike:
        torch = before.versions.get("torch")
        install = f"install torch {torch}, " if torch != now.versions.get("torch") else ""
        hint = f"{install}compare with a revision by --baseline REV, or lock anew on a branch that is right"
        return dataclasses.replace(judged, exit_code=_UNMEASURED, reasons=unlike, hint=hint, command=command)
    figures = _Figures(before, now, tolerance)
    reasons = tuple(_faults(figures))
    outcome: Outcome = "regressed" if reasons else _harmless(figures)
    budgets = [precise_bytes(each.limit_bytes) for each in (before, now)]
    more = {"regressed": True, "improved": False}.get(outcome)
    found = find_growths(before, now, more=more)
    return dataclasses.replace(
        judged,
        outcome=outcome,
        exit_code=1 if reasons else 0,
        reasons=reasons,
        hint=_HINTS.get(outcome, "") if command else "",
        command=command if outcome in _HINTS else "",
        explanation=_told(figures, explain(case, before, now, found, more=more)),
        growths=found,
        notes=() if budgets[0] == budgets[1] else (f"the budget was {budgets[0]}, it is {budgets[1]} now",),
    )


def _unlike(before: Measurement, now: Measurement) -> Iterator[str]:
    """Why two measurements say nothing about each other: another schedule, versions, card or settings."""
    if before.kind != now.kind:
        yield f"what it is compared with was {before.kind}, this was {now.kind}"
    if before.micro_batches != now.micro_batches:
        was, is_now = (" + ".join(map(str, each.micro_batches)) for each in (before, now))
        yield f"what it is compared with is of micro-batches of {was}, this is of {is_now}"
    if before.card != now.card:
        yield f"the lock was measured on {before.card}, this is {now.card}"
    for were, are in ((before.versions, now.versions), (before.settings, now.settings)):
        for name in sorted({*were, *are}):
            if were.get(name) != are.get(name):
                was, is_now = were.get(name, "not set"), are.get(name, "not set")
                yield f"the lock was written with {name} {was}, here it is {is_now}"


def _faults(figures: _Figures) -> Iterator[str]:
    """What is worse than it may be, the heaviest first."""
    before, now, worse = figures.before, figures.now, figures.worse
    if before.fits and not now.fits:
        yield f"micro-batch {now.micro_batch} does not fit any more: {describe_shortfall(now)}"
    if figures.fell:
        yield f"the largest micro-batch that fits fell from {before.largest} to {now.largest}"
    if worse is not None:
        grown = f"{precise_bytes(worse.more_bytes)} ({percent(worse.more_bytes, worse.before_bytes)})"
        spread = f", and {precise_bytes(worse.spread_bytes)} for how far runs are apart" if worse.spread_bytes else ""
        yield f"{worse.name} grew by {grown}, {figures.tolerance} is allowed{spread}"


def _harmless(figures: _Figures) -> Outcome:
    """What it comes to where nothing is worse."""
    before, now = figures.before, figures.now
    if _known(before) == _known(now):
        return "unchanged"
    fits_more = now.largest > before.largest + figures.samples_allowed or (now.fits and not before.fits)
    return "improved" if figures.improved or (fits_more and not figures.grew) else "within"


def _known(measurement: Measurement) -> tuple[object, ...]:
    held = {category: count for category, count in measurement.categories.items() if count}
    least_bytes, runs_in = measurement.least_bytes, (measurement.largest, measurement.fits)
    return measurement.peak_bytes, measurement.held_bytes, least_bytes, runs_in, held


def _told(figures: _Figures, grown: str) -> str:
    """What grew; and where that does not tell why less fits, or nothing did, that the least budget is another."""
    least = figures.least
    untold = figures.fell and not (figures.peak.grew or figures.held.grew) and least.more_bytes > 0
    if not least.more_bytes or (grown and not untold):
        return grown
    closely = "less" if least.more_bytes > 0 else "more"
    told = f"least budget {signed_bytes(least.more_bytes)} ({least.change}): the allocator packs it {closely} closely"
    return "; ".join(filter(None, (told, grown)))


def explain(
    case: Case, before: Measurement, now: Measurement, growths: Sequence[Growth], *, more: bool | None = None
) -> str:
    """Say by how much the peak grew, for what, and what fits now; empty where nothing changed.

    `more`: whether what grew is to be told, or what shrank; None: as the peak did, or what is held of it.
    """
    grown, held = now.peak_bytes - before.peak_bytes, (now.held_bytes or 0) - (before.held_bytes or 0)
    sign = (-1 if (grown or held) < 0 else 1) if more is None else 1 if more else -1
    causes = list(_causes(before, now, growths, sign))
    fits = ""
    if before.largest != now.largest:
        fits = f"{case.place} now holds {now.largest or 'none'} instead of {before.largest}"
    if not (grown or causes or held):
        return fits
    told = _change(grown, before.peak_bytes) if grown else "the peak is as high as it was"
    if sign * held > 0 >= sign * grown:
        other = f"a peak that is {precise_bytes(abs(grown))} {'lower' if grown < 0 else 'higher'}"
        told = f"{_change(held, before.held_bytes or 0)} of {other if grown else 'the same peak'} are held"
    return "; ".join(part for part in (f"{told}: {', '.join(causes)}" if causes else told, fits) if part)


def _causes(before: Measurement, now: Measurement, growths: Sequence[Growth], sign: int) -> Iterator[str]:
    """The largest growths, the largest that goes against them, and what the update is made with."""
    moved = bool(before.phase and now.phase and before.phase != now.phase)
    told = [growth for growth in growths if not (growth.is_unused and moved)]
    told.sort(key=lambda growth: -sign * growth.bytes)
    most = max((sign * growth.bytes for growth in told), default=0)
    shown = [growth for growth in told if sign * growth.bytes >= max(_LITTLE * most, 1)][:_MOST_CAUSES]
    against = [growth for growth in told if -sign * growth.bytes >= max(0.5 * most, 1) and not growth.is_unused]
    for growth in sorted([*shown, *against[-1:]], key=lambda growth: growth.is_unused):
        yield f"{growth.what} {signed_bytes(growth.bytes)}{f' ({growth.change})' if growth.change else ''}"
    if moved:
        yield f"the peak moved from {before.phase} to {now.phase}"
    for name in ("precision", "optimizer", "batchnorm"):
        was, is_now = getattr(before, name), getattr(now, name)
        if was != is_now:
            yield f"{name} {was} -> {is_now}"
    if before.parameters != now.parameters:
        yield f"parameters {before.parameters:,} -> {now.parameters:,}"
    state, state_now = (each.categories.get("optimizer_state", 0) for each in (before, now))
    if state and state == state_now and not all(growth.is_unused for growth in shown):
        yield "optimizer unchanged"


def _change(grown: int, before: int) -> str:
    return f"{signed_bytes(grown)} ({percent(grown, before, sign=True)})"

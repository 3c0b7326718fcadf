"""The outcome of one case: whether memory grew more than it may, and whether what fitted still does."""

from __future__ import annotations

from collections.abc import Iterator

from autoaccum.guarding.asked.tolerance import Tolerance
from autoaccum.guarding.growth.attribution import growths
from autoaccum.guarding.judgements import Judgement, Outcome
from autoaccum.guarding.records import Case, Measured, Measurement
from autoaccum.guarding.verdict.figures import Figure, Figures
from autoaccum.guarding.verdict.phrases import explain
from autoaccum.units import percent, precise_bytes, signed_bytes

_REGRESSED = 1
_UNMEASURED = 3
_HINTS: dict[Outcome, str] = {
    "regressed": "if it is meant, lock it in",
    "improved": "lock it in",
    "unmeasured": "lock anew, on a branch that is right",
}


def compare(
    case: Case, before: Measurement, measured: Measured, tolerance: Tolerance, *, command: str = ""
) -> Judgement:
    """Judge what a case takes now by what it took, both of the same schedule.

    Args:
        case: What was measured.
        before: What it is compared with.
        measured: What was measured now.
        tolerance: By how much memory may grow. Of runs on a real device, how far apart they are comes on top.
        command: Locks in what was measured; empty where there is no lock.
    """
    now = measured.measurement
    figures = Figures(before, now, tolerance)
    reasons = tuple(_unlike(before, now))
    outcome: Outcome = "unmeasured"
    if not reasons:
        reasons = tuple(_faults(figures))
        outcome = "regressed" if reasons else _harmless(figures)
    more = {"regressed": True, "improved": False}.get(outcome)
    found = () if outcome == "unmeasured" else growths(before, now, more=more)
    return Judgement(
        case=case,
        outcome=outcome,
        exit_code={"regressed": _REGRESSED, "unmeasured": _UNMEASURED}.get(outcome, 0),
        reasons=reasons,
        hint=_HINTS.get(outcome, "") if command else "",
        command=command if outcome in _HINTS else "",
        explanation="" if outcome == "unmeasured" else _told(figures, explain(case, before, now, found, more=more)),
        growths=found,
        before=before,
        now=now,
        warnings=measured.warnings,
        notes=(*measured.notes, *_notes(figures)),
    )


def _unlike(before: Measurement, now: Measurement) -> Iterator[str]:
    """Why two measurements say nothing about each other, beside versions and settings (`judging.incomparable`)."""
    if before.kind != now.kind:
        yield f"what it is compared with was {before.kind}, this was {now.kind}"
    if before.micro_batches != now.micro_batches:
        was, is_now = (" + ".join(map(str, each.micro_batches)) for each in (before, now))
        yield f"what it is compared with is of micro-batches of {was}, this is of {is_now}"


def _faults(figures: Figures) -> Iterator[str]:
    """What is worse than it may be, the heaviest first."""
    before, now = figures.before, figures.now
    if before.fits and not now.fits:
        there = precise_bytes(now.limit_bytes)
        needs = f"more than the {there} that"
        if now.kind == "predicted":
            needs = f"at least {precise_bytes(now.least_bytes or now.peak_bytes)}, {there}"
        yield f"micro-batch {now.micro_batch} does not fit any more: it needs {needs} are there"
    if _fell(figures):
        yield f"the largest micro-batch that fits fell from {before.largest} to {now.largest}"
    worse = figures.worse
    if worse is not None:
        allowed = f"{figures.tolerance} is allowed"
        if worse.spread_bytes:
            allowed += f", and {precise_bytes(worse.spread_bytes)} for how far runs are apart"
        yield f"{worse.name} grew by {_growth(worse)}, {allowed}"


def _fell(figures: Figures) -> bool:
    return figures.now.largest < figures.before.largest - figures.samples_allowed


def _harmless(figures: Figures) -> Outcome:
    """What it comes to where nothing is worse."""
    before, now = figures.before, figures.now
    if _known(before) == _known(now):
        return "unchanged"
    fits_more = now.largest > before.largest + figures.samples_allowed or (now.fits and not before.fits)
    grew = figures.peak.grew or figures.held.grew or figures.least.grew
    return "improved" if figures.improved or (fits_more and not grew) else "within"


def _known(measurement: Measurement) -> tuple[object, ...]:
    held = {category: count for category, count in measurement.categories.items() if count}
    least_bytes, runs_in = measurement.least_bytes, (measurement.largest, measurement.fits)
    return measurement.peak_bytes, measurement.held_bytes, least_bytes, runs_in, held


def _told(figures: Figures, grown: str) -> str:
    """What grew; and where that does not tell why less fits, or nothing did, that the least budget is another."""
    least = figures.least
    untold = _fell(figures) and not (figures.peak.grew or figures.held.grew) and least.more_bytes > 0
    if not least.more_bytes or (grown and not untold):
        return grown
    change = f"{signed_bytes(least.more_bytes)} ({percent(least.more_bytes, least.before_bytes, sign=True)})"
    closely = "less" if least.more_bytes > 0 else "more"
    return "; ".join(filter(None, (f"least budget {change}: the allocator packs it {closely} closely", grown)))


def _growth(figure: Figure) -> str:
    return f"{precise_bytes(figure.more_bytes)} ({percent(figure.more_bytes, figure.before_bytes)})"


def _notes(figures: Figures) -> Iterator[str]:
    before, now = figures.before, figures.now
    was, is_now = (precise_bytes(each.limit_bytes) for each in (before, now))
    if was != is_now:
        yield f"the budget was {was}, it is {is_now} now"
    if figures.contradict:
        peak = Figure("the peak", before.peak_bytes, now.peak_bytes, figures.tolerance)
        told = (f"{each.name} {percent(each.more_bytes, each.before_bytes, sign=True)}" for each in _all(figures, peak))
        yield f"the figures contradict each other: {', '.join(told)}"


def _all(figures: Figures, peak: Figure) -> tuple[Figure, ...]:
    return peak, figures.held, figures.least

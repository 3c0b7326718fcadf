"""The figures of a guard's report, as people read them in each of its forms."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from autoaccum.guarding.judgements import Judgement, Outcome, Report
from autoaccum.guarding.records import Measurement
from autoaccum.units import percent, precise_bytes, signed_bytes

NONE = "-"
WORST_FIRST: tuple[Outcome, ...] = (
    "regressed",
    "too_large",
    "unmeasured",
    "improved",
    "within",
    "unchanged",
    "locked",
)


@dataclass(frozen=True)
class FigureWords:
    """One quantity before and now, as text; `worse` where it went the wrong way."""

    name: str
    before: str
    now: str
    change: str
    share: str
    worse: bool


def figures(judgement: Judgement) -> Iterator[FigureWords]:
    """What was measured before and now; nothing where it was not measured twice, or is not to be compared."""
    before, now = judgement.before, judgement.now
    if before is None or now is None or judgement.outcome == "unmeasured":
        return
    yield _bytes("peak", before.peak_bytes, now.peak_bytes)
    if before.held_bytes is not None and now.held_bytes is not None:
        yield _bytes("most held", before.held_bytes, now.held_bytes)
    if before.least_bytes is not None or now.least_bytes is not None:
        yield _bytes("least budget", before.least_bytes, now.least_bytes)
    change = now.largest - before.largest
    yield FigureWords(
        "largest fit", largest_words(before), largest_words(now), f"{change:+d}" if change else NONE, "", change < 0
    )


def largest_words(measurement: Measurement) -> str:
    """The largest micro-batch that fits; `(all)` where an update has no more samples, and no larger one was sought."""
    if measurement.largest == 0:
        return "none"
    return f"{measurement.largest} (all)" if measurement.capped else str(measurement.largest)


def outcome_counts(report: Report) -> dict[Outcome, int]:
    """How many cases came to what, the worst first."""
    counts = Counter(judgement.outcome for judgement in report.judgements)
    return {outcome: counts[outcome] for outcome in WORST_FIRST if counts[outcome]}


def _bytes(name: str, before: int | None, now: int | None) -> FigureWords:
    was, is_now = (NONE if one is None else precise_bytes(one) for one in (before, now))
    if before is None or now is None or before == now:
        return FigureWords(name, was, is_now, NONE, "", False)
    grown = now - before
    return FigureWords(name, was, is_now, signed_bytes(grown), percent(grown, before, sign=True), grown > 0)

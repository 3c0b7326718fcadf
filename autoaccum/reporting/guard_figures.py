"""The figures of a guard's report, as people read them in each of its forms."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from autoaccum.guarding.records import Measurement
from autoaccum.guarding.verdicts import Judgement, Outcome, Report
from autoaccum.units import GIB, format_bytes

NONE = "-"
_LAST_COMMAND = re.compile(r"(.*(?:: |^))`?(autoaccum guard\b[^`]*)`?", re.DOTALL)
WORST_FIRST: tuple[Outcome, ...] = ("regressed", "unmeasured", "improved", "within", "unchanged", "locked")


@dataclass(frozen=True)
class Figure:
    """One quantity before and now, as text; `worse` where it went the wrong way."""

    name: str
    before: str
    now: str
    change: str
    share: str
    worse: bool


def figures(judgement: Judgement) -> Iterator[Figure]:
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
    yield Figure(
        "largest fit", largest_words(before), largest_words(now), f"{change:+d}" if change else NONE, "", change < 0
    )


def largest_words(measurement: Measurement) -> str:
    """The largest micro-batch that fits; `(all)` where an update has no more samples, and no larger one was sought."""
    if measurement.largest == 0:
        return "none"
    return f"{measurement.largest} (all)" if measurement.capped else str(measurement.largest)


def size(count: int) -> str:
    """Bytes, fine enough to see one percent: GiB with two digits.

    >>> size(15 * 2**30 + 2**28), size(157_286_400)
    ('15.25 GiB', '150 MiB')
    """
    return f"{count / GIB:.2f} GiB" if GIB <= abs(count) < 10 * 1024 * GIB else format_bytes(count)


def signed(count: int) -> str:
    """A change in bytes.

    >>> signed(2**31), signed(-(2**20)), signed(0)
    ('+2.00 GiB', '-1.0 MiB', '0 B')
    """
    return f"+{size(count)}" if count > 0 else size(count)


def percent(share: float) -> str:
    """A change as a share; small ones as such, not as none.

    >>> percent(0.083), percent(-0.25), percent(0.00001)
    ('+8.3 %', '-25.0 %', '+<0.1 %')
    """
    if share and abs(share) < 0.0005:
        return f"{'+' if share > 0 else '-'}<0.1 %"
    return f"{100 * share:+.1f} %"


def split_command(hint: str) -> tuple[str, str]:
    """The words of a hint and the command at its end, which is to be copied; empty where there is none.

    >>> split_command("lock it in: autoaccum guard a.py --update")
    ('lock it in', 'autoaccum guard a.py --update')
    >>> split_command("see `autoaccum gpus`")
    ('see `autoaccum gpus`', '')
    """
    found = _LAST_COMMAND.fullmatch(hint)
    return (hint, "") if found is None else (found[1].rstrip(": "), found[2])


def outcome_counts(report: Report) -> dict[Outcome, int]:
    """How many cases came to what, the worst first."""
    counts = Counter(judgement.outcome for judgement in report.judgements)
    return {outcome: counts[outcome] for outcome in WORST_FIRST if counts[outcome]}


def _bytes(name: str, before: int | None, now: int | None) -> Figure:
    shown = [NONE if one is None else size(one) for one in (before, now)]
    if before is None or now is None or before == now:
        return Figure(name, shown[0], shown[1], NONE, "", False)
    share = percent(now / before - 1) if before else ""
    return Figure(name, shown[0], shown[1], signed(now - before), share, now > before)

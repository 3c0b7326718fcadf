"""The card of this machine, simulated: what peaks to expect of trials that will really run, and where they stand."""

from __future__ import annotations

import os
from collections.abc import Callable

from autoaccum.devices.card import CardMemory, CardReport
from autoaccum.devices.environment import read_torch_release
from autoaccum.devices.explanation import Account, Foresight
from autoaccum.devices.simulated.allocator_settings import read_settings
from autoaccum.devices.simulated.catalog import Card, card_at_hand
from autoaccum.devices.simulated.context import context_bytes
from autoaccum.devices.simulated.explaining import Accountant, Clock
from autoaccum.devices.simulated.replays import Replays
from autoaccum.devices.simulated.traces import Tracer, Traces
from autoaccum.errors import AutoaccumError, first_line

_MOST_SECONDS = 60.0
_PROBE = 2


def foresee_peaks(
    memory: CardMemory, make_tracer: Callable[[Card], Tracer], share: int, limit_seconds: float | None = None
) -> Foresight:
    """Return what peaks to expect on the card at hand; none where it cannot be simulated, whatever the reason.

    The traces are made now, so that no other process is left while trials run.
    """
    card = card_at_hand(memory)
    traces = Traces(lambda: make_tracer(card), share)
    try:
        replays = Replays(card, read_settings(os.environ).for_card(card.total_bytes), read_torch_release())
        follows = traces.follow(_PROBE, min(_MOST_SECONDS, limit_seconds or _MOST_SECONDS))
    except AutoaccumError as error:
        return _none(error.message)
    finally:
        traces.close()
    if follows is None:
        return _none("; ".join(traces.notes) or "there are too few samples")

    def peak_bytes(size: int) -> int | None:
        trace = traces.follow(size)
        return None if trace is None else replays.peak_bytes(trace)

    return Foresight(peak_bytes=peak_bytes)


def explain_at_hand(
    report: CardReport,
    make_tracer: Callable[[Card], Tracer],
    share: int,
    parts: tuple[int, ...],
    *,
    limit_bytes: int,
    changes: bool,
    curve: bool,
    limit_seconds: float | None = None,
) -> Account:
    """Account for the memory of `parts`, which ran on the card at hand, by simulating it: what it tells is predicted.

    Raises:
        WorkloadError, UsageError, NotMeasuredError: They cannot be simulated.
    """
    card, clock = card_at_hand(report.memory), Clock(limit_seconds)
    replays = Replays(card, read_settings(os.environ).for_card(card.total_bytes), read_torch_release())
    outside = report.context_bytes
    if outside is None:
        outside = context_bytes(card).bytes
    traces = Traces(lambda: make_tracer(card), share)
    try:
        made = traces.of_schedule(parts, True, clock.left_seconds)
        accountant = Accountant(f"{card.name} (simulated)", outside, limit_bytes, traces, replays)
        return accountant.account(made, clock, changes=changes, curve=curve)
    finally:
        traces.close()


def _none(why: str) -> Foresight:
    return Foresight(notes=(f"the search began without a simulation of the card ({first_line(why)})",))

"""Trials as replays: what the allocator holds within a limit."""

from __future__ import annotations

import pytest

from autoaccum.devices.simulated.allocator_settings import AllocatorSettings
from autoaccum.devices.simulated.catalog import find_card
from autoaccum.devices.simulated.replays import Replays
from autoaccum.devices.simulated.trace import Scratch, Trace
from autoaccum.units import MIB

WORKSPACE = Scratch("convolution", (20 * MIB, 20 * MIB, 2, 0, 1, 0))
"""Of 40 MiB, which cuDNN does without where there is no memory."""


@pytest.fixture
def replays() -> Replays:
    return Replays(find_card("rtx3090"), AllocatorSettings(), (2, 13))


def trace(*sizes: int | Scratch, events: tuple[int, ...]) -> Trace:
    return Trace(parts=(1,), events=events, sizes=sizes, phases=((0, "forward"),), last_update=len(events))


@pytest.mark.parametrize(("limit_mib", "held_mib"), [(120, 100), (100, 100), (99, 92), (92, 92), (91, 60)])
def test_a_refused_workspace_does_not_end_what_is_held(replays: Replays, limit_mib: int, held_mib: int) -> None:
    known = trace(30 * MIB, 30 * MIB, WORKSPACE, 32 * MIB, events=(0, 1, 2, ~2, 3))
    assert replays.peak_bytes(known) == 100 * MIB
    assert replays.held_bytes(known, limit_mib * MIB) == held_mib * MIB


def test_the_cache_is_given_back_within_a_limit(replays: Replays) -> None:
    known = trace(40 * MIB, 60 * MIB, events=(0, ~0, 1))
    assert replays.peak_bytes(known) == 100 * MIB
    assert replays.held_bytes(known, 99 * MIB) == 60 * MIB
    assert replays.trial(known, 99 * MIB).peak_reserved_bytes == 100 * MIB


def test_a_trial_is_of_updates_that_have_settled(replays: Replays) -> None:
    def update(*sizes: int, events: tuple[int, ...]) -> Trace:
        return Trace(
            parts=(1,),
            events=events,
            sizes=sizes,
            phases=((0, "forward"), (2, "backward"), (3, "update")),
            last_update=1,
        )

    once = update(21 * MIB, 21 * MIB, 30 * MIB, events=(0, 1, ~0, 2, ~2))
    assert (replays.trial(once, 60 * MIB).outcome, replays.trial(once, 60 * MIB).allocator_retries) == ("ok", 2)
    always = update(2 * MIB, 30 * MIB, 40 * MIB, events=(0, 1, ~1, 2, ~2))
    assert replays.trial(always, 65 * MIB).outcome == "ok", "40 MiB serve both once they are there"
    later = update(30 * MIB, 11 * MIB, 30 * MIB, 40 * MIB, events=(0, 1, 2, ~0, ~1, 3, ~3))
    failed = replays.trial(later, 100 * MIB)
    assert (failed.outcome, failed.phase) == ("oom", "backward")


def test_a_size_that_needs_the_cache_flushed_in_every_update_is_tight(replays: Replays) -> None:
    small = range(1, 31)
    events = (0, *small, *(~block for block in small), 31, ~31)
    known = Trace(
        parts=(1,), events=events, sizes=(MIB, *[MIB] * 30, 30 * MIB), phases=((0, "forward"),), last_update=1
    )
    assert replays.peak_bytes(known) > 40 * MIB
    trial = replays.trial(known, 40 * MIB)
    assert (trial.outcome, trial.message) == ("tight", "every update would release the cache and ask again")
    assert replays.trial(known, replays.peak_bytes(known)).outcome == "ok"

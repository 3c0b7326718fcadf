"""Samples per second over micro-batches, measured once for a study, and the knee."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

from autoaccum.accumulation.schedule import make_schedule, split_evenly
from autoaccum.errors import UsageError
from autoaccum.tuning.trial_processes import TrialProcesses
from autoaccum.tuning.tuning_result import Speed, Throughput

KNEE_SHARE = 0.02
"""The share of the highest throughput that the knee may lose."""

_WARM_UP_UPDATES = 2
"""Updates before anything is timed: the very first creates the optimizer's state, guarded by a copy."""
_LEAST, _MOST, _ENOUGH_SECONDS = 3, 200, 0.5
_FAR_BEHIND, _IN_A_ROW = 2.0, 2


def measure_throughput(processes: TrialProcesses, target_batch: int, sizes: Sequence[int], device: str) -> Throughput:
    """Time real updates with each of `sizes`, none of which is above the plan's ceiling.

    Raises:
        WorkloadError: The workload fails, or has changed since it was described.
        DoesNotFitError: An update runs out of memory, although its micro-batch was planned.
        NotMeasuredError: The process cannot be started, died or hung.
    """
    with processes.timing() as time_update:
        timed = time_sizes(time_update, sorted(sizes, reverse=True))
    speeds = tuple(_speed_of(size, target_batch, timed.get(size)) for size in sorted(sizes))
    fastest, knee = find_knee(speeds)
    return Throughput(target_batch=target_batch, device=device, speeds=speeds, fastest=fastest, knee=knee)


def time_sizes(time_update: Callable[[int], float], sizes: Sequence[int]) -> dict[int, list[float]]:
    """Return seconds of updates by size.

    The largest come first; after two in a row that are far behind the best, smaller ones are omitted. Then the sizes
    take turns, so that a drifting clock affects all of them alike.
    """
    timed: dict[int, list[float]] = {}
    behind = 0
    for size in sizes:
        for _ in range(1 if timed else _WARM_UP_UPDATES):
            time_update(size)
        timed[size] = [time_update(size)]
        behind = behind + 1 if timed[size][0] > _FAR_BEHIND * min(taken[0] for taken in timed.values()) else 0
        if behind >= _IN_A_ROW:
            break
    while any(map(needs_more_updates, timed.values())):
        for size in filter(lambda one: needs_more_updates(timed[one]), timed):
            timed[size].append(time_update(size))
    return timed


def needs_more_updates(seconds: Sequence[float]) -> bool:
    """Return whether to time more updates: at least three, and more if they are short."""
    return len(seconds) < _LEAST or (len(seconds) < _MOST and sum(seconds) < _ENOUGH_SECONDS)


def _speed_of(micro_batch: int, target_batch: int, seconds: Sequence[float] | None) -> Speed:
    iter_size = len(split_evenly(target_batch, micro_batch))
    if seconds is None:
        return Speed(micro_batch=micro_batch, iter_size=iter_size)
    low, median, high = statistics.quantiles([target_batch / one for one in seconds], n=4, method="inclusive")
    measured = {"samples_per_second": median, "low": low, "high": high}
    return Speed(micro_batch=micro_batch, iter_size=iter_size, updates=len(seconds), **measured)


def find_knee(speeds: Sequence[Speed]) -> tuple[int, int]:
    """Return the fastest micro-batch, and the smallest whose median is within 2 % of it."""
    medians = {speed.micro_batch: speed.samples_per_second for speed in speeds if speed.samples_per_second is not None}
    best = max(medians.values())
    fastest = min(size for size, median in medians.items() if median == best)
    return fastest, min(size for size, median in medians.items() if median >= best * (1 - KNEE_SHARE))


def micro_batch_ladder(ceiling: int, targets: Sequence[int], least: int = 1, multiple_of: int = 1) -> tuple[int, ...]:
    """Return the sizes worth timing: doublings of the least size below the ceiling, and the ceiling itself.

    Sizes that leave a part below `least` in any of `targets` (samples per update, ascending) are omitted, and so are
    those that cut the largest target into as many parts as a smaller one. All are multiples of `multiple_of`.

    Raises:
        UsageError: There is none.

    >>> micro_batch_ladder(140, (256,), 16), micro_batch_ladder(8, (8,)), micro_batch_ladder(140, (48, 96), 16)
    ((16, 32, 64, 128), (1, 2, 4, 8), (16, 32, 64, 96))
    """
    ceiling = min(ceiling, targets[-1])
    doublings = [least << times for times in range(ceiling.bit_length()) if least << times < ceiling]
    sizes: dict[int, int] = {}
    for size in (*doublings, ceiling):
        cuts = [make_schedule(target, size, multiple_of=multiple_of) for target in targets]
        if all(cut.smallest_part >= least for cut in cuts):
            sizes.setdefault(cuts[-1].iter_size, size)
    if not sizes:
        raise UsageError(
            f"no micro-batch up to {ceiling} splits updates of {targets[-1]} samples into parts of at least {least}",
            hint=f"use multiples of {least} as target batches, or plan with more memory",
        )
    return tuple(sizes.values())

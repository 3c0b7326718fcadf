"""Samples per second over micro-batches, measured once for a study."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from autoaccum.devices.process import ChildDied, ChildProcess
from autoaccum.devices.recording import Failure, failure_error
from autoaccum.devices.worker import death_error
from autoaccum.errors import DoesNotFitError
from autoaccum.tuning.events import Listener, SpeedMeasured
from autoaccum.tuning.facts import Facts
from autoaccum.tuning.judging.knee import find_knee
from autoaccum.tuning.records import Throughput
from autoaccum.tuning.request import TuneRequest
from autoaccum.tuning.running.timing import speed_of, unmeasured
from autoaccum.tuning.running.trainer import (
    LEAVE_SECONDS,
    MOST_SECONDS,
    ask,
    check_unchanged,
    load_request,
    start_trainer,
)


def measure_throughput(
    request: TuneRequest,
    facts: Facts,
    sizes: tuple[int, ...],
    *,
    tell: Listener,
    on_output: Callable[[str], None] | None = None,
) -> Throughput:
    """Time real updates with each of `sizes`, none of which is above the plan's ceiling.

    Args:
        request: What the study is asked to do; its largest target batch is that of the updates.
        facts: Of the workload.
        sizes: Micro-batches in samples.
        tell: Told of each speed, by ascending size.
        on_output: Gets each line the workload prints; None: it goes to stderr.

    Raises:
        WorkloadError: The workload fails, or was changed since the facts were found.
        DoesNotFitError: None of the sizes fits.
        NotMeasuredError: The process cannot be started, died or hung.
    """
    target = request.target_batch.high
    left, short = sorted(sizes, reverse=True), set[int]()
    timed: dict[int, list[float]] | None = None
    while timed is None:
        if not left:
            raise DoesNotFitError(
                f"not even updates with micro-batch {min(sizes)} fit any more: out of memory",
                hint="free memory, and start again",
            )
        timed = _time_sizes(request, facts.digest, left, on_output, short)
        left = [size for size in left if size not in short]
    speeds = tuple(
        speed_of(size, target, timed[size]) if size in timed else unmeasured(size, target, out_of_memory=size in short)
        for size in sorted(sizes)
    )
    for speed in speeds:
        tell(SpeedMeasured(speed))
    fastest, knee = find_knee(speeds)
    return Throughput(target_batch=target, device=facts.card or facts.device, speeds=speeds, fastest=fastest, knee=knee)


def _time_sizes(
    request: TuneRequest, digest: str, sizes: Sequence[int], on_output: Callable[[str], None] | None, short: set[int]
) -> dict[int, list[float]] | None:
    """Seconds of updates by size, measured in a fresh process; None where one ran out of memory, now in `short`."""
    waiting = list(sizes)
    process = start_trainer(on_output)
    try:
        check_unchanged(request, digest, ask(process, load_request(request), "loading the workload")["digest"])
        reply = _converse(process, request, waiting)
    except ChildDied as death:
        if not (death.out_of_memory and waiting):
            raise death_error(death, "timing updates", MOST_SECONDS) from None
        short.add(waiting[0])
        return None
    finally:
        process.end(grace_seconds=LEAVE_SECONDS)
    if "failure" not in reply:
        return dict(reply["sizes"])
    failure = Failure(**reply["failure"])
    if failure.outcome == "oom" and reply["micro_batch"] is not None:
        short.add(reply["micro_batch"])
        return None
    raise failure_error(failure, "the machine")


def _converse(process: ChildProcess, request: TuneRequest, waiting: list[int]) -> dict[str, Any]:
    """The last reply of the job; of `waiting`, the largest first, those are taken out that have run.

    Raises:
        ChildDied: There is none.
    """
    target = request.target_batch.high
    order = {"job": "throughput", "device": request.device, "target_batch": target, "sizes": list(waiting)}
    reply = process.ask(order, MOST_SECONDS)
    while "warmed" in reply:
        waiting.remove(reply["warmed"])
        reply = process.ask({"job": "go_on"}, MOST_SECONDS)
    return reply

"""Choose savers by trials: for a plan (`--savers auto`), and the sets that no others beat (`--savers all`)."""

from __future__ import annotations

import dataclasses
import math
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import cache
from itertools import combinations
from typing import Any

from autoaccum.checks import join_words
from autoaccum.devices.base import Device, Trial
from autoaccum.errors import DoesNotFitError, NotMeasuredError, WorkloadError, first_line
from autoaccum.messages import Message, message
from autoaccum.planning.plan_events import Listener, SaversTried
from autoaccum.planning.plan_messages import peak_bytes, trial_error
from autoaccum.planning.plan_request import PlanRequest
from autoaccum.planning.search import SearchStopped
from autoaccum.planning.throughput import estimate_seconds
from autoaccum.planning.trial_runner import SearchLimits, TrialRunner
from autoaccum.simulation.trace_records import Amount, UpdateCost
from autoaccum.spec import OFFLOADS, RECOMPUTE
from autoaccum.units import format_bytes

_OF_PARAMETERS = ("offload-gradients", "offload-optimizer")
"""Savers that cost the same whatever becomes of activations."""
_QUARTERS = 4

Words = tuple[str, ...]
"""Savers, as `spec.read_savers` returns them."""
Parts = tuple[int, ...]


class SaverTrials:
    """Tries savers with one micro-batch: `PlanRequest.fit_micro_batch`, or else the least that can be trained.

    On a simulated card all savers are tried, and compared by the estimated seconds of an update. An installed card is
    simulated for that, and its own trials may refute the choice. On the CPU only `recompute` is tried, by trials. What
    was tried or counted once is known from then on.

    Attributes:
        device: The device on which savers are tried: that of the plan, or its simulation.
        request: The request, with the `multiple_of` that the inspection found.
        inspection: The inspection of the workload without savers.
        size: The size that has to fit, in samples.
        runner: Runs trials, which nobody is told of.
        remarks: Notes on savers that cannot be used.

    Args:
        device: The device of the plan.
        request: The request.
        limits: The limits of the plan; trials of savers count for the one on time alone.
        notify: Gets `SaversTried`.

    Raises:
        UsageError: The device cannot change savers, or the size cannot be had.
        WorkloadError, DoesNotFitError, NotMeasuredError: As `Device.inspect`.
    """

    def __init__(self, device: Device, request: PlanRequest, limits: SearchLimits, notify: Listener) -> None:
        self._limits, self._notify, self.remarks = limits, notify, list[Message]()
        self._tried: dict[Words, Trial] = {}
        self._costs: dict[Words, UpdateCost | None] = {}
        self.device = device.simulation()
        self.device.use_savers(())
        self.inspection = self.device.inspect(limit_seconds=request.load_limit_seconds)
        self.request = request = request.with_multiple_of(self.inspection.multiple_of)
        self.size = request.size_to_fit(request.fit_micro_batch, self.inspection.least_size)
        self._predictor = self.device.predictor
        self._offloads = OFFLOADS if self._predictor and self.inspection.parallel != "fsdp2" else ()
        self.runner = TrialRunner(self.device, request, self.inspection, limits, lambda event: None)
        parts = self.runner.parts_to_try(self.size, fresh=True)
        one_trace = self._predictor is not None and not self.runner.needs_whole_batch
        self._parts = parts[:1] * min(2, len(parts)) if one_trace else parts  # Uneven ones are proved with the plan.

    def choose(self, refuted: Collection[Words] = ()) -> Words:
        """Return the savers that fit and cost least, of those that trials of the plan have not `refuted`.

        Raises:
            DoesNotFitError: None fit.
            WorkloadError, NotMeasuredError: A trial without savers fails, or the limit on time ends the choice.
        """

        def fits(words: Words) -> bool:
            return words not in refuted and self.fits(words)

        try:
            chosen = choose_savers(self._offloads, self.inspection.workload.blocks, fits, self._seconds)
        except SearchStopped as stopped:
            raise NotMeasuredError(f"{stopped} ended the choice of savers", hint="allow more") from None
        if chosen is None:
            raise self.does_not_fit()
        return chosen

    def list_sets(self) -> list[Words]:
        """Return the sets of savers that fit and can be used: offloads in all combinations, and recomputed blocks."""
        self._count(())  # An error without savers is the workload's own.
        blocks = self.inspection.workload.blocks
        recomputes = bool(blocks) and self._count(with_blocks((), blocks)) is not None
        offloads = [word for word in self._offloads if self._count((word,)) is not None]
        sets = list_sets(offloads, blocks if recomputes else 0, self.fits)
        return [words for words in sets if self._count(words) is not None]

    def notes(self, chosen: Words, parts: Parts) -> tuple[Message, ...]:
        """Return notes for a plan of `parts` per update on a rank: why these savers, and what they cost."""
        if not chosen:
            return message("savers_not_needed", size=self.size), *self.remarks
        cost, without = self._costs.get(chosen), self._costs.get(())
        more: dict[str, Any] = {"flops": None, "moved_bytes": 0, "seconds": 0.0}
        if cost is not None and without is not None:
            more = {
                "flops": cost.flops.of(parts) / max(1.0, without.flops.of(parts)) - 1,
                "moved_bytes": int(cost.moved_bytes.of(parts) - without.moved_bytes.of(parts)),
                "seconds": self.estimate(chosen, parts) / self.estimate((), parts) - 1,
            }
        peak = self._peak(self._tried[()])
        why = message("savers_chosen", savers=format_savers(chosen), size=self.size, peak_bytes=peak, **more)
        return why, *self.remarks

    def fits(self, words: Words) -> bool:
        """Return whether the size fits with these savers, by a trial of them if there was none."""
        if words not in self._tried:
            self.device.use_savers(words)
            self._notify(SaversTried(words))
            self._tried[words] = tried = self.runner.try_parts(self._parts)
            self._notify(SaversTried(words, tried))
            if tried.outcome == "error":
                if not words:
                    raise trial_error(tried)
                self._remark(words, tried.message or "")
        return self._tried[words].ran

    def estimate(self, words: Words, parts: Parts) -> float:
        """Return the estimated seconds of an update by `parts` with savers that can be used."""
        cost = self._count(words)
        assert cost is not None
        assert self._predictor is not None
        precision = self.inspection.workload.product_precision(self.inspection.spec)
        return estimate_seconds(cost, self._predictor.rates, parts, precision=precision)

    def does_not_fit(self) -> DoesNotFitError:
        """Return the error of a size that fits with no savers."""
        tried = {words: trial for words, trial in self._tried.items() if trial.outcome != "error"}
        peaks = {words: peak for words, trial in tried.items() if (peak := self._peak(trial)) is not None}
        limit = format_bytes(self.device.limit_bytes)
        least = min(peaks, key=lambda words: peaks[words], default=None)
        why = (
            f"{join_words(map(format_savers, tried))} ran out of memory, {limit} are available"
            if least is None
            else f"{format_savers(least)} would take the least, {format_bytes(peaks[least])} of {limit}"
        )
        ways = "" if self.request.fit_micro_batch is None else "a smaller --fit-micro-batch, "
        return DoesNotFitError(
            f"micro-batch {self.size} does not fit with any savers: {why}",
            hint=f"take {ways}a smaller model, --precision bf16, or more memory",
        )

    def _seconds(self, words: Words) -> float:
        """Return the estimated seconds of an update; the number of recomputed blocks where costs are not counted."""
        if self._predictor is None:
            return float(words[0].partition("=")[2]) if words else 0.0
        if self._count(words) is None:
            return math.inf
        return self.estimate(words, self.request.schedule(self.size).micro_batches)

    def _count(self, words: Words) -> UpdateCost | None:
        """Return the cost of an update with these savers; None if they cannot be used.

        It is counted only where it is no sum of others.
        """
        if words not in self._costs:
            of_parameters = tuple(word for word in words if word in _OF_PARAMETERS)
            of_activations = tuple(word for word in words if word not in of_parameters)
            if of_parameters and of_activations:
                costs = [self._count(some) for some in (of_activations, of_parameters, ())]
                known = [cost for cost in costs if cost is not None]
                self._costs[words] = add_costs(*known) if len(known) == len(costs) else None
            else:
                self._costs[words] = self._count_by_device(words)
        return self._costs[words]

    def _count_by_device(self, words: Words) -> UpdateCost | None:
        assert self._predictor is not None
        self._predictor.use_savers(words)
        try:
            return self._predictor.count_cost(limit_seconds=self._limits.seconds_left())
        except (WorkloadError, NotMeasuredError) as error:
            if not words:
                raise
            self._remark(words, error.message)
            return None

    def _remark(self, words: Words, why: str) -> None:
        remark = message("saver_unusable", savers=format_savers(words), error=first_line(why))
        if remark not in self.remarks:
            self.remarks.append(remark)

    def _peak(self, trial: Trial) -> int | None:
        """Return what a trial takes, or would take; None where it was not predicted and ran out of memory."""
        return peak_bytes(trial) if trial.ran or self._predictor else None


def add_costs(one: UpdateCost, other: UpdateCost, plain: UpdateCost) -> UpdateCost:
    """Return the cost with two kinds of savers that do not meet, by that with each of them and that `plain` without."""

    def add(name: str) -> Amount:
        first, second, without = (getattr(cost, name) for cost in (one, other, plain))
        return Amount(
            sample=first.sample + second.sample - without.sample,
            part=first.part + second.part - without.part,
            update=first.update + second.update - without.update,
        )

    return UpdateCost(**{field.name: add(field.name) for field in dataclasses.fields(UpdateCost)})


def choose_savers(
    offloads: Sequence[str], blocks: int, fits: Callable[[Words], bool], cost: Callable[[Words], float]
) -> Words | None:
    """Return the savers of least cost that fit: some of `offloads`, and k of `blocks` recomputed; None if none fit.

    Sets of offloads are visited by their cost without recomputation, until that exceeds the cost of the best that was
    found. For each the least k that fits is found by bisection: it ran, and k - 1 did not. So the answer is that of
    trying everything where memory falls and cost grows with each saver and each block.

    Args:
        offloads: The offloads that may be used, of `spec.OFFLOADS`.
        blocks: The number of blocks that may be recomputed.
        fits: Tries savers.
        cost: The cost of an update with savers; infinite where they cannot be used.
    """
    fits = cache(fits)
    if fits(()):
        return ()
    usable = tuple(word for word in offloads if math.isfinite(cost((word,))))
    blocks = blocks if blocks and math.isfinite(cost(with_blocks((), blocks))) else 0
    if least_blocks((), blocks, fits) is None and not fits(with_blocks(usable, blocks)):
        return None
    best, least = None, math.inf
    for offloaded in sorted(_subsets(usable), key=lambda words: (cost(words), len(words))):
        if cost(offloaded) >= least:
            break
        count = least_blocks(offloaded, blocks, fits)
        words = offloaded if count is None else with_blocks(offloaded, count)
        if count is not None and cost(words) < least:
            best, least = words, cost(words)
    return best


def _subsets(offloads: Sequence[str]) -> list[Words]:
    """Return all subsets, the smallest first."""
    return [words for count in range(len(offloads) + 1) for words in combinations(offloads, count)]


def with_blocks(offloaded: Words, count: int) -> Words:
    """Return these offloads with `count` blocks recomputed.

    >>> with_blocks(("offload-optimizer",), 6), with_blocks((), 0)
    (('recompute=6', 'offload-optimizer'), ())
    """
    return (f"{RECOMPUTE}={count}", *offloaded) if count else offloaded


def format_savers(words: Words) -> str:
    """Write a set of savers, which may be empty.

    >>> format_savers(("recompute=6", "offload-optimizer")), format_savers(())
    ('recompute=6 + offload-optimizer', 'no savers')
    """
    return " + ".join(words) or "no savers"


def least_blocks(offloaded: Words, blocks: int, fits: Callable[[Words], bool]) -> int | None:
    """Return the least number of recomputed blocks that fits with these offloads; None if not even all do."""
    if fits(offloaded):
        return 0
    if not blocks or not fits(with_blocks(offloaded, blocks)):
        return None
    return 1 + bisect_left(range(1, blocks), True, key=lambda count: fits(with_blocks(offloaded, count)))


def list_sets(offloads: Sequence[str], blocks: int, fits: Callable[[Words], bool]) -> list[Words]:
    """Return sets of savers that fit: each subset of `offloads`, with some numbers of `blocks` recomputed.

    These are quarters of all, and the least number that fits. Savers are taken to lower the memory: with more of what
    fits, nothing is tried.

    >>> list_sets(["offload-optimizer"], 2, lambda words: "recompute=2" in words)
    [('recompute=2',), ('recompute=2', 'offload-optimizer')]
    """
    found: list[Words] = []
    quarters = [blocks * part // _QUARTERS for part in range(_QUARTERS + 1)]
    for offloaded in _subsets(offloads):
        fits_without = any(set(words) <= set(offloaded) for words in found)
        least = 0 if fits_without else least_blocks(offloaded, blocks, fits)
        if least is not None:
            counts = sorted({least, *(quarter for quarter in quarters if quarter > least)})
            found += [with_blocks(offloaded, count) for count in counts]
    return found


def find_front(
    sets: Iterable[Words],
    seconds: Callable[[Words, Parts], float],
    largest: Callable[[Words, int], Parts | None],
    fewest: Parts,
) -> dict[Words, Parts]:
    """Find the sets that no other beats: none takes at most as long with at least as large a micro-batch.

    They are visited by the least time of an update, which is that in the fewest micro-batches. What is beaten by then,
    whatever its largest micro-batch is, is not tried, and of the others only sizes above those that beat it.

    Args:
        sets: The sets of savers.
        seconds: Returns the seconds of an update by parts, which are no fewer in more parts.
        largest: Returns the parts with the largest micro-batch that fits, or None if that is not above a size.
        fewest: The parts of an update in the fewest micro-batches that may be.

    Returns:
        The parts of each, the fastest first.
    """
    tried: dict[Words, Parts] = {}
    for words in sorted(sets, key=lambda words: (seconds(words, fewest), len(words))):
        least = seconds(words, fewest)
        above = max((max(parts) for other, parts in tried.items() if seconds(other, parts) <= least), default=0)
        if above >= max(fewest):
            break
        parts = largest(words, above)
        if parts is not None:
            tried[words] = parts
    front: dict[Words, Parts] = {}
    for words, parts in sorted(tried.items(), key=lambda item: (seconds(*item), -max(item[1]), len(item[0]))):
        if all(max(other) < max(parts) for other in front.values()):
            front[words] = parts
    return front

"""Trials of savers for a plan that is to choose them (`--savers auto`), and the sentences on what was chosen."""

from __future__ import annotations

import math
import time

from autoaccum.checks import join_words
from autoaccum.devices.base import Device, Trial
from autoaccum.devices.update_cost import CountingDevice, InstalledCard, SavingDevice, UpdateCost
from autoaccum.errors import DoesNotFitError, NotMeasuredError, UsageError, WorkloadError, first_line
from autoaccum.options import OFFLOADS
from autoaccum.planning.plan_events import Listener, SaversTried
from autoaccum.planning.plan_messages import peak_bytes, trial_error
from autoaccum.planning.plan_request import PlanRequest
from autoaccum.planning.saver_choice import Words, choose_savers, format_savers
from autoaccum.planning.search import SearchStopped
from autoaccum.planning.throughput import SpeedEstimate, estimate_seconds
from autoaccum.planning.trial_runner import SearchLimits, TrialRunner
from autoaccum.units import format_bytes

_ONLY_RECOMPUTE = "savers were tried on the device itself, and only recompute saves memory there that can be compared"


class SaverTrials:
    """Finds the least costly savers with which a micro-batch fits.

    That is the size of `PlanRequest.micro_batch`, or else the least that can be trained. On a simulated card all
    savers are tried, and compared by the estimated seconds of an update. An installed card is simulated for that, and
    where trials on it refute the choice, the next one is taken. On other devices only `recompute` is tried, by trials.

    Attributes:
        device: The device on which savers are tried: that of the plan, or its simulation.
        request: The request, with the `multiple_of` that the inspection found.
        inspection: The inspection of the workload without savers.
        load_seconds: The time that it took.
        size: The size that has to fit, in samples.
        runner: Runs trials, which nobody is told of.
        notify: Gets `SaversTried`.
        remarks: Sentences on savers that cannot be used, and on a card that was not simulated.

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
        self._limits, self.notify, self.remarks = limits, notify, list[str]()
        self._tried: dict[Words, Trial] = {}
        self._costs: dict[Words, UpdateCost | None] = {}
        self._refuted: set[Words] = set()
        before = time.monotonic()
        self.device = self._simulate(device, request)
        self.use(())
        try:
            self.inspection = self.device.inspect(limit_seconds=request.load_limit_seconds)
        except (WorkloadError, NotMeasuredError) as error:
            if self.device is device:
                raise
            self.device.close()
            self.remarks.append(f"the card was not simulated ({first_line(error.message)})")
            self.device = device
            self.use(())
            self.inspection = device.inspect(limit_seconds=request.load_limit_seconds)
        self.load_seconds = time.monotonic() - before
        self.request = request = request.with_multiple_of(self.inspection.multiple_of)
        sizes = request.sizes(self.inspection.least_size)
        wanted = request.micro_batch
        if wanted is not None and not sizes[0] <= wanted <= request.cap:
            raise UsageError(
                f"a micro-batch of {wanted} is to fit, and sizes from {sizes[0]} to {request.cap} can be tried",
                hint="give one of them (--micro-batch)",
            )
        self.size = sizes[0] if wanted is None else request.schedule(wanted).micro_batch
        self.runner = TrialRunner(self.device, request, lambda event: None, limits)
        self.runner.least_size, self.runner.joined = self.inspection.least_size, self.inspection.joining is not None
        parts = self.runner.parts_to_try(self.size, fresh=True)
        one_trace = self.counts and not self.runner.joined
        self._parts = parts[:1] * min(2, len(parts)) if one_trace else parts  # Uneven ones are proved with the plan.

    @property
    def counts(self) -> bool:
        """Whether costs are counted, on a simulated card."""
        return isinstance(self.device, CountingDevice)

    @property
    def offloads(self) -> Words:
        """The offloads that may be used."""
        return OFFLOADS if self.counts and self.inspection.parallel != "fsdp2" else ()

    def is_of(self, device: Device) -> bool:
        """Return whether the inspection is by this device."""
        return self.device is device

    def choose(self) -> Words:
        """Return the savers that fit and cost least, of those that are not refuted.

        Raises:
            DoesNotFitError: None fit.
            WorkloadError, NotMeasuredError: A trial without savers fails, or the limit on time ends the choice.
        """
        try:
            chosen = choose_savers(self.offloads, self.inspection.blocks, self.fits, self._cost)
        except SearchStopped as stopped:
            raise NotMeasuredError(f"{stopped} ended the choice of savers", hint="allow more") from None
        if chosen is None:
            raise self.does_not_fit()
        self.use(chosen)
        return chosen

    def end(self, device: Device) -> None:
        """End the simulation of an installed card before trials on it."""
        if not self.is_of(device):
            self.device.close()

    def refute(self, words: Words) -> None:
        """Leave out savers that trials of the plan refuted."""
        self._refuted.add(words)

    def notes(self, chosen: Words, parts: tuple[int, ...]) -> tuple[str, ...]:
        """Return notes for a plan of `parts` per update on a rank: why these savers, and what they cost."""
        if not chosen:
            return (f"no savers are needed: micro-batch {self.size} fits without", *self.remarks)
        peak = self._peak(self._tried[()])
        would = "ran out of memory" if peak is None else f"would take {format_bytes(peak)}"
        why = f"{format_savers(chosen)} chosen, since micro-batch {self.size} {would} without savers"
        cost, without = self._costs.get(chosen), self._costs.get(())
        if cost is None or without is None:
            return f"{why}; {_ONLY_RECOMPUTE}", *self.remarks
        more = cost.flops.of(parts) / max(1.0, without.flops.of(parts)) - 1
        moved = cost.moved_bytes.of(parts) - without.moved_bytes.of(parts)
        seconds = self.estimate(chosen, parts).seconds / self.estimate((), parts).seconds - 1
        costs = [f"{more:.0%} more FLOPs"] if more else []
        costs += [f"{format_bytes(int(moved))} moved between card and host per update"] if moved > 0 else []
        return f"{why}: it costs {join_words(costs)}, by an estimate {seconds:.0%} more time", *self.remarks

    def _simulate(self, device: Device, request: PlanRequest) -> Device:
        if not isinstance(device, SavingDevice):
            raise UsageError(f"{device.name} cannot try savers", hint="name them (--savers)")
        return device.simulation() if isinstance(device, InstalledCard) else device

    def use(self, words: Words) -> None:
        """Let the device use these savers."""
        assert isinstance(self.device, SavingDevice)
        self.device.use_savers(words)

    def fits(self, words: Words) -> bool:
        """Return whether the size fits with these savers, by a trial of them if there was none."""
        if words in self._refuted:
            return False
        if words not in self._tried:
            self.use(words)
            self.notify(SaversTried(words))
            self._tried[words] = tried = self.runner.try_again(self._parts)
            self.notify(SaversTried(words, tried))
            if tried.outcome == "error":
                if not words:
                    raise trial_error(tried)
                self._remark(words, tried.message or "")
        return self._tried[words].ran

    def _cost(self, words: Words) -> float:
        """Return the estimated seconds of an update; the number of recomputed blocks where costs are not counted."""
        if not self.counts:
            return float(words[0].partition("=")[2]) if words else 0.0
        if self.count(words) is None:
            return math.inf
        return self.estimate(words, self.request.schedule(self.size).micro_batches).seconds

    def count(self, words: Words) -> UpdateCost | None:
        """Return the cost of an update with these savers, counted once; None if they cannot be used."""
        if words not in self._costs:
            assert isinstance(self.device, CountingDevice)
            self.use(words)
            try:
                left = self._limits.seconds_left(None, 0.0)
                self._costs[words] = self.device.count_cost(limit_seconds=left)
            except (WorkloadError, NotMeasuredError) as error:
                if not words:
                    raise
                self._costs[words] = None
                self._remark(words, error.message)
        return self._costs[words]

    def _remark(self, words: Words, why: str) -> None:
        remark = f"{format_savers(words)} cannot be used: {first_line(why)}"
        if remark not in self.remarks:
            self.remarks.append(remark)

    def estimate(self, words: Words, parts: tuple[int, ...]) -> SpeedEstimate:
        """Return the estimated seconds of an update by `parts` with savers that can be used."""
        cost = self.count(words)
        assert cost is not None
        return self.estimate_cost(cost, parts)

    def estimate_cost(self, cost: UpdateCost, parts: tuple[int, ...]) -> SpeedEstimate:
        """Return the estimated seconds of an update by `parts` that costs so much."""
        assert isinstance(self.device, CountingDevice)
        return estimate_seconds(cost, self.device.rates, parts, precision=self.inspection.precision)

    def peak(self, words: Words) -> int | None:
        """Return the peak of the size with these savers, in bytes; None where it is not known."""
        self.fits(words)
        return self._peak(self._tried[words])

    def _peak(self, trial: Trial) -> int | None:
        """Return what a trial takes, or would take; None where it was not predicted and ran out of memory."""
        return peak_bytes(trial) if trial.ran or self.counts else None

    def does_not_fit(self) -> DoesNotFitError:
        """Return the error of a size that fits with no savers."""
        limit = format_bytes(self.device.limit_bytes)
        tried = {words: trial for words, trial in self._tried.items() if trial.outcome != "error"}
        known = {words: peak for words, trial in tried.items() if (peak := self._peak(trial)) is not None}
        with_all = f"micro-batch {self.size} does not fit with any savers"
        if known:
            least = min(known, key=lambda words: known[words])
            message = (
                f"{with_all}: {format_savers(least)} would take the least, {format_bytes(known[least])} of {limit}"
            )
        else:
            message = (
                f"{with_all}: {join_words(list(map(format_savers, tried)))} ran out of memory, {limit} are available"
            )
        ways = "" if self.request.micro_batch is None else "a smaller --micro-batch, "
        return DoesNotFitError(message, hint=f"take {ways}a smaller model, --precision bf16, or more memory")

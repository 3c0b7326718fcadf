"""Sets of savers compared on a simulated card: what each lets fit, what it costs, and those that no other beats."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace

from autoaccum.devices.update_cost import Amount, UpdateCost
from autoaccum.errors import DoesNotFitError
from autoaccum.options import RECOMPUTE
from autoaccum.planning.plan_events import SaversTried
from autoaccum.planning.plan_setup import PlanSetup
from autoaccum.planning.planner import plan_on_device
from autoaccum.planning.saver_choice import Parts, Words, find_front, list_sets
from autoaccum.planning.saver_trials import SaverTrials
from autoaccum.planning.throughput import SpeedEstimate


@dataclass(frozen=True, kw_only=True)
class SaverRow:
    """A set of savers, and the plan with it in short.

    Attributes:
        savers: The words, as `options.read_savers` returns them.
        micro_batch, iter_size, micro_batches: As in `Plan`.
        peak_bytes: The peak of the least micro-batches, by which sets compare at one size; None: not known.
        recomputed: Floating-point operations beyond those without savers, as a share of these.
        moved_bytes: Bytes that an update copies between card and host, those of its batch included.
        estimate: The estimated time of an update, with its band.
        relative_time: The same in units of an update without savers in the fewest micro-batches, which need not fit.
    """

    savers: Words
    micro_batch: int
    iter_size: int
    micro_batches: Parts
    peak_bytes: int | None
    recomputed: float
    moved_bytes: int
    estimate: SpeedEstimate
    relative_time: float


@dataclass(frozen=True, kw_only=True)
class SaverTable:
    """The sets of savers that no other beats in both time and largest micro-batch, the fastest first.

    Attributes:
        device: The name of the simulated card.
        limit_bytes: The budget.
        target_batch: Samples per update.
        least_size: The least micro-batch that can be trained, in samples.
        rows: The sets.
        remarks: Sentences on savers that cannot be used.
    """

    device: str
    limit_bytes: int
    target_batch: int
    least_size: int
    rows: tuple[SaverRow, ...]
    remarks: tuple[str, ...] = ()


def compare_savers(trials: SaverTrials, reference: str, *, enough: int | None = None) -> SaverTable:
    """Compare sets of savers by trials on a simulated card: offloads in all combinations, and recomputed blocks.

    Args:
        trials: The trials, of the least size.
        reference: The name of the workload in plans.
        enough: Only so many of the fastest are wanted.

    Raises:
        DoesNotFitError: Not even the least micro-batch fits with any of them.
        SearchStopped: The limit on time is over.
        AutoaccumError: As `make_plan`.
    """
    comparison = _Comparison(trials, reference)
    front = comparison.find_front(enough)
    return SaverTable(
        device=trials.device.name,
        limit_bytes=trials.device.limit_bytes,
        target_batch=trials.request.target_batch,
        least_size=trials.size,
        rows=tuple(comparison.row(words, parts) for words, parts in front.items()),
        remarks=tuple(trials.remarks),
    )


class _Comparison:
    """The steps of a comparison."""

    def __init__(self, trials: SaverTrials, reference: str) -> None:
        self._trials, self._costs = trials, dict[Words, UpdateCost]()
        self._setup = PlanSetup(trials.device, reference, isolated=False)
        self._request = replace(
            trials.request, prefer="largest", options=replace(trials.request.options, savers=None, time_limit=None)
        )
        self._fewest = self._request.schedule(self._request.cap).micro_batches

    def find_front(self, enough: int | None) -> dict[Words, Parts]:
        trials = self._trials
        trials.count(())  # An error without savers is the workload's own.
        blocks = trials.inspection.blocks
        recomputes = bool(blocks) and trials.count((f"{RECOMPUTE}={blocks}",)) is not None
        offloads = [word for word in trials.offloads if trials.count((word,)) is not None]
        sets = list_sets(offloads, blocks if recomputes else 0, trials.fits)
        usable = [words for words in sets if math.isfinite(self._seconds(words, self._fewest))]
        front = find_front(usable, self._seconds, self._largest, self._fewest, enough)
        if not front:
            raise trials.does_not_fit()
        return front

    def row(self, words: Words, parts: Parts) -> SaverRow:
        plain, cost = self._cost(()), self._cost(words)
        estimate = self._estimate(words, parts)
        return SaverRow(
            savers=words,
            micro_batch=max(parts),
            iter_size=len(parts),
            micro_batches=parts,
            peak_bytes=self._trials.peak(words),
            recomputed=cost.flops.of(parts) / (plain.flops.of(parts) or 1) - 1,
            moved_bytes=round(cost.moved_bytes.of(parts)),
            estimate=estimate,
            relative_time=estimate.seconds / self._seconds((), self._fewest),
        )

    def _seconds(self, words: Words, parts: Parts) -> float:
        return self._estimate(words, parts).seconds

    def _estimate(self, words: Words, parts: Parts) -> SpeedEstimate:
        return self._trials.estimate_cost(self._cost(words), parts)

    def _cost(self, words: Words) -> UpdateCost:
        """Return the cost of an update, counted only where it is no sum of others."""
        if words not in self._costs:
            of_parameters = tuple(word for word in words if word in _OF_PARAMETERS)
            of_activations = tuple(word for word in words if word not in of_parameters)
            if of_parameters and of_activations:
                cost = add_costs(self._cost(of_activations), self._cost(of_parameters), self._cost(()))
            else:
                self._trials.notify(SaversTried(words))
                counted = self._trials.count(words)
                if counted is None:
                    return _UNUSABLE
                cost = counted
            self._costs[words] = cost
        return self._costs[words]

    def _largest(self, words: Words, above: int) -> Parts | None:
        """Return the parts of the plan with these savers, unless its micro-batch is not above that size."""
        self._trials.notify(SaversTried(words))
        self._trials.use(words)
        larger = next(size for size in self._request.sizes(self._trials.size) if size > above)
        if above:
            tried = self._trials.runner.try_size(larger, fresh=True, unlimited=True)
            if not tried.ran:
                self._trials.notify(SaversTried(words, tried))
                return None
        try:
            plan = plan_on_device(self._setup, self._request)
        except DoesNotFitError:
            return None
        self._trials.notify(SaversTried(words, plan.trials[-1]))
        return plan.micro_batches


_UNUSABLE = UpdateCost(flops=Amount(update=math.inf), moved_bytes=Amount(), host_bytes=Amount())
"""The cost of what cannot run: no other is beaten by it."""
_OF_PARAMETERS = ("offload-gradients", "offload-optimizer")
"""Savers that cost the same whatever becomes of activations."""


def add_costs(one: UpdateCost, other: UpdateCost, plain: UpdateCost) -> UpdateCost:
    """Return the cost with two kinds of savers that do not meet, by that with each of them and that `plain` without."""

    def add(name: str) -> Amount:
        each, more, without = (getattr(cost, name) for cost in (one, other, plain))
        return Amount(
            sample=each.sample + more.sample - without.sample,
            part=each.part + more.part - without.part,
            update=each.update + more.update - without.update,
        )

    return UpdateCost(**{field.name: add(field.name) for field in fields(UpdateCost)})

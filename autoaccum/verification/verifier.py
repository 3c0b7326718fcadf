"""One verification: compare the whole and a shorter window, and search for the causes of a difference."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable
from typing import Any, NamedTuple, cast

from torch.optim import Optimizer

from autoaccum.accumulation.backpropagation import has_weight
from autoaccum.accumulation.coupling import list_names
from autoaccum.accumulation.rng_state import RngState
from autoaccum.accumulation.schedule import check_multiple, format_parts, make_schedule, split_evenly
from autoaccum.devices.budget import Deadline
from autoaccum.devices.environment import describe_environment
from autoaccum.devices.inspection import name_loss
from autoaccum.devices.trial_run import seed_everything
from autoaccum.errors import AutoaccumError, NotMeasuredError, UsageError, WorkloadError, first_line
from autoaccum.options import Options
from autoaccum.sources.batches import split_batch
from autoaccum.sources.samples import take_small_batch
from autoaccum.sources.weight_candidates import shorten
from autoaccum.sources.workload import Workload
from autoaccum.tracebacks import user_code
from autoaccum.verification.cause_search import find_causes
from autoaccum.verification.fixture import Fixture, Precision
from autoaccum.verification.paired_runs import PairedRuns
from autoaccum.verification.rank_team import RankRuns, RankTeam
from autoaccum.verification.update_comparison import (
    Tolerances,
    compare,
    find_tolerances,
    is_finite,
    largest_entry,
    with_move,
    with_optimizer_spread,
)
from autoaccum.verification.verification_result import (
    Cause,
    Compared,
    Comparison,
    Diagnosing,
    Method,
    Verification,
    VerificationStarted,
    Window,
)

_NOT_FINITE = "look for a division by zero, the root or log of 0, or a mean over nothing"
_SINGLE = "if BatchNorm cannot run a single sample, give --batchnorm exact, or --micro-batch 2"

SEARCH_SECONDS = 60.0
"""How long causes are searched for without a time limit."""


class _Unequal(NamedTuple):
    """A comparison that is not equal, with what made it."""

    runs: PairedRuns
    comparison: Comparison
    tolerances: Tolerances


class Verifier:
    """Verifies a workload, which the record calls `reference`, in parts of at most `micro` samples."""

    def __init__(
        self,
        workload: Workload,
        reference: str,
        options: Options,
        target: int,
        micro: int,
        on_event: Callable[[Any], Any] | None = None,
    ) -> None:
        self._workload, self._reference, self._options = workload, reference, options
        self._target, self._notify = target, on_event or (lambda event: None)
        self._comparisons: list[Comparison] = []
        self._unequal: list[_Unequal] = []
        self._causes: list[Cause] = []
        self._notes: list[str] = []
        self._untested: tuple[str, ...] = ()
        self._is_neutral = False
        self._precision = cast("Precision", options.spec.get("precision", "fp64"))  # May become float32.
        self._team: RankTeam | None = None
        self._each = workload.multiple_of or 1
        check_multiple(target, self._each, "the target batch")
        self._micro_batch = max(micro // self._each, 1) * self._each
        if self._micro_batch == target:
            raise UsageError(
                f"micro-batches must be multiples of {self._each}, but there are only {self._each} samples",
                hint=f"give a target batch of {2 * self._each}",
            )

    def run(self, began: float) -> Verification:
        """Compare, and find out why something differs; `began` is the `time.monotonic` of the call."""
        if self._options.world_size == 1:
            return self._run(began)
        with RankTeam(self._options.world_size) as self._team:
            return self._run(began)

    def _run(self, began: float) -> Verification:
        target = self._target
        seed_everything()
        self._batch = take_small_batch(self._workload, target)
        self._random = RngState()
        runs = self._window_runs(self._dealt(target))
        self._notify(
            VerificationStarted(**self._describe(runs), precision=self._precision, device=str(runs.fixture.device))
        )
        tolerances = find_tolerances(self._precision, runs.fixture.fresh().model.parameters())
        self._compare_both(runs, "whole", tolerances)
        self._compare_uneven(runs, tolerances)
        self._compare_last(runs.fixture, tolerances)
        self._search()
        return self._record(runs, tolerances, began)

    def _window_runs(self, sizes: tuple[int, ...]) -> PairedRuns:
        """Return the runs of the whole window; in float32 where float64 is only the default and does not run."""
        try:
            return self._runs_in(self._precision, sizes)
        except WorkloadError as error:
            if "precision" in self._options.spec:
                raise
            failure = error
        self._precision = "fp32"
        runs = self._runs_in("fp32", sizes)
        self._note(f"verified in float32, since in float64 the workload does not run ({first_line(failure.message)})")
        return runs

    def _runs_in(self, precision: Precision, sizes: tuple[int, ...]) -> PairedRuns:
        """Return runs whose full batch has a finite loss and gradient.

        Raises:
            WorkloadError: The weight is 0, or the gradient is not finite.
        """
        self._random.restore()  # Each precision begins with the same weights.
        live = optimizer if isinstance(optimizer := self._options.spec.get("optimizer"), Optimizer) else None
        with user_code("model()"):
            fixture = Fixture(self._workload, precision=precision, device=self._options.device, optimizer=live)
        runs = self._paired(fixture, self._batch, sizes)
        with user_code("weight(batch)"):
            weight = runs.objective.weight(runs.batch)
        if not has_weight(weight):
            raise WorkloadError(
                f"weight(batch) of {sum(sizes)} samples is 0, so no sample counts",
                hint="make batch(size) return samples that count",
            )
        odd = _nonfinite_gradient(runs)
        if odd is not None:
            raise WorkloadError(f"the gradient of {odd} from batch({sum(sizes)}) is not finite", hint=_NOT_FINITE)
        if largest_entry(runs.full().gradients.values()) == 0:
            raise NotMeasuredError(
                f"every gradient of batch({sum(sizes)}) is zero, so there is nothing to compare",
                hint="return samples from batch(size) that give the model a gradient",
            )
        return runs

    def _dealt(self, samples: int) -> tuple[int, ...]:
        """Return the parts of all ranks in order."""
        schedule = make_schedule(
            samples, self._micro_batch, world_size=self._options.world_size, multiple_of=self._each
        )
        return tuple(size for parts in schedule.ranks for size in parts if size)

    def _paired(self, fixture: Fixture, batch: Any, sizes: tuple[int, ...]) -> PairedRuns:
        if self._team is None:
            return PairedRuns(fixture, batch, sizes)
        return RankRuns(self._team, fixture, batch, sizes)

    def _compare_uneven(self, runs: PairedRuns, tolerances: Tolerances) -> None:
        """Compare the batch with samples shortened where all are equally long: no wrong weight shows in these."""
        if runs.objective.reduction == "sum" or runs.objective.coupled or not self._is_equal:
            return
        new_labels = runs.fixture.device.type == "cpu"  # A loss that does not ignore them would end a GPU's context.
        ways = shorten(self._batch, runs.sizes, new_labels=new_labels)
        for way in ways:
            if way.batch is not None and (other := self._runs_of(runs, way.batch)) is not None:
                self._note(f"samples are equally long: also compared with shortened {list_names(way.paths)}")
                self._compare_both(other, "uneven", tolerances)
                return
        self._untested = ways[-1].paths if ways and ways[-1].is_known else ()

    def _runs_of(self, runs: PairedRuns, batch: Any) -> PairedRuns | None:
        """Return the same parts of another batch; None where it does not run, or its loss is not finite."""
        try:
            other = self._paired(runs.fixture, batch, runs.sizes)
            return None if _nonfinite_gradient(other) else other
        except AutoaccumError:
            return None

    def _compare_last(self, fixture: Fixture, tolerances: Tolerances) -> None:
        """Compare a shorter window; one that does not run is left out with a note.

        BatchNorm refuses a single sample, and state that forward keeps may have the size of the parts before.
        """
        sizes = last_window(self._target, self._micro_batch, self._each)
        if sizes is None:
            return
        part, _ = split_batch(self._batch, [sum(sizes), self._target - sum(sizes)])
        if self._team is not None:
            sizes = self._dealt(sum(sizes))
        runs = self._paired(fixture, part, sizes)
        try:
            runs.full()
        except WorkloadError as error:
            if not self._unequal:
                hint = "where samples come in groups of N, give --multiple-of N"
                raise WorkloadError(error.message, hint=hint, user_traceback=error.user_traceback) from error
            self._note(f"the shorter window of {format_parts(sizes)} was left out: {first_line(error.message)}")
        else:
            self._compare_both(runs, "last", tolerances)
            return
        gc.collect()  # Up to torch 2.12, a checkpoint whose forward failed leaves its hooks until its frame is gone.

    def _compare_both(self, runs: PairedRuns, window: Window, tolerances: Tolerances) -> None:
        """Compare the Accumulator, and the workload's own loop where it has one, with the full batch."""
        self._compare(runs, "accumulator", window, tolerances)
        if self._workload.accumulate is not None:
            if len(set(runs.parts_by_rank)) > 1:
                parts = format_parts(runs.sizes)
                self._note(f"accumulate() was not called with {parts}: with fewer parts a rank keeps others waiting")
                return
            self._compare(runs.for_user_loop(), "accumulate", window, tolerances)

    def _compare(self, runs: PairedRuns, method: Method, window: Window, tolerances: Tolerances) -> None:
        found, tolerances = _compared(runs, method, window, tolerances)
        self._comparisons.append(found)
        self._notify(Compared(found))
        if runs.mismatch is not None:
            self._is_neutral = True
            whose = "the Accumulator's" if method == "accumulator" else "accumulate()'s"
            where = f"in the full batch's update and in {whose} by {format_parts(runs.sizes)}"
            self._note(f"random numbers were replaced by neutral values, {where}: {runs.mismatch}")
        if not found.equal:
            self._unequal.append(_Unequal(runs, found, tolerances))

    def _search(self) -> None:
        """Search for the causes of all differences, within the time limit."""
        deadline = Deadline(self._options.time_limit or SEARCH_SECONDS)
        explained: set[Method] = set()
        for unequal in self._unequal:
            unequal.runs.fixture.deadline = deadline
            method = unequal.comparison.method
            if method not in explained and self._diagnose(unequal, deadline):
                explained.add(method)  # A shorter window has the causes of the whole one.

    def _diagnose(self, unequal: _Unequal, deadline: Deadline) -> bool:
        """Add the causes of a difference, and return whether all are known."""
        runs, comparison, _ = unequal
        if not runs.uses_host_rng:
            self._notify(Diagnosing(comparison, deadline.limit_seconds or SEARCH_SECONDS))
        try:
            causes = find_causes(*unequal)
        except (WorkloadError, NotMeasuredError) as error:
            self._note(f"the search for the cause failed: {first_line(error.message)}")
            return False
        if not any(cause.proved for cause in causes) and runs.uses_host_rng:
            raise NotMeasuredError(
                "parts draw other random numbers from Python's or NumPy's generators than the full batch does, and"
                " these cannot be replayed",
                hint="draw with torch (torch.rand, torch.randperm), whose numbers are replayed, or draw in batch(size)",
            )
        known = {(cause.kind, cause.where) for cause in self._causes}
        self._causes += [cause for cause in causes if (cause.kind, cause.where) not in known]
        return not any(cause.kind == "unknown" for cause in causes)

    def _note(self, note: str) -> None:
        if note not in self._notes:
            self._notes.append(note)

    @property
    def _is_equal(self) -> bool:
        return all(comparison.equal for comparison in self._comparisons)

    def _record(self, runs: PairedRuns, tolerances: Tolerances, began: float) -> Verification:
        workload, objective = self._workload, self._workload.objective
        return Verification(
            equivalent=self._is_equal and not self._untested,
            target_batch=self._target,
            micro_batch=self._micro_batch,
            precision=self._precision,
            device=str(runs.fixture.device),
            batchnorm=workload.batchnorm,
            coupled=workload.coupled,
            rounding=tolerances.rounding,
            comparisons=tuple(self._comparisons),
            causes=tuple(self._causes),
            notes=tuple(self._notes),
            workload={
                "reference": self._reference,
                "digest": workload.digest,
                **self._describe(runs),
                "loss": name_loss(workload),
                "reduction": objective.reduction,
                "weight": objective.source,
                "worst_of": workload.worst_of,
            },
            environment=describe_environment(runs.fixture.device),
            world_size=self._options.world_size,
            untested=self._untested if self._is_equal else (),
            neutral_random=self._is_neutral,
            seconds=time.monotonic() - began,
        )

    def _describe(self, runs: PairedRuns) -> dict[str, Any]:
        trained = runs.fixture.fresh()
        return {
            "name": self._workload.name,
            "model": type(trained.model).__name__,
            "parameters": sum(parameter.numel() for parameter in trained.model.parameters()),
            "optimizer": type(trained.optimizer).__name__,
        }


def _compared(
    runs: PairedRuns, method: Method, window: Window, tolerances: Tolerances
) -> tuple[Comparison, Tolerances]:
    """Return the comparison and its tolerances; what the optimizer makes of rounding is run only where it matters."""
    full, other = runs.full(), runs.accumulated() if method == "accumulator" else runs.user_loop()
    tolerances = with_move(tolerances, runs)
    differences = compare(full, other, tolerances)
    if [one.quantity for one in differences if not one.equal] == ["update"]:
        differences = compare(full, other, with_optimizer_spread(tolerances, runs, other))
    found = Comparison(method=method, window=window, micro_batches=runs.sizes, differences=differences)
    return found, tolerances


def _nonfinite_gradient(runs: PairedRuns) -> str | None:
    """Return the name of a parameter whose gradient from the full batch is not finite; None where all are finite.

    Raises:
        WorkloadError: The full batch does not run, or its loss is not finite.
    """
    try:
        full = runs.full()
    except WorkloadError as error:
        if max(runs.sizes) > 1:
            raise
        raise WorkloadError(error.message, hint=_SINGLE) from error
    if not math.isfinite(full.loss):
        raise WorkloadError(f"the loss of batch({sum(runs.sizes)}) is {full.loss}", hint=_NOT_FINITE)
    return next((name for name, gradient in full.gradients.items() if not is_finite(gradient)), None)


def last_window(target: int, micro: int, multiple_of: int = 1) -> tuple[int, ...] | None:
    """Return the parts of a shorter window, as at the end of an epoch; uneven where possible.

    >>> last_window(16, 4), last_window(16, 1), last_window(5, 4)
    ((4, 3), (1, 1), None)
    >>> last_window(16, 4, 2)
    (4, 2)
    """
    if multiple_of > 1:
        counted = last_window(target // multiple_of, micro // multiple_of)
        return None if counted is None else tuple(part * multiple_of for part in counted)
    windows = [tuple(split_evenly(samples, micro)) for samples in range(min(2 * micro, target) - 1, micro, -1)]
    if micro == 1 and target > 2:
        return (1, 1)
    return next((parts for parts in windows if len(set(parts)) > 1), windows[0] if windows else None)

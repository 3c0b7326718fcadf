"""The comparisons of one verification, in order, and the search for what makes them differ."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor

from autoaccum.accumulation.randomness import RandomState
from autoaccum.accumulation.schedule import check_multiple
from autoaccum.accumulation.shares import has_weight
from autoaccum.devices.environment import describe_environment
from autoaccum.devices.inspection import name_loss
from autoaccum.devices.rehearsal import seed_everything
from autoaccum.errors import NotMeasuredError, UsageError, WorkloadError, first_line
from autoaccum.verification.comparing import Tolerances, compare
from autoaccum.verification.coupling_causes import KEPT_STATE, has_kept_state
from autoaccum.verification.diagnosis import find_causes
from autoaccum.verification.fixture import Fixture, Precision
from autoaccum.verification.inquiry import find_notes
from autoaccum.verification.records import Begun, Cause, Compared, Comparison, Diagnosing, Verification
from autoaccum.verification.request import Subject, VerifyRequest, last_window, loaded_window, whole_window
from autoaccum.verification.runs import Runs
from autoaccum.verification.tolerance import allow_own, find_tolerances, with_move, with_update
from autoaccum.verification.updates import Change
from autoaccum.workload.batches import split_batch
from autoaccum.workload.experiments import users_code
from autoaccum.workload.sampling import take_small_batch

_NOT_FINITE = "there is nothing to compare: look for a division by zero, the root or log of 0, a mean over nothing"
_LEAST_SCALE = 2.0**-10
"""Of losses under fp16: below, what overflows does so by itself."""

ONE_VALUE = "more than 1 value per channel"
"""Of torch/nn/functional.py, `_verify_batch_size`: BatchNorm and one sample."""


class Preparation:
    """Makes the batch, with seeds of its own, and runs of the whole window.

    Attributes:
        batch: The whole batch.
        precision: That is verified in: as asked for, or float32 where float64 was not and does not run.
        notes: What is to be said of that.

    Args:
        request: What is asked.
        subject: What is verified.

    Raises:
        WorkloadError: There is no batch of that size.
    """

    def __init__(self, request: VerifyRequest, subject: Subject) -> None:
        self._request, self._subject = request, subject
        self.precision: Precision = request.chosen
        self.notes = list(_rounding_notes(subject.workload.accumulate_in, self.precision))
        seed_everything()
        self.batch = self._take_batch(request.target_batch)
        self._random = RandomState()

    def whole_runs(self, sizes: tuple[int, ...]) -> Runs:
        """The whole window; in float32 where float64 was not asked for and does not run."""
        try:
            return self._runs_in(self.precision, sizes)
        except WorkloadError as error:
            if self._request.precision is not None:
                raise
            failure = error
        self.precision = "fp32"
        runs = self._runs_in(self.precision, sizes)
        self.notes.append(f"verified in float32: in float64 the workload does not run ({first_line(failure.message)})")
        return runs

    def double_of(self, runs: Runs) -> Runs | None:
        """The same in float64, to tell rounding by; None where that is what it is, or does not run."""
        if self.precision == "fp64":
            return None
        try:
            double = self._runs_in("fp64", runs.sizes)
            double.full(Change(calm=True))
        except WorkloadError:
            return None
        return double

    def _take_batch(self, target: int) -> Any:
        """Real samples where there are some, since those of a worst case may all weigh the same."""
        workload = self._subject.workload
        if self._request.worst_of is None:
            return take_small_batch(workload, target)
        with users_code(f"batch({target})"):
            return workload.build_batch(target)

    def _runs_in(self, precision: Precision, sizes: tuple[int, ...]) -> Runs:
        """One whose full batch has run to a loss that is a number."""
        self._random.restore()  # Each precision begins with the same weights.
        with users_code("model()"):
            fixture = Fixture(
                self._subject.workload,
                precision=precision,
                device=self._request.device,
                optimizer=self._subject.optimizer,
            )
        runs = Runs(fixture, self.batch, sizes)
        self._check_weight(runs)
        odd = self._odd_gradient(runs)
        while odd is not None and fixture.loss_scale > _LEAST_SCALE:
            fixture.loss_scale /= 16
            runs = Runs(fixture, self.batch, sizes)
            odd = self._odd_gradient(runs)
        if odd is not None:
            raise WorkloadError(f"the gradient of {odd} from batch({sum(sizes)}) is not finite", hint=_NOT_FINITE)
        return runs

    def _check_weight(self, runs: Runs) -> None:
        with users_code("weight(batch)"):
            weight = runs.objective.weight(runs.batch)
        if not has_weight(weight):
            raise WorkloadError(
                f"weight(batch) of {sum(runs.sizes)} samples is 0: nothing would be learnt",
                hint="let batch(size) give samples that count",
            )

    def _odd_gradient(self, runs: Runs) -> str | None:
        """The parameter whose gradient from the full batch is not finite.

        Raises:
            WorkloadError: The full batch does not run, or its loss is not finite.
        """
        try:
            full = runs.full()
        except WorkloadError as error:
            if has_kept_state(runs):
                raise WorkloadError(error.message, hint=KEPT_STATE, user_traceback=error.user_traceback) from error
            raise _with_hint(error, max(runs.sizes)) from error
        if not math.isfinite(full.loss):
            raise WorkloadError(f"the loss of batch({sum(runs.sizes)}) is {full.loss}", hint=_NOT_FINITE)
        return next((name for name, gradient in full.gradients.items() if not _is_finite(gradient)), None)


def _is_finite(gradient: Tensor | None) -> bool:
    return gradient is None or bool(
        gradient.coalesce().values().isfinite().all() if gradient.is_sparse else gradient.isfinite().all()
    )


def _with_hint(error: WorkloadError, largest: int) -> WorkloadError:
    if ONE_VALUE not in error.message or largest > 1:
        return error
    return WorkloadError(error.message, hint="BatchNorm runs no single sample: give --micro-batch 2")


def _rounding_notes(accumulate_in: str, precision: Precision) -> Iterator[str]:
    """What sums in half precision lose does not show where nothing is of half precision."""
    if accumulate_in == "parameters":
        unseen = ' (not in float64, which is verified: precision="fp32" keeps their dtypes)'
        shown = unseen if precision == "fp64" else ""
        yield f'accumulate_in is "parameters": gradients of half-precision parameters are rounded with each part{shown}'


class Verifier:
    """Makes one verification.

    Args:
        request: What is asked.
        subject: What is verified.
    """

    def __init__(self, request: VerifyRequest, subject: Subject) -> None:
        self._request, self._subject = request, subject
        self._precision: Precision = request.chosen
        self._comparisons: list[Comparison] = []
        self._causes: list[Cause] = []
        self._notes: list[str] = []
        self._exact: Fixture | None = None
        self._each = subject.workload.multiple_of or 1
        check_multiple(request.target_batch, self._each, "the target batch")
        self._micro_batch = max(request.largest_part // self._each, 1) * self._each
        if self._micro_batch == request.target_batch:
            raise UsageError(
                f"micro-batches are to be multiples of {self._each}, and there are {self._each} samples",
                hint=f"give a target batch of {2 * self._each}",
            )

    def run(self, began: float) -> Verification:
        """Compare, and where something differs, find out why.

        Args:
            began: When the call came, of `time.monotonic`.
        """
        preparation = Preparation(self._request, self._subject)
        target, micro, each = self._request.target_batch, self._micro_batch, self._each
        runs = preparation.whole_runs(whole_window(target, micro, each))
        self._precision, self._notes = preparation.precision, list(preparation.notes)
        self._tell(Begun(**self._describe(runs), precision=self._precision, device=str(runs.fixture.device)))
        double = preparation.double_of(runs)
        self._exact = None if double is None else double.fixture
        tolerances = find_tolerances(runs, precision=self._precision, samples=target, double=double)
        self._compare_both(runs, "whole", tolerances)
        short = last_window(target, micro, each)
        if short is not None:
            self._compare_last(runs.fixture, preparation.batch, short, tolerances)
        return self._record(runs, tolerances, began)

    def _compare_last(self, fixture: Fixture, batch: Any, sizes: tuple[int, ...], tolerances: Tolerances) -> None:
        samples = sum(sizes)
        part, _ = split_batch(batch, [samples, self._request.target_batch - samples])
        runs = Runs(fixture, part, sizes)
        try:
            runs.full()
        except WorkloadError as error:
            is_single, even = ONE_VALUE in error.message, (max(sizes),) * 2
            if is_single and sizes != even and sum(even) < self._request.target_batch:
                self._compare_last(fixture, batch, even, tolerances)
                return
            if self._try_even(fixture, batch, sizes, error, tolerances):
                return
            if not is_single and not self._causes:  # State that is kept has the size of the parts before.
                raise
            why = "BatchNorm runs no single sample" if is_single else first_line(error.message)
            self._notes.append(f"the shorter window of {_words(sizes)} was left out: {why}")
            return
        self._compare_both(runs, "last", tolerances)

    def _try_even(
        self, fixture: Fixture, batch: Any, sizes: tuple[int, ...], error: WorkloadError, tolerances: Tolerances
    ) -> bool:
        """Whether an even window was compared in place of one with an odd part, which raised (timm's Mixup does)."""
        target, micro = self._request.target_batch, self._micro_batch
        if self._each > 1 or target % 2 or micro % 2 or not any(size % 2 for size in sizes):
            return False
        even = last_window(target, micro, 2)
        if even is None:
            return False
        part, _ = split_batch(batch, [sum(even), target - sum(even)])
        try:
            Runs(fixture, part, even).full()
        except WorkloadError:
            return False
        self._note([f"micro-batches are taken to be even: a window of {_words(sizes)} raises ({first_line(error)})"])
        self._each = 2
        self._compare_last(fixture, batch, even, tolerances)
        return True

    def _compare_both(self, runs: Runs, window: Any, tolerances: Tolerances) -> None:
        """By the Accumulator, and by the workload's own loop where it has one."""
        self._compare(runs, "accumulator", window, tolerances)
        if self._subject.workload.accumulate is not None:
            loaded = loaded_window(sum(runs.sizes), self._micro_batch)
            own = runs if loaded == runs.sizes else runs.with_sizes(loaded)
            self._compare(own.for_own(), "accumulate", window, tolerances)

    def _compare(self, runs: Runs, method: Any, window: Any, tolerances: Tolerances) -> None:
        found, tolerances = self._compared(runs, method, window, tolerances)
        known = self._is_explained(found)
        self._comparisons.append(found)
        self._tell(Compared(found))
        self._note_draws(runs, method)
        self._note(find_notes(runs))
        if not found.equal and not known:
            self._diagnose(runs, found, tolerances)

    def _is_explained(self, found: Comparison) -> bool:
        """Whether the whole window differs too, for reasons that are known: the shorter one has the same."""
        whole = [one for one in self._comparisons if one.method == found.method == "accumulator"]
        known = [cause for cause in self._causes if cause.kind != "unknown"]
        return bool(whole and known) and not whole[0].equal

    def _diagnose(self, runs: Runs, comparison: Comparison, tolerances: Tolerances) -> None:
        self._tell(Diagnosing(comparison))
        try:
            diagnosis = find_causes(*self._exactly(runs, comparison, tolerances))
        except (WorkloadError, NotMeasuredError) as error:
            self._notes.append(f"the cause could not be sought: {first_line(error.message)}")
            return
        if not any(cause.proved for cause in diagnosis.causes):
            _refuse_host_draws(runs)
        known = {(cause.kind, cause.where, cause.change) for cause in self._causes}
        kinds = {cause.kind for cause in self._causes}
        new = [one for one in diagnosis.causes if (one.kind, one.where, one.change) not in known]
        self._causes += [one for one in new if one.kind != "unknown" or "unknown" not in kinds]
        self._note(diagnosis.notes)

    def _exactly(
        self, runs: Runs, comparison: Comparison, tolerances: Tolerances
    ) -> tuple[Runs, Comparison, Tolerances]:
        """The same in float64, where causes do not hide behind rounding; as it is where float64 tells no difference."""
        if self._exact is None:
            return runs, comparison, tolerances
        exact = runs.with_fixture(self._exact)
        bounds = find_tolerances(exact, precision="fp64", samples=sum(runs.sizes))
        found, bounds = self._compared(exact, comparison.method, comparison.window, bounds)
        if found.equal:
            self._note([f"in float64 there is no such difference: it is of {self._precision} alone"])
            return runs, comparison, tolerances
        self._note(["causes were sought in float64"])
        return exact, found, bounds

    def _compared(self, runs: Runs, method: Any, window: Any, tolerances: Tolerances) -> tuple[Comparison, Tolerances]:
        """The comparison, and what it was judged by; how rounding moves an update is asked only where it matters."""
        full, other = runs.full(), runs.accumulated() if method == "accumulator" else runs.own()
        tolerances = with_move(tolerances, runs)
        differences = compare(full, other, tolerances)
        if not all(one.equal for one in differences):
            tolerances = with_update(tolerances, runs)
            differences = compare(full, other, tolerances)
        if [one.quantity for one in differences if not one.equal] == ["update"]:
            differences = compare(full, other, allow_own(tolerances, runs, other))
        found = Comparison(method=method, window=window, micro_batches=runs.sizes, differences=differences)
        return found, tolerances

    def _note_draws(self, runs: Runs, method: Any) -> None:
        if runs.mismatch is not None:
            beside = "the Accumulator's" if method == "accumulator" else "accumulate()'s"
            where = f"in the full batch's update and {beside} by {_words(runs.sizes)}"
            self._note([f"random draws were held at values that do nothing, {where}: {runs.mismatch}"])
        elif runs.shared_draws:
            self._note(
                [
                    "drawn for all samples alike, so that all parts were given what the first one drew:"
                    f" {', '.join(runs.shared_draws)}"
                ]
            )

    def _note(self, notes: Sequence[str]) -> None:
        self._notes += [note for note in notes if note not in self._notes]

    def _record(self, runs: Runs, tolerances: Tolerances, began: float) -> Verification:
        workload, objective = self._subject.workload, self._subject.workload.objective
        return Verification(
            equivalent=all(comparison.equal for comparison in self._comparisons),
            target_batch=self._request.target_batch,
            micro_batch=self._micro_batch,
            precision=self._precision,
            device=str(runs.fixture.device),
            batchnorm=workload.batchnorm,
            rounding=tolerances.rounding,
            comparisons=tuple(self._comparisons),
            causes=tuple(self._causes),
            notes=tuple(self._notes),
            workload={
                "reference": self._subject.reference,
                "digest": workload.digest,
                **self._describe(runs),
                "loss": name_loss(workload),
                "reduction": objective.reduction,
                "weight": objective.source,
                "worst_of": workload.worst_of,
            },
            environment=describe_environment(runs.fixture.device),
            seconds=time.monotonic() - began,
        )

    def _describe(self, runs: Runs) -> dict[str, Any]:
        trained = runs.fixture.fresh()
        return {
            "name": self._subject.workload.name,
            "model": type(trained.model).__name__,
            "parameters": sum(parameter.numel() for parameter in trained.model.parameters()),
            "optimizer": type(trained.optimizer).__name__,
        }

    def _tell(self, event: Any) -> None:
        if self._request.on_event is not None:
            self._request.on_event(event)


def _refuse_host_draws(runs: Runs) -> None:
    """Where no cause is proved, and other draws of Python's or NumPy's would give another gradient, these may be it."""
    whose = runs.host_freedom()
    if whose is not None:
        raise NotMeasuredError(
            f"parts draw otherwise from {whose} generators than the full batch does, and what those draw cannot be"
            " given to another run",
            hint="draw with torch (torch.rand, torch.randperm), whose draws are matched, or where the batch is made",
        )


def _words(sizes: tuple[int, ...]) -> str:
    return " + ".join(map(str, sizes))

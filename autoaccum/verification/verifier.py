"""The comparisons of one verification, in order, and the search for what makes them differ."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from autoaccum.accumulation.schedule import check_multiple
from autoaccum.devices.environment import describe_environment
from autoaccum.devices.inspection import name_loss
from autoaccum.errors import NotMeasuredError, UsageError, WorkloadError, first_line
from autoaccum.verification.causes.diagnosis import find_causes
from autoaccum.verification.causes.notes import find_notes
from autoaccum.verification.comparing import Tolerances, compare
from autoaccum.verification.events import Begun, Compared, Diagnosing
from autoaccum.verification.laboratory.laboratory import Laboratory
from autoaccum.verification.laboratory.specimen import Precision, Specimen
from autoaccum.verification.preparation import ONE_VALUE, Preparation
from autoaccum.verification.records import Cause, Comparison, Verification
from autoaccum.verification.request import VerifyRequest, last_window, loaded_window, whole_window
from autoaccum.verification.subjects import Subject
from autoaccum.verification.tolerance import allow_own, find_tolerances, with_move, with_update
from autoaccum.workload.batches import split_batch


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
        self._exact: Specimen | None = None
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
        lab = preparation.whole_laboratory(whole_window(target, micro, each))
        self._precision, self._notes = preparation.precision, list(preparation.notes)
        self._tell(Begun(**self._describe(lab), precision=self._precision, device=str(lab.specimen.device)))
        double = preparation.double_of(lab)
        self._exact = None if double is None else double.specimen
        tolerances = find_tolerances(lab, precision=self._precision, samples=target, double=double)
        self._compare_both(lab, "whole", tolerances)
        short = last_window(target, micro, each)
        if short is not None:
            self._compare_last(lab.specimen, preparation.batch, short, tolerances)
        return self._record(lab, tolerances, began)

    def _compare_last(self, specimen: Specimen, batch: Any, sizes: tuple[int, ...], tolerances: Tolerances) -> None:
        samples = sum(sizes)
        part, _ = split_batch(batch, [samples, self._request.target_batch - samples])
        lab = Laboratory(specimen, part, sizes)
        try:
            lab.full()
        except WorkloadError as error:
            is_single, even = ONE_VALUE in error.message, (max(sizes),) * 2
            if is_single and sizes != even and sum(even) < self._request.target_batch:
                self._compare_last(specimen, batch, even, tolerances)
                return
            if self._try_even(specimen, batch, sizes, error, tolerances):
                return
            if not is_single and not self._causes:  # State that is kept has the size of the parts before.
                raise
            why = "BatchNorm runs no single sample" if is_single else first_line(error.message)
            self._notes.append(f"the shorter window of {_words(sizes)} was left out: {why}")
            return
        self._compare_both(lab, "last", tolerances)

    def _try_even(
        self, specimen: Specimen, batch: Any, sizes: tuple[int, ...], error: WorkloadError, tolerances: Tolerances
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
            Laboratory(specimen, part, even).full()
        except WorkloadError:
            return False
        self._note([f"micro-batches are taken to be even: a window of {_words(sizes)} raises ({first_line(error)})"])
        self._each = 2
        self._compare_last(specimen, batch, even, tolerances)
        return True

    def _compare_both(self, lab: Laboratory, window: Any, tolerances: Tolerances) -> None:
        """By the Accumulator, and by the workload's own loop where it has one."""
        self._compare(lab, "accumulator", window, tolerances)
        if self._subject.workload.accumulate is not None:
            loaded = loaded_window(sum(lab.sizes), self._micro_batch)
            own = lab if loaded == lab.sizes else lab.with_sizes(loaded)
            self._compare(own.for_own(), "accumulate", window, tolerances)

    def _compare(self, lab: Laboratory, method: Any, window: Any, tolerances: Tolerances) -> None:
        found, tolerances = self._compared(lab, method, window, tolerances)
        known = self._is_explained(found)
        self._comparisons.append(found)
        self._tell(Compared(found))
        self._note_draws(lab, method)
        self._note(find_notes(lab))
        if not found.equal and not known:
            self._diagnose(lab, found, tolerances)

    def _is_explained(self, found: Comparison) -> bool:
        """Whether the whole window differs too, for reasons that are known: the shorter one has the same."""
        whole = [one for one in self._comparisons if one.method == found.method == "accumulator"]
        known = [cause for cause in self._causes if cause.kind != "unknown"]
        return bool(whole and known) and not whole[0].equal

    def _diagnose(self, lab: Laboratory, comparison: Comparison, tolerances: Tolerances) -> None:
        self._tell(Diagnosing(comparison))
        try:
            diagnosis = find_causes(*self._exactly(lab, comparison, tolerances))
        except (WorkloadError, NotMeasuredError) as error:
            self._notes.append(f"the cause could not be sought: {first_line(error.message)}")
            return
        if not any(cause.proved for cause in diagnosis.causes):
            _refuse_host_draws(lab)
        known = {(cause.kind, cause.where, cause.change) for cause in self._causes}
        kinds = {cause.kind for cause in self._causes}
        new = [one for one in diagnosis.causes if (one.kind, one.where, one.change) not in known]
        self._causes += [one for one in new if one.kind != "unknown" or "unknown" not in kinds]
        self._note(diagnosis.notes)

    def _exactly(
        self, lab: Laboratory, comparison: Comparison, tolerances: Tolerances
    ) -> tuple[Laboratory, Comparison, Tolerances]:
        """The same in float64, where causes do not hide behind rounding; as it is where float64 tells no difference."""
        if self._exact is None:
            return lab, comparison, tolerances
        exact = lab.with_specimen(self._exact)
        bounds = find_tolerances(exact, precision="fp64", samples=sum(lab.sizes))
        found, bounds = self._compared(exact, comparison.method, comparison.window, bounds)
        if found.equal:
            self._note([f"in float64 there is no such difference: it is of {self._precision} alone"])
            return lab, comparison, tolerances
        self._note(["causes were sought in float64"])
        return exact, found, bounds

    def _compared(
        self, lab: Laboratory, method: Any, window: Any, tolerances: Tolerances
    ) -> tuple[Comparison, Tolerances]:
        """The comparison, and what it was judged by; how rounding moves an update is asked only where it matters."""
        full, other = lab.full(), lab.accumulated() if method == "accumulator" else lab.own()
        tolerances = with_move(tolerances, lab)
        differences = compare(full, other, tolerances)
        if not all(one.equal for one in differences):
            tolerances = with_update(tolerances, lab)
            differences = compare(full, other, tolerances)
        if [one.quantity for one in differences if not one.equal] == ["update"]:
            differences = compare(full, other, allow_own(tolerances, lab, other))
        found = Comparison(method=method, window=window, micro_batches=lab.sizes, differences=differences)
        return found, tolerances

    def _note_draws(self, lab: Laboratory, method: Any) -> None:
        if lab.mismatch is not None:
            beside = "the Accumulator's" if method == "accumulator" else "accumulate()'s"
            runs = f"in the full batch's update and {beside} by {_words(lab.sizes)}"
            self._note([f"random draws were held at values that do nothing, {runs}: {lab.mismatch}"])
        elif lab.shared_draws:
            self._note(
                [
                    "drawn for all samples alike, so that all parts were given what the first one drew:"
                    f" {', '.join(lab.shared_draws)}"
                ]
            )

    def _note(self, notes: Sequence[str]) -> None:
        self._notes += [note for note in notes if note not in self._notes]

    def _record(self, lab: Laboratory, tolerances: Tolerances, began: float) -> Verification:
        workload, objective = self._subject.workload, self._subject.workload.objective
        return Verification(
            equivalent=all(comparison.equal for comparison in self._comparisons),
            target_batch=self._request.target_batch,
            micro_batch=self._micro_batch,
            precision=self._precision,
            device=str(lab.specimen.device),
            batchnorm=workload.batchnorm,
            rounding=tolerances.rounding,
            comparisons=tuple(self._comparisons),
            causes=tuple(self._causes),
            notes=tuple(self._notes),
            workload={
                "reference": self._subject.reference,
                "digest": workload.digest,
                **self._describe(lab),
                "loss": name_loss(workload),
                "reduction": objective.reduction,
                "weight": objective.source,
                "worst_of": workload.worst_of,
            },
            environment=describe_environment(lab.specimen.device),
            seconds=time.monotonic() - began,
        )

    def _describe(self, lab: Laboratory) -> dict[str, Any]:
        trained = lab.specimen.fresh()
        return {
            "name": self._subject.workload.name,
            "model": type(trained.model).__name__,
            "parameters": sum(parameter.numel() for parameter in trained.model.parameters()),
            "optimizer": type(trained.optimizer).__name__,
        }

    def _tell(self, event: Any) -> None:
        if self._request.on_event is not None:
            self._request.on_event(event)


def _refuse_host_draws(lab: Laboratory) -> None:
    """Where no cause is proved, and other draws of Python's or NumPy's would give another gradient, these may be it."""
    whose = lab.host_freedom()
    if whose is not None:
        raise NotMeasuredError(
            f"parts draw otherwise from {whose} generators than the full batch does, and what those draw cannot be"
            " given to another run",
            hint="draw with torch (torch.rand, torch.randperm), whose draws are matched, or where the batch is made",
        )


def _words(sizes: tuple[int, ...]) -> str:
    return " + ".join(map(str, sizes))

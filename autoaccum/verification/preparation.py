"""What a verification begins with: a batch, and runs of it that come to something."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from torch import Tensor

from autoaccum.accumulation.randomness import RandomState
from autoaccum.accumulation.shares import has_weight
from autoaccum.devices.rehearsal import seed_everything
from autoaccum.errors import WorkloadError, first_line
from autoaccum.verification.causes.states import KEPT_STATE, has_kept_state
from autoaccum.verification.laboratory.laboratory import Laboratory
from autoaccum.verification.laboratory.outcomes import Change
from autoaccum.verification.laboratory.specimen import Precision, Specimen
from autoaccum.verification.request import VerifyRequest
from autoaccum.verification.subjects import Subject
from autoaccum.workload.experiments import users_code
from autoaccum.workload.sampling import take_small_batch

_NOT_FINITE = "there is nothing to compare: look for a division by zero, the root or log of 0, a mean over nothing"
_LEAST_SCALE = 2.0**-10
"""Of losses under fp16: below, what overflows does so by itself."""

ONE_VALUE = "more than 1 value per channel"
"""Of torch/nn/functional.py, `_verify_batch_size`: BatchNorm and one sample."""


class Preparation:
    """Makes the batch, with seeds of its own, and laboratories of the whole window.

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

    def whole_laboratory(self, sizes: tuple[int, ...]) -> Laboratory:
        """The whole window; in float32 where float64 was not asked for and does not run."""
        try:
            return self._laboratory(self.precision, sizes)
        except WorkloadError as error:
            if self._request.precision is not None:
                raise
            failure = error
        self.precision = "fp32"
        lab = self._laboratory(self.precision, sizes)
        self.notes.append(f"verified in float32: in float64 the workload does not run ({first_line(failure.message)})")
        return lab

    def double_of(self, lab: Laboratory) -> Laboratory | None:
        """The same in float64, to tell rounding by; None where that is what it is, or does not run."""
        if self.precision == "fp64":
            return None
        try:
            double = self._laboratory("fp64", lab.sizes)
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

    def _laboratory(self, precision: Precision, sizes: tuple[int, ...]) -> Laboratory:
        """One whose full batch has run to a loss that is a number."""
        self._random.restore()  # Each precision begins with the same weights.
        with users_code("model()"):
            specimen = Specimen(
                self._subject.workload,
                precision=precision,
                device=self._request.device,
                optimizer=self._subject.optimizer,
            )
        lab = Laboratory(specimen, self.batch, sizes)
        self._check_weight(lab)
        odd = self._odd_gradient(lab)
        while odd is not None and specimen.loss_scale > _LEAST_SCALE:
            specimen.loss_scale /= 16
            lab = Laboratory(specimen, self.batch, sizes)
            odd = self._odd_gradient(lab)
        if odd is not None:
            raise WorkloadError(f"the gradient of {odd} from batch({sum(sizes)}) is not finite", hint=_NOT_FINITE)
        return lab

    def _check_weight(self, lab: Laboratory) -> None:
        with users_code("weight(batch)"):
            weight = lab.objective.weight(lab.batch)
        if not has_weight(weight):
            raise WorkloadError(
                f"weight(batch) of {sum(lab.sizes)} samples is 0: nothing would be learnt",
                hint="let batch(size) give samples that count",
            )

    def _odd_gradient(self, lab: Laboratory) -> str | None:
        """The parameter whose gradient from the full batch is not finite.

        Raises:
            WorkloadError: The full batch does not run, or its loss is not finite.
        """
        try:
            full = lab.full()
        except WorkloadError as error:
            if has_kept_state(lab):
                raise WorkloadError(error.message, hint=KEPT_STATE, user_traceback=error.user_traceback) from error
            raise _with_hint(error, max(lab.sizes)) from error
        if not math.isfinite(full.loss):
            raise WorkloadError(f"the loss of batch({sum(lab.sizes)}) is {full.loss}", hint=_NOT_FINITE)
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

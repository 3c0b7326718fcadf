"""One attempt at one update: what a step does between its beginning and its end, or its rollback."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from autoaccum.accumulation.backpropagation import LossRecord, has_weight, make_shares
from autoaccum.accumulation.batchnorm_modes import BACKPROPAGATIONS
from autoaccum.accumulation.cautions import BufferVersions, balancing_warning, buffers_warning
from autoaccum.accumulation.changes import ForwardWatch
from autoaccum.accumulation.gradients import (
    GradientBuffers,
    clip_gradients,
    dense_gradients,
    needs_buffers,
    rounding_warning,
)
from autoaccum.accumulation.observers import StepObserver, StepPhase, StepResult, WeightingWarning, warn_caller
from autoaccum.accumulation.randomness import own_generators
from autoaccum.accumulation.recovery import HeldInterrupts, is_context_dead
from autoaccum.accumulation.state import Transaction
from autoaccum.accumulation.update import Updater, optimizer_parameters
from autoaccum.errors import NonFiniteError, UpdateInterrupted
from autoaccum.options import AccumulateIn, BatchNormMode
from autoaccum.workload.batches import split_batch
from autoaccum.workload.candidates import ignored_labels_warning
from autoaccum.workload.weights import Objective, Weights


class Attempt:
    """Attempts updates of one model by one optimizer; arguments as `Accumulator` has checked them.

    Attributes:
        phase: Where an attempt is now, or was when it failed.
        interrupts: To be entered around attempts: an interruption then waits for the next phase, or for the end.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        objective: Objective,
        precision: str,
        clip_norm: float | None,
        scaler: GradScaler | None,
        scheduler: LRScheduler | None,
        *,
        batchnorm: BatchNormMode,
        accumulate_in: AccumulateIn = "fp32",
        check_finite: bool,
        observer: StepObserver,
    ) -> None:
        self.phase: StepPhase = "batch"
        self.interrupts = HeldInterrupts()
        self._model, self._optimizer, self._objective = model, optimizer, objective
        self._clip_norm, self._scaler = clip_norm, scaler
        self._check_finite, self._observer = check_finite, observer
        self._updater = Updater(optimizer, scaler, scheduler)
        self._backpropagation = BACKPROPAGATIONS[batchnorm](
            model, objective, precision=precision, scaler=scaler, enter=self._enter
        )
        self._generators = own_generators(self._modules())
        self._is_first = True
        self._has_warned = self._has_accumulated = self._knows_buffers = False
        self._sums_wide = accumulate_in == "fp32"

    def check(self) -> None:
        """Refuse to go on with half an update.

        Raises:
            UpdateInterrupted: An earlier one failed half-way.
        """
        self._updater.check()

    @property
    def is_interrupted(self) -> bool:
        """Whether an update was cut in two, or what a step had changed could not be put back."""
        return self._updater.is_interrupted

    def run(self, batches: Sequence[Any], cuts: Sequence[tuple[int, ...]], retries: int) -> StepResult | BaseException:
        """Make one update from `batches`, each cut into parts of `cuts` samples.

        What it raises is returned, so that nobody recovers while handling it: a handled exception would pin the
        tensors of every frame it passed through. By then the state is as before, unless it is UpdateInterrupted.
        """
        transaction = None
        try:
            parameters = self._parameters()
            transaction = Transaction(self._modules(), parameters, generators=self._generators, scaler=self._scaler)
            _drop_gradients(parameters)
            result = self._update(batches, cuts, retries, transaction)
            _drop_gradients(parameters)
            return result
        except BaseException as error:
            failure = error
        try:
            return failure if transaction is None else self._roll_back(transaction, failure)
        finally:
            del failure  # the traceback holds this frame

    def _update(
        self, batches: Sequence[Any], cuts: Sequence[tuple[int, ...]], retries: int, transaction: Transaction
    ) -> StepResult:
        self._enter("batch")
        parts = [part for batch, cut in zip(batches, cuts, strict=True) for part in split_batch(batch, cut)]
        sizes = tuple(size for cut in cuts for size in cut)
        shares = make_shares([self._objective.weight(part) for part in parts], self._objective.reduction)
        if not any(map(has_weight, shares)):
            return StepResult(math.nan, sum(sizes), sizes, None, retries, updated=False, terms={})
        record, buffers = self._accumulate(parts, shares)
        self._enter("clip")
        loss, terms, norm = self._measure(record, buffers)
        if self._check_finite:
            self._refuse_nonfinite(loss, norm)
        self._enter("update")
        if buffers is not None:
            buffers.settle()
        updated = self._updater.run(transaction)
        return StepResult(loss, sum(sizes), sizes, norm, retries, updated, terms)

    def _accumulate(self, parts: Sequence[Any], shares: Sequence[Weights]) -> tuple[LossRecord, GradientBuffers | None]:
        accumulates = sum(has_weight(share) for share in shares) > 1
        trained = optimizer_parameters(self._optimizer)
        buffers = None
        if accumulates and needs_buffers(trained):
            buffers = GradientBuffers(trained, wide=self._sums_wide)
            if not (self._sums_wide or self._has_accumulated):
                warn_caller(rounding_warning(trained))
        watch = ForwardWatch(self._model, parts) if self._is_first else None
        versions = BufferVersions(self._model) if accumulates and not self._knows_buffers else None
        if accumulates and not self._has_accumulated:
            self._has_accumulated = True
            if said := ignored_labels_warning(self._objective, self._model, parts):
                warn_caller(said, WeightingWarning)
            if said := balancing_warning(self._model):
                warn_caller(said)
        self._warn_of_batchnorm(accumulates=accumulates)
        record = self._backpropagation.run(parts, shares, buffers)
        if versions is not None:
            self._knows_buffers = True
            if names := versions.written():
                warn_caller(buffers_warning(names))
        if watch is not None:
            self._is_first = False
            if text := watch.warning():
                warn_caller(text)
        return record, buffers

    def _measure(
        self, record: LossRecord, buffers: GradientBuffers | None
    ) -> tuple[float, dict[str, float], float | None]:
        """Unscale, clip, and read everything at once: the only synchronisation, and before anything is written."""
        if self._scaler is not None:
            self._scaler.unscale_(self._optimizer)
        scalars = record.values
        if self._clip_norm is not None:
            trained = optimizer_parameters(self._optimizer)
            gradients = dense_gradients(trained) if buffers is None else buffers.values()
            if not gradients:
                return *record.total(_read(scalars)), 0.0
            scalars = [*scalars, clip_gradients(gradients, self._clip_norm)]
        values = _read(scalars)
        count = len(record.values)
        return *record.total(values[:count]), values[count] if self._clip_norm is not None else None

    def _refuse_nonfinite(self, loss: float, norm: float | None) -> None:
        """A scaler skips an infinite gradient, and what overflowed by its scale: that is no fault of the training."""
        if self._scaler is None and not math.isfinite(norm or 0.0):
            raise _nonfinite(f"the gradient's norm is {norm}", loss, norm)
        if math.isnan(loss) or (self._scaler is None and math.isinf(loss)):
            raise _nonfinite(f"the loss is {loss}", loss, norm)

    def _roll_back(self, transaction: Transaction, error: BaseException) -> BaseException:
        """Undo everything and give `error` back; UpdateInterrupted when that cannot be done."""
        if isinstance(error, UpdateInterrupted) or self._updater.is_interrupted:
            return error
        if is_context_dead(error):
            self._updater.is_interrupted = True
            return error
        try:
            try:
                transaction.rollback()
            except KeyboardInterrupt as interrupt:
                transaction.rollback()
                return interrupt
        except Exception as second:
            self._updater.is_interrupted = True
            interrupted = UpdateInterrupted(
                f"a step failed, and its state could not be put back ({type(second).__name__}: {second})",
                hint="load a checkpoint and make a new Accumulator",
            )
            interrupted.__cause__ = error
            return interrupted
        return error

    def _warn_of_batchnorm(self, *, accumulates: bool) -> None:
        cautions = [] if self._has_warned else self._backpropagation.cautions(accumulates=accumulates)
        for caution in cautions:
            self._has_warned = True
            warn_caller(caution)

    def _modules(self) -> list[nn.Module]:
        criterion = self._objective.criterion_module
        return [*self._model.modules(), *(() if criterion is None else criterion.modules())]

    def _parameters(self) -> list[Tensor]:
        criterion = self._objective.criterion_module
        everything: list[Tensor] = [*self._model.parameters(), *optimizer_parameters(self._optimizer)]
        if criterion is not None:
            everything.extend(criterion.parameters())
        return list({id(parameter): parameter for parameter in everything}.values())

    def _enter(self, phase: StepPhase) -> None:
        self.interrupts.deliver()
        self.phase = phase
        self._observer.phase(phase)


def _nonfinite(seen: str, loss: float, norm: float | None) -> NonFiniteError:
    return NonFiniteError(
        f"{seen}, the update was not made",
        loss=loss,
        grad_norm=norm,
        hint="lower the learning rate, clip the gradient, or look at this batch",
    )


def _drop_gradients(parameters: Iterable[Tensor]) -> None:
    for parameter in parameters:
        parameter.grad = None


def _read(scalars: Sequence[Tensor]) -> list[float]:
    """The values of scalars of any dtype and device, in one transfer."""
    device = scalars[0].device
    values = torch.stack([scalar.to(device) for scalar in scalars]).tolist()
    return [float(value) for value in values]

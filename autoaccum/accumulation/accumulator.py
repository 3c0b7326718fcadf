"""One effective batch, one update, all or nothing."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from autoaccum.accumulation.argument_checks import (
    check_clip_norm,
    check_group,
    check_model,
    check_optimizer,
    check_precision,
    check_scheduler,
    checked_micro_batch,
)
from autoaccum.accumulation.backpropagation import LossRecord, has_weight, make_shares, model_device
from autoaccum.accumulation.batchnorm_modes import BACKPROPAGATIONS, checked_batchnorm
from autoaccum.accumulation.first_step_checks import BufferVersions, load_balancing_warning
from autoaccum.accumulation.gradients import (
    GradientBuffers,
    choose_scaler,
    clip_gradients,
    dense_gradients,
    needs_buffers,
    rounding_warning,
)
from autoaccum.accumulation.plan_check import (
    PlanLike,
    check_plan,
    choose_ceiling,
    choose_objective,
    choose_option,
)
from autoaccum.accumulation.recovery import (
    DelayedInterrupts,
    clear_frames,
    find_out_of_memory,
    is_context_dead,
    release_memory,
    shrink,
)
from autoaccum.accumulation.rng_state import module_generators
from autoaccum.accumulation.schedule import check_multiple, split_evenly
from autoaccum.accumulation.state_hash import ForwardSideEffects, batch_versions
from autoaccum.accumulation.step_result import StepObserver, StepPhase, WeightingWarning, warn_caller
from autoaccum.accumulation.step_result import StepResult as StepResult
from autoaccum.accumulation.transaction import Transaction
from autoaccum.accumulation.update import Updater, optimizer_parameters
from autoaccum.errors import DoesNotFitError, NonFiniteError, UpdateInterrupted, UsageError
from autoaccum.options import AccumulateIn, BatchNormMode, read_accumulate_in
from autoaccum.workload.batches import batch_size, read_batching, split_batch
from autoaccum.workload.objective import Weights
from autoaccum.workload.weight_candidates import ignored_labels_warning


class Accumulator:
    """Trains with an effective batch in micro-batches: the same gradient, the memory of one micro-batch.

    All weights of the effective batch are known before its first backward; each micro-loss is multiplied by its
    share and its graph freed by its own backward. Gradients that are there before a step do not count, and after it
    `.grad` is None on every parameter. Those of half precision are summed in float32 and rounded once. The norm is
    that of the optimizer's parameters, taken and clipped once per update. Batches may be on any device.

    A step is all or nothing. When memory runs out (or anything else is raised) before the optimizer has begun to
    write, or within its first update, which is guarded by a host copy, everything is put back: weights, buffers,
    optimizer, scaler, scheduler, random states, modes, `.grad`. Out of memory, the batch is then repeated in smaller
    micro-batches (`recovery.shrink`), with a warning, and `micro_batch` stays that small. Later updates have their
    memory made sure of instead of a copy; should one fail half-way all the same, UpdateInterrupted ends training.
    Ctrl-C takes effect between a forward, a backward and the update, never within one; pressed again, at once.

    >>> import torch
    >>> from torch.nn import Linear, MSELoss
    >>> from torch.optim import SGD
    >>> model = Linear(2, 2)
    >>> accumulator = Accumulator(model, SGD(model.parameters(), lr=0.1), MSELoss(), micro_batch=100)
    >>> accumulator.step((torch.ones(256, 2), torch.zeros(256, 2))).micro_batches
    (86, 85, 85)

    Attributes:
        phase: Where a step is now, or was when it raised.

    Args:
        model: The model, in place on its device.
        optimizer: One optimizer of its parameters; it may lack some, whose gradients are dropped.
        loss: `loss(model, batch)`, or a criterion, or an `Objective`; see `workload.weights.resolve_objective`.
            None, and no criterion either: `model(**batch).loss`, as transformers' models compute it of labels.
        micro_batch: The most samples to run at once; leave it away where `plan` is given.
        plan: An `autoaccum.Plan`: its micro-batch is taken, and its precision, reduction and batchnorm where none are
            given. It must have been made for this model, loss, optimizer and device.
        criterion: `criterion(outputs, targets)` for batches of `(inputs, targets)`, in place of `loss`.
        weight: `weight(batch)`: what the mean in `loss` divides by; the number of samples when None.
        reduction: `mean` (if nothing else tells) or `sum`; the parts of a sum are not divided.
        clip_norm: The largest 2-norm of an update's gradient; infinity measures only; None does neither.
        precision: `fp32` (if no plan tells), or `bf16` or `fp16` by autocast.
        scaler: A GradScaler; for `fp16` one is made when None is given.
        scheduler: Stepped once after each update that was made.
        recover: False: an out-of-memory rolls everything back and is raised as it came.
        check_finite: Refuse an update whose loss or (with `clip_norm`) gradient is not finite, before it is made.
            With a scaler, whose business they are, only a loss that is no number and that no smaller scale mends.
        batchnorm: What BatchNorm in training mode sees and remembers of an effective batch in parts. `micro` (if no
            plan tells): as PyTorch does it, each micro-batch for itself. `running`: it normalises by the micro-batch,
            and updates its running statistics once, as the full batch would. `frozen`: it normalises by its running
            statistics, which stay as they are: the gradient is exactly the full batch's; its weight and bias train.
        split: `split(batch, sizes)`: a list of parts with so many samples each, where samples are not rows of tensors
            (graphs, images of many patches, packed tokens); `size` goes with it.
        size: `size(batch)`: the number of its samples.
        multiple_of: Every micro-batch is a multiple of so many samples, as is every batch of a step; the plan's, or 1,
            when None.
        accumulate_in: What gradients of half-precision parameters are summed in: `fp32` (if no plan tells), or
            `parameters`, their own dtype: no bytes beside `.grad`, and each part rounded, of which it warns.
        observer: Told of each step from within, and of an out-of-memory in place of the warning.

    Raises:
        UsageError: An argument cannot be honoured, or the plan is for something else: says what differs.
        WorkloadError: `loss`, `criterion`, `weight` and `reduction` do not go together.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        loss: Any = None,
        *,
        micro_batch: int | None = None,
        plan: PlanLike | None = None,
        criterion: Any = None,
        weight: Any = None,
        reduction: Literal["mean", "sum"] | None = None,
        clip_norm: float | None = None,
        precision: Literal["fp32", "bf16", "fp16"] | None = None,
        scaler: GradScaler | None = None,
        scheduler: LRScheduler | None = None,
        recover: bool = True,
        check_finite: bool = False,
        batchnorm: BatchNormMode | None = None,
        split: Callable[[Any, list[int]], Sequence[Any]] | None = None,
        size: Callable[[Any], int] | None = None,
        multiple_of: int | None = None,
        accumulate_in: AccumulateIn | None = None,
        observer: StepObserver | None = None,
    ) -> None:
        check_model(model)
        check_optimizer(optimizer, model)
        check_scheduler(scheduler, optimizer)
        check_clip_norm(clip_norm)
        self._each = 1 if plan is None else int(getattr(plan, "multiple_of", 1))
        if multiple_of is not None:
            self._each = checked_micro_batch(multiple_of, what="multiple_of")
        self.micro_batch = choose_ceiling(plan, micro_batch)
        chosen = choose_option(plan, "precision", precision, "fp32")
        check_precision(chosen)
        objective = choose_objective(
            loss, criterion=criterion, weight=weight, reduction=reduction, plan=plan, model=model
        )
        if split is not None or size is not None:
            objective = dataclasses.replace(objective, batching=read_batching(split, size))
        norms = checked_batchnorm(
            choose_option(plan, "batchnorm", batchnorm, "micro"), model, objective.criterion_module
        )
        sums = read_accumulate_in(choose_option(plan, "accumulate_in", accumulate_in, "fp32"), UsageError)
        if plan is not None:
            check_plan(plan, model, optimizer, objective, chosen, norms, sums)
        objective.move_criterion(model_device(model))
        scaler = choose_scaler(chosen, scaler, model_device(model), optimizer_parameters(optimizer))
        self.phase: StepPhase = "batch"
        self._model, self._optimizer, self._objective = model, optimizer, objective
        self._clip_norm, self._scaler, self._sums_wide = clip_norm, scaler, sums == "fp32"
        self._recover, self._check_finite, self._observer = recover, check_finite, observer
        self._updater = Updater(optimizer, scaler, scheduler)
        self._backpropagation = BACKPROPAGATIONS[norms](
            model, objective, precision=chosen, scaler=scaler, enter=self._enter
        )
        self._interrupts = DelayedInterrupts()
        self._generators = module_generators(self._modules())
        self._is_first = True
        self._has_warned = self._has_accumulated = False

    @property
    def micro_batch(self) -> int:
        """The ceiling: the most samples run at once. A retry lowers it; set it to raise it again."""
        return self._micro_batch

    @micro_batch.setter
    def micro_batch(self, value: int) -> None:
        self._micro_batch = checked_micro_batch(value, self._each)

    @property
    def is_interrupted(self) -> bool:
        """Whether nobody knows what state model and optimizer are in: an update was cut in two, or not put back."""
        return self._updater.is_interrupted

    def step(self, batch: Any) -> StepResult:
        """Make one update from the effective batch `batch`, on any device.

        Raises:
            DoesNotFitError: Not even one sample at a time fits; the state is as before.
            UpdateInterrupted: The update failed half-way, now or earlier.
            WorkloadError: The batch cannot be split, or the loss is not usable.
            NonFiniteError: `check_finite` is asked for, and the loss or the gradient is not; the state is as before.
            UsageError: The mode of BatchNorm could not be kept, or there are several ranks by now; the state is as
                before.
        """
        with self._interrupts:
            return self._run([batch])

    def step_parts(self, batches: Sequence[Any]) -> StepResult:
        """Make one update from a window of micro-batches, as a loader yields them.

            for window in windows(loader, iter_size):
                result = accumulator.step_parts(window)

        Each keeps its own form (padding, say), is weighted by what it has, and is cut further where it is larger than
        `micro_batch`. A short last window is right as it is.

        Raises:
            UsageError: There is no micro-batch.
            DoesNotFitError: As in `step`, like the other errors.
        """
        batches = list(batches)
        if not batches:
            raise UsageError("there is no micro-batch to step with", hint="give at least one")
        with self._interrupts:
            return self._run(batches)

    def _run(self, batches: list[Any]) -> StepResult:
        self._updater.check()
        check_group()
        if torch.is_inference_mode_enabled():
            raise UsageError("a step is called within torch.inference_mode()", hint="call it outside, to train")
        batches = [self._objective.wrap_batch(batch) for batch in batches]
        sizes, versions = [batch_size(batch) for batch in batches], batch_versions(batches)
        for size in sizes:
            check_multiple(size, self._each, "a batch's size")
        ceiling, failed_in = self.micro_batch, list[StepPhase]()
        while True:
            cuts = [split_evenly(size, ceiling, self._each) for size in sizes]
            outcome = self._attempt(batches, cuts, retries=len(failed_in))
            if isinstance(outcome, StepResult):
                self.micro_batch = ceiling
                return outcome
            failed_in.append(self.phase)
            largest = max(max(cut) for cut in cuts)
            self._refuse(outcome, largest, failed_in, is_same=batch_versions(batches) == versions)
            clear_frames(outcome)
            del outcome
            release_memory(model_device(self._model))
            ceiling = shrink(largest, len(failed_in) - 1, self._each)
            if self._observer is not None:
                self._observer.out_of_memory(self.phase, largest, ceiling)
            else:
                warn_caller(
                    f"out of memory ({self.phase}) with micro-batches of {largest}: nothing was changed, the batch is"
                    f" repeated with at most {ceiling}, and later steps keep to that"
                )

    def _attempt(
        self, batches: Sequence[Any], cuts: Sequence[tuple[int, ...]], retries: int
    ) -> StepResult | BaseException:
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
        accumulates = sum(map(has_weight, shares)) > 1
        trained = optimizer_parameters(self._optimizer)
        buffers = GradientBuffers(trained, wide=self._sums_wide) if accumulates and needs_buffers(trained) else None
        watch = ForwardSideEffects(self._model, parts) if self._is_first else None
        versions = BufferVersions(self._model) if accumulates and not self._has_accumulated else None
        said = [] if self._has_warned else self._backpropagation.cautions(accumulates=accumulates)
        record = self._backpropagation.run(parts, shares, buffers)
        self._has_warned, self._is_first = self._has_warned or bool(said), False
        said += [] if watch is None else watch.warnings()
        if versions is not None:
            self._has_accumulated = True
            rounds = buffers is not None and not self._sums_wide
            said += [
                *load_balancing_warning(self._model),
                *versions.warnings(),
                *([rounding_warning(trained)] * rounds),
            ]
            if text := ignored_labels_warning(self._objective, self._model, parts):
                warn_caller(text, WeightingWarning)
        for text in said:
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
        seen = None
        if math.isnan(loss) or (self._scaler is None and math.isinf(loss)):
            seen = f"the loss is {loss}"
        if self._scaler is None and not math.isfinite(norm or 0.0):
            seen = f"the gradient's norm is {norm}"
        if seen is not None:
            raise NonFiniteError(
                f"{seen}, the update was not made",
                loss=loss,
                grad_norm=norm,
                hint="lower the learning rate, clip the gradient, or look at this batch",
            )

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
        self._interrupts.deliver()
        self.phase = phase
        if self._observer is not None:
            self._observer.phase(phase)

    def _refuse(self, error: BaseException, largest: int, failed_in: list[StepPhase], *, is_same: bool) -> None:
        """Raise `error`, or the clear no it means, unless the batch can be repeated in smaller parts."""
        try:
            shortage = None if isinstance(error, UpdateInterrupted) else find_out_of_memory(error)
            if shortage is None or not self._recover:
                raise error
            if not is_same:
                warn_caller("memory ran out, and forward has changed the batch in place: it cannot be repeated")
                raise error
            # What an update needs does not depend on the micro-batch: twice is enough, once may be fragmentation.
            is_update = failed_in[-2:] == ["update", "update"]
            if largest > self._each and not is_update:
                return
            if not shortage.certain:
                raise error
            clear_frames(error)
            if is_update:
                raise DoesNotFitError(
                    "the update runs out of memory, whatever the micro-batch",
                    hint="free memory on the device, or use an optimizer with less state",
                ) from error
            least = "one sample" if self._each == 1 else f"{self._each} samples"
            raise DoesNotFitError(
                f"not even {least} at a time fits: out of memory ({self.phase})",
                hint="free memory on the device, shorten the samples, or lower the precision",
            ) from error
        finally:
            del error  # the traceback holds this frame


def _drop_gradients(parameters: Iterable[Tensor]) -> None:
    for parameter in parameters:
        parameter.grad = None


def _read(scalars: Sequence[Tensor]) -> list[float]:
    """The values of scalars of any dtype and device, in one transfer."""
    device = scalars[0].device
    values = torch.stack([scalar.to(device) for scalar in scalars]).tolist()
    return [float(value) for value in values]

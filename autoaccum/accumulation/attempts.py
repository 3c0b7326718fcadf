"""Attempts of an update: forward and backward of all parts and the optimizer's step, or the state as it was.

An attempt that fails is rolled back. If memory ran out, all ranks decide alike how it is repeated.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from autoaccum.accumulation.backpropagation import (
    Backpropagation,
    LossRecord,
    UpdateParts,
    has_weight,
    make_loss_factors,
    model_device,
    total_loss,
)
from autoaccum.accumulation.batchnorm import check_synchronised
from autoaccum.accumulation.cuts import Cut, Cuts, Limit
from autoaccum.accumulation.first_step_checks import FirstSteps
from autoaccum.accumulation.gradients import GradientBuffers, clip_gradients, dense_gradients, needs_buffers
from autoaccum.accumulation.out_of_memory import (
    clear_frames,
    find_out_of_memory,
    is_context_dead,
    release_memory,
    shrink,
)
from autoaccum.accumulation.ranks.group import OtherRanksFailed, RankFailure, check_alike
from autoaccum.accumulation.ranks.replicated import sum_gradients, without_calls
from autoaccum.accumulation.ranks.sharded import is_of_collective, out_of_memory
from autoaccum.accumulation.reachable_objects import all_modules
from autoaccum.accumulation.rng_state import module_generators
from autoaccum.accumulation.savers import Savers
from autoaccum.accumulation.schedule import slices
from autoaccum.accumulation.step_result import Progress, StepPhase, StepResult, refuse_nonfinite, warn_caller
from autoaccum.accumulation.transaction import Transaction, batch_versions
from autoaccum.accumulation.update import Updater, optimizer_parameters
from autoaccum.accumulation.whole_batch.lockstep import NeedsWholeBatch
from autoaccum.accumulation.whole_batch.parts_runners import LockstepParts, RecomputedParts, check_whole_batch
from autoaccum.errors import DoesNotFitError, RankLostError, UpdateInterrupted, UsageError, describe_error
from autoaccum.messages import message
from autoaccum.spec import TrainingSpec


class Attempts:
    """Makes updates, each in one attempt or more.

    The options are the Accumulator's; `cuts` says how batches are cut, and `wrappers` are modules in
    DistributedDataParallel, which the loss must not call.
    """

    def __init__(
        self,
        backpropagation: Backpropagation,
        updater: Updater,
        savers: Savers,
        progress: Progress,
        first_steps: FirstSteps,
        cuts: Cuts,
        spec: TrainingSpec,
        *,
        clip_norm: float | None,
        check_finite: bool,
        recover: bool,
        add_savers: bool,
        multiple_of: int,
        wrappers: Sequence[nn.Module],
    ) -> None:
        self._backpropagation, self._updater, self._savers = backpropagation, updater, savers
        self._progress, self._first_steps, self._cuts = progress, first_steps, cuts
        self._ranks, self._sharded = backpropagation.ranks, backpropagation.sharded
        self._batchnorm, self._in_fp32 = spec.batchnorm, spec.accumulate_in == "fp32"
        self._clip_norm, self._check_finite = clip_norm, check_finite
        self._recover, self._add_savers, self._multiple_of = recover, add_savers, multiple_of
        self._wrappers = wrappers
        self._generators = module_generators(all_modules(backpropagation.criterion, backpropagation.model))
        self._failed_in: list[StepPhase] = []
        if backpropagation.objective.coupled or spec.batchnorm == "exact":
            self._give_whole_batch(in_lockstep=spec.batchnorm == "exact")

    def make_update(
        self, batches: Sequence[Any], measures: Sequence[list[int]], limit: Limit
    ) -> tuple[StepResult, Limit]:
        """Make one update of `batches` in parts within `limit`, alike on all ranks.

        `measures` are the lengths of the samples of each (`Cuts.measure`).

        Returns:
            The result, and the limit with which it was made.

        Raises:
            BaseException: No attempt made the update. The state is restored unless it is UpdateInterrupted.
        """
        versions = batch_versions(batches)
        self._failed_in = []
        while True:
            cuts = [self._cuts.cut(*measured, limit.number) for measured in zip(batches, measures, strict=True)]
            outcome = self._attempt(batches, cuts, limit)
            if isinstance(outcome, StepResult):
                return outcome, limit
            largest = max((cut.largest for cut in cuts), default=0)
            unchanged = self._sharded is not None or batch_versions(batches) == versions
            limit = self._lower(limit, outcome, largest, unchanged=unchanged)

    def _attempt(self, batches: Sequence[Any], cuts: Sequence[Cut], limit: Limit) -> StepResult | BaseException:
        """Make one update from `batches`, each cut as `cuts` say, and return its result or its error.

        An error is returned, not raised: while an exception is handled, it keeps the tensors of all its frames alive.
        The state is restored by then, unless the error is UpdateInterrupted.
        """
        with ExitStack() as around:  # Its end comes after a rollback, which restores what was there within it.
            transaction, self._updater.has_agreed = None, False
            try:
                modules = all_modules(self._backpropagation.criterion, self._backpropagation.model)
                parameters = self._parameters(modules)
                transaction = Transaction(modules, parameters, generators=self._generators, scaler=self._updater.scaler)
                for parameter in parameters:
                    parameter.grad = None
                result = self._update(batches, cuts, transaction, modules, around, limit)
                for parameter in parameters:
                    parameter.grad = None
                return result
            except BaseException as error:
                if self._updater.has_agreed:
                    raise  # The others make their updates, and wait for no word of this one; nor is it to be repeated.
                return error if transaction is None else _roll_back(transaction, self._updater, error)

    def _update(
        self,
        batches: Sequence[Any],
        cuts: Sequence[Cut],
        transaction: Transaction,
        modules: Sequence[nn.Module],
        around: ExitStack,
        limit: Limit,
    ) -> StepResult:
        self._progress.begin_phase("batch")
        backpropagation, ranks, sharded = self._backpropagation, self._ranks, self._sharded
        objective, trained = backpropagation.objective, optimizer_parameters(self._updater.optimizer)
        pairs = list(zip(batches, cuts, strict=True))
        parts = [part for pair in pairs for part in self._cuts.parts(*pair)]
        sizes, weights = tuple(chain(*(cut.sizes for cut in cuts))), [objective.weight(part) for part in parts]
        facts_here: dict[str, Any] = {"micro_batch": None, "micro_tokens": None, limit.unit: limit.number}
        facts_here |= self._updater.common_facts()
        facts, samples, weights_by_rank = zip(*ranks.gather((facts_here, sum(sizes), weights)), strict=True)
        check_alike(facts)
        if not any(weights_by_rank):
            where = " on any rank" if ranks.size > 1 else ""
            raise UsageError(f"there is no micro-batch to step with{where}", hint="give at least one")
        all_factors = make_loss_factors([*chain(*weights_by_rank)], objective.reduction)
        result = StepResult(math.nan, sum(samples), sizes, None, len(self._failed_in), updated=False, terms={})
        if not any(map(has_weight, all_factors)):
            return result
        factors_by_rank = [all_factors[rank] for rank in slices(map(len, weights_by_rank))]
        if objective.coupled:
            batches = [cut.sort(batch) for batch, cut in pairs]
        update = UpdateParts(batches, parts, factors_by_rank[ranks.rank])
        compared = batches if self._cuts.costs is None else parts
        if sharded is not None:
            sharded.deal(ranks, update, factors_by_rank, trained)
        runs_all = backpropagation.run_parts is not None
        run = [sum(runs_all or has_weight(factors) for factors in of_rank) for of_rank in factors_by_rank]
        if ranks.size > 1:
            check_synchronised(self._batchnorm, modules, run)
        # Alike on all ranks, whose norms would differ otherwise; FSDP2 runs equal numbers of parts.
        is_summed = needs_buffers(trained) and (sum(run) if sharded is None else max(run)) > 1
        buffers = self._savers.buffers(trained, in_fp32=self._in_fp32)
        if buffers is None and is_summed:
            buffers = GradientBuffers(trained, in_fp32=self._in_fp32)
        update.buffers = buffers
        watching = self._first_steps.watching(
            backpropagation, modules, update, trained if sizes else (), compared, limit.number, is_split=sum(run) > 1
        )
        with without_calls(self._wrappers), watching, self._savers.around_parts():
            backpropagation.run(update)
        self._progress.begin_phase("clip")
        sum_gradients(ranks, trained, buffers)
        is_scaled = self._updater.scaler is not None
        buffers = around.enter_context(self._savers.around_update(buffers, is_scaled=is_scaled))
        loss, terms, norm = self._measure(update.losses, buffers)
        if sharded is not None:
            sharded.is_running = False
        if self._check_finite:
            refuse_nonfinite(loss, norm, is_scaled=is_scaled)
        self._progress.begin_phase("update")
        if buffers is not None:
            buffers.write_gradients()
        updated = self._updater.run(transaction, lambda: ranks.gather(None))
        self._savers.write_back()
        return replace(result, loss=loss, grad_norm=norm, updated=updated, terms=terms)

    def _measure(
        self, losses: LossRecord, buffers: GradientBuffers | None
    ) -> tuple[float, dict[str, float], float | None]:
        """Unscale and clip the gradients, then read loss, terms and norm in the step's only synchronisation."""
        optimizer, scaler, norm = self._updater.optimizer, self._updater.scaler, None
        if scaler is not None:
            if not losses.entries:  # This rank ran no part: the scaler makes its scale when it is first used.
                scaler.scale(torch.zeros((), device=model_device(self._backpropagation.model)))
            scaler.unscale_(optimizer)
        if self._clip_norm is not None:
            gradients = dense_gradients(optimizer_parameters(optimizer)) if buffers is None else buffers.values()
            norm = clip_gradients(gradients, self._clip_norm)
        sums, read_norm = losses.read(norm)
        return *total_loss(self._ranks.gather((list(losses.names), sums))), read_norm

    def _parameters(self, modules: Sequence[nn.Module]) -> list[Tensor]:
        of_modules = [tensor for module in modules for tensor in module._parameters.values() if tensor is not None]
        trained = optimizer_parameters(self._updater.optimizer)
        return list({id(tensor): tensor for tensor in (*of_modules, *trained)}.values())

    def _give_whole_batch(self, *, in_lockstep: bool = True) -> None:
        """Let the parts of all further updates get the whole batch, in lock step or by recomputing; or refuse that."""
        half = self._in_fp32 and needs_buffers(optimizer_parameters(self._updater.optimizer))
        check_whole_batch(self._backpropagation, self._batchnorm, sums_half=in_lockstep and half)
        lockstep = LockstepParts(exact_batchnorm=self._batchnorm == "exact", on_part=self._progress.begin_part)
        self._backpropagation.run_parts = lockstep if in_lockstep else RecomputedParts()

    def _lower(self, limit: Limit, error: BaseException, largest: int, *, unchanged: bool) -> Limit:
        """Return the limit of a part with which to repeat a batch, all of whose tensors are freed.

        It stays the same where parts only need the whole batch, or a saver was added; else it is below `largest`, the
        cost of the largest part (`Cut.largest`). `error` ended the attempt here; the batch is `unchanged` if it is as
        it was before.

        Raises:
            BaseException: The batch cannot be repeated: `error`, or another in its place.
        """
        try:
            if self._sharded is not None and isinstance(error, NeedsWholeBatch):
                self._give_whole_batch()  # It refuses that, on every rank.
            if self._sharded is not None and self._sharded.is_running:  # Its modules are half-way, too.
                self._updater.is_interrupted = True
                if is_of_collective(error):
                    error = self._ranks.explain(error)
            failures = self.report(error, self._progress.phase, largest, unchanged=unchanged)
            if any(failure.needs_whole_batch for failure in failures):  # whole_batch was called: nothing was changed.
                self._give_whole_batch()
                clear_frames(error)
                failures = tuple(failure for failure in failures if not failure.needs_whole_batch)
                if not failures:
                    return limit
                if isinstance(error, NeedsWholeBatch):
                    error = OtherRanksFailed(failures)
            self._failed_in.append(failures[0].phase)
            saver = self._check(error, failures, limit)
            clear_frames(error)
            is_own = not isinstance(error, OtherRanksFailed)
        finally:
            del error  # the traceback holds this frame
        release_memory(self._backpropagation.device)
        largest = max(failure.largest for failure in failures)
        if saver is None:
            limit = replace(limit, number=shrink(largest, len(self._failed_in) - 1, self._multiple_of))
        try:
            self._tell(largest, limit, saver, is_own=is_own)
        except Exception as second:  # Warnings may be errors.
            self.report(second)
            raise
        return limit

    def _tell(self, largest: int, lowered: Limit, saver: str | None, *, is_own: bool) -> None:
        """Call the observer, or else warn if it was this rank that ran out of memory."""
        failed_in, observer = self._failed_in[-1], self._progress.observer
        unit = lowered.counted if largest else "sample"
        largest = max(largest, 1)  # By tokens, parts of one sample count as none.
        if observer is not None and saver is None:
            observer.out_of_memory(failed_in, largest, lowered.number)
        elif observer is not None and saver is not None:
            observer.saver_added(failed_in, largest, saver)
        elif is_own:
            facts = {"phase": failed_in, "size": largest, "unit": unit}
            if saver is None:
                warn_caller(message("repeated_smaller", **facts, lowered=lowered.number))
            else:
                warn_caller(message("repeated_with_saver", **facts, saver=saver))

    def report(
        self, error: BaseException, phase: StepPhase = "batch", largest: int = 0, *, unchanged: bool = True
    ) -> tuple[RankFailure, ...]:
        """Return the failures of all ranks in this attempt, which hear of this rank's `error`; see `_lower`."""
        if isinstance(error, OtherRanksFailed):
            return error.failures
        if isinstance(error, RankLostError):
            raise error
        oom = None if isinstance(error, UpdateInterrupted) or not self._recover else find_out_of_memory(error)
        failure = RankFailure(
            self._ranks.rank,
            describe_error(error),
            phase,
            largest,
            out_of_memory=None if oom is None else "certain" if oom.is_definite_oom else "uncertain",
            unchanged=unchanged,
            needs_whole_batch=isinstance(error, NeedsWholeBatch),
        )
        try:
            is_waited_for = self._sharded is not None and self._sharded.is_running
            return (self._ranks.store_failure if is_waited_for else self._ranks.report_failure)(failure)
        except RankLostError:  # This rank's own error says more.
            raise error from None
        finally:
            del error  # the traceback holds this frame

    def _check(self, error: BaseException, failures: Sequence[RankFailure], limit: Limit) -> str | None:
        """Raise `error`, or another in its place, unless the batch can be repeated: in smaller parts, or with a saver.

        All ranks decide alike, from the same `failures`. Returns the word of the saver, if one was added.
        """
        try:
            is_own = not isinstance(error, OtherRanksFailed)
            fatal = [failure for failure in failures if failure.out_of_memory is None]
            if not all(failure.unchanged for failure in failures):
                if is_own and not fatal:
                    warn_caller(message("batch_changed"))
                fatal = list(failures)
            if fatal:
                raise error if any(failure.rank == self._ranks.rank for failure in fatal) else fatal[0].as_error()
            # An update's memory does not depend on the micro-batch: a first failure may be fragmentation, two are not.
            is_update = self._failed_in[-2:] == ["update", "update"]
            largest = max(failure.largest for failure in failures)
            if largest > self._multiple_of and not is_update:
                if self._sharded is None:
                    return None
                raise out_of_memory(failures[0], shrink(largest, 0, self._multiple_of), limit.unit) from error
            may_add = self._add_savers and self._sharded is None
            if may_add and (saver := self._savers.add_next(self._failed_in[-1])) is not None:
                return saver
            if not any(failure.out_of_memory == "certain" for failure in failures):
                raise error if is_own else failures[0].as_error()
            clear_frames(error)
            where = "" if self._ranks.size == 1 else f" on rank {failures[0].rank}"
            least = "one sample" if self._multiple_of == 1 else f"{self._multiple_of} samples"
            seen, hint = (
                f"not even {least} at a time fits: out of memory ({self._failed_in[-1]}{where})",
                "free memory on the device, shorten the samples, or lower the precision",
            )
            if is_update:
                seen = f"the update runs out of memory{where}, whatever the micro-batch"
                hint = "free memory on the device, or use an optimizer with less state"
            raise DoesNotFitError(seen, hint=hint) from error
        finally:
            del error  # the traceback holds this frame


def _roll_back(transaction: Transaction, updater: Updater, error: BaseException) -> BaseException:
    """Restore the state and return `error`, or UpdateInterrupted if that fails."""
    if isinstance(error, UpdateInterrupted) or updater.is_interrupted:
        return error
    if is_context_dead(error):
        updater.is_interrupted = True
        return error
    try:
        try:
            transaction.rollback()
        except KeyboardInterrupt as interrupt:
            transaction.rollback()
            return interrupt
    except Exception as second:
        updater.is_interrupted = True
        interrupted = UpdateInterrupted(
            f"a step failed, and the state before it could not be restored ({type(second).__name__}: {second})",
            hint="load a checkpoint and make a new Accumulator",
        )
        interrupted.__cause__ = error
        return interrupted
    return error

"""One attempt of an update: forward and backward of all parts, and the optimizer's step, or the state as it was."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer

from autoaccum.accumulation.backpropagation import (
    Backpropagation,
    LossRecord,
    has_weight,
    make_shares,
    model_device,
    total_loss,
)
from autoaccum.accumulation.batchnorm import check_synchronised
from autoaccum.accumulation.first_step_checks import FirstSteps, WeightingCheck
from autoaccum.accumulation.gradients import (
    GradientBuffers,
    clip_gradients,
    dense_gradients,
    needs_buffers,
    rounding_warning,
)
from autoaccum.accumulation.interrupts import DelayedInterrupts
from autoaccum.accumulation.ranks.group import check_alike
from autoaccum.accumulation.ranks.replicated import sum_gradients, without_calls
from autoaccum.accumulation.reachable_objects import all_modules
from autoaccum.accumulation.retries import roll_back
from autoaccum.accumulation.rng_state import Generator
from autoaccum.accumulation.savers import Savers
from autoaccum.accumulation.schedule import slices
from autoaccum.accumulation.step_result import StepObserver, StepPhase, StepResult, refuse_nonfinite
from autoaccum.accumulation.transaction import Transaction
from autoaccum.accumulation.update import Updater, optimizer_parameters
from autoaccum.errors import UsageError
from autoaccum.options import BatchNormMode
from autoaccum.sources.batches import split_batch
from autoaccum.sources.objective import Weights


class Progress:
    """Where a step is: an observer is told, and signals that came meanwhile are delivered.

    Attributes:
        phase: The phase of the running step, or the one in which the last step raised.
        interrupts: Delays Ctrl-C to where a phase or a part begins.
    """

    def __init__(self, observer: StepObserver | None) -> None:
        self.phase: StepPhase = "batch"
        self.interrupts = DelayedInterrupts()
        self._observer = observer

    def begin_phase(self, phase: StepPhase) -> None:
        """Note that a phase begins."""
        self.interrupts.deliver()
        self.phase = phase
        if self._observer is not None:
            self._observer.phase(phase)

    def begin_part(self, index: int) -> None:
        """Note that a part begins or goes on, where parts run in lock step."""
        self.interrupts.deliver()
        if self._observer is not None:
            self._observer.part(index)


@dataclass
class UpdateAttempts:
    """Makes attempts of updates; each is an update, or leaves the state as it was.

    Attributes:
        progress: What is told of phases.
        backpropagation: Runs the parts.
        optimizer: The optimizer, whose parameters are trained.
        updater: Makes the optimizer's step.
        scaler: The scaler, if there is one.
        savers: What saves memory.
        weighting: The check of the parts' weights.
        batchnorm_mode: How BatchNorm treats the parts.
        in_fp32: Whether gradients of half precision are summed in float32.
        clip_norm, check_finite: As the Accumulator's arguments.
        wrappers: Modules in DistributedDataParallel, which the loss must not call.
        number: The number of the Accumulator on its rank.
        generators: Generators of the model and the criterion.
    """

    progress: Progress
    backpropagation: Backpropagation
    optimizer: Optimizer
    updater: Updater
    scaler: GradScaler | None
    savers: Savers
    weighting: WeightingCheck
    batchnorm_mode: BatchNormMode
    in_fp32: bool
    clip_norm: float | None
    check_finite: bool
    wrappers: Sequence[nn.Module]
    number: int
    generators: Sequence[Generator]
    _first_steps: FirstSteps = field(default_factory=FirstSteps)

    def run(
        self, batches: Sequence[Any], cuts: Sequence[tuple[int, ...]], *, micro_batch: int, retries: int
    ) -> StepResult | BaseException:
        """Make one update from `batches`, each split into parts of `cuts` samples, and return its result or its error.

        An error is returned, not raised: while an exception is handled, it keeps the tensors of all its frames alive.
        The state is restored by then, unless the error is UpdateInterrupted. `micro_batch` is to be alike on all ranks,
        and `retries` counts the attempts of this update before.
        """
        with ExitStack() as around:  # Its end comes after a rollback, which restores what was there within it.
            transaction, self.updater.has_agreed = None, False
            try:
                modules = all_modules(self.backpropagation.criterion, self.backpropagation.model)
                parameters = self._parameters(modules)
                transaction = Transaction(modules, parameters, generators=self.generators, scaler=self.scaler)
                for parameter in parameters:
                    parameter.grad = None
                result = self._update(batches, cuts, transaction, modules, around, micro_batch, retries)
                for parameter in parameters:
                    parameter.grad = None
                return result
            except BaseException as error:
                if self.updater.has_agreed:
                    raise  # The others make their updates, and wait for no word of this one; nor is it to be repeated.
                failure = error
            try:
                return failure if transaction is None else roll_back(transaction, self.updater, failure)
            finally:
                del failure  # the traceback holds this frame

    def _update(
        self,
        batches: Sequence[Any],
        cuts: Sequence[tuple[int, ...]],
        transaction: Transaction,
        modules: Sequence[nn.Module],
        around: ExitStack,
        micro_batch: int,
        retries: int,
    ) -> StepResult:
        self.progress.begin_phase("batch")
        parts = [part for batch, cut in zip(batches, cuts, strict=True) for part in split_batch(batch, cut)]
        sizes, ranks, sharded = sum(cuts, ()), self.backpropagation.ranks, self.backpropagation.sharded
        weights = [self.backpropagation.objective.weight(part) for part in parts]
        own = {
            "micro_batch": micro_batch,
            "the number of the Accumulator that steps": self.number,
            **self.updater.common_facts(),
        }
        facts, samples, weights_by_rank = zip(*ranks.gather((own, sum(sizes), weights)), strict=True)
        check_alike(facts)
        if not any(weights_by_rank):
            where = " on any rank" if ranks.size > 1 else ""
            raise UsageError(f"there is no micro-batch to step with{where}", hint="give at least one")
        all_shares = make_shares(
            [one for weights in weights_by_rank for one in weights], self.backpropagation.objective.reduction
        )
        if not any(map(has_weight, all_shares)):
            return StepResult(math.nan, sum(samples), sizes, None, retries, updated=False, terms={})
        shares_by_rank: list[Sequence[Weights]] = [all_shares[own] for own in slices(map(len, weights_by_rank))]
        shares, trained = shares_by_rank[ranks.rank], optimizer_parameters(self.optimizer)
        if sharded is not None:
            parts, shares = sharded.deal(ranks, parts, shares_by_rank, trained)
        joins = self.backpropagation.run_parts is not None
        run = [sum(joins or has_weight(one) for one in each) for each in shares_by_rank]
        if ranks.size > 1:
            check_synchronised(self.batchnorm_mode, modules, run)
        # Alike on all ranks, whose norms would differ otherwise; FSDP2 runs equal numbers of parts.
        is_summed = needs_buffers(trained) and (sum(run) if sharded is None else max(run)) > 1
        buffers = self.savers.buffers(trained, in_fp32=self.in_fp32)
        if buffers is None and is_summed:
            buffers = GradientBuffers(trained, in_fp32=self.in_fp32)
        if is_split := sum(run) > 1:
            with without_calls(self.wrappers):
                self.weighting.look(self.backpropagation, modules, batches, micro_batch)
        warn = self._first_steps.watch(self.backpropagation, modules, is_split=is_split)
        with without_calls(self.wrappers), self.savers.around_parts():
            record = self.backpropagation.run(parts, shares, buffers, batches)
        sums, is_rounded = () if buffers is None else buffers.sums, buffers is not None and not self.in_fp32
        warn(trained if record.values and sizes else (), sums, rounding_warning(trained) if is_rounded else None)
        self.weighting.tell(self.backpropagation, parts, is_split=is_split)
        self.progress.begin_phase("clip")
        sum_gradients(ranks, trained, buffers)
        buffers = around.enter_context(self.savers.around_update(buffers, is_scaled=self.scaler is not None))
        loss, terms, norm = self._measure(record, buffers)
        if sharded is not None:
            sharded.is_running = False
        if self.check_finite:
            refuse_nonfinite(loss, norm, is_scaled=self.scaler is not None)
        self.progress.begin_phase("update")
        if buffers is not None:
            buffers.write_gradients()
        updated = self.updater.run(transaction, lambda: ranks.gather(None))
        self.savers.write_back()
        return StepResult(loss, sum(samples), sizes, norm, retries, updated, terms)

    def _measure(
        self, record: LossRecord, buffers: GradientBuffers | None
    ) -> tuple[float, dict[str, float], float | None]:
        """Unscale and clip the gradients, then read loss, terms and norm in the step's only synchronisation."""
        if self.scaler is not None:
            if not record.values:  # This rank ran no part: the scaler makes its scale when it is first used.
                self.scaler.scale(torch.zeros((), device=model_device(self.backpropagation.model)))
            self.scaler.unscale_(self.optimizer)
        norm = None
        if self.clip_norm is not None:
            trained = optimizer_parameters(self.optimizer)
            norm = clip_gradients(dense_gradients(trained) if buffers is None else buffers.values(), self.clip_norm)
        sums, read_norm = record.read(norm)
        return *total_loss(self.backpropagation.ranks.gather((list(record.names), sums))), read_norm

    def _parameters(self, modules: Iterable[nn.Module]) -> list[Tensor]:
        of_modules = [one for module in modules for one in module._parameters.values() if one is not None]
        return list({id(one): one for one in (*of_modules, *optimizer_parameters(self.optimizer))}.values())

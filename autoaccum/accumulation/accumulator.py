"""The Accumulator: one optimizer update from one effective batch, run in micro-batches, all or nothing."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Sequence
from typing import Any, Literal, get_args

import torch
from torch import nn
from torch.amp import GradScaler
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from autoaccum.accumulation.argument_checks import (
    PlanLike,
    check_clip_norm,
    check_model,
    check_optimizer,
    check_plan,
    check_scheduler,
    check_token_limit,
    choose_limit,
    choose_objective,
    choose_token_costs,
    current_facts,
    read_micro_batch,
)
from autoaccum.accumulation.attempts import Attempts
from autoaccum.accumulation.backpropagation import model_device
from autoaccum.accumulation.batchnorm import BACKPROPAGATIONS, check_batchnorm
from autoaccum.accumulation.cuts import Cuts, Limit
from autoaccum.accumulation.first_step_checks import FirstSteps
from autoaccum.accumulation.gradients import choose_scaler
from autoaccum.accumulation.ranks.group import join_ranks, world_size
from autoaccum.accumulation.ranks.replicated import copy_from_first
from autoaccum.accumulation.ranks.sharded import check_lists, find_sharded
from autoaccum.accumulation.reachable_objects import find_used_modules
from autoaccum.accumulation.savers import Savers
from autoaccum.accumulation.step_result import Progress, StepObserver, StepPhase, warn_caller
from autoaccum.accumulation.step_result import StepResult as StepResult
from autoaccum.accumulation.update import Updater, optimizer_parameters
from autoaccum.accumulation.whole_batch.parts_runners import LockstepParts
from autoaccum.checks import check_word, describe_type
from autoaccum.errors import UsageError
from autoaccum.options import CHECKS, GradSync, resolve_spec
from autoaccum.sources.batches import batch_size, read_batching
from autoaccum.sources.objective import read_coupled_loss, with_coupling
from autoaccum.spec import AccumulateIn, BatchNormMode, Padding, TrainingSpec, WholeBatchMode


class Accumulator:
    """Trains on an effective batch in micro-batches: the full batch's gradient in the memory of one micro-batch.

    A step computes the weights of all micro-batches before the first backward. It then multiplies each micro-batch's
    loss by its fraction of the weight, so that the gradients add up to the full batch's, and runs backward at once,
    which frees the graph. Gradients from before a step do not count, and `.grad` is None after it. Gradients of
    half-precision parameters are summed in float32 and rounded once. The norm, that of the optimizer's parameters, is
    measured and clipped once per update. A batch may be on any device.

    A step is all or nothing. If it raises before the optimizer starts to write, or during the first update,
    everything is restored: weights, buffers, optimizer, scaler, scheduler, random states, modes and `.grad`. If
    memory ran out, the batch is then repeated in smaller micro-batches (`out_of_memory.shrink`) with a warning, and
    `micro_batch` (or `micro_tokens`) stays at the smaller number. The first update is protected by a copy in host
    memory; later ones allocate their temporary memory in advance instead. Should one of those still fail half-way,
    UpdateInterrupted ends the training. Ctrl-C takes effect between forward, backward and update; a second Ctrl-C takes
    effect at once.

    Under an initialised process group of several ranks, every rank makes an Accumulator and steps with its own samples;
    all together are the effective batch, however many a rank has, even none. Weights are summed over ranks before the
    first backward, gradients once per update, in float32 where parameters are of half precision. A module wrapped in
    DistributedDataParallel is used without the wrapper. All ranks begin with the weights and buffers of rank 0, and
    with the smallest of their micro-batches. An error on one rank ends the step on all; if one runs out of memory, all
    repeat the step in smaller micro-batches. `batchnorm="exact"` and `"running"`, a coupled loss and `whole_batch` take
    the samples of all ranks, of which some may have none; with `"micro"`, running statistics are each rank's own.

    A model that FSDP2 shards (`fully_shard`, over a mesh of all ranks) stays as it is. Every rank runs the same number
    of micro-batches: one that has fewer repeats one with gradients of zero. Its gradients are summed by FSDP2, as
    `grad_sync` says. Ranks wait for each other within forward and backward, so memory that runs out on one ends the run
    on all: UpdateInterrupted then has the `next_micro_batch` to go on with from a checkpoint.

    Examples:
        >>> import torch
        >>> from torch.nn import Linear, MSELoss
        >>> from torch.optim import SGD
        >>> model = Linear(2, 2)
        >>> accumulator = Accumulator(model, SGD(model.parameters(), lr=0.1), MSELoss(), micro_batch=100)
        >>> accumulator.step((torch.ones(256, 2), torch.zeros(256, 2))).micro_batches
        (86, 85, 85)

    Args:
        model: The model, on the device it trains on.
        optimizer: One optimizer of the model's parameters. It may leave some out; their gradients are dropped.
        loss: `loss(model, batch)`, a criterion or an `Objective`; see `sources.objective.resolve_objective`. Without
            `loss` and `criterion`, the loss is `model(**batch).loss`, as models of transformers compute it.
        micro_batch: The most samples to run at once; omit it when `plan` is given.
        micro_tokens: The most padded tokens (or frames, nodes) to run at once, instead of `micro_batch`: samples are
            packed so that padding and the number of micro-batches are both small. A micro-batch costs the length of its
            longest sample times the number of samples, or the sum of its lengths (`padding`). A sample that costs more
            runs alone, with a warning.
        plan: An `autoaccum.Plan` made for this model, loss, optimizer and device. Its micro-batch is used, or its
            token budget if it has one, and its precision, reduction, batchnorm, accumulate_in, savers and
            multiple_of where they are not given here.
        spec: All options of how an update is run at once, such as a Workload; in place of the plan's. Those that are
            given by name win.
        padding: With `micro_tokens`: `longest` (default) if a micro-batch is padded to its longest sample, `none` if it
            is packed without padding (usually with `split` and `size`).
        lengths: With `micro_tokens`: `lengths(batch)` returns the tokens of each sample. Default: counted in the
            tensors of the names that transformers uses, such as `attention_mask`.
        trim: With `micro_tokens`: `trim(batch)` returns a batch without the padding that none of its samples needs.
            Default: tensors of those names are cut.
        criterion: `criterion(outputs, targets)` for batches of `(inputs, targets)`, in place of `loss`.
        weight: `weight(batch)`: the number that the mean in `loss` divides by. Default: the number of samples.
        reduction: `mean` (default) or `sum`; the losses of a sum are added without a division.
        clip_norm: The largest 2-norm of an update's gradient. Infinity measures without clipping; None does neither.
        precision: `fp32` (default), or `bf16` or `fp16` with autocast.
        scaler: A GradScaler. With `fp16`, one is made when None is given.
        scheduler: A learning-rate scheduler, stepped once after each update.
        recover: Whether to repeat a batch in smaller micro-batches after an out-of-memory error. If False, the error
            is raised after the state is restored.
        check_finite: Whether to refuse an update with a loss or (with `clip_norm`) a gradient that is not finite. With
            a scaler, which skips such updates itself, only a loss of NaN is refused.
        check: What to do if `weight` is not what the loss divides by. The first updates whose samples differ in length
            compare the loss of a few samples with the weighted losses of two parts of them, in evaluation mode and
            without gradients. `warn` (default) issues a warning with the likely right weight, `strict` raises it as a
            WorkloadError, `off` skips the comparison.
        batchnorm: How BatchNorm in training mode treats the micro-batches. `micro` (default): as in PyTorch, each by
            itself. `running`: normalise by the micro-batch, but update the running statistics once, as the full batch
            would. `frozen`: normalise by the running statistics and leave them as they are, so that the gradient is
            exactly the full batch's; weight and bias still train. `exact`: normalise by the whole effective batch, so
            that gradient and running statistics are those without accumulation. What its micro-batches keep for
            backward then waits in host memory.
        coupled: Whether the loss compares samples and needs the outputs of the whole effective batch (contrastive
            losses, hard mining). It is then computed once, of all outputs, on each rank of those of all ranks, and
            each micro-batch runs forward twice, without and with a graph; with an exact BatchNorm once, and what
            backward needs waits in host memory.
        outputs: For a coupled loss that is no criterion: `outputs(model, batch)`, which returns tuples and dicts of
            tensors whose first dimension is the sample, or numbers such as a learned temperature.
        coupled_loss: `coupled_loss(outputs, batch)`, in place of `loss`; give `outputs` with it.
        split: `split(batch, sizes)`: a list of parts with these numbers of samples, for batches in which samples are
            not rows of tensors (graphs, images of many patches, packed tokens). Give `size` with it.
        size: `size(batch)`: the number of samples in the batch.
        multiple_of: The number of samples that every micro-batch and every batch is a multiple of. Default: 1.
        accumulate_in: `fp32` (default): sum the gradients of half-precision parameters in float32. `parameters`: sum
            them in their own dtype, which needs no memory beyond `.grad` but rounds each part (with a warning).
        grad_sync: When FSDP2 sums the gradients of a sharded model. `each` (the default, unless the plan says
            otherwise): with each micro-batch. `last`: with the last, which sends less and holds the gradients of the
            whole model until then: 4 bytes for each of its parameters in float32, of which `each` holds this rank's
            part alone.
        savers: Ways to take less memory of the device, for the same gradient. `recompute`: the model's repeated blocks
            run again in backward, or N of them with `recompute=N`, evenly spread. `offload-activations`: what backward
            needs waits in host memory. `offload-gradients`: gradients are summed there, in float32.
            `offload-optimizer`: so are the optimizer's state and update, with copies of the weights.
        add_savers: Whether to add a saver where not even the smallest micro-batch fits, in place of an error: for the
            repeated batch and all later ones. All blocks are recomputed first; on a card, the offloads follow. A model
            that FSDP2 shards gets none.
        observer: A `StepObserver`, called as a step proceeds. It replaces the warning about an out-of-memory error.

    Raises:
        UsageError: An argument is invalid, or the plan was made for something else; the message names the difference.
        WorkloadError: `loss`, `criterion`, `weight` and `reduction` contradict each other.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        loss: Any = None,
        *,
        micro_batch: int | None = None,
        micro_tokens: int | None = None,
        plan: PlanLike | None = None,
        spec: TrainingSpec | None = None,
        padding: Padding | None = None,
        lengths: Callable[[Any], Any] | None = None,
        trim: Callable[[Any], Any] | None = None,
        criterion: Any = None,
        weight: Any = None,
        reduction: Literal["mean", "sum"] | None = None,
        clip_norm: float | None = None,
        precision: Literal["fp32", "bf16", "fp16"] | None = None,
        scaler: GradScaler | None = None,
        scheduler: LRScheduler | None = None,
        recover: bool = True,
        check_finite: bool = False,
        check: str = "warn",
        batchnorm: BatchNormMode | None = None,
        coupled: bool | None = None,
        outputs: Callable[[nn.Module, Any], Any] | None = None,
        coupled_loss: Callable[[Any, Any], Any] | None = None,
        split: Callable[[Any, list[int]], Sequence[Any]] | None = None,
        size: Callable[[Any], int] | None = None,
        multiple_of: int | None = None,
        accumulate_in: AccumulateIn | None = None,
        grad_sync: GradSync | None = None,
        savers: str | Sequence[str] | None = None,
        add_savers: bool = False,
        observer: StepObserver | None = None,
    ) -> None:
        given, model = model, check_model(model)
        check_optimizer(optimizer, model)
        check_scheduler(scheduler, optimizer)
        check_clip_norm(clip_norm)
        check_word(check, "check", CHECKS)
        if spec is not None and not isinstance(spec, TrainingSpec):
            raise UsageError(
                f"spec is {describe_type(spec)}, not a TrainingSpec",
                hint="give a TrainingSpec, a Workload or the spec of a plan",
            )
        planned = getattr(plan, "multiple_of", 1)  # Planning may find one that the spec does not have.
        planned = planned if spec is None else spec.multiple_of or planned
        self._multiple_of = read_micro_batch(planned if multiple_of is None else multiple_of, what="multiple_of")
        limit = choose_limit(plan, micro_batch, micro_tokens, self._multiple_of)
        costs = choose_token_costs(plan, spec, {"padding": padding, "lengths": lengths, "trim": trim}, limit)
        objective = choose_objective(
            read_coupled_loss(loss, outputs, coupled_loss),
            criterion=criterion,
            weight=weight,
            reduction=reduction,
            plan=plan,
            model=model,
        )
        by_name = {
            "precision": precision,
            "batchnorm": batchnorm,
            "coupled": objective.coupled or None if coupled is None else coupled,
            "accumulate_in": accumulate_in,
            "savers": savers,
        }
        planned_spec = None if plan is None else plan.spec
        spec = resolve_spec(by_name, planned_spec if spec is None else spec)
        objective = with_coupling(objective, spec.coupled, UsageError)
        if split is not None or size is not None or objective.batching is None:
            expected = getattr(plan, "target_batch", None)
            objective = dataclasses.replace(objective, batching=read_batching(split, size, expected))
        check_batchnorm(spec.batchnorm, model, objective.criterion_module)
        if costs is not None:
            check_token_limit(costs, spec, self._multiple_of)
        self._cuts = Cuts(self._multiple_of, costs, objective.wrap_batch)
        if plan is not None:
            check_plan(plan, current_facts(model, optimizer, objective, spec))
        summed = grad_sync or getattr(plan, "grad_sync", None) or "each"
        check_word(summed, "grad_sync", get_args(GradSync))
        sharded = find_sharded(model, summed, in_fp32=spec.accumulate_in == "fp32")
        if sharded is not None:
            check_lists(optimizer, model_device(model))
        objective.move_criterion(model_device(model))
        scaler = choose_scaler(spec.precision, scaler, model_device(model), optimizer_parameters(optimizer))
        self._objective = objective
        self._progress = Progress(observer)
        self._updater = Updater(optimizer, scaler, scheduler)
        self._ranks = join_ranks()
        self._backpropagation = BACKPROPAGATIONS[spec.batchnorm](
            model,
            objective,
            precision=spec.precision,
            scaler=scaler,
            on_phase=self._progress.begin_phase,
            ranks=self._ranks,
            sharded=sharded,
        )
        self._savers = Savers(tuple(spec.savers), model, optimizer, exact_batchnorm=spec.batchnorm == "exact")
        in_reach = () if self._ranks.size == 1 else (given, *find_used_modules(objective, model).values())
        self._attempts = Attempts(
            self._backpropagation,
            self._updater,
            self._savers,
            self._progress,
            FirstSteps(check, objective, self._multiple_of, self._cuts.trim),
            self._cuts,
            spec,
            clip_norm=clip_norm,
            check_finite=check_finite,
            recover=recover,
            add_savers=add_savers,
            multiple_of=self._multiple_of,
            wrappers=[module for module in in_reach if isinstance(module, DistributedDataParallel)],
        )
        self.limit = dataclasses.replace(limit, number=min(self._ranks.gather(limit.number)))
        """The `micro_batch` or `micro_tokens` now."""
        roots = [root for root in (model, objective.criterion_module) if root is not None]
        named = [pair for root in roots for pair in (*root.named_parameters(), *root.named_buffers())]
        names = {tensor: f"{name} in the optimizer" for name, tensor in named}
        trained = [(names.get(tensor, "a parameter of the loss"), tensor) for tensor in optimizer_parameters(optimizer)]
        copy_from_first(self._ranks, (*named, *trained))

    @property
    def phase(self) -> StepPhase:
        """The phase of the running step, or the one in which the last step raised."""
        return self._progress.phase

    @property
    def micro_batch(self) -> int | None:
        """The most samples run at once; None if tokens are counted.

        A retry after an out-of-memory error lowers it; set it to raise it again.
        """
        return None if self.limit.unit == "micro_tokens" else self.limit.number

    @micro_batch.setter
    def micro_batch(self, value: int) -> None:
        self._set_limit(Limit(value))

    @property
    def micro_tokens(self) -> int | None:
        """The most padded tokens run at once, lowered and set as `micro_batch`; None if samples are counted."""
        return None if self.limit.unit == "micro_batch" else self.limit.number

    @micro_tokens.setter
    def micro_tokens(self, value: int) -> None:
        self._set_limit(Limit(value, "micro_tokens"))

    def _set_limit(self, limit: Limit) -> None:
        if limit.unit != self.limit.unit:
            raise UsageError(f"this Accumulator counts {self.limit.counted}s", hint=f"set {self.limit.unit}")
        number = read_micro_batch(limit.number, self._multiple_of, what=limit.unit)
        self.limit = dataclasses.replace(limit, number=number)

    @property
    def savers(self) -> tuple[str, ...]:
        """The savers in use: those that were given, and those that were added since (`add_savers`)."""
        return self._savers.words

    def restore_savers(self, words: Collection[str]) -> None:
        """Use savers that an earlier run has added, except those that save nothing here."""
        while self._savers.add_next("forward", words):
            pass

    @property
    def is_interrupted(self) -> bool:
        """True if an update failed half-way or could not be undone, so that the training state is unknown."""
        return self._updater.is_interrupted

    @property
    def has_agreed(self) -> bool:
        """True once all ranks make the update that ran last, so that they do not hear of an error after that."""
        return self._updater.has_agreed

    @property
    def whole_batch(self) -> WholeBatchMode | None:
        """How the parts of an update run if they need each other; None: one after the other."""
        runner = self._backpropagation.run_parts
        return None if runner is None else "lockstep" if isinstance(runner, LockstepParts) else "recompute"

    @property
    def host_bytes(self) -> int:
        """The bytes that the last update kept in host memory at most: for its backward, and by savers."""
        runner = self._backpropagation.run_parts
        return self._savers.host_bytes + (runner.host_bytes if isinstance(runner, LockstepParts) else 0)

    def step(self, batch: Any) -> StepResult:
        """Make one update from the effective batch `batch`, or this rank's samples of it, which may be on any device.

        The state is as before the step when it raises anything but UpdateInterrupted.

        Raises:
            DoesNotFitError: Not even the smallest micro-batch fits.
            UpdateInterrupted: The update failed half-way, now or in an earlier step.
            WorkloadError: The batch cannot be split, or the loss is not usable.
            NonFiniteError: The loss or the gradient is not finite, and `check_finite` is set.
            UsageError: The chosen BatchNorm mode could not be kept, or the process group is not that of the beginning.
            RankFailedError: Another rank failed with an error of its own, which it raises itself.
            RankLostError: Another rank has ended, or does not answer in time.
        """
        with self._progress.interrupts:
            return self._run([batch])

    def step_parts(self, batches: Sequence[Any]) -> StepResult:
        """Make one update from a window of micro-batches, as a loader yields them.

            for window in windows(loader, iter_size):
                result = accumulator.step_parts(window)

        Micro-batches may differ in form, such as the length they are padded to, and each counts by its own weight. One
        that is larger than `micro_batch` (or `micro_tokens`) is split further. A last window with fewer of them is
        weighted correctly. One of several ranks may have none.

        Raises:
            UsageError: `batches` is empty.
            DoesNotFitError: As in `step`; so are the other errors.
        """
        with self._progress.interrupts:
            return self._run(list(batches))

    def _run(self, batches: list[Any]) -> StepResult:
        if world_size() != self._ranks.size:
            raise UsageError(
                f"there are {world_size()} ranks now, and {self._ranks.size} when the Accumulator was made",
                hint="initialise the process group first",
            )
        self._updater.has_agreed = False
        try:
            self._updater.check()
            if torch.is_inference_mode_enabled():
                raise UsageError("a step is called within torch.inference_mode()", hint="call it outside of that")
            wrapped = [self._objective.wrap_batch(batch) for batch in batches]
            while guesses := getattr(self._objective.batching, "guesses", []):
                warn_caller(guesses.pop())
            batches = [batch for batch in wrapped if batch_size(batch)]  # An empty batch is none.
            measures = [self._cuts.measure(batch, self.limit.number) for batch in batches]
        except Exception as error:
            self._attempts.report(error)
            raise
        result, self.limit = self._attempts.make_update(batches, measures, self.limit)
        return result

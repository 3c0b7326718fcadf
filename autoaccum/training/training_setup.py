"""What is trained, by which plan, and the objects built from it.

A live model is read as a Workload at once, so that all that follows knows one kind of source.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import nn
from torch.amp import GradScaler
from torch.optim import Optimizer
from torch.utils.data import Dataset, Subset

from autoaccum.accumulation.argument_checks import (
    check_optimizer,
    check_scheduler,
    differences,
    plan_facts,
    unwrap_model,
)
from autoaccum.accumulation.backpropagation import model_device
from autoaccum.accumulation.batchnorm import batchnorm_names
from autoaccum.accumulation.cuts import Limit
from autoaccum.accumulation.gradients import choose_scaler, needs_buffers
from autoaccum.accumulation.ranks.group import join_ranks, world_size
from autoaccum.accumulation.ranks.launch import choose_parallel, shard_model
from autoaccum.accumulation.ranks.replicated import copy_from_first
from autoaccum.accumulation.reachable_objects import find_auxiliary_modules, find_used_modules
from autoaccum.accumulation.schedule import check_multiple
from autoaccum.accumulation.update import optimizer_parameters
from autoaccum.checks import counted, describe_type
from autoaccum.devices.device_choice import card_index, check_device
from autoaccum.devices.live_objects import workload_of_objects
from autoaccum.devices.loop_memory import EMA_DECAY, EmaModel
from autoaccum.errors import NotMeasuredError, UsageError, WorkloadError
from autoaccum.messages import message
from autoaccum.options import check_mesh, resolve_spec
from autoaccum.planning.plan_record import Plan
from autoaccum.planning.plan_request import DEFAULT_LONGEST_OF, PlanRequest
from autoaccum.planning.plan_setup import refuse_overrides
from autoaccum.planning.planner import make_plan
from autoaccum.sharded_tensors import is_sharded_model
from autoaccum.sources.objective import Objective, with_coupling
from autoaccum.sources.optimizers import make_optimizer, set_learning_rate
from autoaccum.sources.samples import replace_fields
from autoaccum.sources.source import find_source
from autoaccum.sources.workload import Workload, no_batch
from autoaccum.spec import TrainingSpec
from autoaccum.training.fit_events import Notice, WorkloadOutput
from autoaccum.training.fit_request import FitRequest, load_plan
from autoaccum.training.windows import WindowReader
from autoaccum.units import format_overrides

_OF_THE_LOSS = ("loss", "criterion", "outputs", "coupled_loss", "weight")


@dataclass(frozen=True, kw_only=True)
class TrainingComponents:
    """The model on its device, and everything that goes with it.

    Attributes:
        scheduler: The learning-rate scheduler; None without one.
        scaler: The loss scaler of fp16; None otherwise.
        spec: How updates are run.
        averages: The averaged weights (EMA); None without them.
    """

    model: nn.Module
    objective: Objective
    optimizer: Optimizer
    scheduler: Any = None
    scaler: GradScaler | None = None
    spec: TrainingSpec = TrainingSpec()
    averages: EmaModel | None = None

    @property
    def device(self) -> torch.device:
        """The device of the model."""
        return model_device(self.model)

    @property
    def devices(self) -> list[torch.device]:
        """All devices of parameters and buffers: a model may be on two GPUs."""
        return list(dict.fromkeys(tensor.device for tensor in (*self.model.parameters(), *self.model.buffers())))

    @property
    def is_sharded(self) -> bool:
        """Whether each rank holds a part of the model only."""
        return is_sharded_model(self.model)

    @property
    def loss_modules(self) -> list[nn.Module]:
        """The criterion, if it is a module, and other modules that the loss uses."""
        used = find_used_modules(self.objective, unwrap_model(self.model)).values()
        criterion = self.objective.criterion_module
        return [*used] if criterion is None else [criterion, *used]


@dataclass(frozen=True)
class MicroBatchChoice:
    """A micro-batch, its plan (None if it was given as a number), and the number that sizes are multiples of.

    `micro_tokens` is the token budget of micro-batches; None: they are made by their samples.
    """

    micro_batch: int
    plan: Plan | None = None
    multiple_of: int = 1
    micro_tokens: int | None = None

    @property
    def limit(self) -> Limit:
        """The limit of micro-batches."""
        return Limit(self.micro_batch) if self.micro_tokens is None else Limit(self.micro_tokens, "micro_tokens")


class TrainingSetup:
    """What a request says to train, as a workload.

    A live model is trained where it is, or on the GPU that is requested.

    Attributes:
        workload: The workload, with the request's values in place of its own. A live model is its `model`.
        data: The training data.
        eval_data: The evaluation data, or None.
        device: Where the model is trained.

    Raises:
        UsageError: The request has neither a model nor a workload, or an argument that does not go with it.
        WorkloadError: The workload has no data, or cannot be used.
    """

    def __init__(self, request: FitRequest) -> None:
        self.request, self.is_live = request, isinstance(request.model_or_workload, nn.Module)
        if not isinstance(request.model_or_workload, (str, os.PathLike)):
            refuse_overrides(request.options)
        self.workload = workload = _read_live_model(request) if self.is_live else _read_workload(request)
        self.objective = workload.objective
        self.data = _as_samples(workload.dataset) if request.data is None else request.data
        if self.data is None and self.is_live:
            raise UsageError("a model is given, and no data", hint="give a Dataset, a DataLoader or batches")
        if self.data is None:
            raise WorkloadError(
                f"{workload.name} has no dataset to train on", hint="define dataset in it, or give data"
            )
        self.eval_data = _as_samples(workload.evaluation_dataset) if request.eval_data is None else request.eval_data
        self.device = self._move_live_model() if self.is_live else find_device(request.options.device)

    def choose_micro_batch(
        self, reader: WindowReader, checkpoint: Mapping[str, Any] | None, notify: Callable[[Any], Any]
    ) -> MicroBatchChoice:
        """Return the micro-batch that was given, else that of the interrupted run, else that of a new plan.

        Args:
            reader: The training data, of which batches are made for trials if the workload has none.
            checkpoint: The record of the checkpoint to resume from.
            notify: Called with notices, and with the planner's events.

        Raises:
            UsageError: The given plan is for other updates or another device.
            DoesNotFitError, NotMeasuredError, WorkloadError: Planning failed.
        """
        request, micro_batch = self.request, self.request.micro_batch
        saved, plan = None if checkpoint is None else checkpoint["plan"], None
        micro_tokens = request.micro_tokens
        earlier = None if saved is None else Plan.from_json(saved, source="the plan in the checkpoint")
        moved = [] if earlier is None else _place_differences(earlier, self.device)
        if micro_batch is None and request.plan is not None:
            plan = self._read_given_plan(request.plan)
        elif micro_batch is None and checkpoint is not None and not moved:
            plan, micro_batch, micro_tokens = earlier, int(checkpoint["micro_batch"]), checkpoint.get("micro_tokens")
        elif micro_batch is None:
            for there, here in moved[:1]:
                notify(Notice(message("planned_elsewhere", there=there, here=here)))
            plan = self._make_plan(reader, notify)
            if earlier is not None:  # A tuned learning rate stays valid for the new plan.
                plan = dataclasses.replace(plan, learning_rate=earlier.learning_rate)
        micro_batch = micro_batch if plan is None else plan.micro_batch
        assert micro_batch is not None
        multiple = max(self.workload.multiple_of or 1, 1 if plan is None else plan.multiple_of)
        if request.target_batch is not None:
            check_multiple(request.target_batch, multiple, "the target batch")
        elif multiple > 1:
            raise UsageError(
                f"updates of {request.target_tokens:,} tokens have any number of samples, not multiples of {multiple}",
                hint="give target_batch (--target-batch)",
            )
        if plan is not None and plan.tokens is not None:
            micro_tokens = plan.tokens.micro_tokens
        return MicroBatchChoice(micro_batch, plan, multiple, micro_tokens)

    def build(self, plan: Plan | None) -> TrainingComponents:
        """Build the model and its components from the current random states.

        The learning rate that was given, or that a plan was tuned with, is the rate of the first parameter group; other
        groups keep their ratio to it, and the scheduler is built after it is set.

        Raises:
            UsageError: The scheduler, a saver or a coupled loss cannot be used.
            WorkloadError: The model cannot be copied for an average.
        """
        request, scheduler = self.request, self.request.scheduler
        learning_rate = request.learning_rate or (None if plan is None else plan.learning_rate)
        if learning_rate is not None and scheduler is not None and not callable(scheduler):
            raise UsageError(
                f"learning_rate is {learning_rate:g}, but the {type(scheduler).__name__} already exists",
                hint="give scheduler as a function of the optimizer",
            )
        options = request.options
        given = {"coupled": self.workload.coupled or None, **options.spec}
        if options.chooses_savers:
            del given["savers"]
        spec = resolve_spec(given, None if plan is None else plan.spec, self.workload)
        model = self._build_model(plan)
        optimizer = spec.optimizer if isinstance(spec.optimizer, Optimizer) else make_optimizer(spec.optimizer, model)
        if learning_rate is not None:
            set_learning_rate(optimizer, learning_rate)
        if scheduler is None or callable(scheduler):
            scheduler = self.workload.build_scheduler(optimizer)
        check_scheduler(scheduler, optimizer)
        device, trained = model_device(model), optimizer_parameters(optimizer)
        if "offload-optimizer" in spec.savers and needs_buffers(trained):
            raise UsageError(
                "offload-optimizer keeps half-precision weights in float32, and checkpoints would have them rounded",
                hint="keep the parameters in float32 (precision bf16 runs them under autocast), or train by the"
                " Accumulator",
            )
        ema_decay = request.ema_decay or (EMA_DECAY if self.workload.ema else None)
        if not model.training:  # `from_pretrained` leaves it in eval mode. Submodules in eval mode stay so otherwise.
            model.train()
        return TrainingComponents(
            model=model,
            objective=with_coupling(self.objective, spec.coupled, UsageError),
            optimizer=optimizer,
            scheduler=scheduler,
            scaler=choose_scaler(spec.precision, None, device, trained),
            spec=spec,
            averages=None if ema_decay is None else EmaModel(model, ema_decay),
        )

    def notes_on_plan(self, plan: Plan, components: TrainingComponents) -> list[Notice]:
        """Return what a user should know about a training by this plan."""
        notes = list[Notice]()
        if plan.learning_rate is not None and self.request.learning_rate is None:
            notes.append(Notice(message("tuned_rate", rate=plan.learning_rate), warns=False))
        if plan.coupling is not None and plan.iter_size > 1:
            # The Accumulator itself warns of BatchNorm layers; exact ones are those of the whole window.
            already_warned = () if components.spec.batchnorm == "frozen" else batchnorm_names(components.model)
            is_joint = bool(components.objective.coupled)
            notes += map(Notice, plan.coupling.warnings(already_warned, is_joint=is_joint))
        return notes

    def _read_given_plan(self, given: Any) -> Plan:
        """Return the plan that was given, or whose file was, after a check; the Accumulator compares the rest."""
        request, plan = self.request, load_plan(given)
        if plan.parallel == "fsdp2" and self.is_live:
            raise UsageError(
                "the plan shards the model, and fit shards those that it builds", hint="give it a workload"
            )
        different = _place_differences(plan, self.device)
        updates = _updates(**plan.update)
        if updates != (wanted := _updates(request.target_batch, request.target_tokens)):
            different.append((updates, wanted))
        for name in ("parallel", "mesh"):
            planned, asked = getattr(plan, name), getattr(request.options, name)
            if None not in (planned, asked) and planned != asked:
                different.append((f"{name}={planned!r}", f"{name}={asked!r}"))
        sets = (dict(sorted(given.overrides.items())) for given in (plan.workload, request.options))
        planned, asked = map(format_overrides, sets)
        if asked and asked != planned:
            different.append((planned or "a workload without --set", asked))
        if different:
            planned, here = different[0]
            raise UsageError(
                f"the plan is for {planned}; here is {here}",
                hint=f"leave out --plan to plan again, or use its micro-batch anyway: micro_batch={plan.micro_batch}"
                f" (--micro-batch {plan.micro_batch})",
            )
        return plan

    def _make_plan(self, reader: WindowReader, on_event: Callable[[Any], Any]) -> Plan:
        """Find the micro-batch by trials, of the file if that has all the code, else of the objects.

        Raises:
            UsageError: Ranks shard the model, which no trial on a device of this machine does.
        """
        request, workload, source = self.request, self.workload, self.request.model_or_workload
        options = dataclasses.replace(request.options.with_spec(longest_of=None), world_size=world_size())
        longest_of = request.options.spec.get("longest_of")
        listeners: dict[str, Any] = {"on_event": on_event, "on_output": lambda line: on_event(WorkloadOutput(line))}
        if world_size() > 1 and not self.is_live and self._chooses_fsdp2(None):
            raise UsageError(
                "trials on a device of this machine run the whole model, and ranks shard it",
                hint=f"give the plan of a simulated card (autoaccum plan --gpu NAME --world-size {world_size()}); or"
                f" {_GIVE_A_NUMBER}",
            )
        asked = partial(PlanRequest, request.target_batch, target_tokens=request.target_tokens)
        has_lengths = workload.counts_tokens and request.data is not None
        in_code = (request.collate, request.evaluate, request.data, request.split)
        is_file = isinstance(source, str | os.PathLike) and all(value is None for value in in_code)
        try:
            if is_file and isinstance(options.spec.get("optimizer"), str | None):
                if longest_of is None and workload.batch is no_batch and not workload.counts_tokens:
                    longest_of = DEFAULT_LONGEST_OF
                options = options.with_spec(longest_of=longest_of)
                return make_plan(os.fspath(source), asked(options), **listeners)
            if self.is_live or workload.batch is no_batch or longest_of is not None or has_lengths:
                workload = reader.with_planning_batches(workload, longest_of)
            if not self.is_live:
                return make_plan(workload, asked(options), **listeners)
            # Trials run where the model is; there is no batch of evaluation data.
            options = dataclasses.replace(options.with_spec(evaluation_batch=None), device="auto")
            live = _live_objects(request) | {"batch": workload.batch}
            return make_plan(None, asked(options), live=live, **listeners)
        except (UsageError, NotMeasuredError) as error:
            hint = "" if error.hint is None else f"{error.hint}; or "
            raise type(error)(error.message, hint=f"{hint}{_GIVE_A_NUMBER}") from error.__cause__

    def _build_model(self, plan: Plan | None) -> nn.Module:
        if self.is_live:
            live: nn.Module = self.request.model_or_workload
            return live
        model = self.workload.build_model()
        self.objective = self.workload.objective  # The divisor of a loss that the model computes is known now.
        for module in find_auxiliary_modules(self.workload).values():
            module.to(self.device)
        if world_size() == 1 or not self._chooses_fsdp2(plan):
            return model.to(self.device)
        mesh = self.request.options.mesh or (None if plan is None else plan.mesh) or (world_size(),)
        check_mesh(mesh, world_size())
        # On the host, since a card may not have room for a whole model.
        copy_from_first(join_ranks(), (*model.named_parameters(), *model.named_buffers()))
        return shard_model(model, self.device, mesh, self.workload.parallelize)

    def _chooses_fsdp2(self, plan: Plan | None) -> bool:
        """Return whether ranks shard the workload's model, as requested or planned."""
        parallel = self.request.options.parallel or (None if plan is None else plan.parallel)
        return choose_parallel(parallel, self.workload.parallelize) == "fsdp2"

    def _move_live_model(self) -> torch.device:
        """Move a live model to the requested device and return that, unless a live optimizer keeps it where it is."""
        model, requested = self.request.model_or_workload, self.request.options.device
        here = model_device(model)
        target = here if requested == "auto" and here.type != "cpu" else find_device(requested)
        if target == here:
            return here
        if isinstance(self.request.options.spec.get("optimizer"), Optimizer):
            if requested == "auto":
                return here
            raise UsageError(
                f"the model is on {here}, {target} is requested, and the optimizer already exists",
                hint="move the model first, then create the optimizer",
            )
        model.to(target)
        for module in find_used_modules(self.objective, model, self.request.evaluate).values():
            module.to(target)
        return model_device(model)


_GIVE_A_NUMBER = "give a number of your own: micro_batch=32 (--micro-batch 32)"


def find_device(name: str) -> torch.device:
    """Return the device for `auto` (the first GPU, or the CPU without one), `cpu`, `cuda` or `cuda:N`.

    Raises:
        UsageError: This machine has no such device.
    """
    check_device(name)
    index = card_index(name)
    if index is not None and world_size() > 1:
        if ":" in name:
            raise UsageError(f"the device is {name}, and each rank has a card of its own", hint="take cuda")
        index = torch.cuda.current_device()
    return torch.device("cpu") if index is None else torch.device("cuda", index)


def _live_objects(request: FitRequest) -> dict[str, Any]:
    """Return a live model and what goes with it, by the names of `autoaccum.plan`'s arguments."""
    live = {name: getattr(request, name) for name in (*_OF_THE_LOSS, "reduction", "split", "size")}
    return live | {"model": request.model_or_workload}


def _read_live_model(request: FitRequest) -> Workload:
    """Return the workload of a live model. Its batches come from the data, and its optimizer may be a live one."""
    optimizer = request.options.spec.get("optimizer")
    live = _live_objects(request) | {"batch": no_batch, "evaluate": request.evaluate}
    workload = workload_of_objects(live, request.options.with_spec(optimizer=None))
    if isinstance(optimizer, Optimizer):
        check_optimizer(optimizer, request.model_or_workload)
    scheduler = request.scheduler if callable(request.scheduler) else None
    return replace_fields(workload, collate=request.collate, scheduler=scheduler)


def _read_workload(request: FitRequest) -> Workload:
    """Return the workload, with the request's values in place of its own."""
    source = request.model_or_workload
    if not isinstance(source, (str, os.PathLike, Workload)):
        raise UsageError(f"model_or_workload is {describe_type(source)}", hint="give a module, a Workload or a file")
    given = [name for name in _OF_THE_LOSS if getattr(request, name) is not None]
    given += [] if request.reduction == "mean" else ["reduction"]
    if given:
        raise UsageError(f"a workload is given, and {given[0]} too", hint="define it in the workload")
    if isinstance(source, Workload):
        workload = source
    else:
        planned = {} if request.plan is None else load_plan(request.plan).workload.overrides
        workload = find_source(source, request.options.overrides or planned).load()
    own = {name: getattr(request, name) for name in ("split", "size", "scheduler", "collate", "evaluate")}
    return replace_fields(workload, **{**request.options.spec, "longest_of": None}, **own)


def _as_samples(dataset: Any) -> Any:
    return Subset(cast("Dataset[Any]", dataset), range(len(dataset))) if isinstance(dataset, (list, tuple)) else dataset


def _updates(target_batch: int | None, target_tokens: int | None) -> str:
    return f"updates of {target_batch} samples" if target_tokens is None else f"updates of {target_tokens} tokens"


def _place_differences(plan: Plan, device: torch.device) -> list[tuple[str, str]]:
    """Return how the plan's ranks and device differ from those here, as text for both."""
    here: dict[str, Any] = {"kind": device.type}
    if device.type == "cuda":
        here["card"] = torch.cuda.get_device_properties(device).name
    different = differences(plan_facts(plan), here)
    if plan.world_size != world_size():
        different.insert(0, (counted(plan.world_size, "rank"), counted(world_size(), "rank")))
    return different

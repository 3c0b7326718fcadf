"""The micro-batch to train with: as given, of the interrupted run, or of a plan, which is made if none is given."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from autoaccum.accumulation.argument_checks import differences, plan_facts
from autoaccum.accumulation.cuts import Limit
from autoaccum.accumulation.ranks.group import world_size
from autoaccum.accumulation.schedule import check_multiple
from autoaccum.checks import counted
from autoaccum.errors import NotMeasuredError, UsageError
from autoaccum.messages import message
from autoaccum.planning.plan_record import Plan
from autoaccum.planning.plan_request import DEFAULT_LONGEST_OF, PlanRequest
from autoaccum.planning.planner import make_plan
from autoaccum.sources.workload import no_batch
from autoaccum.training.fit_events import Notice, WorkloadOutput
from autoaccum.training.fit_request import load_plan
from autoaccum.training.training_setup import TrainingSetup, live_objects
from autoaccum.training.windows import WindowReader
from autoaccum.units import format_overrides

_GIVE_A_NUMBER = "give a number of your own: micro_batch=32 (--micro-batch 32)"


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


def choose_micro_batch(
    setup: TrainingSetup, reader: WindowReader, checkpoint: Mapping[str, Any] | None, notify: Callable[[Any], Any]
) -> MicroBatchChoice:
    """Return the micro-batch that was given, else that of the interrupted run, else that of a new plan.

    Args:
        setup: What is trained, where.
        reader: The training data, of which batches are made for trials if the workload has none.
        checkpoint: The record of the checkpoint to resume from.
        notify: Called with notices, and with the planner's events.

    Raises:
        UsageError: The given plan is for other updates or another device.
        DoesNotFitError, NotMeasuredError, WorkloadError: Planning failed.
    """
    request, micro_batch = setup.request, setup.request.micro_batch
    saved, plan = None if checkpoint is None else checkpoint["plan"], None
    micro_tokens = request.micro_tokens
    earlier = None if saved is None else Plan.from_json(saved, source="the plan in the checkpoint")
    moved = [] if earlier is None else _place_differences(earlier, setup.device)
    if micro_batch is None and request.plan is not None:
        plan = _read_given_plan(setup, request.plan)
    elif micro_batch is None and checkpoint is not None and not moved:
        plan, micro_batch, micro_tokens = earlier, int(checkpoint["micro_batch"]), checkpoint.get("micro_tokens")
    elif micro_batch is None:
        for there, here in moved[:1]:
            notify(Notice(message("planned_elsewhere", there=there, here=here)))
        plan = _make_plan(setup, reader, notify)
        if earlier is not None:  # A tuned learning rate stays valid for the new plan.
            plan = dataclasses.replace(plan, learning_rate=earlier.learning_rate)
    micro_batch = micro_batch if plan is None else plan.micro_batch
    assert micro_batch is not None
    multiple = max(setup.workload.multiple_of or 1, 1 if plan is None else plan.multiple_of)
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


def _read_given_plan(setup: TrainingSetup, given: Any) -> Plan:
    """Return the plan that was given, or whose file was, after a check; the Accumulator compares the rest."""
    request, plan = setup.request, load_plan(given)
    if plan.parallel == "fsdp2" and setup.is_live:
        raise UsageError("the plan shards the model, and fit shards those that it builds", hint="give it a workload")
    different = _place_differences(plan, setup.device)
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


def _make_plan(setup: TrainingSetup, reader: WindowReader, on_event: Callable[[Any], Any]) -> Plan:
    """Find the micro-batch by trials, of the file if that has all the code, else of the objects.

    Raises:
        UsageError: Ranks shard the model, which no trial on a device of this machine does.
    """
    request, workload, source = setup.request, setup.workload, setup.request.model_or_workload
    options = dataclasses.replace(request.options.with_spec(longest_of=None), world_size=world_size())
    longest_of = request.options.spec.get("longest_of")
    listeners: dict[str, Any] = {"on_event": on_event, "on_output": lambda line: on_event(WorkloadOutput(line))}
    if world_size() > 1 and not setup.is_live and setup.chooses_fsdp2(None):
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
        if setup.is_live or workload.batch is no_batch or longest_of is not None or has_lengths:
            workload = reader.with_planning_batches(workload, longest_of)
        if not setup.is_live:
            return make_plan(workload, asked(options), **listeners)
        # Trials run where the model is; there is no batch of evaluation data.
        options = dataclasses.replace(options.with_spec(evaluation_batch=None), device="auto")
        live = live_objects(request) | {"batch": workload.batch}
        return make_plan(None, asked(options), live=live, **listeners)
    except (UsageError, NotMeasuredError) as error:
        hint = "" if error.hint is None else f"{error.hint}; or "
        raise type(error)(error.message, hint=f"{hint}{_GIVE_A_NUMBER}") from error.__cause__


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

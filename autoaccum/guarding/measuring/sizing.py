"""How large a micro-batch may be: a plan's search, of which a guard keeps the numbers."""

from __future__ import annotations

from dataclasses import dataclass

from autoaccum.accumulation.schedule import Schedule
from autoaccum.devices.base import Inspection, Trial
from autoaccum.errors import DoesNotFitError, NotMeasuredError
from autoaccum.planning.events import Event, Inspected, Listener
from autoaccum.planning.planner import plan_on
from autoaccum.planning.request import Request
from autoaccum.planning.subjects import Subject


@dataclass(frozen=True)
class Task:
    """What is to be measured.

    Attributes:
        subject: The workload, and where it is tried.
        request: What a plan of it is asked to do.
        micro_batches: The schedule that is measured, whether it fits or not; None: the one that is planned.
        tell: Told of every step.
    """

    subject: Subject
    request: Request
    micro_batches: tuple[int, ...] | None
    tell: Listener

    def trial_parts(self, micro_batches: tuple[int, ...]) -> tuple[int, ...]:
        """What has to run of a schedule, on all ranks: as the confirmation of its plan does.

        The parts of the other ranks follow from the largest one, as they do in the plan.
        """
        planned = self.request.schedule(max(micro_batches))
        schedule = planned if planned.micro_batches == micro_batches else Schedule((micro_batches,))
        return schedule.trial_parts


@dataclass(frozen=True, kw_only=True)
class Sizing:
    """What planning found out.

    Attributes:
        inspection: What is known of the workload.
        micro_batches: The schedule to measure.
        largest: The largest micro-batch that fits; 0: none.
        capped: It is where the search was told to stop.
        proved: Trials of schedules from clean states, in the plan's own budget.
        warnings: Sentences.
    """

    inspection: Inspection
    micro_batches: tuple[int, ...]
    largest: int
    capped: bool
    proved: tuple[Trial, ...] = ()
    warnings: tuple[str, ...] = ()


def size_up(task: Task) -> Sizing:
    """Plan, and keep what a guard needs of it.

    Raises:
        UsageError, WorkloadError: As from `plan`.
        DoesNotFitError: Nothing fits, and no schedule is given; or it cannot even be loaded.
        NotMeasuredError: As from `plan`; or a limit ended the search, so that the largest size is not known.
    """
    seen: list[Inspection] = []

    def listen(event: Event) -> None:
        if isinstance(event, Inspected):
            seen.append(event.inspection)
        task.tell(event)

    try:
        plan = plan_on(task.subject, task.request, on_event=listen)
    except DoesNotFitError:
        if task.micro_batches is None or not seen:
            raise
        return Sizing(inspection=seen[-1], micro_batches=task.micro_batches, largest=0, capped=False)
    if plan.stopped is not None:
        raise NotMeasuredError(
            f"the limit on {plan.stopped} ended the search for the largest micro-batch at {plan.largest_fit}",
            hint="allow more, or name the size with --micro-batch",
        )
    return Sizing(
        inspection=seen[-1],
        micro_batches=task.micro_batches or plan.micro_batches,
        largest=plan.largest_fit,
        capped=plan.capped,
        proved=tuple(trial for trial in plan.trials if trial.fresh and trial.ran),
        warnings=plan.warnings,
    )

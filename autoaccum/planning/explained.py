"""Where the memory of a proved schedule goes, as far as its device can tell; a plan never fails by it.

Ctrl-C ends the explanation alone: the plan has been proved by then.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from autoaccum.devices.explanation import Explaining, Explanation
from autoaccum.devices.prediction import Predicting
from autoaccum.errors import DoesNotFitError, NotMeasuredError, UsageError, WorkloadError, first_line
from autoaccum.planning.allowance import Allowance
from autoaccum.planning.events import Explained, ExplanationStarted, Listener
from autoaccum.planning.request import Request
from autoaccum.planning.search import SearchStopped
from autoaccum.planning.subjects import Subject

_SEE_IT = "where memory goes is told of plans: plan with more of it (--memory, or a card such as --gpu 80GiB) to see it"


def check_explaining(subject: Subject, request: Request) -> None:
    """Refuse now what could not be explained at the end.

    Raises:
        UsageError: An explanation is asked for, and the device has none.
    """
    device = subject.device
    if not request.explain or isinstance(device, Explaining):
        return
    if subject.isolated or isinstance(device, Predicting):
        raise UsageError(
            f"explain (--explain) tells where the memory of a card goes, and trials run on the {device.name.upper()}",
            hint="predict for a card, which need not be here, by gpu=NAME (--gpu NAME; see `autoaccum gpus`)",
        )
    raise UsageError(
        "explain tells where the memory of a card goes, and that of live objects is not told apart",
        hint="predict for a card, which need not be here: gpu=NAME",
    )


@contextmanager
def told_of_plans_only(request: Request) -> Iterator[None]:
    """Say how to see where memory goes where nothing fits, and so nothing is explained.

    Raises:
        DoesNotFitError: As it came, with that for somebody who asked.
    """
    try:
        yield
    except DoesNotFitError as error:
        if not request.explain:
            raise
        raise DoesNotFitError(error.message, hint=f"{error.hint}; {_SEE_IT}") from error


def explain_proof(
    subject: Subject, request: Request, parts: tuple[int, ...], allowance: Allowance, tell: Listener
) -> tuple[Explanation | None, tuple[str, ...]]:
    """What the plan keeps of where the memory of `parts` goes, and sentences where that is not all; listeners get all.

    Args:
        subject: What was tried, and where.
        request: What is asked for.
        parts: Of the trial that proved the schedule.
        allowance: What is left of a limit on time.
        tell: Is told the whole account, for pictures.
    """
    device = subject.device
    if not (request.explain or request.picture) or not isinstance(device, Explaining):
        return None, ()
    tell(ExplanationStarted())
    try:
        left = allowance.seconds_left(None, 0.0)
        account = device.explain(parts, changes=request.explain, curve=request.picture, limit_seconds=left)
    except SearchStopped as stopped:
        return None, (f"where the memory goes was not asked: {stopped} was over",)
    except KeyboardInterrupt:  # What was proved is worth more; pressed again, it ends that too.
        return None, ("where the memory goes is not known (it was interrupted)",)
    except (WorkloadError, UsageError, NotMeasuredError) as error:
        return None, (f"where the memory goes is not known ({first_line(error.message)})",)
    tell(Explained(account))
    return (account.explanation, account.notes) if request.explain else (None, ())

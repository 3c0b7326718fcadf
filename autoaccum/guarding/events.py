"""What a guard tells while it works: small frozen records, for whoever draws them; of several cases, in any order."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from autoaccum.guarding.judgements import Judgement
from autoaccum.guarding.records import Case
from autoaccum.planning.events import Event as PlanningEvent


@dataclass(frozen=True)
class CheckedOut:
    """Another revision lies in a folder of its own now, to be measured there.

    Attributes:
        revision: As it was asked for.
    """

    revision: str


@dataclass(frozen=True)
class CaseStarted:
    """A case is measured from now on.

    Attributes:
        case: Which; beside it another one may be under way.
        number: Of this case, counted from 1.
        count: Of all cases.
    """

    case: Case
    number: int
    count: int


@dataclass(frozen=True)
class CaseStep:
    """What planning tells meanwhile.

    Attributes:
        case: Of which case.
        event: The record of `autoaccum.planning.events`.
    """

    case: Case
    event: PlanningEvent


@dataclass(frozen=True)
class CaseFinished:
    """All is known of a case.

    Attributes:
        number: As in `CaseStarted`.
        count: Likewise.
        judgement: What it came to.
    """

    number: int
    count: int
    judgement: Judgement


Event = CheckedOut | CaseStarted | CaseStep | CaseFinished
Listener = Callable[[Event], None]

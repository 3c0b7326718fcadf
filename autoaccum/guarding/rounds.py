"""One round over several cases: each is measured and judged, and what goes wrong with one ends none of the others."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from autoaccum.devices.checkout import Checkout
from autoaccum.errors import AutoaccumError, NotMeasuredError
from autoaccum.guarding.events import CaseFinished, CaseStarted, CaseStep, Event, Listener
from autoaccum.guarding.judgements import Judgement
from autoaccum.guarding.measuring.measuring import measure
from autoaccum.guarding.records import Case, Measured
from autoaccum.guarding.side_by_side import run_side_by_side
from autoaccum.guarding.verdict.judging import unmeasured
from autoaccum.planning.events import Event as PlanningEvent


class Measure(Protocol):
    """Measures the case at hand."""

    def __call__(self, checkout: Checkout, micro_batches: tuple[int, ...] | None = None) -> Measured:
        """As `measuring.measure`."""


Judge = Callable[[Case, Measure], Judgement]
"""Measures a case and says what that comes to, or raises an AutoaccumError that says why it cannot."""


@dataclass(frozen=True)
class Round:
    """How cases are measured.

    Attributes:
        tell: Told of every step; by one thread at a time.
        on_output: Given what workloads print, likewise; None: it goes to stderr.
        deadline: When the searches have to be over, by `time.monotonic`; None: never.
        unmeasured: What an error in place of figures comes to.
    """

    tell: Listener
    on_output: Callable[[str], None] | None = None
    deadline: float | None = None
    unmeasured: Callable[[Case, AutoaccumError], Judgement] = unmeasured
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def judge_all(self, cases: Sequence[Case], judge: Judge) -> tuple[Judgement, ...]:
        """The judgements of all cases, in their order; simulated ones are measured two at a time.

        Raises:
            KeyboardInterrupt: As it came; every process has ended.
        """
        jobs = [partial(self._judge, case, judge, number, len(cases)) for number, case in enumerate(cases, 1)]
        beside = [index for index, case in enumerate(cases) if case.device is None]
        found = dict(zip(beside, run_side_by_side([jobs[index] for index in beside]), strict=True))
        for index in set(range(len(cases))) - found.keys():
            found[index] = jobs[index](lambda: False)
        return tuple(found[index] for index in range(len(cases)))

    def _judge(self, case: Case, judge: Judge, number: int, count: int, is_stopped: Callable[[], bool]) -> Judgement:
        self._tell(CaseStarted(case, number, count))
        try:
            judgement = judge(case, partial(self._measure, case, is_stopped))
        except AutoaccumError as error:
            judgement = self.unmeasured(case, error)
        self._tell(CaseFinished(number, count, judgement))
        return judgement

    def _measure(
        self,
        case: Case,
        is_stopped: Callable[[], bool],
        checkout: Checkout,
        micro_batches: tuple[int, ...] | None = None,
    ) -> Measured:
        left = None if self.deadline is None else self.deadline - time.monotonic()
        if left is not None and left <= 0:
            raise NotMeasuredError("the limit on time was over before it was measured", hint="allow more")

        def listen(event: PlanningEvent) -> None:
            self._tell(CaseStep(case, event))

        return measure(
            case,
            checkout,
            micro_batches=micro_batches,
            time_limit=left,
            is_stopped=is_stopped,
            on_event=listen,
            on_output=None if self.on_output is None else self._pass_on,
        )

    def _tell(self, event: Event) -> None:
        with self._lock:
            self.tell(event)

    def _pass_on(self, line: str) -> None:
        assert self.on_output is not None
        with self._lock:
            self.on_output(line)

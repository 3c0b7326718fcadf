"""How a training goes through its budget: looked at on the way, and ended where that is asked for."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

from autoaccum.training.events import Evaluated, EvaluationFailed, ShortageMet, Started, Updated
from autoaccum.tuning.records import Ending
from autoaccum.tuning.runner import MILESTONES, GoOn
from autoaccum.tuning.settings import Budget


class Course:
    """Follows a training: `hear` is its callback, `is_due` tells when it evaluates.

    Seconds are those of training alone: neither evaluations count nor what `go_on` waits for.

    Args:
        budget: How long it trains.
        go_on: Asked at each milestone; what an update passes together is asked one after the other.
        clock: Seconds that go on.

    Attributes:
        samples: Trained on so far.
        updates: Made so far.
        seconds: Of training so far.
        shortages: Updates that were repeated because memory ran out.
        loss: On held-out data, as it was measured last.
        ending: What ended it before its budget; None where nothing did.
        reason: Why, where something went wrong.
        raised: What `go_on` raised, which is no failure of the training.
    """

    def __init__(self, budget: Budget, go_on: GoOn, clock: Callable[[], float] = time.perf_counter) -> None:
        self.samples = self.updates = self.shortages = 0
        self.seconds = 0.0
        self.loss: float | None = None
        self.ending: Ending | None = None
        self.reason: str | None = None
        self.raised: BaseException | None = None
        self._budget, self._go_on, self._clock = budget, go_on, clock
        self._left = list(MILESTONES)
        self._since = clock()

    def is_due(self, samples: int) -> bool:
        """Whether to evaluate now; at the end of the budget training does so by itself."""
        del samples  # `hear` has counted them.
        return not self._has_passed(100) and any(map(self._has_passed, self._left))

    def hear(self, event: Any) -> bool:
        """Take in an event of `training.events`; whether training ends here."""
        if isinstance(event, Updated):
            self._count(event)
            return self._has_passed(100)
        if isinstance(event, Evaluated):
            self._judge(event)
        elif isinstance(event, EvaluationFailed):
            ending: Ending = "out_of_memory" if event.out_of_memory else "failed"
            self._end(ending, f"the evaluation after update {event.update} failed: {event.reason}")
        elif isinstance(event, ShortageMet):
            self.shortages += 1
        if isinstance(event, (Started, Evaluated, EvaluationFailed)):
            self._since = self._clock()
        return self.ending is not None

    def _count(self, event: Updated) -> None:
        now = self._clock()
        self.seconds += now - self._since
        self._since = now
        self.samples, self.updates = event.samples, event.update

    def _judge(self, event: Evaluated) -> None:
        loss = event.values["loss"]
        if not math.isfinite(loss):
            self._end("diverged", f"the loss on held-out data is {loss} after update {event.update}")
            return
        self.loss = loss
        if self._has_passed(100):
            return
        while self._left and self._has_passed(self._left[0]):
            if not self._may_go_on(self._left.pop(0), loss):
                self._end("pruned", None)
                return

    def _may_go_on(self, percent: int, loss: float) -> bool:
        try:
            return self._go_on(percent, loss)
        except BaseException as error:
            self.raised = error
            raise

    def _end(self, ending: Ending, reason: str | None) -> None:
        self.ending, self.reason = ending, reason

    def _has_passed(self, percent: int) -> bool:
        done = self.samples if self._budget.unit == "samples" else self.seconds
        return done * 100 >= self._budget.amount * percent

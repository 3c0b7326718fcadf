"""Who runs the trainings of a study."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from autoaccum.tuning.records import Outcome
from autoaccum.tuning.settings import Setting

MILESTONES = (25, 50)
"""Percent of the budget at which a trial's loss is looked at before its end."""

END = 100
"""Percent of the budget at which a complete trial ends."""

GoOn = Callable[[int, float], bool]
"""Told of a milestone (percent of the budget) and the held-out loss there; whether the trial shall go on."""


class Runner(Protocol):
    """Runs one training after the other. A result depends on setting and seed alone, not on those before it."""

    def run(self, setting: Setting, seed: int, go_on: GoOn) -> Outcome:
        """Train with `setting` for the whole budget, unless `go_on` ends it at a milestone.

        What goes wrong within the training is an `Outcome`.

        Raises:
            NotMeasuredError: No process can be started.
            KeyboardInterrupt: It was interrupted; its process is gone.
        """

"""What a step tells while it goes on, for a training loop around it."""

from __future__ import annotations

from autoaccum.accumulation.phases import StepPhase


class StepObserver:
    """Hears of a step from within; derive from it and override what is of interest.

    What `phase` and `part` raise ends the step, which is rolled back.
    """

    def phase(self, phase: StepPhase) -> None:
        """A phase begins: `batch`, `forward` and `backward` of each part, `clip`, `update`."""

    def part(self, samples: int, share: float | None, factor: float) -> None:
        """The backward of a part comes next; gradients arrive as the part's own, before they are added.

        Args:
            samples: Samples in the part.
            share: What part of the effective batch's weight it has; None where the terms of the loss differ in it.
            factor: What its loss is multiplied by in this backward: its share (unless buffers of higher precision
                apply it afterwards) times the loss scale.
        """

    def shortage(self, phase: StepPhase, micro_batch: int, next_micro_batch: int) -> None:
        """Memory ran out, everything was put back, and the batch is repeated.

        Args:
            phase: Where.
            micro_batch: The largest part that was tried, in samples.
            next_micro_batch: The most that is tried next.
        """

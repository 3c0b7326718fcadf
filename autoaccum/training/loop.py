"""The loop of a training: a window, an update; now and then an evaluation, a checkpoint."""

from __future__ import annotations

import time
from dataclasses import dataclass

from autoaccum.accumulation.observers import StepResult
from autoaccum.training.checkpoints.keeping import Keeper
from autoaccum.training.coupling_watch import CompanyCheck
from autoaccum.training.data.windows import Source, Window
from autoaccum.training.evaluation.evaluating import Evaluator
from autoaccum.training.events import EpochEnded, Noted, Updated
from autoaccum.training.progress import Goal, Progress
from autoaccum.training.stopping import Stopping
from autoaccum.training.telling import Teller
from autoaccum.training.updates.peaks import PeakMeter
from autoaccum.training.updates.stepping import Stepper


@dataclass
class Loop:
    """A training that is under way.

    Attributes:
        source: Gives the windows.
        stepper: Makes an update of each.
        evaluator: Evaluates when it is due.
        keeper: Writes checkpoints when they are due.
        progress: How far it is; training goes on from where it stands.
        goal: When it is done.
        stopping: Whether it was asked to stop.
        peaks: The memory each update takes.
        company: Looks whether samples are coupled.
        teller: Told of every event; a callback may end training through it.
        has_left_out: Whether it was told that samples are left out.
    """

    source: Source
    stepper: Stepper
    evaluator: Evaluator
    keeper: Keeper
    progress: Progress
    goal: Goal
    stopping: Stopping
    peaks: PeakMeter
    company: CompanyCheck
    teller: Teller
    has_left_out: bool = False

    def run(self) -> None:
        """Train to the goal, or until a callback ends it.

        Whatever is raised, `progress` and all that is trained are those of the last whole update, unless it is
        UpdateInterrupted.

        Raises:
            StopAsked: A signal asked for it.
        """
        self.evaluator.run_missed()
        if not self.goal.is_reached(self.progress):
            self.source.start_epoch(self.progress.epoch)
        while not (self.teller.ended or self.goal.is_reached(self.progress)):
            self.stopping.check()
            began = time.perf_counter()
            window = self.source.next_window()
            if window is not None and window.samples % self.source.multiple_of:
                window = self._whole(window)
            if window is None:
                self._end_epoch()
            elif window.samples:
                self.company.look(window.parts)
                self._update(window, began)
                del window  # A whole effective batch: not to be held while the next one is read.
                self.evaluator.run_if_due()
                self.keeper.keep_if_due()
        self.evaluator.run()
        self.keeper.keep()

    def _whole(self, window: Window) -> Window:
        """The window without what is left over at the end of an epoch, which is told once."""
        each = self.source.multiple_of
        if not self.has_left_out:
            self.has_left_out = True
            self.teller.tell(
                Noted(
                    f"samples that are left over at the end of an epoch ({window.samples % each} here) are left out:"
                    f" micro-batches are multiples of {each}",
                    warns=False,
                )
            )
        whole = window.whole(each)
        if not whole.samples:
            self.source.commit()
        return whole

    def _update(self, window: Window, began: float) -> None:
        self.peaks.start()
        learning_rate = self.stepper.learning_rate
        result = self.stepper.step(window.parts)
        # The update is made, or its window passed over: from here on it is not made again, whatever is raised.
        self.source.commit()
        self.progress.count(window.samples, result)
        self.stepper.follow(result)
        seconds = time.perf_counter() - began
        self.teller.tell(self._updated(result, learning_rate, window.samples / seconds))

    def _updated(self, result: StepResult, learning_rate: float | None, samples_per_second: float) -> Updated:
        return Updated(
            update=self.progress.update,
            epoch=self.progress.epoch + 1,
            samples=self.progress.samples,
            loss=result.loss,
            grad_norm=result.grad_norm,
            learning_rate=learning_rate,
            samples_per_second=samples_per_second,
            peak_bytes=self.peaks.read_bytes(),
            micro_batches=len(result.micro_batches),
            micro_batch=max(result.micro_batches),
            retries=result.retries,
            updated=result.updated,
            noise_scale=self.stepper.noise_scale,
            terms=result.terms if len(result.terms) > 1 else None,
        )

    def _end_epoch(self) -> None:
        ended = EpochEnded(self.progress.epoch + 1, self.progress.update, self.progress.epoch_samples)
        self.progress.end_epoch()
        if not self.goal.is_reached(self.progress):
            self.source.start_epoch(self.progress.epoch)
        self.teller.tell(ended)
        self.evaluator.run_after_epoch()

"""A training that is under way: a window, an update; now and then an evaluation, a checkpoint."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from autoaccum.accumulation.batchnorm import batchnorm_names
from autoaccum.accumulation.coupling import Coupling
from autoaccum.accumulation.coupling_probe import SAMPLES, probe_model
from autoaccum.accumulation.plan_check import unwrap_model
from autoaccum.accumulation.reachable_objects import find_python_attributes, find_reachable
from autoaccum.accumulation.step_result import StepResult
from autoaccum.accumulation.transaction import TorchState
from autoaccum.errors import AutoaccumError
from autoaccum.training.checkpoints import CheckpointWriter
from autoaccum.training.data_source import Source
from autoaccum.training.data_windows import Window
from autoaccum.training.evaluation import Evaluation, EvaluationData, Evaluator
from autoaccum.training.fit_events import EpochEnded, EventNotifier, Notice, Updated
from autoaccum.training.fit_request import FitRequest
from autoaccum.training.resume import MicroBatchChoice
from autoaccum.training.run_folder import RunFolder
from autoaccum.training.seeds import derive_seed
from autoaccum.training.stepper import Stepper
from autoaccum.training.stop_signals import StopSignals
from autoaccum.training.training_setup import TrainingComponents, TrainingSetup
from autoaccum.training.training_state import Goal, Progress, capture_settings, capture_training, restore_training
from autoaccum.workload.batches import batch_size, join_batches, split_batch
from autoaccum.workload.model_copies import is_large


class Loop:
    """A training, with all that changes while it goes on.

    The arguments are what `fitting.train` has made of a request; `run` is what must be the same when it is resumed,
    and without a `folder` nothing is kept.

    Attributes:
        progress: How far it is; training goes on from where it stands.
        goal: When it is done.
        stepper: Makes an update of each window.
        keeper: Writes checkpoints when they are due.

    Raises:
        UsageError: The plan is for something else, or the evaluation data cannot be used.
    """

    def __init__(
        self,
        request: FitRequest,
        subject: TrainingSetup,
        trainee: TrainingComponents,
        source: Source,
        choice: MicroBatchChoice,
        *,
        folder: RunFolder | None,
        run: Mapping[str, Any],
        stopping: StopSignals,
        teller: EventNotifier,
    ) -> None:
        self.trainee, self.choice, self.progress = trainee, choice, Progress()
        self._source, self._stopping, self._teller = source, stopping, teller
        self._run, self._digest = run, subject.digest
        self._settings = None if folder is None else capture_settings(trainee)
        self._has_left_out = self._has_told_of_coupling = False
        source.part_size, source.multiple_of = choice.micro_batch, choice.multiple_of
        source.interruptible = stopping.interruptible
        source.saves_position = folder is not None
        self.goal = Goal(request.epochs, request.steps, _updates_per_epoch(source, request.target_batch))
        self.stepper = Stepper(request, trainee, choice, self.progress, stopping.check, teller.tell)
        self._evaluator = self._make_evaluator(request, subject)
        store = None if folder is None else folder.checkpoints
        self.keeper = CheckpointWriter(store, request.checkpoint_every, self.progress, self.compose, teller.tell)

    def run(self) -> None:
        """Train to the goal, or until a callback ends it.

        Whatever is raised, `progress` and all that is trained are those of the last whole update, unless it is
        UpdateInterrupted.

        Raises:
            StopRequested: A signal asked for it.
        """
        self._evaluator.run_missed()
        if not self.goal.is_reached(self.progress):
            self._source.start_epoch(self.progress.epoch)
        while not (self._teller.ended or self.goal.is_reached(self.progress)):
            self._stopping.check()
            began = time.perf_counter()
            window = self._source.next_window()
            if window is not None and window.samples % self._source.multiple_of:
                window = self._whole(window)
            if window is None:
                self._end_epoch()
            elif window.samples:
                self._look_for_coupling(window)
                self._update(window, began)
                del window  # A whole effective batch: not to be held while the next one is read.
                self._evaluator.run_if_due()
                self.keeper.keep_if_due()
        self._evaluator.run()
        self.keeper.keep()

    def compose(self) -> dict[str, Any]:
        """What a checkpoint holds: plain values and tensors, as of the last whole update."""
        plan = self.choice.plan
        return {
            "run": dict(self._run),
            "digest": self._digest,
            "settings": self._settings,
            "progress": dict(vars(self.progress)),
            "plan": None if plan is None else plan.to_json(),
            "micro_batch": self.choice.micro_batch,
            "stepper": self.stepper.state(),
            "evaluation": self._evaluator.state(),
            "data": self._source.state_dict(),
            "training": capture_training(self.trainee),
        }

    def restore(self, record: Mapping[str, Any]) -> None:
        """Put everything where `record` has it, but for random states, which come last of all.

        Raises:
            UsageError: It is of another model or optimizer: says what differs, and nothing is changed.
        """
        restore_training(record["training"], record["settings"], self.trainee, self._teller.tell)
        self._settings = record["settings"]
        vars(self.progress).update(record["progress"])
        self.stepper.restore(record["stepper"], same_plan=record["micro_batch"] == self.choice.micro_batch)
        self._evaluator.restore(record["evaluation"])
        how = self._source.load_state_dict(record["data"])
        if how is not None:
            self._teller.tell(Notice(how, warns=False))

    def _whole(self, window: Window) -> Window:
        """The window without what is left over at the end of an epoch, which is told once."""
        each = self._source.multiple_of
        if not self._has_left_out:
            self._has_left_out = True
            left = f"samples that are left over at the end of an epoch ({window.samples % each} here) are left out"
            self._teller.tell(Notice(f"{left}: micro-batches are multiples of {each}", warns=False))
        whole = window.whole(each)
        if not whole.samples:
            self._source.commit()
        return whole

    def _look_for_coupling(self, window: Window) -> None:
        """In the first window of several parts."""
        if not self._has_told_of_coupling and len(window.parts) > 1:
            self._has_told_of_coupling = True
            known = None if self.choice.plan is None else self.choice.plan.coupling
            _tell_of_coupling(self.trainee, known, window.parts, self._teller.tell)

    def _update(self, window: Window, began: float) -> None:
        learning_rate = self.stepper.learning_rate
        result = self.stepper.step(window.parts)
        # The update is made, or its window passed over: from here on it is not made again, whatever is raised.
        self._source.commit()
        self.progress.count(window.samples, result)
        self.stepper.follow(result)
        seconds = time.perf_counter() - began
        self._teller.tell(self._updated(result, learning_rate, window.samples / seconds))

    def _updated(self, result: StepResult, learning_rate: float | None, samples_per_second: float) -> Updated:
        return Updated(
            update=self.progress.update,
            epoch=self.progress.epoch + 1,
            samples=self.progress.samples,
            loss=result.loss,
            grad_norm=result.grad_norm,
            learning_rate=learning_rate,
            samples_per_second=samples_per_second,
            peak_bytes=self.stepper.peak_bytes(),
            micro_batches=len(result.micro_batches),
            micro_batch=max(result.micro_batches),
            retries=result.retries,
            updated=result.updated,
            terms=result.terms if len(result.terms) > 1 else None,
        )

    def _end_epoch(self) -> None:
        ended = EpochEnded(self.progress.epoch + 1, self.progress.update, self.progress.epoch_samples)
        self.progress.end_epoch()
        if not self.goal.is_reached(self.progress):
            self._source.start_epoch(self.progress.epoch)
        self._teller.tell(ended)
        self._evaluator.run_after_epoch()

    def _make_evaluator(self, request: FitRequest, subject: TrainingSetup) -> Evaluator:
        trainee, evaluation = self.trainee, None
        if subject.eval_data is not None:
            data = EvaluationData(subject.eval_data, collate=subject.collate, workers=request.workers)
            data.check_not_shared(subject.data)
            evaluation = Evaluation(
                trainee.objective,
                trainee.evaluate,
                trainee.precision,
                data,
                micro_batch=subject.evaluation_batch or self.choice.micro_batch,
                beside=trainee.beside,
                seed=derive_seed(request.seed, "evaluation"),
                interruptible=self._stopping.interruptible,
            )
        return Evaluator(evaluation, trainee, request, self.progress, self._teller.tell)


def _updates_per_epoch(source: Source, target_batch: int) -> int | None:
    samples = source.samples_per_epoch
    return None if samples is None else -(-(samples - samples % source.multiple_of) // target_batch)


def _tell_of_coupling(
    trainee: TrainingComponents, known: Coupling | None, parts: Sequence[Any], tell: Callable[[Any], None]
) -> None:
    """Say what couples the samples of an update: what its plan knows, else what an experiment on a copy finds.

    Nothing of the training is changed by it: a forward of the loss may reach the model itself, a teacher, or their
    generators, and all of them are put back.
    """
    found = known or _find_out(trainee, _take(parts))
    # Of BatchNorms the Accumulator itself warns, and knows more.
    told = () if trainee.batchnorm == "frozen" else batchnorm_names(trainee.model)
    for sentence in found.warnings(told):
        tell(Notice(sentence))


def _take(parts: Sequence[Any]) -> Any:
    """Some samples of an update; None where there are too few, or its parts differ in their form."""
    taken: list[Any] = []
    while sum(map(batch_size, taken)) < SAMPLES and len(taken) < len(parts):
        taken.append(parts[len(taken)])
    try:
        joined = join_batches(taken)
        return split_batch(joined, [SAMPLES, batch_size(joined) - SAMPLES])[0]
    except (AutoaccumError, RuntimeError):
        return None


def _find_out(trainee: TrainingComponents, batch: Any) -> Coupling:
    if batch is None:
        return Coupling(reason="the first update has too few samples, or parts of several forms")
    model, objective = trainee.model, trainee.objective
    criterion = None if objective.criterion is None else objective.criterion.function
    held = find_python_attributes(unwrap_model(model), trainee.optimizer)
    modules, generators = find_reachable((objective.loss_function, criterion), held)
    if any(is_large(module) for module in (model, *modules.values())):
        return Coupling(reason="what is to be copied is too large")
    state = TorchState([model, *modules.values()], generators=generators)
    try:
        return probe_model(model, objective, batch, trainee.batchnorm)
    finally:
        state.restore()

"""The training loop: a window of data, an update; now and then an evaluation and a checkpoint."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from autoaccum.accumulation.argument_checks import unwrap_model
from autoaccum.accumulation.batchnorm import batchnorm_names
from autoaccum.accumulation.coupling import Coupling
from autoaccum.accumulation.coupling_probe import SAMPLES, probe_model
from autoaccum.accumulation.reachable_objects import find_python_attributes, find_reachable
from autoaccum.accumulation.rng_state import derive_seed
from autoaccum.accumulation.transaction import TorchState
from autoaccum.errors import AutoaccumError
from autoaccum.training.checkpoints import CheckpointWriter
from autoaccum.training.data_source import Source
from autoaccum.training.data_windows import Window
from autoaccum.training.evaluation import Evaluation, EvaluationData, Evaluator
from autoaccum.training.fit_events import EpochEnded, EventNotifier, Notice, Updated
from autoaccum.training.fit_request import FitRequest
from autoaccum.training.ranks_agreement import TrainingRanks
from autoaccum.training.resume import MicroBatchChoice
from autoaccum.training.run_folder import RunFolder
from autoaccum.training.stepper import Stepper
from autoaccum.training.stop_signals import StopSignals
from autoaccum.training.training_setup import TrainingComponents, TrainingSetup
from autoaccum.training.training_state import Goal, Progress, capture_settings, capture_training, restore_training
from autoaccum.workload.batches import batch_size, join_batches, split_batch
from autoaccum.workload.model_copies import is_large


class Loop:
    """A training in progress, with all its changing state.

    The arguments are what `trainer.train` has built from a request. `run` holds what must be equal on resuming; without
    a `folder` nothing is saved.

    Attributes:
        progress: The progress so far, from which training continues.
        goal: When training is done.
        stepper: Makes an update from each window.
        checkpoint_writer: Writes checkpoints when they are due.

    Raises:
        UsageError: The plan does not match the training, or the evaluation data cannot be used.
    """

    def __init__(
        self,
        request: FitRequest,
        setup: TrainingSetup,
        components: TrainingComponents,
        source: Source,
        choice: MicroBatchChoice,
        folder: RunFolder | None,
        run: Mapping[str, Any],
        *,
        signals: StopSignals,
        notifier: EventNotifier,
        ranks: TrainingRanks,
    ) -> None:
        self.components, self.choice, self.progress = components, choice, Progress()
        self._source, self._signals, self._notifier, self._ranks = source, signals, notifier, ranks
        self._run, self._digest = run, setup.digest
        self._settings = None if folder is None else capture_settings(components)
        self._has_noted_remainder = self._has_checked_coupling = False
        source.part_size, source.multiple_of = choice.micro_batch, choice.multiple_of
        source.interruptible = signals.interruptible
        source.saves_position = folder is not None
        samples = source.samples_per_epoch
        used = None if samples is None else samples - samples % source.multiple_of
        self.goal = Goal(request.epochs, request.steps, None if used is None else -(-used // request.target_batch))
        self._is_alone = ranks.size == 1
        # Several ranks stop between two updates, since a step has to end alike on all.
        check = signals.check if self._is_alone else lambda: None
        self.stepper = Stepper(request, components, choice, self.progress, check, notifier.notify)
        averaged = [] if components.averages is None else [components.averages.model]
        others = (*components.loss_modules, *averaged)
        ranks.copy_from_first(one for module in others for one in (*module.parameters(), *module.buffers()))
        self._evaluator = self._make_evaluator(request, setup)
        store = None if folder is None else folder.checkpoints
        self.checkpoint_writer = CheckpointWriter(
            store, request.checkpoint_every, self.progress, self.checkpoint_record, notifier.notify, ranks
        )

    def run(self) -> None:
        """Train to the goal, or until a callback ends it.

        After any exception except UpdateInterrupted, `progress` and all trained state are those of the last whole
        update.

        Raises:
            StopRequested: A signal asked the run to stop.
        """
        self._evaluator.run_missed()
        if not self.goal.is_reached(self.progress):
            self._source.start_epoch(self.progress.epoch)
        while not self.goal.is_reached(self.progress):
            self._signals.check()
            began = time.perf_counter()
            window = None if self._notifier.should_stop else self._source.next_window()
            self._ranks.agree_on_window(window, self._notifier)
            if self._notifier.should_stop:
                break
            if window is not None and window.samples % self._source.multiple_of:
                window = self._drop_remainder(window)
            if window is None:
                self._end_epoch()
            elif window.samples:
                self._check_coupling(window)
                self._update(window, began)
                del window  # Free the whole effective batch before the next one is read.
                self._evaluator.run_if_due()
                self.checkpoint_writer.write_if_due()
        self._evaluator.run()
        self.checkpoint_writer.write()

    def checkpoint_record(self) -> dict[str, Any]:
        """Return the content of a checkpoint: plain values and tensors as of the last whole update."""
        plan, training = self.choice.plan, capture_training(self.components)
        first, *others = self._ranks.gather(training.pop("random"))
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
            "training": {**training, "random": first},
            "random_of_others": others,
        }

    def restore(self, record: Mapping[str, Any]) -> None:
        """Restore everything from `record` except random states, which are restored last.

        Raises:
            UsageError: The record belongs to another model or optimizer. The message names the difference; nothing is
                changed.
        """
        restore_training(record["training"], record["settings"], self.components, self._notifier.notify)
        self._settings = record["settings"]
        vars(self.progress).update(record["progress"])
        self.stepper.restore(record["stepper"], same_plan=record["micro_batch"] == self.choice.micro_batch)
        self._evaluator.restore(record["evaluation"])
        note = self._source.load_state_dict(record["data"])
        if note is not None:
            self._notifier.notify(note)

    def _drop_remainder(self, window: Window) -> Window:
        """Drop the samples left over at the end of an epoch, with a notice the first time."""
        each = self._source.multiple_of
        if not self._has_noted_remainder:
            self._has_noted_remainder = True
            left = f"samples left over at the end of an epoch ({window.samples % each} here) are dropped"
            self._notifier.notify(Notice(f"{left}: micro-batches are multiples of {each}", warns=False))
        whole = window.drop_remainder(each)
        if not whole.samples:
            self._source.commit()
        return whole

    def _check_coupling(self, window: Window) -> None:
        """Warn of batch coupling in the first window of several parts, as the plan or an experiment on a copy finds it.

        The experiment may run the model itself, a teacher, or their generators; all of them are restored.
        """
        if self._has_checked_coupling or (len(window.parts) < 2 and self._is_alone) or self.components.is_sharded:
            return
        self._has_checked_coupling = True
        if not self._ranks.is_first:
            return
        components = self.components
        known = None if self.choice.plan is None else self.choice.plan.coupling
        found = known or _probe_coupling(components, _take_samples(window.parts))
        # The Accumulator itself warns of BatchNorm layers, in more detail; exact ones are those of the whole window.
        already_warned = () if components.batchnorm == "frozen" else batchnorm_names(components.model)
        for sentence in found.warnings(already_warned, is_joint=bool(components.objective.coupled)):
            self._notifier.notify(Notice(sentence))

    def _update(self, window: Window, began: float) -> None:
        learning_rate = self.stepper.learning_rate
        result = self.stepper.step(window.parts)
        # The update is made, or its window skipped: from here on it is never repeated, even if something raises.
        self._source.commit()
        self.progress.count(window.samples, result)
        self.stepper.after_update(result)
        seconds = time.perf_counter() - began
        updated = Updated(
            update=self.progress.update,
            epoch=self.progress.epoch + 1,
            samples=self.progress.samples,
            loss=result.loss,
            grad_norm=result.grad_norm,
            learning_rate=learning_rate,
            samples_per_second=window.samples / seconds,
            peak_bytes=self.stepper.peak_bytes(),
            micro_batches=len(result.micro_batches),
            micro_batch=max(result.micro_batches, default=0),
            retries=result.retries,
            updated=result.updated,
            terms=result.terms if len(result.terms) > 1 else None,
            savers=self.stepper.savers or None,
        )
        self._notifier.notify(updated)

    def _end_epoch(self) -> None:
        ended = EpochEnded(self.progress.epoch + 1, self.progress.update, self.progress.epoch_samples)
        self.progress.epoch += 1
        self.progress.epoch_samples = 0
        if not self.goal.is_reached(self.progress):
            self._source.start_epoch(self.progress.epoch)
        self._notifier.notify(ended)
        self._evaluator.run_after_epoch()

    def _make_evaluator(self, request: FitRequest, setup: TrainingSetup) -> Evaluator:
        components, evaluation = self.components, None
        if setup.eval_data is not None:
            data = EvaluationData(setup.eval_data, collate=setup.collate, workers=request.workers)
            data.check_not_shared(setup.data)
            is_coupled = components.objective.coupled and components.evaluate is None
            size = setup.evaluation_batch
            evaluation = Evaluation(
                components.objective,
                components.evaluate,
                components.precision,
                data,
                micro_batch=self.choice.micro_batch if is_coupled else size or self.choice.micro_batch,
                loss_batch=size or request.target_batch if is_coupled else None,
                loss_modules=components.loss_modules,
                seed=derive_seed(request.seed, "evaluation"),
                interruptible=self._signals.interruptible,
                ranks=self._ranks,
            )
        return Evaluator(evaluation, components, request, self.progress, self._notifier.notify)


def _take_samples(parts: Sequence[Any]) -> Any:
    """Return a few samples of an update, or None if there are too few or the parts differ in structure."""
    taken: list[Any] = []
    while sum(map(batch_size, taken)) < SAMPLES and len(taken) < len(parts):
        taken.append(parts[len(taken)])
    try:
        joined = join_batches(taken)
        return split_batch(joined, [SAMPLES, batch_size(joined) - SAMPLES])[0]
    except (AutoaccumError, RuntimeError):
        return None


def _probe_coupling(components: TrainingComponents, batch: Any) -> Coupling:
    if batch is None:
        return Coupling(reason="the first update has too few samples, or parts of different structure")
    model, objective = components.model, components.objective
    criterion = None if objective.criterion is None else objective.criterion.function
    held = find_python_attributes(unwrap_model(model), components.optimizer)
    modules, generators = find_reachable((objective.loss_function, criterion), held)
    if any(is_large(module) for module in (model, *modules.values())):
        return Coupling(reason="the modules to copy are too large")
    state = TorchState([model, *modules.values()], generators=generators)
    try:
        return probe_model(model, objective, batch, components.batchnorm)
    finally:
        state.restore()

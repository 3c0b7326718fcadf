"""`train`: plan, build, resume, train and save."""

from __future__ import annotations

import resource
import time
import warnings
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import torch

from autoaccum.accumulation.accumulator import Accumulator
from autoaccum.accumulation.argument_checks import unwrap_model
from autoaccum.accumulation.out_of_memory import is_context_dead
from autoaccum.accumulation.ranks.group import OtherRanksFailed
from autoaccum.accumulation.ranks.launch import launched_ranks
from autoaccum.accumulation.rng_state import RngState, derive_seed, initialized_cuda_devices, seed_generators
from autoaccum.accumulation.sharded_tensors import model_class
from autoaccum.accumulation.step_result import StepObserver, StepPhase, StepResult
from autoaccum.errors import CheckpointError, NonFiniteError, RankLostError, UpdateInterrupted, UsageError
from autoaccum.sources.batches import batch_size
from autoaccum.training.data import DataSettings, Window, WindowReader, open_data
from autoaccum.training.evaluation import Evaluation
from autoaccum.training.fit_events import (
    CheckpointWritten,
    EpochEnded,
    Evaluated,
    EventNotifier,
    FitResult,
    Notice,
    Started,
    Updated,
)
from autoaccum.training.fit_request import FitRequest
from autoaccum.training.run_folder import MetricsLog, RunFolder, read_checkpoint
from autoaccum.training.stopping import StopRequested, StopSignals, TrainingRanks, raise_other
from autoaccum.training.training_setup import MicroBatchChoice, TrainingComponents, TrainingSetup
from autoaccum.training.training_state import (
    Progress,
    capture_settings,
    capture_training,
    full_weights,
    restore_training,
    restore_training_rng,
)

_MEASURE_ONLY = float("inf")
_PATIENCE, _MOST_PATIENCE = 32, 1024


def train(request: FitRequest, on_event: Callable[[Any], Any] | None = None) -> FitResult:
    """Plan, train, and return the result; `autoaccum.fit` documents the arguments and errors.

    Args:
        request: The arguments of `fit`.
        on_event: Called with every event of `fit_events`, and the planner's while it plans.

    Raises:
        KeyboardInterrupt: Ctrl-C, after a last checkpoint; SystemExit for the other signals.
        Exception: Any error of the user's code, unchanged, after a last checkpoint.
    """
    began = time.monotonic()
    with ExitStack() as stack:
        ranks = TrainingRanks(stack.enter_context(launched_ranks(on_cards=request.options.device != "cpu")))
        stack.enter_context(ranks.ending())
        if not ranks.is_first:
            stack.enter_context(warnings.catch_warnings(action="ignore"))
        notifier = EventNotifier([on_event] if on_event is not None and ranks.is_first else [], request.callbacks)
        stack.callback(RngState(initialized_cuda_devices()).restore)
        setup = TrainingSetup(request)
        folder = None
        if request.run_dir is not None:
            folder = RunFolder(request.run_dir, keep=request.keep, reads_only=not ranks.is_first)
            stack.enter_context(folder)
        settings = DataSettings(
            target_batch=request.target_batch,
            seed=request.seed,
            workers=request.workers,
            collate=setup.workload.collate,
            batching=setup.objective.batching,
            card=setup.device if setup.device.type == "cuda" else None,
            rank=ranks.rank,
            ranks=ranks.size,
        )
        reader = open_data(setup.data, settings)
        stack.callback(reader.close)
        checkpoint = None if folder is None else _find_checkpoint(folder, request.resume, ranks)
        record = None if checkpoint is None else read_checkpoint(checkpoint)
        choice = setup.choose_micro_batch(reader, record, notifier.notify)
        if setup.device.type == "cuda":  # CUDA may have started only during planning.
            stack.callback(RngState([setup.device]).restore)
        _seed_training(request.seed)  # All ranks build the same model.
        components = setup.build(choice.plan)
        # Ranks meet here, and one that waits for the others can still be stopped at once.
        ceiling = None if folder is None else ranks.by_first(folder.read_ceiling)
        if ceiling is not None and ceiling < choice.micro_batch:
            text = f"micro-batches of more than {ceiling} ran out of memory before (ceiling.json)"
            notifier.notify(Notice(text, warns=False))
            choice = MicroBatchChoice(ceiling, multiple_of=choice.multiple_of)
        signals = stack.enter_context(StopSignals())
        stack.enter_context(ranks.ending(signals))
        stack.callback(reader.close)  # Before StopSignals ends, which hides errors of workers that a signal ended.
        run = Run(setup, components, reader, choice, folder, signals=signals, notifier=notifier, ranks=ranks)
        if ranks.rank > 0:
            _seed_training(request.seed, ranks.rank)
        if checkpoint is not None and record is not None:
            run.restore(checkpoint, record)
        notifier.notify(run.started(checkpoint))
        run.save_first()  # Before other files: a checkpoint shows that they belong to a run.
        if folder is not None and ranks.is_first:
            log = MetricsLog(folder.path, run.progress.update, run.progress.evaluated_at, notifier.notify)
            notifier.listeners.append(stack.enter_context(log).on_event)
            if choice.plan is not None:
                choice.plan.save(folder.path / "plan.json", force=True)
        if record is not None:
            run.restore_rng(record)
            record = None  # Frees host memory as large as model and optimizer.
        run.train()
        return run.result(checkpoint, time.monotonic() - began)


def _find_checkpoint(folder: RunFolder, resume: str, ranks: TrainingRanks) -> Path | None:
    """Return the newest checkpoint that rank 0 finds, subject to `resume`; None for a new run.

    Raises:
        UsageError: The folder holds a run that must not be resumed, or none although one is required.
    """

    def choose() -> Path | None:
        newest = next(iter(folder.checkpoints()), None)
        if resume == "never" and newest is not None:
            raise UsageError(f"{folder.path} already holds a run, and resume is never", hint="use another folder")
        if resume == "must" and newest is None:
            raise UsageError(f"{folder.path} holds no checkpoint to resume", hint="start the run without --resume must")
        return newest

    return ranks.by_first(choose)


def _seed_training(*numbers: int) -> None:
    seed = derive_seed(numbers[0], "training", *numbers[1:])
    seed_generators(seed)
    torch.cuda.manual_seed_all(seed)


class Ceiling:
    """The largest micro-batch, from update to update.

    The Accumulator lowers it when memory runs out. After `patience` updates without that, the planned size is tried
    again, and the patience doubles, up to 1,024 updates.

    >>> ceiling = Ceiling(256, patience=2)
    >>> [ceiling.record(retries, size) for retries, size in [(2, 100), (0, 100), (0, 100), (1, 90), (0, 90), (0, 90)]]
    [100, 100, 256, 90, 90, 90]
    """

    def __init__(self, planned: int, *, patience: int = _PATIENCE) -> None:
        self.planned = self.largest = planned
        self.patience, self.stable_updates = patience, 0

    def record(self, retries: int, micro_batch: int) -> int:
        """Record an update's `retries` and the Accumulator's ceiling after it; return the ceiling of the next one."""
        self.largest = min(micro_batch, self.planned)
        self.stable_updates = 0 if retries else self.stable_updates + 1
        if self.largest < self.planned and self.stable_updates >= self.patience:
            self.largest, self.stable_updates = self.planned, 0
            self.patience = min(2 * self.patience, _MOST_PATIENCE)
        return self.largest


class Stepper(StepObserver):
    """Makes one update from each window; without a `clip_norm`, the gradient's norm is still measured for the log.

    Args:
        progress: The progress; skipped windows are counted in it.
        check: Called at the start of each phase of a step; an exception from it rolls the step back.
        notify: Called with notices.

    Attributes:
        ceiling: The largest micro-batch now.
        has_failed: Whether a step has raised an error that all ranks know of.

    Raises:
        UsageError: The plan does not match the training.
    """

    def __init__(
        self,
        request: FitRequest,
        components: TrainingComponents,
        choice: MicroBatchChoice,
        progress: Progress,
        check: Callable[[], None],
        notify: Callable[[Any], None],
    ) -> None:
        self.ceiling = Ceiling(choice.micro_batch)
        self.has_failed = False
        self._components, self._progress, self._skip_nonfinite = components, progress, request.skip_nonfinite
        self._device, self._check, self._notify = components.device, check, notify
        self._retries = 0
        self._skip_reason: str | None = None
        self.accumulator = Accumulator(
            components.model,
            components.optimizer,
            components.objective,
            plan=choice.plan,
            micro_batch=choice.micro_batch if choice.plan is None else None,
            clip_norm=_MEASURE_ONLY if request.clip_norm is None else request.clip_norm,
            precision=components.spec.precision,
            batchnorm=components.spec.batchnorm,
            coupled=components.objective.coupled,
            accumulate_in=components.spec.accumulate_in,
            savers=components.spec.savers,
            add_savers=True,
            scaler=components.scaler,
            multiple_of=choice.multiple_of,
            check_finite=True,
            check=request.check,
            observer=self,
        )

    @property
    def added_savers(self) -> tuple[str, ...]:
        """The savers that were added because not even the smallest micro-batch fitted."""
        return tuple(word for word in self.accumulator.savers if word not in self._components.spec.savers)

    def step(self, parts: list[Any]) -> StepResult:
        """Make the next update. With `skip_nonfinite`, a window whose loss or gradient is not finite is skipped.

        Nothing is raised once the update is made; `after_update` does what may raise.

        Raises:
            NonFiniteError: The loss or the gradient is not finite; everything is as before the step.
            DoesNotFitError: As in `Accumulator.step_parts`, like the other errors.
        """
        self._skip_reason, self._retries = None, 0
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
        try:
            return self.accumulator.step_parts(parts)
        except NonFiniteError as error:
            if not self._skip_nonfinite:
                self.has_failed = True
                message = f"update {self._progress.update + 1}: {error.message}"
                raise NonFiniteError(message, loss=error.loss, grad_norm=error.grad_norm, hint=error.hint) from None
            self._skip_reason = error.message
            sizes = tuple(batch_size(part) for part in parts)
            return StepResult(error.loss, sum(sizes), sizes, error.grad_norm, self._retries, False, {})
        except BaseException:
            self.has_failed = not self.accumulator.has_agreed
            raise

    def after_update(self, result: StepResult) -> None:
        """Update the averaged weights, the ceiling and the schedule, after the update has been counted.

        Raises:
            WorkloadError: The model's parameters or buffers are not those that the average began with.
            Exception: As the scheduler or a callback raised it.
        """
        averages, scheduler = self._components.averages, self._components.scheduler
        if averages is not None and result.updated:
            averages.update()
        self.accumulator.micro_batch = self.ceiling.record(result.retries, self.accumulator.micro_batch)
        if scheduler is not None and result.updated:
            scheduler.step()  # Before any event: a callback that raises ends the run here.
        if self._skip_reason is not None:
            self._progress.skipped += 1
            self._notify(Notice(f"update {self._progress.update} is skipped: {self._skip_reason}", warns=False))

    def peak_bytes(self) -> int | None:
        """Return the peak memory of this update, as `Updated` describes it."""
        if self._device.type == "cuda":
            return torch.cuda.max_memory_reserved(self._device)
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 if self._device.type == "cpu" else None

    def state_dict(self) -> dict[str, Any]:
        """Return how much memory the updates may take, as plain values."""
        return {"ceiling": dict(vars(self.ceiling)), "savers": list(self.added_savers)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from the state of an earlier run with the same micro-batch."""
        self.accumulator.restore_savers(state["savers"])
        vars(self.ceiling).update(state["ceiling"])
        self.accumulator.micro_batch = self.ceiling.largest

    def phase(self, phase: StepPhase) -> None:
        """Let a request to stop interrupt the step (see `StepObserver`)."""
        if phase != "update":  # The gradient is complete by then, and the run stops right after the update.
            self._check()

    def out_of_memory(self, phase: StepPhase, micro_batch: int, next_micro_batch: int) -> None:
        """See `StepObserver`: memory ran out, and the step is repeated."""
        # A step that ends without an update would not lower it.
        self.accumulator.micro_batch = min(self.accumulator.micro_batch, next_micro_batch)
        self._tell_retry(phase, f"{micro_batch}, repeated with {next_micro_batch}", warns=False)

    def saver_added(self, phase: StepPhase, micro_batch: int, saver: str) -> None:
        """See `StepObserver`: not even the smallest micro-batch fitted, and the step is repeated with a saver."""
        self._tell_retry(phase, f"{micro_batch}: this and later updates run with {saver}", warns=True)

    def _tell_retry(self, phase: StepPhase, what: str, *, warns: bool) -> None:
        self._retries += 1
        text = f"update {self._progress.update + 1}: out of memory in {phase} with {what}"
        self._notify(Notice(text, warns=warns))


class Run:
    """A training in progress, with all its changing state.

    The arguments are what `train` has made of a request. Without a `folder` nothing is saved.

    Attributes:
        progress: The progress so far, from which training continues.

    Raises:
        UsageError: The plan does not match the training, or the evaluation data cannot be used.
    """

    def __init__(
        self,
        setup: TrainingSetup,
        components: TrainingComponents,
        reader: WindowReader,
        choice: MicroBatchChoice,
        folder: RunFolder | None,
        *,
        signals: StopSignals,
        notifier: EventNotifier,
        ranks: TrainingRanks,
    ) -> None:
        self._setup, self._components, self._choice, self.progress = setup, components, choice, Progress()
        self._request, self._reader, self._folder = setup.request, reader, folder
        self._signals, self._notifier, self._ranks = signals, notifier, ranks
        self._settings = None if folder is None else capture_settings(components.optimizer)
        reader.part_size, reader.multiple_of = choice.micro_batch, choice.multiple_of
        reader.interruptible, reader.saves_position = signals.interruptible, folder is not None
        # Several ranks stop between two updates, since a step has to end alike on all.
        check = signals.check if ranks.size == 1 else lambda: None
        self._stepper = Stepper(self._request, components, choice, self.progress, check, notifier.notify)
        if choice.plan is not None:
            for notice in setup.notes_on_plan(choice.plan, components):
                notifier.notify(notice)
        averaged = [] if components.averages is None else [components.averages.model]
        others = (*components.loss_modules, *averaged)
        ranks.copy_from_first(tensor for module in others for tensor in (*module.parameters(), *module.buffers()))
        self._evaluation = self._make_evaluation()
        self._newest: Path | None = None
        self._saved_at: tuple[int, ...] | None = None
        self._unsaved: str | None = None

    @property
    def is_done(self) -> bool:
        """Whether training has come to its last epoch or update."""
        steps, epochs = self._request.steps, self._request.epochs
        is_last = steps is not None and self.progress.update >= steps
        return is_last or (epochs is not None and self.progress.epoch >= epochs)

    def train(self) -> None:
        """Train to the end, or until a callback ends it.

        After any error, the state of the last whole update is saved, unless that state is unknown.

        Raises:
            StopRequested: A signal asked the run to stop.
        """
        ranks, signals, stepper = self._ranks, self._signals, self._stepper
        try:
            self._train()
        except BaseException as own:
            error = ranks.report(own, signals, is_known=stepper.has_failed)
            # Nothing is written after a second signal. Any other BaseException comes from the user's code.
            at_once = signals.requested is not None and not isinstance(error, (StopRequested, Exception))
            is_whole, is_sharded = not stepper.accumulator.is_interrupted, self._components.is_sharded
            can_save = is_whole and not at_once and not is_context_dead(error)
            # The other ranks come here, too, unless one is gone, or they wait in a collective for this one to leave.
            is_known = isinstance(error, (StopRequested, Exception)) and not isinstance(error, RankLostError)
            if ranks.size == 1 or (is_known and (is_whole or not is_sharded)):
                with suppress(OtherRanksFailed, RankLostError):
                    if all(ranks.gather(can_save)):
                        self._save()
            if isinstance(error, UpdateInterrupted) and self._newest is not None:
                raise self._way_to_resume(error, self._newest) from error
            if error is not own:
                raise_other(error)
            del error  # Its traceback holds this frame.
            raise

    def restore(self, checkpoint: Path, record: Mapping[str, Any]) -> None:
        """Restore everything from the record of a checkpoint except random states, which are restored last.

        Raises:
            UsageError: The record belongs to another training. The message names the difference; nothing is changed.
        """
        here, notify = self._describe(), self._notifier.notify
        different = "; ".join(
            f"{name} was {record['run'].get(name)!r}, is {value!r}"
            for name, value in here.items()
            if record["run"].get(name) != value
        )
        if different:
            raise UsageError(
                f"{checkpoint} belongs to another training: {different}",
                hint="use the same arguments as before, or another run folder",
            )
        workload = self._setup.workload
        if record["digest"] != workload.digest:
            notify(Notice(f"{workload.name} has changed since the run began: training continues with the new code"))
        restore_training(record["training"], record["settings"], self._components)
        self._settings = record["settings"]
        vars(self.progress).update(record["progress"])
        if record["micro_batch"] == self._choice.micro_batch:
            self._stepper.load_state_dict(record["stepper"])
        if self._evaluation is not None and record["evaluation"] is not None:
            self._evaluation.micro_batch = min(self._evaluation.micro_batch, record["evaluation"])
        if (notice := self._reader.load_state_dict(record["data"])) is not None:
            notify(notice)
        self._newest, self._saved_at = checkpoint, self._position()

    def restore_rng(self, record: Mapping[str, Any]) -> None:
        """Continue with the random states of the interrupted run, or with new ones on another number of ranks."""
        states, ranks, progress = record["random"], self._ranks, self.progress
        if len(states) == ranks.size:
            restore_training_rng(states[ranks.rank], self._components)
            return
        _seed_training(self._request.seed, progress.epoch, progress.update, ranks.rank)
        text = (
            f"the run had {len(states)} ranks, and has {ranks.size} now: random numbers, as of dropout, are drawn anew"
        )
        self._notifier.notify(Notice(text, warns=False))

    def save_first(self) -> None:
        """Write a checkpoint before the first update: what cannot be saved is better known before hours of training.

        Raises:
            CheckpointError: It cannot be written, or the state could be loaded only by running code.
            UsageError: The scheduler has no state_dict.
        """
        if self._saved_at is None:
            self._write_checkpoint()

    def started(self, resumed_from: Path | None) -> Started:
        """Return the event that begins the training."""
        return Started(
            model=self._components.model,
            optimizer=self._components.optimizer,
            plan=self._choice.plan,
            micro_batch=self._stepper.ceiling.largest,
            target_batch=self._request.target_batch,
            device=str(self._components.device),
            update=self.progress.update,
            updates=self._count_updates(),
            epochs=self._request.epochs,
            resumed_from=resumed_from,
        )

    def result(self, resumed_from: Path | None, seconds: float) -> FitResult:
        """Write the weights and return the result."""
        progress, components, folder, ranks = self.progress, self._components, self._folder, self._ranks
        averages, unsaved = components.averages, self._unsaved
        model_path = ema_path = None
        if folder is not None:
            try:
                weights = full_weights(components)
                model_path = ranks.by_first(lambda: folder.write_weights(weights))
                if averages is not None:
                    ema_path = ranks.by_first(lambda: folder.write_weights(averages.model.state_dict(), "ema.pt"))
            except (CheckpointError, UsageError) as error:
                unsaved = unsaved or str(error)
        return FitResult(
            model=components.model,
            optimizer=components.optimizer,
            plan=self._choice.plan,
            micro_batch=self._stepper.ceiling.largest,
            updates=progress.update,
            epochs=progress.epoch,
            samples=progress.samples,
            loss=progress.loss,
            evaluation=progress.evaluation,
            oom_retries=progress.oom_retries,
            added_savers=self._stepper.added_savers,
            skipped=progress.skipped,
            seconds=seconds,
            stopped="callback" if self._notifier.should_stop else None,
            run_dir=None if folder is None else folder.path,
            checkpoint=self._newest,
            model_path=model_path,
            ema_model=None if averages is None else averages.model,
            ema_path=ema_path,
            unsaved=unsaved,
            resumed_from=resumed_from,
            warnings=tuple(self._notifier.warnings),
        )

    def _train(self) -> None:
        reader, notifier = self._reader, self._notifier
        if not self.is_done:
            reader.start_epoch(self.progress.epoch)
        while True:
            self._evaluate_if_due()
            is_new = self._saved_at is None or self._saved_at[0] != self.progress.update
            if is_new and self.progress.update % self._request.checkpoint_every == 0:
                self._save()
            if self.is_done:
                break
            self._signals.check()
            began = time.perf_counter()
            window = None if notifier.should_stop else reader.next_window()
            if self._ranks.size > 1:
                read = None if window is None else (window.samples, window.checksum)
                notifier.should_stop = self._ranks.agree_on_window(read, notifier.should_stop)
            if notifier.should_stop:
                break
            if window is None:
                self._end_epoch()
            elif window.samples % reader.multiple_of:
                text = f"{window.samples} samples left over at the end of an epoch are dropped"
                notifier.notify(Notice(f"{text}: micro-batches are multiples of {reader.multiple_of}", warns=False))
                reader.commit()
            else:
                self._update(window, began)
                del window  # Free the whole effective batch before the next one is read.
        self._evaluate_if_due(at_end=True)
        self._save()

    def _update(self, window: Window, began: float) -> None:
        rate = self._components.optimizer.param_groups[0].get("lr")
        rate = None if rate is None else float(rate)
        result = self._stepper.step(window.parts)
        # The update is made, or its window skipped: from here on it is never repeated, even if something raises.
        self._reader.commit()
        self.progress.count(window.samples, result)
        self._stepper.after_update(result)
        updated = Updated(
            update=self.progress.update,
            epoch=self.progress.epoch + 1,
            samples=self.progress.samples,
            loss=result.loss,
            grad_norm=result.grad_norm,
            learning_rate=rate,
            samples_per_second=window.samples / (time.perf_counter() - began),
            peak_bytes=self._stepper.peak_bytes(),
            micro_batches=len(result.micro_batches),
            micro_batch=max(result.micro_batches, default=0),
            retries=result.retries,
            updated=result.updated,
            terms=result.terms if len(result.terms) > 1 else None,
            savers=self._stepper.accumulator.savers or None,
        )
        self._notifier.notify(updated)

    def _end_epoch(self) -> None:
        progress = self.progress
        ended = EpochEnded(progress.epoch + 1, progress.update, progress.epoch_samples)
        progress.epoch += 1
        progress.epoch_samples = 0
        if not self.is_done:
            self._reader.start_epoch(progress.epoch)
        self._notifier.notify(ended)

    def _evaluate_if_due(self, *, at_end: bool = False) -> None:
        """Evaluate at the end, and when the request says so, else after each epoch; once after an update at most.

        What an interruption prevented is due when the run resumes.
        """
        progress, request = self.progress, self._request
        if self._evaluation is None or progress.update in (0, progress.evaluated_at):
            return
        if request.eval_due is not None:
            is_due = request.eval_due(progress.samples)
        elif request.eval_every is not None:
            is_due = progress.update % request.eval_every == 0
        else:
            is_due = progress.epoch_samples == 0
        if not (is_due or at_end):
            return
        evaluated, averages = self._evaluation.run(self._components.model, progress.update), self._components.averages
        if averages is not None:
            averaged = self._evaluation.run(averages.model, progress.update)
            values = {**evaluated.values, **{f"ema_{name}": value for name, value in averaged.values.items()}}
            evaluated = Evaluated(progress.update, values, evaluated.samples, evaluated.seconds + averaged.seconds)
        progress.evaluated_at, progress.evaluation = progress.update, dict(evaluated.values)
        self._notifier.notify(evaluated)

    def _make_evaluation(self) -> Evaluation | None:
        request, components, workload = self._request, self._components, self._setup.workload
        if self._setup.eval_data is None:
            for name in ("eval_every", "eval_due"):
                if getattr(request, name) is not None:
                    raise UsageError(
                        f"{name} is given, but no evaluation data",
                        hint="give eval_data, or define evaluation_dataset in the workload",
                    )
            return None
        is_coupled = components.objective.coupled and workload.evaluate is None
        size = workload.evaluation_batch
        return Evaluation(
            components.objective,
            workload.evaluate,
            components.spec.precision,
            self._setup.eval_data,
            collate=workload.collate,
            workers=request.workers,
            micro_batch=self._choice.micro_batch if is_coupled else size or self._choice.micro_batch,
            loss_batch=size or request.target_batch if is_coupled else None,
            loss_modules=components.loss_modules,
            seed=derive_seed(request.seed, "evaluation"),
            interruptible=self._signals.interruptible,
            ranks=self._ranks,
        )

    def _save(self) -> None:
        """Write a checkpoint unless nothing has changed since the last; a failure ends nothing."""
        try:
            if self._saved_at != self._position():
                self._write_checkpoint()
                self._unsaved = None
        except (CheckpointError, UsageError) as error:
            self._unsaved = str(error)
            text = f"no checkpoint was written after update {self.progress.update}: {error}"
            self._notifier.notify(Notice(text))

    def _write_checkpoint(self) -> None:
        """Write one: all ranks give their part of it, rank 0 writes, and all know how that went."""
        folder, update, began = self._folder, self.progress.update, time.perf_counter()
        if folder is None:
            return
        record = self._record()
        path = self._ranks.by_first(lambda: folder.write_checkpoint(update, record))
        assert path is not None
        self._newest, self._saved_at = path, self._position()
        self._notifier.notify(CheckpointWritten(update, path, time.perf_counter() - began))

    def _record(self) -> dict[str, Any]:
        """Return the content of a checkpoint: plain values and tensors as of the last whole update."""
        plan, training = self._choice.plan, capture_training(self._components)
        return {
            "run": self._describe(),
            "digest": self._setup.workload.digest,
            "settings": self._settings,
            "progress": dict(vars(self.progress)),
            "plan": None if plan is None else plan.to_json(),
            "micro_batch": self._choice.micro_batch,
            "stepper": self._stepper.state_dict(),
            "evaluation": None if self._evaluation is None else self._evaluation.micro_batch,
            "data": self._reader.state_dict(),
            "random": self._ranks.gather(training.pop("random")),
            "training": training,
        }

    def _describe(self) -> dict[str, Any]:
        """Return what must be equal on resuming, as plain values, except what `restore_training` compares.

        These may change: `epochs` and `steps`, everything about evaluations, checkpoints and callbacks, the workers
        that read data, the micro-batch, the plan, the device and its budget, `clip_norm`, `skip_nonfinite`, `check`,
        and the workload's code (with a warning). A learning-rate schedule continues from its saved state.
        """
        components = self._components
        return {
            "target batch": self._request.target_batch,
            "seed": self._request.seed,
            **{f"data: {name}": value for name, value in self._reader.fingerprint.items()},
            "model": model_class(unwrap_model(components.model)).__name__,
            "optimizer": type(components.optimizer).__name__,
            "schedule": None if components.scheduler is None else type(components.scheduler).__name__,
            "loss": f"{components.objective.reduction} over {components.objective.source}",
            "precision": components.spec.precision,
            "batchnorm": components.spec.batchnorm,
            "coupled": components.objective.coupled,
            "accumulate_in": components.spec.accumulate_in,
            "ema_decay": None if components.averages is None else components.averages.decay,
        }

    def _position(self) -> tuple[int, ...]:
        return self.progress.update, self.progress.epoch, self.progress.evaluated_at

    def _count_updates(self) -> int | None:
        """Return the updates that there are at the end; None if the data has no known length."""
        epochs, steps, samples = self._request.epochs, self._request.steps, self._reader.samples_per_epoch
        if epochs is None or samples is None:
            return steps if epochs is None else None
        whole, left = divmod(samples, self._request.target_batch)
        updates = epochs * (whole + (left > 0 and left % self._reader.multiple_of == 0))
        return updates if steps is None else min(updates, steps)

    def _way_to_resume(self, error: UpdateInterrupted, checkpoint: Path) -> UpdateInterrupted:
        """Return the error with what resumes the run, and leave a smaller micro-batch for the next start."""
        hint = f"the same command resumes from {checkpoint}"
        if error.next_micro_batch is not None:
            hint += f", in micro-batches of at most {error.next_micro_batch}"
            if self._folder is not None and self._ranks.is_first:
                self._folder.write_ceiling(error.next_micro_batch)
        return UpdateInterrupted(error.message, hint=hint)

"""A training in progress: update after update, evaluations, checkpoints, and how it ends."""

from __future__ import annotations

import resource
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from autoaccum.accumulation.accumulator import Accumulator
from autoaccum.accumulation.out_of_memory import is_context_dead
from autoaccum.accumulation.ranks.group import OtherRanksFailed
from autoaccum.accumulation.step_result import StepObserver, StepPhase, StepResult
from autoaccum.checks import counted
from autoaccum.errors import CheckpointError, NonFiniteError, RankLostError, UpdateInterrupted, UsageError
from autoaccum.messages import message
from autoaccum.sources.batches import batch_size
from autoaccum.training.evaluation import make_evaluation
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
from autoaccum.training.micro_batch_choice import MicroBatchChoice
from autoaccum.training.run_folder import RunFolder
from autoaccum.training.stopping import StopRequested, StopSignals, TrainingRanks, raise_other
from autoaccum.training.training_setup import TrainingComponents, TrainingSetup
from autoaccum.training.training_state import (
    Ceiling,
    Progress,
    TrainingState,
    full_weights,
    seed_training,
    training_facts,
)
from autoaccum.training.windows import Window, WindowReader

_MEASURE_ONLY = float("inf")
"""A bound on the gradient's norm by which it is measured for the log, and never clipped."""


class Run(StepObserver):
    """A training in progress, with all its changing state.

    The arguments are what `train` has made of a request. Without a `folder` nothing is saved.

    Attributes:
        progress: The progress so far, from which training continues.

    Raises:
        UsageError: The plan does not match the training, or evaluations are requested without data.
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
        self._state = TrainingState(components, training_facts(setup.request, reader.fingerprint, components))
        reader.part_size, reader.micro_tokens = choice.micro_batch, choice.micro_tokens
        reader.multiple_of = choice.multiple_of
        reader.interruptible = signals.interruptible
        self._ceiling = Ceiling(choice.limit.number)
        costs = setup.workload.token_costs
        limit: dict[str, Any] = {} if choice.plan is not None else {choice.limit.unit: choice.limit.number}
        if choice.micro_tokens is not None:
            limit |= {"padding": costs.padding, "lengths": costs.lengths, "trim": costs.trim}
        self._accumulator = Accumulator(
            components.model,
            components.optimizer,
            components.objective,
            plan=choice.plan,
            **limit,
            clip_norm=_MEASURE_ONLY if setup.request.clip_norm is None else setup.request.clip_norm,
            spec=components.spec,
            add_savers=True,
            scaler=components.scaler,
            multiple_of=choice.multiple_of,
            check_finite=True,
            check=setup.request.check,
            observer=self,
        )
        if choice.plan is not None:
            for notice in setup.notes_on_plan(choice.plan, components):
                notifier.notify(notice)
        averaged = [] if components.averages is None else [components.averages.model]
        others = (*components.loss_modules, *averaged)
        ranks.copy_from_first(tensor for module in others for tensor in (*module.parameters(), *module.buffers()))
        self._evaluation = make_evaluation(setup, components, choice.micro_batch, signals.interruptible, ranks)
        self._data_position = reader.state_dict()
        self._retries, self._is_known_error = 0, False
        self._resumed_from: Path | None = None
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
        ranks, signals = self._ranks, self._signals
        try:
            self._train()
        except BaseException as raised:
            error = ranks.report(raised, signals, is_known=self._is_known_error)
            # Nothing is written after a second signal. Any other BaseException comes from the user's code.
            at_once = signals.requested is not None and not isinstance(error, (StopRequested, Exception))
            is_whole, is_sharded = not self._accumulator.is_interrupted, self._components.is_sharded
            can_save = is_whole and not at_once and not is_context_dead(error)
            # The other ranks come here, too, unless one is gone, or they wait in a collective for this one to leave.
            is_known = isinstance(error, (StopRequested, Exception)) and not isinstance(error, RankLostError)
            if ranks.size == 1 or (is_known and (is_whole or not is_sharded)):
                with suppress(OtherRanksFailed, RankLostError):
                    if all(ranks.gather(can_save)):
                        self.save()
            if isinstance(error, UpdateInterrupted) and self._newest is not None:
                raise self._way_to_resume(error, self._newest) from error
            if error is not raised:
                raise_other(error)
            del error  # Its traceback holds this frame.
            raise

    def restore(self, checkpoint: Path, record: Mapping[str, Any]) -> None:
        """Restore everything from the record of a checkpoint except random states, which are restored last.

        Raises:
            UsageError: The record belongs to another training. The message names the difference; nothing is changed.
        """
        notify, workload = self._notifier.notify, self._setup.workload
        self._state.restore(record)
        if record["digest"] != workload.digest:
            notify(Notice(message("code_changed", name=workload.name)))
        vars(self.progress).update(record["progress"])
        if record["stepper"]["ceiling"]["planned"] == self._ceiling.planned:
            self._accumulator.restore_savers(record["stepper"]["savers"])
            vars(self._ceiling).update(record["stepper"]["ceiling"])
            self._set_limit(self._ceiling.largest)
        if self._evaluation is not None and record["evaluation"] is not None:
            self._evaluation.micro_batch = min(self._evaluation.micro_batch, record["evaluation"])
        if (notice := self._reader.load_state_dict(record["data"])) is not None:
            notify(notice)
        self._data_position = record["data"]
        self._resumed_from = self._newest = checkpoint
        self._saved_at = self.progress.update, self.progress.epoch, self.progress.evaluated_at

    def restore_rng(self, record: Mapping[str, Any]) -> None:
        """Continue with the random states of the interrupted run, or with new ones on another number of ranks."""
        states, ranks, progress = record["random"], self._ranks, self.progress
        if len(states) == ranks.size:
            self._state.restore_rng(states[ranks.rank])
            return
        seed_training(self._request.seed, progress.epoch, progress.update, ranks.rank)
        self._notifier.notify(Notice(message("ranks_changed", before=len(states), now=ranks.size), warns=False))

    def started(self) -> Started:
        """Return the event that begins the training."""
        return Started(
            model=self._components.model,
            optimizer=self._components.optimizer,
            plan=self._choice.plan,
            **self._sizes,
            target_batch=self._request.target_batch,
            target_tokens=self._request.target_tokens,
            device=str(self._components.device),
            update=self.progress.update,
            updates=self._count_updates(),
            epochs=self._request.epochs,
            resumed_from=self._resumed_from,
        )

    def result(self, seconds: float) -> FitResult:
        """Write the weights and return the result."""
        progress, components, folder = self.progress, self._components, self._folder
        averages, unsaved = components.averages, self._unsaved
        model_path = ema_path = None
        if folder is not None:
            try:
                model_path = folder.write_weights(full_weights(components))
                if averages is not None:
                    ema_path = folder.write_weights(averages.model.state_dict(), "ema.pt")
            except (CheckpointError, UsageError) as error:
                unsaved = unsaved or str(error)
        return FitResult(
            model=components.model,
            optimizer=components.optimizer,
            plan=self._choice.plan,
            **self._sizes,
            updates=progress.update,
            epochs=progress.epoch,
            samples=progress.samples,
            loss=progress.loss,
            evaluation=progress.evaluation,
            oom_retries=progress.oom_retries,
            added_savers=self._added_savers,
            skipped=progress.skipped,
            seconds=seconds,
            stopped="callback" if self._notifier.should_stop else None,
            run_dir=None if folder is None else folder.path,
            checkpoint=self._newest,
            model_path=model_path,
            ema_model=None if averages is None else averages.model,
            ema_path=ema_path,
            unsaved=unsaved,
            resumed_from=self._resumed_from,
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
                self.save()
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
                left = message("samples_dropped", samples=window.samples, multiple_of=reader.multiple_of)
                notifier.notify(Notice(left, warns=False))
                self._mark_position()
            else:
                self._update(window, began)
                del window  # Free the whole effective batch before the next one is read.
        self._evaluate_if_due(at_end=True)
        self.save()

    def _update(self, window: Window, began: float) -> None:
        """Make the update of a window, whose reading began at this `time.perf_counter()`.

        Raises:
            NonFiniteError: The loss or the gradient is not finite; everything is as before the step.
            DoesNotFitError: As in `Accumulator.step_parts`, like the other errors.
            WorkloadError: The model's parameters or buffers are not those that the average began with.
            Exception: As the scheduler or a callback raised it.
        """
        components, progress, device = self._components, self.progress, self._components.device
        rate = components.optimizer.param_groups[0].get("lr")
        learning_rate = None if rate is None else float(rate)  # A scheduler may change it in place.
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        result, skip_reason = self._step(window.parts)
        # The update is made, or its window skipped: from here on it is never repeated, even if something raises.
        self._mark_position()
        progress.update += 1
        progress.samples += window.samples
        progress.epoch_samples += window.samples
        progress.oom_retries += result.retries
        progress.loss = result.loss
        if components.averages is not None and result.updated:
            components.averages.update()
        self._set_limit(self._ceiling.record(result.retries, self._accumulator.limit.number))
        if components.scheduler is not None and result.updated:
            components.scheduler.step()  # Before any event: a callback that raises ends the run here.
        if skip_reason is not None:
            progress.skipped += 1
            skipped = message("update_skipped", update=progress.update, reason=skip_reason)
            self._notifier.notify(Notice(skipped, warns=False))
        self._notifier.notify(
            Updated(
                update=progress.update,
                epoch=progress.epoch + 1,
                samples=progress.samples,
                loss=result.loss,
                grad_norm=result.grad_norm,
                learning_rate=learning_rate,
                samples_per_second=window.samples / (time.perf_counter() - began),
                peak_bytes=_peak_bytes(device),
                micro_batches=len(result.micro_batches),
                micro_batch=max(result.micro_batches, default=0),
                retries=result.retries,
                updated=result.updated,
                terms=result.terms if len(result.terms) > 1 else None,
                savers=self._accumulator.savers or None,
            )
        )

    def _step(self, parts: list[Any]) -> tuple[StepResult, str | None]:
        """Make an update; with `skip_nonfinite`, skip one that is not finite, and return the reason."""
        self._retries, accumulator = 0, self._accumulator
        try:
            return accumulator.step_parts(parts), None
        except NonFiniteError as error:
            if not self._request.skip_nonfinite:
                self._is_known_error = True
                message = f"update {self.progress.update + 1}: {error.message}"
                raise NonFiniteError(message, loss=error.loss, grad_norm=error.grad_norm, hint=error.hint) from None
            sizes = tuple(batch_size(part) for part in parts)
            result = StepResult(error.loss, sum(sizes), sizes, error.grad_norm, self._retries, False, {})
            return result, error.message
        except BaseException:
            self._is_known_error = not accumulator.has_agreed
            raise

    def phase(self, phase: StepPhase) -> None:
        """Let a request to stop interrupt the step (see `StepObserver`).

        Not within an update: the gradient is complete by then, and the run stops right after it. Several ranks stop
        between two updates, since a step has to end alike on all.
        """
        if phase != "update" and self._ranks.size == 1:
            self._signals.check()

    def out_of_memory(self, phase: StepPhase, micro_batch: int, next_micro_batch: int) -> None:
        """See `StepObserver`: memory ran out, and the step is repeated."""
        # A step that ends without an update would not lower it.
        self._set_limit(min(self._accumulator.limit.number, next_micro_batch))
        self._report_retry("retried_smaller", phase, micro_batch, lowered=next_micro_batch)

    def saver_added(self, phase: StepPhase, micro_batch: int, saver: str) -> None:
        """See `StepObserver`: not even the smallest micro-batch fitted, and the step is repeated with a saver."""
        self._report_retry("retried_with_saver", phase, micro_batch, saver=saver)

    def _report_retry(self, code: str, phase: StepPhase, size: int, **facts: Any) -> None:
        self._retries += 1
        facts |= {"phase": phase, "size": size, "unit": self._choice.limit.counted if size > 1 else "sample"}
        retried = message(code, update=self.progress.update + 1, **facts)
        self._notifier.notify(Notice(retried, warns="saver" in facts))

    def _set_limit(self, number: int) -> None:
        setattr(self._accumulator, self._choice.limit.unit, number)

    @property
    def _sizes(self) -> dict[str, Any]:
        """The `micro_batch` and the `micro_tokens` now."""
        choice = self._choice
        sizes = {"micro_batch": choice.micro_batch, "micro_tokens": choice.micro_tokens}
        return sizes | {self._choice.limit.unit: self._ceiling.largest}

    @property
    def _added_savers(self) -> tuple[str, ...]:
        """The savers that were added because not even the smallest micro-batch fitted."""
        return tuple(word for word in self._accumulator.savers if word not in self._components.spec.savers)

    def _mark_position(self) -> None:
        """Mark all data that was read as trained on or skipped."""
        if self._folder is not None:
            self._data_position = self._reader.state_dict()

    def _end_epoch(self) -> None:
        progress = self.progress
        ended = EpochEnded(progress.epoch + 1, progress.update, progress.epoch_samples)
        progress.epoch += 1
        progress.epoch_samples = 0
        if not self.is_done:
            self._reader.start_epoch(progress.epoch)
        self._mark_position()
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

    def save(self, *, must: bool = False) -> None:
        """Write a checkpoint unless nothing has changed since the last one.

        All ranks give their part of it, rank 0 writes, and all know how that went. A failure ends nothing, unless it
        `must` be written.

        Raises:
            CheckpointError: It cannot be written, or the state could be loaded only by running code.
            UsageError: The scheduler has no state_dict.
        """
        folder, update, began = self._folder, self.progress.update, time.perf_counter()
        position = update, self.progress.epoch, self.progress.evaluated_at
        if folder is None or self._saved_at == position:
            return
        try:
            self._newest = folder.write_checkpoint(update, self._record())
        except (CheckpointError, UsageError) as error:
            if must:
                raise
            self._unsaved = str(error)
            self._notifier.notify(Notice(message("checkpoint_not_written", update=update, error=str(error))))
        else:
            self._saved_at, self._unsaved = position, None
            self._notifier.notify(CheckpointWritten(update, self._newest, time.perf_counter() - began))

    def _record(self) -> dict[str, Any]:
        """Return the content of a checkpoint: plain values and tensors as of the last whole update."""
        plan = self._choice.plan
        return {
            **self._state.capture(),
            "digest": self._setup.workload.digest,
            "progress": dict(vars(self.progress)),
            "plan": None if plan is None else plan.to_json(),
            "micro_batch": self._choice.micro_batch,
            "micro_tokens": self._choice.micro_tokens,
            "stepper": {"ceiling": dict(vars(self._ceiling)), "savers": list(self._added_savers)},
            "evaluation": None if self._evaluation is None else self._evaluation.micro_batch,
            "data": self._data_position,
            "random": self._ranks.gather(self._state.capture_rng()),
        }

    def _count_updates(self) -> int | None:
        """Return the updates that there are at the end; None if the data has no known length, or tokens count."""
        epochs, steps, samples = self._request.epochs, self._request.steps, self._reader.samples_per_epoch
        if epochs is None or samples is None or self._request.target_batch is None:
            return steps if epochs is None else None
        whole, left = divmod(samples, self._request.target_batch)
        updates = epochs * (whole + (left > 0 and left % self._reader.multiple_of == 0))
        return updates if steps is None else min(updates, steps)

    def _way_to_resume(self, error: UpdateInterrupted, checkpoint: Path) -> UpdateInterrupted:
        """Return the error with what resumes the run, and leave a smaller micro-batch for the next start."""
        hint = f"the same command resumes from {checkpoint}"
        if error.next_micro_batch is not None:
            hint += f", in micro-batches of at most {counted(error.next_micro_batch, self._choice.limit.counted)}"
            if self._folder is not None:
                self._folder.write_ceiling(error.next_micro_batch, self._choice.limit.unit)
        return UpdateInterrupted(error.message, hint=hint)


def _peak_bytes(device: torch.device) -> int | None:
    """Return the peak memory of an update, as `Updated` describes it."""
    if device.type == "cuda":
        return torch.cuda.max_memory_reserved(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 if device.type == "cpu" else None

"""`train`: from a request to a trained model, through a plan, with everything kept that must not be lost."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from autoaccum.accumulation.argument_checks import check_launch
from autoaccum.accumulation.recovery import is_context_dead
from autoaccum.accumulation.rng_state import RngState, initialized_cuda_devices
from autoaccum.errors import CheckpointError, NonFiniteError, UpdateInterrupted, UsageError
from autoaccum.training.data_source import open_source
from autoaccum.training.data_windows import DataSettings
from autoaccum.training.fit_events import EventNotifier, FitResult, Notice, Started
from autoaccum.training.fit_request import FitRequest
from autoaccum.training.loop import Loop
from autoaccum.training.resume import (
    check_choice,
    check_same_run,
    choose_learning_rate,
    choose_micro_batch,
    describe_request,
    describe_run,
    find_checkpoint,
    warn_of_changes,
)
from autoaccum.training.run_folder import MetricsLog, RunFolder
from autoaccum.training.seeds import derive_seed, seed_generators
from autoaccum.training.stop_signals import StopRequested, StopSignals
from autoaccum.training.training_setup import TrainingSetup
from autoaccum.training.training_state import restore_training_rng


def train(request: FitRequest, on_event: Callable[[Any], Any] | None = None) -> FitResult:
    """Plan, train, and come back with a trained model; `autoaccum.fit` says what can be asked for, and what is raised.

    Args:
        request: What is asked for.
        on_event: Told of every event of `training.events`, and of the planner's while it plans.

    Raises:
        KeyboardInterrupt: Ctrl-C, after a last checkpoint; SystemExit for the other signals.
        Exception: What the user's code raised, as it came, after a last checkpoint.
    """
    began = time.monotonic()
    check_launch()
    teller = EventNotifier([] if on_event is None else [on_event], request.callbacks)
    tell = teller.tell
    with ExitStack() as stack:
        stack.callback(RngState(initialized_cuda_devices()).restore)
        subject = TrainingSetup(request)
        folder = None
        if request.run_dir is not None:
            folder = stack.enter_context(RunFolder(request.run_dir, keep=request.keep))
        settings = DataSettings(
            target_batch=request.target_batch,
            seed=request.seed,
            workers=request.workers,
            collate=subject.collate,
            batching=subject.objective.batching,
            card=subject.device if subject.device.type == "cuda" else None,
        )
        source = open_source(subject.data, settings)
        stack.callback(source.close)
        saved = find_checkpoint(folder, request.resume, tell)
        if saved is not None:
            check_same_run(saved, describe_request(request, source))  # Before a plan that may take minutes.
            warn_of_changes(saved, subject.name, subject.digest, tell)
        resumed_from = None if saved is None else saved.path
        choice = choose_micro_batch(request, subject, source, saved, tell)
        if subject.device.type == "cuda":  # Which may have started only while it was planned.
            stack.callback(RngState([subject.device]).restore)
        own = derive_seed(request.seed, "training")
        seed_generators(own)
        torch.cuda.manual_seed_all(own)
        trainee = subject.build(choice.plan, choose_learning_rate(request, choice.plan))
        run = describe_run(request, trainee, source)
        if saved is not None:
            check_same_run(saved, run)
        check_choice(request, subject, trainee, choice, tell)
        stopping = stack.enter_context(StopSignals())
        stack.callback(source.close)  # In here, where torch's word on workers that a signal ended is held back.
        loop = Loop(request, subject, trainee, source, choice, folder=folder, run=run, stopping=stopping, teller=teller)
        if saved is not None:
            loop.restore(saved.record)
            loop.keeper.go_on_from(saved.path)
        tell(_started(request, loop, resumed_from))
        loop.keeper.keep_first()  # Before all other files: they are known for a run's by a checkpoint beside them.
        if folder is not None:
            place = loop.progress
            logs = stack.enter_context(MetricsLog(folder.path, place.update, place.evaluated_at, tell))
            teller.listeners.append(logs.hear)
            if choice.plan is not None:
                choice.plan.save(folder.plan_path, force=True)
        if saved is not None:
            restore_training_rng(saved.record["training"], trainee)
            saved = None  # As large as model and optimizer, in host memory.
        _run(loop, stopping)
        return _result(loop, folder, teller, resumed_from, time.monotonic() - began)


def _run(loop: Loop, stopping: StopSignals) -> None:
    """Train; whatever ends it, the state of the last whole update is kept, unless nobody knows what it is."""
    try:
        loop.run()
    except BaseException as error:
        # After a second signal nothing should be written; what else is no Exception comes from the user's own code.
        at_once = stopping.asked is not None and not isinstance(error, (StopRequested, Exception))
        if loop.stepper.is_whole and not is_context_dead(error) and not at_once and not _is_spoilt(error, loop):
            loop.keeper.keep()
        if isinstance(error, UpdateInterrupted) and loop.keeper.newest is not None:
            raise UpdateInterrupted(error.message, hint=f"the same again goes on from {loop.keeper.newest}") from error
        raise


def _is_spoilt(error: BaseException, loop: Loop) -> bool:
    """Whether the weights themselves are not finite any more: the checkpoint before is worth more."""
    return isinstance(error, NonFiniteError) and not all(
        bool(parameter.isfinite().all()) for parameter in loop.stepper.parameters
    )


def _started(request: FitRequest, loop: Loop, resumed_from: Path | None) -> Started:
    return Started(
        model=loop.trainee.model,
        optimizer=loop.trainee.optimizer,
        plan=loop.choice.plan,
        micro_batch=loop.stepper.ceiling.largest,
        target_batch=request.target_batch,
        device=str(loop.trainee.device),
        update=loop.progress.update,
        updates=loop.goal.updates,
        epochs=request.epochs,
        resumed_from=resumed_from,
    )


def _result(
    loop: Loop, folder: RunFolder | None, teller: EventNotifier, resumed_from: Path | None, seconds: float
) -> FitResult:
    progress, averages = loop.progress, loop.trainee.averages
    if progress.update and not progress.made:
        teller.tell(Notice(f"of {progress.update} updates none was made: the weights are those it began with"))
    unsaved = loop.keeper.failure
    model_path = ema_path = None
    if folder is not None:
        try:
            model_path = folder.write_weights(loop.trainee.model)
            ema_path = None if averages is None else folder.write_weights(averages.model, "ema.pt")
        except (CheckpointError, UsageError) as error:
            unsaved = unsaved or str(error)
    return FitResult(
        model=loop.trainee.model,
        optimizer=loop.trainee.optimizer,
        plan=loop.choice.plan,
        updates=progress.update,
        epochs=progress.epoch,
        samples=progress.samples,
        loss=progress.loss,
        evaluation=progress.evaluation,
        oom_retries=progress.oom_retries,
        skipped=progress.skipped,
        seconds=seconds,
        stopped="callback" if teller.ended else None,
        run_dir=None if folder is None else folder.path,
        checkpoint=loop.keeper.newest,
        model_path=model_path,
        ema_model=None if averages is None else averages.model,
        ema_path=ema_path,
        unsaved=unsaved,
        resumed_from=resumed_from,
        warnings=tuple(teller.warnings),
    )

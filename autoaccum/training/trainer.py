"""`train`: plan, build, resume, train and save."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from autoaccum.accumulation.out_of_memory import is_context_dead
from autoaccum.accumulation.ranks.launch import launched_ranks
from autoaccum.accumulation.rng_state import RngState, derive_seed, initialized_cuda_devices, seed_generators
from autoaccum.errors import CheckpointError, NonFiniteError, UpdateInterrupted, UsageError
from autoaccum.training.data_source import open_source
from autoaccum.training.data_windows import DataSettings
from autoaccum.training.fit_events import EventNotifier, FitResult, Notice, Started
from autoaccum.training.fit_request import FitRequest
from autoaccum.training.loop import Loop
from autoaccum.training.resume import (
    MicroBatchChoice,
    check_choice,
    check_same_run,
    choose_learning_rate,
    choose_micro_batch,
    describe_run,
    find_checkpoint,
)
from autoaccum.training.run_folder import MetricsLog, RunFolder
from autoaccum.training.stopping import StopRequested, StopSignals, TrainingRanks, raise_other
from autoaccum.training.training_setup import TrainingSetup
from autoaccum.training.training_state import full_weights, restore_training_rng


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
        stack.enter_context(ranks.warning_once())
        shown = [] if on_event is None or not ranks.is_first else [on_event]
        notifier = EventNotifier(shown, request.callbacks)
        notify = notifier.notify
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
            collate=setup.collate,
            batching=setup.objective.batching,
            card=setup.device if setup.device.type == "cuda" else None,
            rank=ranks.rank,
            ranks=ranks.size,
        )
        source = open_source(setup.data, settings)
        stack.callback(source.close)
        checkpoint = find_checkpoint(folder, request.resume, notify, ranks)
        resumed_from = None if checkpoint is None else checkpoint.path
        choice = choose_micro_batch(request, setup, source, checkpoint, notify)
        if setup.device.type == "cuda":  # CUDA may have started only during planning.
            stack.callback(RngState([setup.device]).restore)
        _seed_training(request.seed)  # All ranks build the same model.
        components = setup.build(choice.plan, choose_learning_rate(request, choice.plan))
        run = describe_run(request, components, source)
        if checkpoint is not None:
            check_same_run(checkpoint, run, setup, notify)
        check_choice(request, setup, components, choice, notify)
        # Ranks meet here, and one that waits for the others can still be stopped at once.
        choice = _lower(choice, None if folder is None else ranks.by_first(folder.read_ceiling), notify)
        signals = stack.enter_context(StopSignals())
        stack.enter_context(ranks.ending(signals))
        stack.callback(source.close)  # Before StopSignals ends, which hides errors of workers that a signal ended.
        parts = request, setup, components, source, choice, folder, run
        loop = Loop(*parts, signals=signals, notifier=notifier, ranks=ranks)
        if ranks.rank > 0:
            _seed_training(request.seed, ranks.rank)
        if checkpoint is not None:
            loop.restore(checkpoint.record)
            loop.checkpoint_writer.resume_from(checkpoint.path)
        notify(_started(request, loop, resumed_from))
        loop.checkpoint_writer.write_first()  # Before other files: a checkpoint shows that they belong to a run.
        if folder is not None and ranks.is_first:
            progress = loop.progress
            log = stack.enter_context(MetricsLog(folder.path, progress.update, progress.evaluated_at, notify))
            notifier.listeners.append(log.on_event)
            if choice.plan is not None:
                choice.plan.save(folder.path / "plan.json", force=True)
        if checkpoint is not None:
            _restore_rng(request, loop, checkpoint.record, ranks, notify)
            checkpoint = None  # Frees host memory as large as model and optimizer.
        _run(loop, signals, ranks, folder)
        return _result(loop, folder, notifier, resumed_from, time.monotonic() - began, ranks)


def _seed_training(*numbers: int) -> None:
    seed = derive_seed(numbers[0], "training", *numbers[1:])
    seed_generators(seed)
    torch.cuda.manual_seed_all(seed)


def _restore_rng(
    request: FitRequest, loop: Loop, record: Mapping[str, Any], ranks: TrainingRanks, notify: Callable[[Any], Any]
) -> None:
    """Continue with the random states of the interrupted run, or with new ones on another number of ranks."""
    states = [record["training"]["random"], *record.get("random_of_others", ())]
    rank, progress = ranks.rank, loop.progress
    if len(states) == ranks.size and None not in states:
        restore_training_rng(states[rank], loop.components)
        return
    _seed_training(request.seed, progress.epoch, progress.update, rank)
    seen = f"the run had {len(states)} ranks, and has {ranks.size} now"
    if len(states) == ranks.size:
        seen = "a rank was gone when the checkpoint was written"
    notify(Notice(f"{seen}: random numbers, as of dropout, are drawn anew from here", warns=False))


def _lower(choice: MicroBatchChoice, ceiling: int | None, notify: Callable[[Any], Any]) -> MicroBatchChoice:
    """Return the choice, or the smaller one that a run has left which could not repeat an update."""
    if ceiling is None or ceiling >= choice.micro_batch:
        return choice
    notify(Notice(f"micro-batches of more than {ceiling} ran out of memory before (ceiling.json)", warns=False))
    return MicroBatchChoice(ceiling, multiple_of=choice.multiple_of)


def _run(loop: Loop, signals: StopSignals, ranks: TrainingRanks, folder: RunFolder | None) -> None:
    """Train. After any error, save the state of the last whole update, unless that state is unknown."""
    writer = loop.checkpoint_writer
    try:
        loop.run()
    except BaseException as own:
        error = ranks.report(own, signals, is_known=loop.stepper.has_failed)
        # Nothing is written after a second signal. Any other BaseException comes from the user's code.
        at_once = signals.requested is not None and not isinstance(error, (StopRequested, Exception))
        # If the weights are no longer finite, the previous checkpoint is worth more.
        is_finite = not isinstance(error, NonFiniteError) or loop.stepper.has_finite_weights
        can_save = loop.stepper.is_whole and is_finite and not at_once and not is_context_dead(error)
        if loop.stepper.is_whole or not loop.components.is_sharded:  # Else other ranks may wait for this one to leave.
            ranks.leave_out_absent(can_save)
        if can_save and not (loop.components.is_sharded and ranks.is_alone):
            writer.write()
        if isinstance(error, UpdateInterrupted) and error.next_micro_batch and folder and ranks.is_first:
            folder.write_ceiling(error.next_micro_batch)
        if isinstance(error, UpdateInterrupted) and writer.newest is not None:
            hint = f"the same command resumes from {writer.newest}"
            if error.next_micro_batch is not None:
                hint += f", in micro-batches of at most {error.next_micro_batch}"
            raise UpdateInterrupted(error.message, hint=hint) from error
        if error is not own:
            raise_other(error)
        del error  # Its traceback holds this frame.
        raise


def _started(request: FitRequest, loop: Loop, resumed_from: Path | None) -> Started:
    return Started(
        model=loop.components.model,
        optimizer=loop.components.optimizer,
        plan=loop.choice.plan,
        micro_batch=loop.stepper.ceiling.largest,
        target_batch=request.target_batch,
        device=str(loop.components.device),
        update=loop.progress.update,
        updates=loop.goal.updates,
        epochs=request.epochs,
        resumed_from=resumed_from,
    )


def _result(
    loop: Loop,
    folder: RunFolder | None,
    notifier: EventNotifier,
    resumed_from: Path | None,
    seconds: float,
    ranks: TrainingRanks,
) -> FitResult:
    progress, averages = loop.progress, loop.components.averages
    if progress.update and not progress.applied:
        notifier.notify(Notice(f"none of {progress.update} updates changed the weights: they are the initial ones"))
    unsaved = loop.checkpoint_writer.failure
    model_path = ema_path = None
    if folder is not None:
        try:
            weights = full_weights(loop.components)
            model_path = ranks.by_first(lambda: folder.write_weights(weights))
            if averages is not None:
                ema_path = ranks.by_first(lambda: folder.write_weights(averages.model.state_dict(), "ema.pt"))
        except (CheckpointError, UsageError) as error:
            unsaved = unsaved or str(error)
    return FitResult(
        model=loop.components.model,
        optimizer=loop.components.optimizer,
        plan=loop.choice.plan,
        micro_batch=loop.stepper.ceiling.largest,
        updates=progress.update,
        epochs=progress.epoch,
        samples=progress.samples,
        loss=progress.loss,
        evaluation=progress.evaluation,
        oom_retries=progress.oom_retries,
        added_savers=loop.stepper.added_savers,
        skipped=progress.skipped,
        seconds=seconds,
        stopped="callback" if notifier.should_stop else None,
        run_dir=None if folder is None else folder.path,
        checkpoint=loop.checkpoint_writer.newest,
        model_path=model_path,
        ema_model=None if averages is None else averages.model,
        ema_path=ema_path,
        unsaved=unsaved,
        resumed_from=resumed_from,
        warnings=tuple(notifier.warnings),
    )

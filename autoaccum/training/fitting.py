"""`train`: from a request to a trained model, through a plan, with everything kept that must not be lost."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from autoaccum.accumulation.randomness import RandomState, seeded_devices
from autoaccum.accumulation.ranks import check_launch
from autoaccum.accumulation.recovery import is_context_dead
from autoaccum.errors import CheckpointError, NonFiniteError, UpdateInterrupted, UsageError
from autoaccum.training.assembly import assemble
from autoaccum.training.data.source import open_source
from autoaccum.training.data.windows import DataSettings, Source
from autoaccum.training.events import Finished, Noted, Started
from autoaccum.training.loop import Loop
from autoaccum.training.progress import Progress
from autoaccum.training.request import FitRequest
from autoaccum.training.results import FitResult
from autoaccum.training.resuming import check_same_run, describe_request, describe_run, find_saved, tell_of_changes
from autoaccum.training.run_folder.logs import Logs
from autoaccum.training.run_folder.run_folder import RunFolder
from autoaccum.training.seeds import mix, seed_generators
from autoaccum.training.stopping import StopAsked, Stopping
from autoaccum.training.subjects.learning_rate import choose_learning_rate, tell_of_schedule
from autoaccum.training.subjects.micro_batches import Choice, choose_micro_batch
from autoaccum.training.subjects.subject import Subject, find_subject
from autoaccum.training.subjects.trainee import Trainee
from autoaccum.training.telling import Teller
from autoaccum.training.whole_state import WholeState
from autoaccum.units import format_bytes


def train(request: FitRequest, on_event: Callable[[Any], Any] | None = None) -> FitResult:
    """Plan, train, and come back with a trained model; `autoaccum.fit` says what can be asked for.

    The caller's random states are put back in the end, whatever training draws.

    Args:
        request: What is asked for.
        on_event: Told of every event of `training.events`, and of the planner's while it plans.

    Raises:
        UsageError: The request cannot be honoured.
        WorkloadError: The workload or the data cannot be used.
        DoesNotFitError: Not even one sample at a time fits.
        NotMeasuredError: No plan could be made.
        DataWorkerError: A process that reads data died.
        NonFiniteError: Loss or gradient of an update were not finite; the state from before it is kept.
        CheckpointError: The first checkpoint could not be written, or of those there are none is whole.
        UpdateInterrupted: An update failed half-way; the last checkpoint is from before it.
        KeyboardInterrupt: Ctrl-C, after a last checkpoint; SystemExit for the other signals.
        Exception: What the user's code raised, as it came, after a last checkpoint.
    """
    began = time.monotonic()
    check_launch()
    teller = Teller([] if on_event is None else [on_event], request.callbacks)
    with ExitStack() as stack:
        stack.callback(RandomState(seeded_devices()).restore)
        subject = find_subject(request)
        folder = _open_folder(request, teller, stack)
        source = _open_source(request, subject, stack)
        saved = find_saved(folder, request, teller.tell)
        if saved is not None:
            check_same_run(saved, describe_request(request, source))  # Before a plan that may take minutes.
            tell_of_changes(saved, subject, teller.tell)
        resumed_from = None if saved is None else saved.path
        choice = choose_micro_batch(request, subject, source, saved, teller.tell)
        if subject.device.type == "cuda":  # Which may have started only while it was planned.
            stack.callback(RandomState([subject.device]).restore)
        _seed(request.seed)
        learning_rate = choose_learning_rate(request, choice.plan, teller.tell)
        trainee = subject.build(choice.plan, learning_rate)
        tell_of_schedule(learning_rate, subject, trainee, teller.tell)
        _tell_of_average(trainee, choice, teller)
        run = describe_run(request, trainee, source)
        if saved is not None:
            check_same_run(saved, run)
        stopping = stack.enter_context(Stopping())
        stack.callback(source.close)  # In here, where torch's word on workers that a signal ended is held back.
        loop, state = assemble(
            request,
            subject,
            trainee,
            source,
            choice,
            folder=folder,
            run=run,
            stopping=stopping,
            teller=teller,
        )
        stack.callback(loop.stepper.close)
        if saved is not None:
            state.restore(saved.record, teller.tell)
            loop.keeper.go_on_from(saved.path)
        teller.tell(_started(request, loop, state, resumed_from))
        loop.keeper.keep_first()  # Before all other files: they are known for a run's by a checkpoint beside them.
        if folder is not None:
            teller.listen(stack.enter_context(_open_logs(folder, state.progress, teller)).hear)
            _keep_plan(folder, choice)
        if saved is not None:
            state.restore_randomness(saved.record, teller.tell)
            saved = None  # As large as model and optimizer, in host memory.
        _run(loop)
        result = _result(request, loop, state, resumed_from, folder, teller, time.monotonic() - began)
        teller.tell(Finished(result))
        return result


def _run(loop: Loop) -> None:
    """Train; whatever ends it, the state of the last whole update is kept, unless nobody knows what it is."""
    try:
        loop.run()
    except BaseException as error:
        # After a second signal nothing should be written; what else is no Exception comes from the user's own code.
        at_once = loop.stopping.asked is not None and not isinstance(error, (StopAsked, Exception))
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


def _open_folder(request: FitRequest, teller: Teller, stack: ExitStack) -> RunFolder | None:
    if request.run_dir is None:
        return None
    folder = stack.enter_context(RunFolder.open(request.run_dir, keep=request.keep))
    if folder.note is not None:
        teller.tell(Noted(folder.note))
    return folder


def _open_source(request: FitRequest, subject: Subject, stack: ExitStack) -> Source:
    settings = DataSettings(
        target_batch=request.target_batch,
        seed=request.seed,
        workers=request.workers,
        collate=subject.collate,
        batching=subject.batching,
        card=subject.device if subject.device.type == "cuda" else None,
    )
    source = open_source(subject.data, settings)
    stack.callback(source.close)
    return source


def _seed(seed: int) -> None:
    """Everything that training draws from, on every card."""
    own = mix(seed, "training")
    seed_generators(own)
    torch.cuda.manual_seed_all(own)


def _tell_of_average(trainee: Trainee, choice: Choice, teller: Teller) -> None:
    """A plan that was made without the average of the weights has no room for it."""
    if trainee.averages is None or choice.plan is None or "ema" in (choice.plan.workload.get("keeps") or ()):
        return
    size = format_bytes(sum(tensor.nbytes for tensor in trainee.averages.tensors))
    hint = 'should memory run out, plan again with keeps="ema" (--keeps ema)'
    teller.tell(Noted(f"an average of the weights is kept, {size} that the plan does not count: {hint}"))


def _open_logs(folder: RunFolder, progress: Progress, teller: Teller) -> Logs:
    return Logs(folder, progress.update, progress.evaluated_at, teller.tell)


def _keep_plan(folder: RunFolder, choice: Choice) -> None:
    if choice.plan is not None:
        choice.plan.save(folder.plan_path, force=True)


def _started(request: FitRequest, loop: Loop, state: WholeState, resumed_from: Path | None) -> Started:
    return Started(
        model=state.trainee.model,
        optimizer=state.trainee.optimizer,
        plan=state.choice.plan,
        micro_batch=loop.stepper.ceiling.largest,
        target_batch=request.target_batch,
        device=str(state.trainee.device),
        update=loop.progress.update,
        updates=loop.goal.updates,
        epochs=request.epochs,
        resumed_from=resumed_from,
    )


def _result(
    request: FitRequest,
    loop: Loop,
    state: WholeState,
    resumed_from: Path | None,
    folder: RunFolder | None,
    teller: Teller,
    seconds: float,
) -> FitResult:
    progress = loop.progress
    if progress.update and not progress.made:
        teller.tell(Noted(f"of {progress.update} updates none was made: the weights are those it began with"))
    unsaved = loop.keeper.failure
    averages = state.trainee.averages
    model_path = ema_path = None
    if folder is not None:
        try:
            model_path = folder.write_model(state.trainee.model)
            ema_path = None if averages is None else folder.write_model(averages.model, folder.ema_path)
        except (CheckpointError, UsageError) as error:
            unsaved = unsaved or str(error)
    return FitResult(
        model=state.trainee.model,
        optimizer=state.trainee.optimizer,
        plan=state.choice.plan,
        updates=progress.update,
        epochs=progress.epoch,
        samples=progress.samples,
        loss=progress.loss,
        evaluation=progress.evaluation,
        shortages=progress.shortages,
        skipped=progress.skipped,
        seconds=seconds,
        stopped="callback" if teller.ended else None,
        noise_scale=loop.stepper.estimate_noise(),
        run_dir=None if folder is None else folder.path,
        checkpoint=loop.keeper.newest,
        model_path=model_path,
        ema_model=None if averages is None else averages.model,
        ema_path=ema_path,
        unsaved=unsaved,
        resumed_from=resumed_from,
        warnings=tuple(teller.warnings),
    )

"""`train`: plan, build, resume, train and save."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

from autoaccum.accumulation.ranks.launch import launched_ranks
from autoaccum.accumulation.rng_state import RngState, initialized_cuda_devices
from autoaccum.messages import message
from autoaccum.training.data import open_data
from autoaccum.training.fit_events import EventNotifier, FitResult, Notice
from autoaccum.training.fit_request import FitRequest
from autoaccum.training.micro_batch_choice import choose_micro_batch
from autoaccum.training.run_folder import MetricsLog, RunFolder, read_checkpoint
from autoaccum.training.stopping import StopSignals, TrainingRanks
from autoaccum.training.training_run import Run
from autoaccum.training.training_setup import TrainingSetup
from autoaccum.training.training_state import seed_training
from autoaccum.training.windows import DataSettings


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
            folder = RunFolder(request.run_dir, max_checkpoints=request.max_checkpoints, ranks=ranks)
            stack.enter_context(folder)
        settings = DataSettings(
            target_batch=request.target_batch,
            target_tokens=request.target_tokens,
            costs=setup.workload.token_costs,
            lengths=None if callable(setup.workload.lengths) else setup.workload.lengths,
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
        checkpoint = None if folder is None else folder.find_checkpoint(request.resume)
        record = None if checkpoint is None else read_checkpoint(checkpoint)
        choice = choose_micro_batch(setup, reader, record, notifier.notify)
        if setup.device.type == "cuda":  # CUDA may have started only during planning.
            stack.callback(RngState([setup.device]).restore)
        seed_training(request.seed)  # All ranks build the same model.
        components = setup.build(choice.plan)
        # Ranks meet here, and one that waits for the others can still be stopped at once.
        limit = choice.limit
        ceiling = None if folder is None else folder.read_ceiling(limit.unit)
        if ceiling is not None and ceiling < limit.number:
            notifier.notify(Notice(message("ceiling_known", size=ceiling, unit=limit.counted), warns=False))
            choice = replace(choice, plan=None, **{limit.unit: ceiling})
        signals = stack.enter_context(StopSignals())
        stack.enter_context(ranks.ending(signals))
        stack.callback(reader.close)  # Before StopSignals ends, which hides errors of workers that a signal ended.
        run = Run(setup, components, reader, choice, folder, signals=signals, notifier=notifier, ranks=ranks)
        if ranks.rank > 0:
            seed_training(request.seed, ranks.rank)
        if checkpoint is not None and record is not None:
            run.restore(checkpoint, record)
        notifier.notify(run.started())
        if record is None:
            # What cannot be saved is better known before hours of training; and this shows whose the other files are.
            run.save(must=True)
        if folder is not None and ranks.is_first:
            log = MetricsLog(folder.path, run.progress.update, run.progress.evaluated_at, notifier.notify)
            notifier.listeners.append(stack.enter_context(log).on_event)
            if choice.plan is not None:
                choice.plan.save(folder.path / "plan.json", force=True)
        if record is not None:
            run.restore_rng(record)
            record = None  # Frees host memory as large as model and optimizer.
        run.train()
        return run.result(time.monotonic() - began)

"""The public `tune`: `tuning.tuning.tune`, drawn on the terminal."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import fields
from typing import Any

from autoaccum.options import Options
from autoaccum.reporting.consoles import make_console
from autoaccum.reporting.tune_progress import TuneProgress
from autoaccum.tuning.records import Tuning
from autoaccum.tuning.request import TuneRequest, read_batches, read_rates


def tune(
    workload: str | os.PathLike[str],
    *,
    target_batch: int | str | tuple[int, int],
    learning_rate: str | tuple[float, float] | None = None,
    storage: str | os.PathLike[str] | None = None,
    progress: bool = True,
    on_event: Callable[[Any], Any] | None = None,
    **asked: Any,
) -> Tuning:
    """Search the learning rate and, on request, the effective batch that a workload trains best with, by Optuna.

        found = autoaccum.tune("model.py", target_batch=256)
        found.best.setting.learning_rate, found.plan.save("best.json")

    With exact accumulation the micro-batch changes speed and memory, not the gradient: samples per second are measured
    once over micro-batches, and trials are spent on what changes the training. Only where samples are coupled, as by a
    BatchNorm in `micro` mode, micro-batches are searched with the rest. Nothing above the plan's ceiling is run.

    Every trial trains in a process of its own, from the same weights and in the same order of data, and is judged by
    its loss on held-out data: the workload's `evaluation_dataset`, else a tenth of its `dataset`. The best few are
    repeated with two other seeds each, and the lowest mean wins.

    The study is Optuna's, in one of Optuna's storages: the same call goes on where an interrupted one ended, and
    several may work on one study, as far as the storage allows it. The ceiling is that of a worker which has its device
    to itself: several on one card need each its share as `memory`. With a budget in samples on the CPU, a study that
    one worker begins and ends in one go is the same for the same seed, threads and plan.

    Args:
        workload: The file of a workload: `model.py`, `model.py:name` or `package.module:name`.
        target_batch: Samples per update: a number, or a range, as `"64..1024"` or a pair, of which doublings of the
            smallest, and the largest, are searched: few enough that learning rates at one of them can be compared.
        trials: How many trials the study is to have in all, those of before and of other workers among them; each of
            several workers may add one.
        learning_rate: The range to search, as `"1e-4..1e-1"` or a pair; a hundredth to a hundred times the workload's
            own when None. Parameter groups keep their ratios to the first.
        budget_samples: Samples that a trial trains on; once over the data when None.
        budget_seconds: Seconds that a trial trains, instead.
        confirm: How many of the best settings are repeated with other seeds; 0: none.
        storage: Where the study is kept: a file of SQLite (`tune.db` here when None), a journal (`name.journal`), or
            any URL that Optuna's `RDBStorage` takes.
        study: Its name in there; the workload's when None.
        seed: Of the sampler, and of every trial of the search.
        sampler: `tpe` or `random`.
        pruner: `halving` (Optuna's `SuccessiveHalvingPruner` at a quarter and at half of the budget), or `none`.
        plan: A plan, or the file of one, whose ceiling counts; the study's own, or made first, when None.
        heartbeat: Seconds between the signs of life of a running trial: Optuna takes up the trial of a process that
            gave none for twice as long. In a journal Optuna has no heartbeat.
        progress: Draw lines, and on a terminal the trial that runs, on stderr.
        on_event: Called with every event (`autoaccum.tuning.events`).
        **asked: The others of these, by name; and of `autoaccum.options.Options` device, memory and reserve (of the
            plan), precision, batchnorm, multiple_of and optimizer (in place of the workload's), time_limit (no trial
            of the search begins later; the best are still repeated) and trial_limit.

    Raises:
        UsageError: An argument cannot be honoured, Optuna is not installed, or the study of that name is another one.
        StudyError: The storage cannot be read or written.
        WorkloadError: The workload cannot be tuned, or its code raised in trial after trial.
        DoesNotFitError: Not even one sample at a time fits.
        NotMeasuredError: No plan could be made, or no process started.
    """
    from autoaccum.tuning.tuning import tune as run_study

    own = {field.name: asked.pop(field.name) for field in fields(TuneRequest) if field.name in asked}
    request = TuneRequest(
        reference=workload,  # type: ignore[arg-type]  # The request makes a text of a path.
        target_batch=read_batches(target_batch),
        learning_rate=read_rates(learning_rate),
        storage=None if storage is None else os.fspath(storage),
        options=Options.of("tune", asked),
        **own,
    )
    console = make_console(stderr=True)
    with TuneProgress(console, quiet=not progress) as shown:

        def listen(event: Any) -> None:
            if on_event is not None:
                on_event(event)
            shown.tell(event)

        return run_study(request, on_event=listen, on_output=shown.pass_on if console.can_redraw else None)

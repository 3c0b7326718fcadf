"""The public `tune`: `tuning.tuning.tune`, drawn on the terminal."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autoaccum.reporting.consoles import make_console
from autoaccum.reporting.tune_progress import TuneProgress
from autoaccum.tuning.records import Tuning
from autoaccum.tuning.request import TuneRequest, read_batches, read_rates

if TYPE_CHECKING:
    from autoaccum.planning.records import Plan
    from autoaccum.units import MemorySize


def tune(
    workload: str | os.PathLike[str],
    *,
    target_batch: int | str | tuple[int, int],
    trials: int = 30,
    learning_rate: str | tuple[float, float] | None = None,
    budget_samples: int | None = None,
    budget_seconds: float | None = None,
    confirm: int = 3,
    storage: str | os.PathLike[str] | None = None,
    study: str | None = None,
    seed: int = 0,
    sampler: str = "tpe",
    pruner: str = "halving",
    plan: Plan | str | Path | None = None,
    device: str = "auto",
    memory: str | MemorySize | None = None,
    reserve: str | MemorySize | None = None,
    precision: str | None = None,
    batchnorm: str | None = None,
    multiple_of: int | None = None,
    optimizer: str | None = None,
    time_limit: float | None = None,
    trial_limit: float | None = None,
    heartbeat: float = 20.0,
    progress: bool = True,
    on_event: Callable[[Any], Any] | None = None,
) -> Tuning:
    """Search the learning rate and, on request, the effective batch that a workload trains best with, by Optuna.

        found = autoaccum.tune("model.py", target_batch=256)
        found.best.setting.learning_rate, found.plan.save("best.json")

    With exact accumulation the micro-batch changes speed and memory, not the gradient: samples per second are measured
    once over micro-batches, and trials are spent on what changes the training. Only where samples are coupled, as by a
    BatchNorm in `micro` mode, micro-batches are searched with the rest. Nothing above the plan's ceiling is run.

    Every trial trains in a process of its own, from the same weights and in the same order of data, and is judged by
    its loss on held-out data: the workload's `evaluation_dataset`, else a tenth of its `dataset`. A trial that is
    behind ends early, but for the workload's own rate and slower ones that may catch up; the best few are repeated with
    two other seeds each, and the lowest mean wins.

    The study is kept in `storage`: the same call goes on where an interrupted one ended, several may work on one study
    at once, and a trial whose worker died is run again. The ceiling is that of a worker which has its device to itself:
    several on one card need each its share as `memory`, from the first call on. With a budget in samples on the CPU,
    one worker, the same seed, threads and plan give the same study: trials run with the plan's own micro-batch then,
    and with the one that was the fastest only where the budget is in seconds. Where the largest batch does not fit at
    once, the plan depends on the memory that is free, unless `plan` is given.

    Args:
        workload: The file of a workload: `model.py`, `model.py:name` or `package.module:name`.
        target_batch: Samples per update: a number, or a range, as `"64..1024"` or a pair, of which doublings of the
            smallest, and the largest, are searched: few enough that learning rates at one of them can be compared.
        trials: How many trials the study is to have in all, those of before and of other workers among them.
        learning_rate: The range to search, as `"1e-4..1e-1"` or a pair; a hundredth to a hundred times the workload's
            own when None. Parameter groups keep their ratios to the first.
        budget_samples: Samples that a trial trains on; once over the data when None.
        budget_seconds: Seconds that a trial trains, instead.
        confirm: How many of the best settings are repeated with other seeds; 0: none.
        storage: Where the study is kept: a file of SQLite (`tune.db` here when None), a journal (`name.journal`), or
            any URL that Optuna takes.
        study: Its name in there; the workload's when None.
        seed: Of the sampler, and of every trial of the search.
        sampler: `tpe` or `random`.
        pruner: `halving` (successive halving at a quarter and at half of the budget), or `none`.
        plan: A plan, or the file of one, whose ceiling counts; the study's own, or made first, when None.
        device: `auto` (a card where there is one), `cpu`, `cuda` or `cuda:N`.
        memory: The budget of the plan: `10GiB`, `80%`; what is free when None.
        reserve: Kept free of it.
        precision: `fp32`, `bf16` or `fp16`, instead of the workload's.
        batchnorm: `micro`, `running` or `frozen`, instead of the workload's.
        multiple_of: Every micro-batch is a multiple of so many samples, as are the target batches: the workload's, or
            what a plan finds out, when None.
        optimizer: One of `torch.optim`, instead of the workload's.
        time_limit: Seconds from the beginning of the search after which no further trial of it begins; one that runs
            is trained to its end, and the best are still repeated.
        trial_limit: Seconds after which a trial is given up as failed.
        heartbeat: Seconds between the signs of life by which other machines know that a worker is there. In a journal
            15 or more: the lock of a worker that was killed is taken over after 30 seconds only.
        progress: Draw lines, and on a terminal the trial that runs, on stderr.
        on_event: Called with every event (`autoaccum.tuning.events`).

    Raises:
        UsageError: An argument cannot be honoured, Optuna is not installed, or the study of that name is another one.
        StudyError: The storage cannot be read or written.
        WorkloadError: The workload cannot be tuned, or its code raised in trial after trial.
        DoesNotFitError: Not even one sample at a time fits.
        NotMeasuredError: No plan could be made, or no process started.
    """
    from autoaccum.tuning.tuning import tune as run_study

    request = TuneRequest(
        reference=workload,  # type: ignore[arg-type]  # The request makes a text of a path.
        target_batch=read_batches(target_batch),
        trials=trials,
        learning_rate=read_rates(learning_rate),
        budget_samples=budget_samples,
        budget_seconds=budget_seconds,
        confirm=confirm,
        storage=str(storage) if isinstance(storage, os.PathLike) else storage,
        study=study,
        seed=seed,
        sampler=sampler,
        pruner=pruner,
        plan=plan,
        device=device,
        memory=memory,
        reserve=reserve,
        precision=precision,
        batchnorm=batchnorm,
        multiple_of=multiple_of,
        optimizer=optimizer,
        time_limit=time_limit,
        trial_limit=trial_limit,
        heartbeat=heartbeat,
    )
    console = make_console(stderr=True)
    with TuneProgress(console, quiet=not progress) as shown:

        def listen(event: Any) -> None:
            if on_event is not None:
                on_event(event)
            shown.tell(event)

        return run_study(request, on_event=listen, on_output=shown.pass_on if console.can_redraw else None)

"""The public `tune`: `tuning.tuning.tune`, drawn on the terminal."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from autoaccum.options import Options
from autoaccum.reporting.consoles import make_console
from autoaccum.reporting.tune_progress import TuneProgress
from autoaccum.tuning.records import Tuning
from autoaccum.tuning.request import TuneRequest, read_batches, read_rates

if TYPE_CHECKING:
    import os

    from typing_extensions import Unpack

    from autoaccum.options import OptionArguments


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
    heartbeat: int = 20,
    progress: bool = True,
    on_event: Callable[[Any], Any] | None = None,
    **options: Unpack[OptionArguments],
) -> Tuning:
    """Search the learning rate and, on request, the effective batch that a workload trains best with, by Optuna.

        found = autoaccum.tune("model.py", target_batch=256)
        found.best.setting.learning_rate, found.plan.save("best.json")

    Every trial trains in a process of its own, from the same weights and in the same order of data, and is judged by
    its loss on held-out data. Micro-batches are searched only where samples are coupled, as by a BatchNorm in `micro`
    mode; otherwise they change speed and memory alone, and are timed once. Nothing above the plan's ceiling is run.

    The study is Optuna's: the same call goes on where an interrupted one ended, and several may work on one study. On
    one card, give each its share as `memory`.

    Args:
        workload: `model.py`, `model.py:name` or `package.module:name`, with a `dataset`; losses are of its
            `evaluation_dataset`, else of a tenth of the dataset.
        target_batch: Samples per update; or a range, as `"64..1024"` or a pair, whose doublings are searched.
        trials: Of the study in all, earlier ones and other workers' too.
        learning_rate: The range, as `"1e-4..1e-1"` or a pair; the workload's own / 100 to x 100 when None.
        budget_samples: Samples that a trial trains on; once over the data when None.
        budget_seconds: Seconds that a trial trains, instead.
        confirm: How many of the best settings are repeated with two other seeds each.
        storage: A file of SQLite (`tune.db` when None), a `.journal`, or a URL of Optuna's `RDBStorage`.
        study: Its name in there; the workload's when None.
        seed: Of the sampler, and of every trial of the search.
        sampler: `tpe` or `random`.
        pruner: `halving` (at a quarter and at half of the budget), or `none`.
        heartbeat: Seconds between signs of life, by which Optuna knows of a killed trial; not in a journal.
        progress: Draw progress on stderr.
        on_event: Called with every event (`autoaccum.tuning.records`).
        options: Of `autoaccum.options.Options`: device, memory and reserve (of the plan), precision, batchnorm,
            multiple_of, optimizer, time_limit (no trial of the search begins later) and trial_limit.

    Raises:
        UsageError: An argument cannot be honoured, or the study of that name is another one.
        StudyError: The storage cannot be read or written.
        WorkloadError: The workload cannot be tuned, or its code raised in trial after trial.
        DoesNotFitError: Not even one sample at a time fits.
        NotMeasuredError: No plan could be made, or no process started.
    """
    from autoaccum.tuning.tuning import tune as run_study

    request = TuneRequest(
        reference=workload,  # type: ignore[arg-type]  # The request makes a text of a path.
        target_batch=read_batches(target_batch),
        options=Options.of("tune", options),
        trials=trials,
        learning_rate=read_rates(learning_rate),
        budget_samples=budget_samples,
        budget_seconds=budget_seconds,
        confirm=confirm,
        storage=None if storage is None else str(storage),
        study=study,
        seed=seed,
        sampler=sampler,
        pruner=pruner,
        heartbeat=heartbeat,
    )
    console = make_console(stderr=True)
    with TuneProgress(console, quiet=not progress) as shown:

        def listen(event: Any) -> None:
            if on_event is not None:
                on_event(event)
            shown.tell(event)

        return run_study(request, on_event=listen, on_output=shown.pass_on if console.can_redraw else None)

"""The public `fit`: `training.fitting.train`, drawn on the terminal."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autoaccum.options import Options
from autoaccum.reporting.console import make_console
from autoaccum.reporting.fit_report import TrainingProgress
from autoaccum.reporting.tune_report import TuneProgress
from autoaccum.training.fit_events import FitResult
from autoaccum.training.fit_request import FitRequest
from autoaccum.training.trainer import train
from autoaccum.tuning.tune_request import TuneRequest, read_batches, read_rates
from autoaccum.tuning.tuning_result import Tuning

if TYPE_CHECKING:
    import os

    from torch import nn
    from typing_extensions import Unpack

    from autoaccum.options import OptionArguments
    from autoaccum.planning.plan import Plan
    from autoaccum.workload.spec import Workload


def fit(
    model_or_workload: nn.Module | Workload | str | os.PathLike[str],
    data: Any = None,
    *,
    target_batch: int,
    loss: Any = None,
    criterion: Any = None,
    weight: Callable[[Any], Any] | None = None,
    reduction: str = "mean",
    split: Callable[[Any, list[int]], Any] | None = None,
    size: Callable[[Any], int] | None = None,
    epochs: int | None = None,
    steps: int | None = None,
    plan: Plan | str | Path | None = None,
    micro_batch: int | None = None,
    ema_decay: float | None = None,
    clip_norm: float | None = None,
    learning_rate: float | None = None,
    scheduler: Any = None,
    collate: Callable[[list[Any]], Any] | None = None,
    eval_data: Any = None,
    eval_every: int | None = None,
    evaluate: Callable[..., Any] | None = None,
    run_dir: str | Path | None = None,
    resume: str = "auto",
    checkpoint_every: int = 100,
    keep: int = 3,
    seed: int = 0,
    workers: int = 0,
    skip_nonfinite: bool = False,
    progress: bool = True,
    callbacks: Sequence[Callable[[Any], Any]] = (),
    **options: Unpack[OptionArguments],
) -> FitResult:
    """Train with batches of `target_batch` samples, in micro-batches that fit: each update is the full batch's.

        result = autoaccum.fit(model, dataset, target_batch=256, loss=nn.CrossEntropyLoss(), epochs=3, run_dir="runs/a")

    Where neither `plan` nor `micro_batch` is given, it plans first, by trials that leave no trace. Where memory runs
    out while it trains, an update is repeated in smaller micro-batches and is still the full batch's; after a calm
    stretch they grow back. With a `run_dir` it writes checkpoints, and the same call goes on where an interrupted one
    ended: for map-style data on the CPU, with equal threads and micro-batches, to the same weights bit for bit.

    It draws from random states of its own (`seed`); the caller's are put back. SIGTERM, SIGHUP and Ctrl-C end it after
    a checkpoint. An exception of a callback or of the data comes as it is, after a checkpoint too.

    Args:
        model_or_workload: A model, which is trained in place and moved to `device`; or a Workload, or the file of one.
        data: What to train on; a workload's own `dataset` when None. A map-style dataset is shuffled anew in each
            epoch and its samples collated for each micro-batch; so are those of an IterableDataset, as they come. A
            DataLoader keeps its order, sampler and collate function, but its batch size is not the effective batch:
            what it yields is regrouped. Anything else that can be iterated yields batches, a list included,
            each in memory of its own.
        target_batch: Samples per update. The last update of an epoch has what is left.
        loss: For a model: `loss(model, batch)`, or a criterion.
        criterion: For a model: `criterion(outputs, targets)`, in place of `loss`.
        weight: For a model: `weight(batch)`, what the mean in `loss` divides by; the number of samples when None.
        reduction: For a model: `mean` or `sum`.
        split: `split(batch, sizes)`: a list of parts with so many samples each, where samples are not rows of tensors;
            a workload's own when None. `size` goes with it.
        size: `size(batch)`: the number of its samples.
        epochs: How often to go through the data.
        steps: How many updates to make; with `epochs`, whichever is reached first.
        plan: A plan or the file of one; it must be for this model, batch and device.
        micro_batch: The most samples to run at once, in place of a plan.
        ema_decay: What is left of that average at each update; 0.999 when None.
        clip_norm: The largest 2-norm of an update's gradient.
        learning_rate: Of the first parameter group; the others keep their ratio to it, and a schedule begins there.
            The plan's, where it was tuned, else the optimizer's own when None.
        scheduler: A learning-rate schedule of `optimizer`, or a function that makes one of it; stepped per update.
        collate: From a list of samples to a batch; torch's default_collate when None.
        eval_data: What to evaluate on: a dataset, a DataLoader, or batches that can be gone through again.
        eval_every: Updates between evaluations; after each epoch when None.
        evaluate: `evaluate(model, batch)`: a number, or several by name, averaged over samples; the loss when None.
        run_dir: The folder of the run: checkpoints, `metrics.jsonl`, `plan.json`, `model.pt`, `ema.pt`, and
            TensorBoard's files where it is installed. None: nothing is written.
        resume: `auto`: go on where the folder has a checkpoint; `must`: only that; `never`: refuse such a folder.
        checkpoint_every: Updates between checkpoints.
        keep: How many are kept.
        seed: Of the model that a workload builds, of the order of the data, of what the data and training draw.
        workers: Processes that read a map-style dataset; a DataLoader has its own.
        skip_nonfinite: Pass over a window whose loss or gradient is not finite, rather than end there.
        progress: Draw a progress bar, or lines where there is no terminal, on stderr.
        callbacks: Called with every event (`autoaccum.training.fit_events`); one that returns True ends the training.
        options: Fields of `autoaccum.options.Options`, each in place of the plan's or the workload's own.
            `optimizer`: an optimizer of the model's, a function of its parameters, a class, or a name of
            `torch.optim` (AdamW by itself). `device`: `auto`, `cpu`, `cuda` or `cuda:N`; a model whose optimizer is
            given stays where it is. `memory` and `reserve`: the budget of the plan. `precision`: by autocast.
            `batchnorm`, `accumulate_in` and `multiple_of`: as the Accumulator has them; what makes no multiple at the
            end of an epoch is left out, and said. `keeps`: `ema` keeps an average of the weights, as
            `torch.optim.swa_utils.AveragedModel` makes it, updated once per update: it is in every checkpoint,
            evaluated beside the weights (`ema_loss`), and in the end `ema.pt` and `FitResult.ema_model`; `outputs`
            plans for what a loop that logs them holds. `worst_of`: plan for the longest of so many samples.
            `evaluation_batch`: the most samples to evaluate at once; the micro-batch by itself.

    Raises:
        UsageError: An argument cannot be honoured, or the folder is another run's.
        WorkloadError: The workload or the data cannot be used.
        DoesNotFitError: Not even one sample at a time fits.
        NotMeasuredError: No plan could be made.
        DataWorkerError: A process that reads data died.
        NonFiniteError: Loss or gradient of an update were not finite; everything is as before it.
        CheckpointError: The first checkpoint could not be written, or none there is can be read.
        UpdateInterrupted: An update failed half-way; resume from the last checkpoint.
    """
    given = {**locals(), **options}
    for name in ("model_or_workload", "progress", "options"):
        del given[name]
    request = FitRequest.of(model_or_workload, given)
    with TrainingProgress(make_console(stderr=True), quiet=not progress) as shown:
        return train(request, on_event=shown.notify)


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
        on_event: Called with every event (`autoaccum.tuning.tuning_result`).
        options: Of `autoaccum.options.Options`: device, memory and reserve (of the plan), precision, batchnorm,
            multiple_of, optimizer, time_limit (no trial of the search begins later) and trial_limit.

    Raises:
        UsageError: An argument cannot be honoured, or the study of that name is another one.
        StudyError: The storage cannot be read or written.
        WorkloadError: The workload cannot be tuned, or its code raised in trial after trial.
        DoesNotFitError: Not even one sample at a time fits.
        NotMeasuredError: No plan could be made, or no process started.
    """
    from autoaccum.tuning.tuner import tune as run_study

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
            shown.notify(event)

        return run_study(request, on_event=listen, on_output=shown.print_output if console.can_redraw else None)

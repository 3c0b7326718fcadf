"""The public functions that train, `fit` and `tune`: each makes its request and runs it.

`autoaccum.api` says what several functions take and raise, and why packages are imported on the first call.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autoaccum.options import Options

if TYPE_CHECKING:
    from torch import nn
    from typing_extensions import Unpack

    from autoaccum.options import OptionArguments
    from autoaccum.planning.plan_record import Plan
    from autoaccum.sources.workload import Workload
    from autoaccum.training.fit_events import FitResult
    from autoaccum.tuning.tuning_records import Tuning


def fit(
    model_or_workload: nn.Module | Workload | str | os.PathLike[str],
    data: Any = None,
    *,
    target_batch: int,
    loss: Any = None,
    criterion: Any = None,
    outputs: Callable[[nn.Module, Any], Any] | None = None,
    coupled_loss: Callable[[Any, Any], Any] | None = None,
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
    check: str = "warn",
    progress: bool = True,
    callbacks: Sequence[Callable[[Any], Any]] = (),
    **options: Unpack[OptionArguments],
) -> FitResult:
    """Train with batches of `target_batch` samples in micro-batches that fit; every update equals the full batch's.

        result = autoaccum.fit(model, dataset, target_batch=256, loss=nn.CrossEntropyLoss(), epochs=3, run_dir="runs/a")

    Without `plan` or `micro_batch` it plans first, in processes of their own. When memory runs out during
    training, the update is repeated in smaller micro-batches, and is still the full batch's; after a number of updates
    without trouble the micro-batches grow again. With a `run_dir` it writes checkpoints, and the same call resumes an
    interrupted run: for map-style data on the CPU, with equal threads and micro-batches, to bit-identical weights.

    Random numbers come from generators of its own (`seed`); the caller's random state is restored. SIGTERM, SIGHUP and
    Ctrl-C end the run after a checkpoint. So do exceptions of a callback or of the data, which are raised unchanged.

    Under torchrun, or in an initialised process group, every rank calls it with the same arguments and all of the data,
    of which it deals each its share of every update: the weights are those of one process. A dataset, or a DataLoader
    over one, is read by its share; other data is read whole by every rank. Evaluations are dealt out as well, callbacks
    run on every rank, and rank 0 writes the folder, which all must be able to read. An error or a signal on one rank
    ends all after the same update. A run may resume on another number of ranks.

    Args beside those of this module, of which those up to `reduction` go with a model:
        model_or_workload: A model, which is trained in place and moved to `device`; or a Workload, or its file.
        data: The training data; the workload's own `dataset` when None. A map-style dataset is shuffled in each
            epoch, and each micro-batch is collated from its samples; samples of an IterableDataset keep their order. A
            DataLoader keeps its order, sampler and collate function, but not its batch size: its batches are
            regrouped. Any other iterable, such as a list, must yield batches that do not share memory.
        target_batch: Samples per update. The last update of an epoch has the samples that are left.
        epochs: Passes over the data.
        steps: Updates to make; with `epochs`, training ends at whichever comes first.
        plan: A plan or its file; it must be for this model, batch and device.
        micro_batch: The most samples to run at once, in place of a plan.
        ema_decay: The share of the average that each update keeps; 0.999 when None.
        clip_norm: The largest 2-norm of an update's gradient.
        learning_rate: The rate of the first parameter group; other groups keep their ratio to it, and a schedule
            starts from it. When None: the rate of a tuned plan, else the optimizer's own.
        scheduler: A learning-rate schedule of `optimizer`, or a function that makes one from it; stepped per update.
        collate: Makes a batch of a list of samples; torch's `default_collate` when None.
        eval_data: The evaluation data: a dataset, a DataLoader, or batches that can be iterated more than once.
        eval_every: Updates between evaluations; one after each epoch when None.
        evaluate: `evaluate(model, batch)`: returns a number, or several by name, averaged over samples; the loss when
            None.
        run_dir: The folder for checkpoints, `metrics.jsonl`, `plan.json`, `model.pt`, `ema.pt`, and TensorBoard's
            files if that is installed. None: nothing is written.
        resume: `auto`: resume if the folder has a checkpoint; `must`: fail without one; `never`: refuse such a folder.
        checkpoint_every: Updates between checkpoints.
        keep: Number of checkpoints to keep.
        seed: Seeds the weights of a workload's model, the order of the data, and all random numbers of training.
        workers: Processes that read a map-style dataset; a DataLoader uses its own.
        skip_nonfinite: Skip an update with a non-finite loss or gradient instead of ending the run.
        check: What to do if the first updates show that `weight` is not what the loss divides by: `warn`, `strict`
            (end the run before the update) or `off` (do not check).
        progress: Draw a progress bar on stderr, or print lines where stderr is no terminal.
        callbacks: Called with every event (`autoaccum.training.fit_events`); one that returns True ends the training.
        options: Fields of `autoaccum.options.Options`, which win over the plan's, as those over the workload's.
            `optimizer`: an optimizer of the model, a function of its parameters, a class, or a name of `torch.optim`
            (AdamW by default). `device`: `auto`, `cpu`, `cuda` or `cuda:N`; a model whose optimizer is given stays
            where it is. `memory` and `reserve`: the budget of the plan. `precision`: by autocast. `batchnorm`,
            `coupled`, `accumulate_in` and `multiple_of`: as for the Accumulator; a last update of an epoch that is no
            multiple is left out, with a note. `keeps`: `ema` keeps an average of the
            weights, as `torch.optim.swa_utils.AveragedModel` makes it, updated once per update, stored in every
            checkpoint, evaluated beside the weights (`ema_loss`), and returned as `ema.pt` and `FitResult.ema_model`;
            `outputs` plans for a loop that holds outputs for logging. `worst_of`: plan for the longest of this many
            samples. `evaluation_batch`: the most samples to evaluate at once; the micro-batch by default. A coupled
            loss is evaluated of that many samples together, or of the target batch's number.

    Raises:
        DataWorkerError: A process that reads data died.
        NonFiniteError: Loss or gradient of an update was not finite; the state is that before the update.
        CheckpointError: The first checkpoint could not be written, or no checkpoint can be read.
        UpdateInterrupted: An update failed half-way; resume from the last checkpoint.
        RankFailedError, RankLostError: Another rank failed with an error of its own, or does not answer in time.
    """
    given = {**locals(), **options}
    for name in ("model_or_workload", "progress", "options"):
        del given[name]

    from autoaccum.accumulation.rng_state import preserve_rng_state
    from autoaccum.training.fit_request import FitRequest
    from autoaccum.training.trainer import train

    with preserve_rng_state():  # Rich draws a random number when it is imported.
        from autoaccum.reporting.console import make_console
        from autoaccum.reporting.fit_report import TrainingProgress

    request = FitRequest.of(model_or_workload, given)
    with TrainingProgress(make_console(stderr=True), quiet=not progress) as shown:
        return train(request, on_event=shown.notify)


def tune(
    workload: str | os.PathLike[str],
    *,
    target_batch: int | range,
    trials: int = 30,
    learning_rate: str | tuple[float, float] | None = None,
    budget_samples: int | None = None,
    storage: str | os.PathLike[str] = "tune.db",
    study: str | None = None,
    seed: int = 0,
    progress: bool = True,
    on_event: Callable[[Any], Any] | None = None,
    **options: Unpack[OptionArguments],
) -> Tuning:
    """Search the learning rate, effective batch and micro-batch that train a workload best, with Optuna.

        found = autoaccum.tune("model.py", target_batch=256)
        found.best.learning_rate, found.plan.save("best.json")

    Every trial trains in a process of its own, from the same weights and in the same order of data, and is ranked by
    its loss on held-out data. The micro-batch is searched where samples depend on others of theirs, as by BatchNorm in
    `micro` mode; otherwise it changes speed and memory alone, and the fastest is planned once.

    The same call resumes an interrupted Optuna study, and several processes may work on one study at the same time.
    On one card, give each its share as `memory`.

    Args beside those of `autoaccum.api`:
        workload: `model.py` or `model.py:name`, with a `dataset`. Losses are measured on its
            `evaluation_dataset`, else on a tenth of the dataset.
        target_batch: Samples per update; or a range, such as `range(64, 1025)`, of which the doublings of its first are
            searched.
        trials: The number of trials of the study, earlier ones and other workers' included.
        learning_rate: The range, `"1e-4..1e-1"` or a pair; from a hundredth to a hundred times the workload's own
            when None.
        budget_samples: Samples that a trial trains on; one pass over the data when None.
        storage: The SQLite file of the study.
        study: The name of the study in the storage; the workload's name when None.
        seed: Seeds the sampler and every trial of the search.
        progress: Draw progress on stderr.
        on_event: Called with each event of `autoaccum.tuning.tuning_records`, and with warnings (`fit_events.Notice`).
        options: Fields of `autoaccum.options.Options`: `device`, `memory` and `reserve` (of the plan), `precision`,
            `batchnorm`, `coupled`, `multiple_of`, `optimizer` and `time_limit` (no trial starts later).

    Raises:
        UsageError: The study of that name searches something else.
        StudyError: The storage cannot be read or written.
    """
    from autoaccum.reporting.console import make_console
    from autoaccum.reporting.tune_report import TuneProgress
    from autoaccum.tuning.tuner import tune as run_study
    from autoaccum.tuning.tuning_records import TuneRequest, read_rates

    request = TuneRequest(
        reference=workload,  # type: ignore[arg-type]  # The request makes a text of a path.
        target_batch=target_batch,
        options=Options.of("tune", options),
        trials=trials,
        learning_rate=read_rates(learning_rate),
        budget_samples=budget_samples,
        storage=os.fspath(storage),
        study=study,
        seed=seed,
    )
    console = make_console(stderr=True)
    with TuneProgress(console, quiet=not progress) as shown:

        def listen(event: Any) -> None:
            if on_event is not None:
                on_event(event)
            shown.notify(event)

        return run_study(request, on_event=listen, on_output=shown.print_output if console.can_redraw else None)

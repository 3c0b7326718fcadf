"""The public functions `plan`, `compare`, `verify`, `guard`, `fit` and `tune`.

Packages are imported on the first call, so importing this module loads neither torch nor optuna.

These arguments mean the same in every function that takes them:

- `workload`: `model.py` or `model.py:name`, where the name may be a Trainer's; or a `Workload`; or a training command
  as a list of words, with `{micro_batch}` and `{iter_size}` where it takes them.
- `trainer`: a Trainer of transformers or Lightning, instead of a workload: its model, loss, optimizer, precision and
  evaluation, and batches of the longest of 256 samples of its dataset. For Lightning, also give what `trainer.fit`
  takes: the `model`, and `data` if the model has no loader.
- `data`: a LightningDataModule, or the DataLoader for training.
- `model`: a live model, instead of a workload, on the device it is to be trained on. The arguments below go with it.
- `batch`: `batch(size)`; or a batch, which is repeated and cut to size.
- `loss`: `loss(model, batch)`, or a criterion.
- `criterion`: `criterion(outputs, targets)`, instead of `loss`.
- `outputs`: `outputs(model, batch)`: what a coupled loss is computed of, as for the Accumulator.
- `coupled_loss`: `coupled_loss(outputs, batch)`: the loss of the whole effective batch, instead of `loss`.
- `weight`: `weight(batch)`: the divisor of the mean in `loss`; the number of samples when None.
- `split`: `split(batch, sizes)`: returns a list of parts with these numbers of samples, for batches whose samples are
  not rows of tensors; needs `size`.
- `size`: `size(batch)`: returns the number of samples.
- `reduction`: `mean` (when None) or `sum`.
- `on_event`: called with each event of the function's events module; when None, `plan`, `compare` and `verify` show
  their progress in a notebook.
- `on_output`: called with each line that the workload prints; when None, these go to stderr.
- `options`: fields of `autoaccum.options.Options`. `optimizer` may be the live one of a live model.

Every function raises `UsageError` if an argument cannot be honoured, `WorkloadError` if the workload cannot be used,
`DoesNotFitError` if not even one sample at a time fits, and `NotMeasuredError` if there is no answer.
"""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from autoaccum.errors import UsageError
from autoaccum.options import Options

if TYPE_CHECKING:
    from torch import nn
    from typing_extensions import Unpack

    from autoaccum.guarding.guard_result import Listener as GuardListener
    from autoaccum.guarding.guard_result import Report
    from autoaccum.options import OptionArguments
    from autoaccum.planning.comparison_record import Comparison, ComparisonRow
    from autoaccum.planning.plan_events import Listener as PlanListener
    from autoaccum.planning.plan_record import Plan
    from autoaccum.planning.plan_request import Prefer
    from autoaccum.sources.workload import Workload
    from autoaccum.training.fit_events import FitResult
    from autoaccum.tuning.tuning_records import Tuning
    from autoaccum.verification.verification_result import Event as VerificationEvent
    from autoaccum.verification.verification_result import Verification

_LIVE = (
    *("trainer", "data", "model", "batch", "loss", "criterion", "outputs", "coupled_loss"),
    *("weight", "split", "size", "reduction"),
)
"""The arguments of `plan` and `verify` for what is trained, where that is not a workload."""


@contextmanager
def _listening(on_event: Any, verb: Literal["plan", "verify"], *, of_command: bool = False) -> Iterator[Any]:
    """Yield `on_event`; if it is None, in a notebook a listener that draws the progress there."""
    if on_event is not None or "IPython" not in sys.modules:
        yield on_event
        return
    state = random.getstate()  # Rich draws a number when it is imported.
    from autoaccum.reporting.console import drawn_in_notebook
    from autoaccum.reporting.progress import PlanProgress
    from autoaccum.reporting.verify_report import OPENINGS, VerificationProgress

    random.setstate(state)
    kind, first = (PlanProgress, OPENINGS[0]) if verb == "plan" else (VerificationProgress, OPENINGS[of_command])
    with drawn_in_notebook(kind, first) as listen:
        yield listen


def plan(
    workload: str | os.PathLike[str] | Workload | Sequence[str] | None = None,
    *,
    target_batch: int | None = None,
    target_tokens: int | None = None,
    trainer: Any = None,
    data: Any = None,
    model: nn.Module | None = None,
    batch: Any = None,
    loss: Any = None,
    criterion: Any = None,
    outputs: Callable[[nn.Module, Any], Any] | None = None,
    coupled_loss: Callable[[Any, Any], Any] | None = None,
    weight: Callable[[Any], Any] | None = None,
    split: Callable[[Any, list[int]], Any] | None = None,
    size: Callable[[Any], int] | None = None,
    reduction: str | None = None,
    evaluate: Callable[[nn.Module, Any], Any] | None = None,
    max_micro_batch: int | None = None,
    fit_micro_batch: int | None = None,
    solve: Mapping[str, range] | None = None,
    max_trials: int | None = None,
    exact_max: bool = False,
    prefer: Prefer = "largest",
    explain: bool = False,
    picture: bool = False,
    report: bool = False,
    on_event: PlanListener | None = None,
    on_output: Callable[[str], None] | None = None,
    **options: Unpack[OptionArguments],
) -> Plan:
    """Find the largest micro-batch that fits, and the schedule of an update of `target_batch` samples.

        plan = autoaccum.plan("model.py", target_batch=256, gpu="rtx3090")
        plan = autoaccum.plan(model=model, batch=batch, loss=nn.MSELoss(), optimizer=optimizer, target_batch=256)
        plan = autoaccum.plan("model.py", gpu="t4", solve={"LENGTH": range(512, 8193, 128)})

    Trials run in processes of their own. Live objects, and a `Workload` made in code, are sent there by `cloudpickle`,
    and nothing of them changes. On the CPU the budget is what is free beside your objects. A live model on a card and
    its optimizer's state wait in host memory until the trials have ended; they come back bit for bit, at other
    addresses, and a note of the plan says so. With `gpu` nothing runs on a card, and the plan's kind is `predicted`;
    weights are sent without their values, unless `values` are computed.

    Under torchrun, or in a process group, every rank calls it for the same workload. Each tries on its own card, and
    all return the plan of the one where the least fits. `world_size` alone plans for ranks on one device.

    Other Parameters:
        target_tokens: In place of `target_batch`: an update has as many whole samples as reach so many tokens, by the
            workload's `length` or `lengths`.
        evaluate: `evaluate(model, batch)`: one evaluation pass (`evaluation_batch`); the loss in eval mode when None.
        max_micro_batch: Try no larger size, in samples.
        fit_micro_batch: With `savers="auto"`: choose savers with which the fewest parts of at most so many samples fit,
            in place of those with which one sample does. With `solve`: the micro-batch that has to fit.
        solve: Find the largest value that fits of one name that `overrides` could set, with micro-batches of one
            sample: `{"length": range(512, 32769, 128)}`. The plan uses that value. It ran, and the next larger one did
            not, unless it is the last of the range; `Plan.solved` has all that were tried. Without a `target_batch`,
            an update is one micro-batch.
        max_trials: End the search after this many trials. The largest size that ran by then is confirmed by one more
            trial, and `Plan.stopped` is set.
        exact_max: Find the largest size that fits to the sample. Otherwise the search ends where the next schedule with
            fewer parts does not fit: for 256 samples any size that fits from 128 to 255 gives 128 + 128.
        prefer: `fastest`: of the micro-batches that fit, take the smallest within 2 % of the most samples per second,
            by timed updates (`Plan.throughput`), or with a `gpu` by an estimate. `largest`: take the fewest
            micro-batches per update.
        explain: Add `Plan.explanation`: the memory at the peak by purpose and by module, and changes that would save
            some. It is simulated, even where the trials were real.
        picture: Send listeners the data of a memory picture (`plan_events.Explained`), where the device has it.
        report: Send listeners that data and the changes of `explain`, likewise, for a page.
        **options: Those of a workload replace its own; the others say where and how trials run. `time_limit` counts
            from this call; loading and checking the workload may take half a minute whatever the limit is, and the
            confirmation of the schedule comes on top.
    """
    given = dict(locals())

    from autoaccum.accumulation.packing import check_target
    from autoaccum.planning.plan_request import PlanRequest
    from autoaccum.planning.planner import make_plan
    from autoaccum.planning.solve import solve_plan
    from autoaccum.sources.command import read_command

    if target_tokens is not None:
        check_target(target_batch, target_tokens)
    live = {name: given[name] for name in (*_LIVE, "evaluate")}
    decided = {"savers": options.get("savers"), "fit_micro_batch": None if solve else fit_micro_batch}
    source, asked = read_command(workload, Options.of("plan", options), verb="plan", live=live, **decided)
    request = PlanRequest(
        target_batch,
        asked,
        target_tokens=target_tokens,
        max_micro_batch=max_micro_batch,
        fit_micro_batch=fit_micro_batch,
        solve=solve,
        max_trials=max_trials,
        exact_max=exact_max,
        prefer=prefer,
        explain=explain,
        picture=picture,
        report=report,
    )
    make = make_plan if solve is None else solve_plan
    with _listening(on_event, "plan") as listen:
        return make(source, request, live=live, on_event=listen, on_output=on_output)


def compare(
    workload: str | os.PathLike[str] | Workload | Sequence[str],
    *,
    target_batch: int | None = None,
    gpu: str,
    world_size: int | range = 1,
    savers: str | Sequence[str] | None = None,
    max_micro_batch: int | None = None,
    fit_micro_batch: int | None = None,
    exact_max: bool = False,
    overrides: Mapping[str, Any] | None = None,
    sort: str | None = None,
    prices: str | os.PathLike[str] | Mapping[str, float] | None = None,
    on_row: Callable[[ComparisonRow], None] | None = None,
    on_event: PlanListener | None = None,
    on_output: Callable[[str], None] | None = None,
    **options: Any,
) -> Comparison:
    """Plan for several simulated cards, values of a parameter, numbers of ranks and sets of savers, in one table.

        table = autoaccum.compare("model.py", target_batch=256, gpu="rtx4090,h100")
        table = autoaccum.compare("model.py", target_batch=512, gpu="h100", world_size=range(1, 65), parallel="fsdp2")
        table = autoaccum.compare("model.py", target_batch=64, gpu="t4", overrides={"length": [1024, 2048, 4096]})
        table = autoaccum.compare("model.py", target_batch=256, gpu="rtx4090", savers="all")
        table = autoaccum.compare(["python", "train.py", "--bs={micro_batch}"], gpu="all")

    Each row has the whole plan (`row.plan`), or says why nothing fits. Speeds are estimates, for comparing
    cards, values and savers; numbers of ranks have none, since what ranks exchange is not counted.

    Other Parameters:
        gpu: Names or sizes of cards with commas in between, or `all`.
        world_size: The number of ranks; or a range, of which powers of two, its ends, and the numbers where the model
            begins to fit are planned. Several cards are planned up to the least number of each that trains the model.
        savers: `all`: a row for each set of savers that no other beats in both time and largest micro-batch. Otherwise
            as of `plan`.
        max_micro_batch: As of `plan`.
        fit_micro_batch: As of `plan`.
        exact_max: As of `plan`.
        overrides: Values in place of constants, parameters of a named model, or `{name}` in a command. A list holds
            several values, and every combination of them is planned; write a value that is a sequence as a tuple.
        sort: The name of a column of the table, such as `speed`: the best rows come first. When None, rows come by
            card, then by value, then by number of ranks; sets of savers with the fastest first.
        prices: The price of an hour of each card, by its name, or a CSV file with the columns `name` and `per_hour`.
            The cheapest rows come first then, by the cost of a million samples.
        on_row: Called with each row as it is found; also before an error.
        on_event: Called with `plan_events.SaversTried` while sets of savers are tried.
        **options: Fields of `autoaccum.options.Options` as for `plan`, but for `device` and `time_limit`.
    """
    from autoaccum.planning.comparison import ComparisonRequest, compare_plans

    request = ComparisonRequest(
        target_batch=target_batch,
        gpu=gpu,
        world_size=world_size,
        savers=savers,
        max_micro_batch=max_micro_batch,
        fit_micro_batch=fit_micro_batch,
        exact_max=exact_max,
        overrides=overrides or {},
        sort=sort,
        prices=prices,
        options=options,
    )
    with _listening(on_event, "plan") as listen:
        rows = on_row or (listen if on_event is None else None)
        return compare_plans(workload, request, on_row=rows, on_event=listen, on_output=on_output)


def verify(
    workload: str | os.PathLike[str] | Workload | Sequence[str] | None = None,
    *,
    target_batch: int = 16,
    micro_batch: int | None = None,
    trainer: Any = None,
    data: Any = None,
    model: nn.Module | None = None,
    batch: Any = None,
    loss: Any = None,
    criterion: Any = None,
    outputs: Callable[[nn.Module, Any], Any] | None = None,
    coupled_loss: Callable[[Any, Any], Any] | None = None,
    weight: Callable[[Any], Any] | None = None,
    split: Callable[[Any, list[int]], Any] | None = None,
    size: Callable[[Any], int] | None = None,
    reduction: str | None = None,
    accumulate: Callable[[nn.Module, list[Any]], Any] | None = None,
    on_event: Callable[[VerificationEvent], Any] | None = None,
    **options: Unpack[OptionArguments],
) -> Verification:
    """Compare an update accumulated in micro-batches with the full batch's, and find the cause of a difference.

        result = autoaccum.verify("model.py", target_batch=16)
        result.equivalent, result.causes

    Both start from equal copies of model and criterion and replay the same random numbers. The loss, every gradient and
    every buffer are compared, for a whole window and for a shorter one, such as the last of an epoch. Only copies are
    run, and random states are restored; but what the caller's code counts or collects in globals and closures stays
    changed.

    A training command, as a list of words, runs twice up to its first optimizer step with the same samples, without
    dropout: with all of them as one micro-batch, and in parts. `accumulate`, and what goes with a live model, cannot be
    given. Runs that cannot be compared leave `comparisons` empty, and `notes` say why:

        autoaccum.verify(["python", "train.py", "--bs={micro_batch}", "--accum={iter_size}"]).equivalent

    Other Parameters:
        target_batch: Samples of the full batch.
        micro_batch: The most samples to run at once; a quarter of the target when None.
        accumulate: `accumulate(model, micro_batches)`: a loop of your own that leaves the gradient of an update in
            `.grad`; it is compared with the full batch too. The workload's own when None.
        **options: Fields of `autoaccum.options.Options`. `precision`: float64 when None, whatever the workload trains
            in, or float32 with a note where float64 does not run. `device`: the CPU by default. `time_limit`: seconds
            to search for the causes of a difference once the answer is known, 60 when None; then the cause is
            `unknown`. `world_size`: compare an update of so many ranks, in processes on this machine, with that of
            one; `accumulate` is called on each rank with the bare model and its own micro-batches, and wraps or shards
            the model as your script does. Also `batchnorm`, `coupled`, `multiple_of` and `longest_of`.
    """
    given = dict(locals())

    from autoaccum.sources.command import CommandSource, read_command

    asked, live = Options.of("verify", {"device": "cpu", **options}), {name: given[name] for name in _LIVE}
    source, asked = read_command(workload, asked, verb="verify", live={**live, "accumulate": accumulate})
    with _listening(on_event, "verify", of_command=isinstance(source, CommandSource)) as listen:
        sizes: dict[str, Any] = {"target_batch": target_batch, "micro_batch": micro_batch}
        if isinstance(source, CommandSource):
            from autoaccum.verification.command_check import verify_command

            return verify_command(source, asked, **sizes)
        from autoaccum.verification.verifier import run_verification

        return run_verification(source, asked, **sizes, live=live, accumulate=accumulate, on_event=listen)


def guard(
    workload: str | os.PathLike[str] | Sequence[str] | None = None,
    *,
    gpus: Sequence[str] = (),
    target_batch: int | None = None,
    micro_batch: int | None = None,
    tolerance: str = "1%",
    update: bool = False,
    baseline: str | None = None,
    force: bool = False,
    on_event: GuardListener | None = None,
    on_output: Callable[[str], None] | None = None,
    **options: Unpack[OptionArguments],
) -> Report:
    """Measure the memory of an update again, and compare it with the lock file or with another git revision.

        autoaccum.guard("model.py", gpu="rtx3090", target_batch=256, update=True)  # Writes autoaccum.lock.
        report = autoaccum.guard()  # Compares everything that the lock names.
        autoaccum.guard(["python", "train.py", "--bs={micro_batch}"], gpu="rtx3090", micro_batch=8, update=True)
        report.exit_code, report.to_json()

    A case that cannot be measured is reported as `unmeasured`; the others are still measured.

    Other Parameters:
        workload: `model.py` or `model.py:name`, or the words of a command, which runs in the folder of the lock; None:
            every known case that matches the other arguments.
        gpus: Several cards to simulate, each a case of its own, in place of `gpu`.
        micro_batch: The most samples to run at once; planned when None.
        tolerance: The growth of the peak that passes, such as `1%` or `50MiB`.
        update: Plan and measure anew, and write the lock instead of comparing with it.
        baseline: Compare with this git revision, which is measured too; no lock is written.
        force: With `update`, replace a lock that cannot be read.
        **options: `time_limit` is for all cases together.

    Raises:
        LockFileError: The lock cannot be read; it is left unchanged.
        MissingLockError, NotMeasuredError: No case is known, or the revision cannot be checked out.
    """
    from autoaccum.guarding.cases import Case, read_reference
    from autoaccum.guarding.guard_result import parse_tolerance
    from autoaccum.guarding.guard_run import guard as run_guard
    from autoaccum.guarding.project import find_folder

    if isinstance(gpus, str) or (gpus and "gpu" in options):
        raise UsageError("gpus is one name, or gpu is given too", hint="give gpu=NAME or gpus=[NAME, ...]")
    time_limit = options.pop("time_limit", None)
    cards, reference = gpus or (options.get("gpu"),), read_reference(workload)
    cases = [
        Case(
            workload=reference,
            target_batch=target_batch,
            micro_batch=micro_batch,
            options=Options.of("guard", {**options, "gpu": card}),
        )
        for card in cards
    ]
    return run_guard(
        cases,
        find_folder(Path.cwd()),
        update=update,
        baseline=baseline,
        tolerance=parse_tolerance(tolerance),
        time_limit=time_limit,
        force=force,
        on_event=on_event,
        on_output=on_output,
    )


def fit(
    model_or_workload: nn.Module | Workload | str | os.PathLike[str],
    data: Any = None,
    *,
    target_batch: int | None = None,
    target_tokens: int | None = None,
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
    max_checkpoints: int = 3,
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

    Other Parameters:
        model_or_workload: A model, which is trained in place and moved to `device`; or a Workload, or its file.
        data: The training data; the workload's own `dataset` when None. A map-style dataset is shuffled in each
            epoch, and each micro-batch is collated from its samples; samples of an IterableDataset keep their order. A
            DataLoader keeps its order, sampler and collate function, but not its batch size: its batches are
            regrouped. Any other iterable, such as a list, must yield batches that do not share memory.
        target_batch: Samples per update; those of `plan` by default. The last update of an epoch has the samples that
            are left.
        target_tokens: Tokens per update, instead of `target_batch`: as many whole samples as reach them, by the
            workload's `length` or `lengths`. Each sample is measured once, unless `lengths` are those of the dataset.
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
        max_checkpoints: How many checkpoints to keep; older ones are removed.
        seed: Seeds the weights of a workload's model, the order of the data, and all random numbers of training.
        workers: Processes that read a map-style dataset; a DataLoader uses its own.
        skip_nonfinite: Skip an update with a non-finite loss or gradient instead of ending the run.
        check: What to do if the first updates show that `weight` is not what the loss divides by: `warn`, `strict`
            (end the run before the update) or `off` (do not check).
        progress: Draw a progress bar on stderr, or print lines where stderr is no terminal.
        callbacks: Called with every event (`autoaccum.training.fit_events`); one that returns True ends the training.
        **options: Fields of `autoaccum.options.Options`, which win over the plan's, as those over the workload's.
            `optimizer`: an optimizer of the model, a function of its parameters, a class, or a name of `torch.optim`
            (AdamW by default). `device`: a model whose optimizer is given stays where it is. `multiple_of`: a last
            update of an epoch that is no multiple is left out, with a note. `ema`: keeps an average of the
            weights, as `torch.optim.swa_utils.AveragedModel` makes it, updated once per update, stored in every
            checkpoint, evaluated beside the weights (`ema_loss`), and returned as `ema.pt` and `FitResult.ema_model`.
            `evaluation_batch`: the most samples to evaluate at once; the micro-batch by default. A coupled loss is
            evaluated of that many samples together, or of the target batch's number.

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

    from autoaccum.sources.command import refuse_command

    refuse_command(model_or_workload, "fit")

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

    Other Parameters:
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
        on_event: Called with each event of `autoaccum.tuning.tuning_records`, and with warnings
            (`autoaccum.messages.Message`).
        **options: Fields of `autoaccum.options.Options`: `device`, `memory` and `reserve` (of the plan), `precision`,
            `batchnorm`, `coupled`, `multiple_of`, `optimizer` and `time_limit` (no trial starts later).

    Raises:
        UsageError: The study of that name searches something else.
        StudyError: The storage cannot be read or written.
    """
    from autoaccum.reporting.console import make_console
    from autoaccum.reporting.tune_report import TuneProgress
    from autoaccum.sources.command import refuse_command
    from autoaccum.tuning.tuner import tune as run_study
    from autoaccum.tuning.tuning_records import TuneRequest, read_rates

    refuse_command(workload, "tune")
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

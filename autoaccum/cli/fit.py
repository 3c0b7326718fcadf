"""`autoaccum fit`: train with the target batch, by a plan."""

from __future__ import annotations

import os
import warnings
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from autoaccum.checks import is_one_of_ranks
from autoaccum.cli.flags import OUTPUT_FLAGS, SET_OF_WORKLOAD, HelpWithHeadings, count, natural, options, positive
from autoaccum.cli.outputs import CODE_INTERRUPTED, Outputs, running_words, stdout_kept
from autoaccum.errors import AutoaccumError, CheckpointError, RankLostError
from autoaccum.options import CHECKS
from autoaccum.reporting.console import make_console, relative_path

if TYPE_CHECKING:
    from autoaccum.training.fit_events import FitResult

_SIGNALLED = (129, 143)
"""Exit codes of SIGHUP and SIGTERM; any other SystemExit is of the user's code."""


@click.command("fit", cls=HelpWithHeadings, short_help="Train by the plan; resume an interrupted run.")
@click.argument("workload")
@click.option(
    "--run-dir", metavar="FOLDER", required=True, help="Folder for checkpoints, metrics and the trained model."
)
@click.option("--epochs", type=count, metavar="N", help="Passes over the dataset.")
@click.option(
    "--steps", type=count, metavar="N", help="Updates to make; with --epochs, training ends at whichever comes first."
)
@click.option("--plan", metavar="FILE", help="Plan of `autoaccum plan -o`.  [default: plan first]")
@options(
    "fit",
    *("target_batch", "target_tokens", "micro_batch", "as_json", "quiet"),
    target_batch={"required": False},
    micro_batch="The most samples to run at once, instead of a plan.",
    device="Where to train; auto is the GPU if there is one.",
    ema="Also keep a moving average of the weights, in checkpoints, in evaluations and as ema.pt.",
    hold_outputs="Plan for a loop that holds the outputs of the last micro-batch, for logging.",
    longest_of="Plan for the longest of N samples of the dataset.",
    evaluation_batch="The most samples to evaluate at once.  [default: the micro-batch]",
    overrides=SET_OF_WORKLOAD,
)
@click.option(
    "--ema-decay", type=positive, metavar="DECAY", help="Decay of the moving average per update.  [default: 0.999]"
)
@click.option("--clip-norm", type=positive, metavar="NORM", help="Clip the gradient of each update to this 2-norm.")
@click.option(
    "--learning-rate",
    type=positive,
    metavar="RATE",
    help="Learning rate of the first parameter group; the others keep their ratio, and a schedule starts here.  "
    "[default: the plan's, if it was tuned, else the workload's]",
)
@click.option("--eval-every", type=count, metavar="N", help="Updates between evaluations.  [default: one per epoch]")
@click.option(
    "--checkpoint-every", type=count, default=100, show_default=True, metavar="N", help="Updates between checkpoints."
)
@click.option(
    "--max-checkpoints", type=count, default=3, show_default=True, metavar="N", help="Keep the newest N checkpoints."
)
@click.option(
    "--resume",
    type=click.Choice(("auto", "must", "never")),
    default="auto",
    show_default=True,
    help="auto: resume if the folder has a checkpoint; must: fail without one; never: refuse such a folder.",
)
@click.option(
    "--seed", type=natural, default=0, show_default=True, metavar="N", help="Seed of weights, order and random numbers."
)
@click.option(
    "--workers", type=natural, default=0, show_default=True, metavar="N", help="Processes that read the dataset."
)
@click.option(
    "--skip-nonfinite", is_flag=True, help="Skip updates whose loss or gradient is not finite, instead of ending."
)
@click.option(
    "--check",
    type=click.Choice(CHECKS),
    default="warn",
    show_default=True,
    help="If the first updates show a wrong `weight`: warn, end the run (strict), or do not check it (off).",
)
def command(workload: str, **asked: Any) -> None:
    """Train WORKLOAD with batches of a given size, in micro-batches that fit.

    WORKLOAD is model.py or model.py:name, with a `dataset`. Optional are `evaluation_dataset`,
    `evaluate(model, batch)`, `optimizer(params)`, `scheduler(optimizer)` and `collate(samples)`; to count tokens,
    `length(sample)` or `lengths(batch)`, `trim(batch)` and `padding`.

    Without --plan or --micro-batch it plans first. Every update equals the full batch's. On an out-of-memory
    error the update is retried in smaller micro-batches, which grow again later. An evaluation has a micro-batch of its
    own.

    The same command resumes an interrupted run from its newest checkpoint, or trains longer with more
    --epochs or --steps. The micro-batch, plan, device and the flags on evaluation and checkpoints may change. A
    different target, seed, model, dataset, optimizer setting or precision is refused.

    Files in the run folder:
      metrics.jsonl  loss, gradient norm, learning rate, speed and peak bytes of each update
      plan.json      the plan, as written by `autoaccum plan -o`
      model.pt       the trained weights, at the end; ema.pt is their average, with --ema
      checkpoints, and TensorBoard's files if it is installed

    Under torchrun each rank runs its share of every update, and the weights equal those of one process. A run may
    resume on a different number of ranks.

    Examples:
      autoaccum fit model.py --target-batch 256 --epochs 3 --run-dir runs/a
      torchrun --nproc-per-node 4 -m autoaccum fit model.py --target-batch 256 --epochs 3 --run-dir runs/a

    Exit codes:
      0    trained
      1    does not fit, or loss or gradient is not finite
      2    wrong usage, or the workload is missing or raises
      3    could not be planned, checkpoints could not be written or read, or another rank failed or ended
      130  ended by Ctrl-C, 143 by SIGTERM, 129 by SIGHUP; all three after a checkpoint
    """
    outputs = Outputs(asked)
    run_dir = Path(asked["run_dir"]).absolute()  # A workload may change the working directory.
    # Of several ranks, only the first shows anything but errors.
    shows = not is_one_of_ranks() or os.environ.get("RANK") == "0"
    try:
        from autoaccum.accumulation.ranks.launch import launched_ranks

        with stdout_kept() as own_stdout, launched_ranks(on_cards=asked["device"] != "cpu") as ranks:  # gloo prints.
            result = _train(workload, asked, run_dir, quiet=outputs.quiet or not shows)
            if shows:
                with own_stdout():
                    _show(result, asked, ranks.size, outputs)
    except (KeyboardInterrupt, SystemExit) as leaving:
        if not _is_signal(leaving):
            raise
        if shows:
            how = "interrupted" if isinstance(leaving, KeyboardInterrupt) else "ended"
            same = "the same command without --resume" if asked["resume"] == "never" else "the same command"
            kept = _state_kept(run_dir)
            _say(f"{how} before training began" if kept is None else f"{how}; {kept}; {same} goes on from there")
        if isinstance(leaving, SystemExit):
            raise
        raise click.exceptions.Exit(CODE_INTERRUPTED) from None
    except AutoaccumError as error:
        # The first rank tells of it, by its own error or as told by this rank, unless it is gone itself.
        if shows or isinstance(error, RankLostError) or getattr(error, "user_traceback", None):
            raise
        raise click.exceptions.Exit(error.exit_code) from None


def _train(workload: str, asked: dict[str, Any], run_dir: Path, *, quiet: bool) -> FitResult:
    from autoaccum.devices.child.failures import describe_failure, failure_error
    from autoaccum.reporting.fit_report import TrainingProgress
    from autoaccum.training.fit_request import FitRequest
    from autoaccum.training.trainer import train

    request = FitRequest.of(workload, asked)
    with ExitStack() as stack:
        progress = stack.enter_context(TrainingProgress(make_console(stderr=True), quiet=quiet))
        stack.enter_context(warnings.catch_warnings())
        warnings.showwarning = lambda message, *_, **__: progress.warn(str(message))  # A line for each.
        try:
            return train(request, on_event=progress.notify)
        except BaseException as error:
            if _is_signal(error):
                raise
            stack.close()
            if (kept := _state_kept(run_dir)) is not None:
                _say(f"note: {kept}")
            if isinstance(error, AutoaccumError):
                raise
            # What is none of ours is raised as what it means: memory, or the user's code, shown as theirs.
            raise failure_error(describe_failure(error, "training"), "the device") from error


def _is_signal(error: BaseException) -> bool:
    return isinstance(error, KeyboardInterrupt) or (isinstance(error, SystemExit) and error.code in _SIGNALLED)


def _show(result: FitResult, asked: dict[str, Any], ranks: int, outputs: Outputs) -> None:
    from autoaccum.reporting.fit_report import fit_blocks, fit_record

    update = {name: asked[name] for name in ("target_batch", "target_tokens")}
    longer = {name: 2 * asked[name] for name in ("epochs", "steps") if asked[name] is not None}
    command = running_words(without=(*OUTPUT_FLAGS, "resume"), instead=longer)
    if ranks > 1:
        started = ["torchrun", "--nproc-per-node", os.environ.get("LOCAL_WORLD_SIZE", str(ranks))]
        command = [*started, "-m", "autoaccum", *command[command.index("fit") :]]
    outputs.show(
        lambda: fit_record(result, **(update if result.plan is None else result.plan.update)),
        lambda: fit_blocks(result, command=command),
        apart=True,
    )
    if result.unsaved is not None:
        raise CheckpointError(f"the end of the training is not on disk: {result.unsaved}")


def _state_kept(run_dir: Path) -> str | None:
    """Return which state the newest checkpoint has, as a sentence; None without one."""
    newest = max((run_dir / "checkpoints").glob("checkpoint-*.pt"), default=None)
    if newest is None:
        return None
    return f"the state after update {int(newest.stem.rpartition('-')[2])} is kept: {relative_path(newest)}"


def _say(text: str) -> None:
    make_console(stderr=True).print(text, soft_wrap=True)

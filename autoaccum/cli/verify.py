"""`autoaccum verify`: check that the accumulated update is the full batch's, and find out why it is not."""

from __future__ import annotations

from functools import partial
from typing import Any

import click

from autoaccum.cli.flags import OUTPUT_FLAGS, WORKLOAD_OR_COMMAND, HelpWithHeadings, options
from autoaccum.cli.outputs import Outputs, page, running_words, stdout_kept
from autoaccum.reporting.console import make_console, show


@click.command("verify", cls=HelpWithHeadings, short_help="Check that an accumulated update is the full batch's.")
@click.argument("workload", metavar=WORKLOAD_OR_COMMAND)
@options(
    "verify",
    *("target_batch", "micro_batch", "as_json", "output", "report", "force", "verbose", "quiet"),
    target_batch={"required": False, "default": 16, "show_default": True, "help": "Samples of the full batch."},
    micro_batch="The most samples to run at once.  [default: a quarter]",
    world_size="Compare an update of N ranks, which are started on this machine, with that of one process.",
    precision={
        "metavar": "fp64|fp32",
        "help": "Precision of the comparison.  [default: fp64, whatever the workload trains in]",
    },
    device={"default": "cpu", "metavar": "cpu|cuda|cuda:N", "help": "Where the comparison runs."},
    time_limit="Stop the search for causes after this time. The answer is printed before it starts.  [default: 60]",
    verbose="Show everything that was compared, and every note.",
)
def command(workload: Any, **asked: Any) -> None:
    """Compare an update in micro-batches with the full batch's, and find the cause of a difference.

    WORKLOAD is model.py or model.py:name. From equal copies, with the same random numbers, it compares the loss,
    every gradient and every buffer, for a whole window and for a shorter one, such as the last of an epoch. To compare
    a loop of your own, define `accumulate(model, micro_batches)` in the file, which leaves the gradient of an update in
    `.grad`.

    If something differs, experiments find the cause: BatchNorm, a loss or model that compares samples, a wrong
    `weight` or `reduction`, random numbers that mix samples, or, in a loop of your own, losses that are not divided,
    are divided twice, or are divided wrongly in a shorter window. `proved` says that the comparison is equal with
    the cause removed. For anything else the answer is the first tensor that differs.

    With --world-size 2, two processes make the update, each with its share of the batch, and call `accumulate` with
    their own micro-batches: wrap the model in DistributedDataParallel there, or shard it by fully_shard, as your script
    does.

    COMMAND is a training command, with {micro_batch} and {iter_size} where it takes its batch size and accumulation
    steps. It runs twice up to its first optimizer step, on the same samples and without dropout: once with the full
    batch, and once in micro-batches. The gradients of both runs are compared.

    A large model in float64 takes long and needs much memory: --target-batch 4 --micro-batch 2 answers sooner.

    Examples:
      autoaccum verify model.py --batchnorm frozen
      autoaccum verify -- python train.py --batch-size {micro_batch} --accum {iter_size}

    Exit codes:
      0  equivalent
      1  not equivalent
      2  wrong usage, or the workload or command is missing or fails
      3  the updates could not be compared, or the weighting could not be tested
    """
    from autoaccum.api import verify
    from autoaccum.reporting.verify_report import OPENINGS, VerificationProgress, difference_line, verification_blocks
    from autoaccum.verification.verification_result import Diagnosing

    outputs = Outputs(asked, workload)
    answers: list[Diagnosing] = []

    def listen(event: Any) -> None:
        """Print the answer before the search for its causes."""
        if isinstance(event, Diagnosing) and not outputs.as_json:
            if not answers:
                progress.stop()
                with own_stdout():
                    show(make_console(), difference_line(event.comparison))
            answers.append(event)
        progress.notify(event)

    with (
        stdout_kept() as own_stdout,
        VerificationProgress(make_console(stderr=True), quiet=outputs.quiet) as progress,
    ):
        progress.show(OPENINGS[not isinstance(workload, str)])
        result = verify(workload, on_event=listen, **asked)
    blocks = partial(verification_blocks, result, again=running_words(without=OUTPUT_FLAGS))
    made_of = (result.workload, result.environment)
    outputs.show(
        result.to_json,
        lambda: blocks(verbose=outputs.verbose, answered=bool(answers)),
        files={
            "-o": lambda _: result.to_json(),
            "--report": lambda _: page(str(result.workload["name"]), {"Verification": blocks(verbose=True)}, made_of),
        },
    )
    if result.exit_code:
        raise click.exceptions.Exit(result.exit_code)

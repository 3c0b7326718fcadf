"""`autoaccum tune`: search the learning rate by a study of real trainings."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from autoaccum.cli.flags import OUTPUT_FLAGS, SET_OF_WORKLOAD, CountOrRange, HelpWithHeadings, count, natural, options
from autoaccum.cli.outputs import CODE_INTERRUPTED, Contents, Outputs, page, running_words
from autoaccum.reporting.console import make_console

if TYPE_CHECKING:
    from autoaccum.reporting.console import Block
    from autoaccum.tuning.tuning_records import Tuning

_CODE_NOTHING_FOUND = 1
_OF_THE_STUDY = (
    *("target_batch", "trials", "learning_rate", "budget_samples", "storage", "study"),
    *("memory", "reserve", "time_limit"),
)
"""The flags that a command for `fit` leaves out, or gives itself."""


@click.command("tune", cls=HelpWithHeadings, short_help="Search learning rate and batch by a study of real trainings.")
@click.argument("workload")
@click.option(
    "--trials",
    type=count,
    default=30,
    show_default=True,
    metavar="N",
    help="Trials of the study, including earlier ones.",
)
@click.option(
    "--learning-rate",
    metavar="LOW..HIGH",
    help="Range to search, such as 1e-4..1e-1.  [default: a hundredth to a hundred times the workload's]",
)
@click.option("--budget-samples", type=count, metavar="N", help="Samples that a trial trains on.  [default: one epoch]")
@click.option(
    "--storage",
    metavar="FILE",
    default="tune.db",
    show_default=True,
    help="The SQLite file of the study.",
)
@click.option("--study", metavar="NAME", help="Name of the study.  [default: the workload's]")
@click.option(
    "--seed", type=natural, default=0, show_default=True, metavar="N", help="Seed of the sampler and all trials."
)
@options(
    "tune",
    *("target_batch", "as_json", "output", "report", "force", "quiet"),
    target_batch={
        "type": CountOrRange(),
        "metavar": "N|N..M",
        "help": "Samples per update, or a range, searched by doublings of N.",
    },
    device="Where to train; auto is the GPU if there is one.",
    time_limit="Start no trial after this time.",
    overrides=SET_OF_WORKLOAD,
    output="Write the plan of the best setting, for `autoaccum fit --plan`.",
    force="Overwrite existing files, but never the study.",
)
def command(workload: str, **asked: Any) -> None:
    """Search for the best learning rate, effective batch and micro-batch for WORKLOAD.

    WORKLOAD is model.py or model.py:name, with a `dataset`. Losses are measured on its
    `evaluation_dataset`, or on a tenth of the dataset that no trial trains on.

    Each trial trains in a process of its own, from the same weights and in the same order of data. The first one has
    the workload's own learning rate. Poor trials are pruned at a quarter or at half of the budget. A trial that
    diverges or runs out of memory finishes with an infinite loss. The micro-batch is searched only if it changes the
    training, as with BatchNorm; otherwise the fastest is planned once, as with `plan --prefer fastest`.

    Optuna's commands and dashboard read the study. The same command resumes it, and several may run at once; if they
    share a card, divide it by --memory. The best of many losses is lower than the loss on new data: keep a test set
    apart. The rate is the best for the budget; longer training may need another.

    Run it once, not under torchrun: trials train on one card.

    Example:
      autoaccum tune model.py --target-batch 64..1024 --trials 20 -o best.json

    Exit codes:
      0    a best setting was found
      1    no trial finished with a finite loss, or not even one sample fits
      2    wrong usage, or the workload is missing or raises
      3    could not be planned or trained, or the study could not be read or written
      130  ended by Ctrl-C, 143 by SIGTERM, 129 by SIGHUP; finished trials are kept
    """
    from autoaccum.api import tune
    from autoaccum.reporting.tune_report import tuning_blocks, tuning_record

    outputs = Outputs(asked, workload, {"the study itself": Path(asked["storage"])})

    def blocks() -> list[Block]:
        return tuning_blocks(tuning, _offers(tuning, outputs.written.get("-o")))

    try:
        tuning = tune(workload, progress=not outputs.quiet, **asked)
        files: Contents = {"--report": lambda _: page(tuning.study, {"Study": blocks()}, (tuning.workload,))}
        if (plan := tuning.plan) is not None:
            files = {"-o": lambda _: plan.to_json(), **files}
        outputs.show(lambda: tuning_record(tuning), blocks, files=files, apart=True)
    except KeyboardInterrupt:
        click.echo("interrupted: finished trials are kept, and the same command goes on", err=True)
        raise click.exceptions.Exit(CODE_INTERRUPTED) from None
    if "-o" in outputs.files and tuning.plan is None:
        note = f"note: {outputs.files['-o']} was not written: there is no best setting"
        make_console(stderr=True).print(note, soft_wrap=True)
    if tuning.best is None:
        raise click.exceptions.Exit(_CODE_NOTHING_FOUND)


def _offers(tuning: Tuning, kept: Path | None) -> dict[str, list[str]]:
    """Return the words of commands that are offered, by what they do."""
    params = click.get_current_context().params
    offers: dict[str, list[str]] = {}
    if kept is not None and tuning.best is not None:
        words = running_words(without=(*OUTPUT_FLAGS, *_OF_THE_STUDY))
        words[words.index("tune")] = "fit"
        words += ["--target-batch", str(tuning.best.target_batch), "--epochs", "3"]
        offers[f"train by its plan, {kept}"] = [*words, "--plan", str(kept), "--run-dir", f"runs/{kept.stem}"]
    elif tuning.best is not None:
        offers["keep its plan"] = [*running_words(without=OUTPUT_FLAGS), "-o", "best.json"]
    more = running_words(without=(*OUTPUT_FLAGS, "trials"))
    return offers | {"go on with more trials": [*more, "--trials", str(2 * params["trials"])]}

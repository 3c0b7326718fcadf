"""`autoaccum tune`: the learning rate that trains best, by a study."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from autoaccum.cli.flags import count, natural, options, seconds
from autoaccum.cli.outputs import check_apart, running_words
from autoaccum.errors import AutoaccumError, NotMeasuredError, UsageError

if TYPE_CHECKING:
    from autoaccum.tuning.tuning_result import Tuning

_CODE_NOTHING_FOUND = 1
_CODE_INTERRUPTED = 130
_OUTPUTS = ("as_json", "output", "plot", "force", "quiet")
_OF_THE_STUDY = (
    *("target_batch", "trials", "learning_rate", "budget_samples", "budget_seconds", "confirm", "storage", "study"),
    *("sampler", "pruner", "memory", "reserve", "time_limit", "trial_limit", "heartbeat"),
)
"""What a training has no use for, or is told anyway."""


@click.command("tune", short_help="Search the learning rate by a study of real trainings.")
@click.argument("workload")
@click.option(
    "--target-batch", metavar="N|LOW..HIGH", required=True, help="Samples per update, or doublings to search: 64..1024."
)
@click.option(
    "--trials", type=count, default=30, show_default=True, metavar="N", help="Of the study in all, earlier ones too."
)
@click.option(
    "--learning-rate", metavar="LOW..HIGH", help="Such as 1e-4..1e-1.  [default: the workload's own / 100 to x 100]"
)
@click.option("--budget-samples", type=count, metavar="N", help="Of each trial.  [default: once over the data]")
@click.option("--budget-seconds", type=seconds, metavar="SECONDS", help="Likewise, by time.")
@click.option(
    "--confirm",
    type=natural,
    default=3,
    show_default=True,
    metavar="N",
    help="How many of the best are repeated with two other seeds each.",
)
@click.option(
    "--storage", metavar="FILE|URL", help="Of the study: a file of SQLite, a .journal, or a URL.  [default: tune.db]"
)
@click.option("--study", metavar="NAME", help="Its name in there.  [default: the workload's]")
@click.option("--seed", type=natural, default=0, show_default=True, metavar="N", help="Of the sampler and all trials.")
@click.option("--sampler", default="tpe", show_default=True, metavar="tpe|random", help="Optuna's, draws the settings.")
@click.option(
    "--pruner", default="halving", show_default=True, metavar="halving|none", help="Optuna's, ends trials early."
)
@options(
    "device",
    "memory",
    "reserve",
    "precision",
    "batchnorm",
    "multiple_of",
    "optimizer",
    "time_limit",
    "trial_limit",
    device="Where to train.",
    time_limit="No trial begins that many seconds after the search began; repetitions still run.",
    trial_limit="When a trial is given up.",
)
@click.option(
    "--heartbeat", type=count, default=20, show_default=True, metavar="SECONDS", help="Between a trial's signs of life."
)
@click.option("--plot", metavar="FOLDER", help="Draw what was found: four pictures as .svg.")
@click.option("--json", "as_json", is_flag=True, help="What was found as JSON on stdout, and nothing else there.")
@click.option("-o", "--output", metavar="FILE", help="Keep the plan of the best setting, for `autoaccum fit --plan`.")
@click.option("--force", is_flag=True, help="Overwrite that file and those pictures; never the study.")
@click.option("-q", "--quiet", is_flag=True, help="No progress; warnings and errors remain.")
def command(
    workload: str, as_json: bool, output: str | None, plot: str | None, force: bool, quiet: bool, **asked: Any
) -> None:
    """Search the learning rate, and on request the effective batch, that WORKLOAD trains best with.

    WORKLOAD is model.py, model.py:name or package.module:name, with a `dataset`. Each trial trains in a process of its
    own, and is judged by its loss on held-out data. The micro-batch is timed, and searched only where it changes the
    training. The study is Optuna's: the same command goes on with it, and may run several times at once.

    Exit code: 0 a best setting was found, 1 no trial came to the end of its budget with a finite loss, or not even one
    sample fits, 2 bad usage or workload, or an exception of its code, 3 could not be measured or kept, 130 Ctrl-C, 143
    SIGTERM, 129 SIGHUP, all three with the trials kept.
    """
    from autoaccum.api import tune

    _check_outputs(workload, asked["storage"], output, plot, force=force)
    try:
        tuning = tune(workload, progress=not quiet, **asked)
        _show(tuning, output, plot, force=force, as_json=as_json, quiet=quiet)
    except KeyboardInterrupt:
        click.echo("interrupted: finished trials are kept, and the same command goes on", err=True)
        raise click.exceptions.Exit(_CODE_INTERRUPTED) from None
    if tuning.best is None:
        raise click.exceptions.Exit(_CODE_NOTHING_FOUND)


def _check_outputs(workload: str, storage: str | None, output: str | None, plot: str | None, *, force: bool) -> None:
    """Refuse now what could not be written later.

    Raises:
        UsageError: A file is there or cannot be written, or is the workload or the study; or matplotlib is missing.
    """
    from autoaccum.files import check_output
    from autoaccum.reporting.figures.file_format import picture_format
    from autoaccum.tuning.study import parse_storage_address, storage_file

    study = storage_file(parse_storage_address(storage))
    if output is not None:
        check_apart("-o", output, workload)
        if study is not None and Path(output).resolve() == Path(study).resolve():
            raise UsageError(f"-o names the study itself, {output}", hint="choose another name")
        check_output(output, force=force, hint="for the record on stdout, use --json")
    if plot is None:
        return
    picture_format("throughput.svg")
    folder = Path(plot)
    if folder.exists() and (not folder.is_dir() or (any(folder.glob("*.svg")) and not force)):
        raise UsageError(f"{plot} is there already", hint="choose another folder, or overwrite its pictures by --force")


def _show(tuning: Tuning, output: str | None, plot: str | None, *, force: bool, as_json: bool, quiet: bool) -> None:
    """Write what is asked for, and print what was found, also where that cannot be written: it took its time."""
    from autoaccum.reporting.console import make_console
    from autoaccum.reporting.tune_report import print_tuning, tuning_record

    stderr, written = make_console(stderr=True), dict[str, Path]()
    try:
        if output is not None and tuning.best is not None:
            _keep_plan(tuning, Path(output), force=force)
            written["its plan"] = Path(output)
        if plot is not None:
            _write_pictures(tuning, Path(plot), force=force)
            written["pictures"] = Path(plot)
    except AutoaccumError:
        print_tuning(stderr, tuning, _offers(tuning, output), written)
        raise
    if as_json:
        click.echo(json.dumps(tuning_record(tuning), indent=2, allow_nan=False))
    else:
        if not quiet:
            stderr.print()
        print_tuning(make_console(), tuning, _offers(tuning, output), written)
    if output is not None and tuning.best is None:
        stderr.print(f"note: {output} was not written: there is no best setting", soft_wrap=True)


def _keep_plan(tuning: Tuning, output: Path, *, force: bool) -> None:
    if tuning.plan is None:
        raise NotMeasuredError(
            f"{output} was not written: the best setting has no plan that was proved",
            hint="plan for it with `autoaccum plan`, and train with `autoaccum fit --learning-rate`",
        )
    tuning.plan.save(output, force=force)


def _write_pictures(tuning: Tuning, folder: Path, *, force: bool) -> None:
    from autoaccum.files import write_bytes
    from autoaccum.reporting.figures.tuning_figure import draw_tuning

    drawn = draw_tuning(tuning, click.get_current_context().params["storage"])
    folder.mkdir(parents=True, exist_ok=True)
    for file, content in drawn.items():
        write_bytes(folder / file, content, force=force)


def _offers(tuning: Tuning, output: str | None) -> dict[str, list[str]]:
    """Return the words of commands that are offered, by what they do; a password is never among them."""
    params = click.get_current_context().params
    shown = {"storage": tuning.storage} if "://" in (params["storage"] or "") else {}
    found: dict[str, list[str]] = {}
    if tuning.best is not None:
        kept = output or "best.json"
        if output is None:
            found["keep its plan"] = [*running_words(without=_OUTPUTS, instead=shown), "-o", kept]
        words = running_words(without=(*_OUTPUTS, *_OF_THE_STUDY))
        words[words.index("tune")] = "fit"
        target = str(tuning.best.setting.target_batch)
        run = ["--run-dir", f"runs/{Path(kept).stem}"]
        found["train with it"] = [*words, "--target-batch", target, "--epochs", "3", "--plan", kept, *run]
    more = running_words(without=(*_OUTPUTS, "trials"), instead=shown)
    found["go on with more trials"] = [*more, "--trials", str(2 * params["trials"])]
    return found

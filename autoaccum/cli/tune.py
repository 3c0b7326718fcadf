"""`autoaccum tune`: the learning rate that trains best, by a study."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import click

from autoaccum.cli.flags import count, natural, options, seconds
from autoaccum.cli.tune_offers import offers
from autoaccum.cli.tune_outputs import TuneOutputs
from autoaccum.cli.tune_seen import Seen, say
from autoaccum.errors import AutoaccumError

if TYPE_CHECKING:
    from autoaccum.tuning.records import Tuning

_SIGNALLED = (129, 143)
"""Exit codes of SIGHUP and SIGTERM."""
_CODE_NOTHING_FOUND = 1
_CODE_INTERRUPTED = 130


@click.command("tune", short_help="Search the learning rate by a study of real trainings.")
@click.argument("workload")
@click.option(
    "--target-batch", metavar="N|LOW..HIGH", required=True, help="Samples per update, or doublings to search: 64..1024."
)
@click.option(
    "--trials", type=count, default=30, show_default=True, metavar="N", help="Of the study in all, earlier ones too."
)
@click.option(
    "--learning-rate",
    metavar="LOW..HIGH",
    help="The range to search: 1e-4..1e-1.  [default: the workload's own / 100 to x 100]",
)
@click.option(
    "--budget-samples", type=count, metavar="N", help="How long each trial trains.  [default: once over the data]"
)
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
    "--storage",
    metavar="FILE|URL",
    help="Where the study is kept: a file of SQLite, a .journal, or a URL of Optuna's.  [default: tune.db]",
)
@click.option("--study", metavar="NAME", help="Its name in there.  [default: the workload's]")
@click.option("--seed", type=natural, default=0, show_default=True, metavar="N", help="Of the sampler and all trials.")
@click.option("--sampler", default="tpe", show_default=True, metavar="tpe|random", help="What draws the settings.")
@click.option(
    "--pruner",
    default="halving",
    show_default=True,
    metavar="halving|none",
    help="What ends trials that are behind: successive halving, but for slower rates that may catch up.",
)
@click.option("--plan", metavar="FILE", help="Whose ceiling counts.  [default: the study's, or it is planned first]")
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
    "--heartbeat",
    type=seconds,
    default=20.0,
    show_default=True,
    metavar="SECONDS",
    help="Between signs of life, by which other machines know of a worker that died; in a journal 15 or more.",
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
    own, and is judged by its loss on held-out data. With exact accumulation the micro-batch changes speed and memory,
    not the gradient: samples per second are measured once over micro-batches, and no trial is spent on them unless
    the model couples the samples of a micro-batch. The same command goes on with the study, and may run several times
    at once.

    Exit code: 0 a best setting was found, 1 no trial came to the end of its budget with a finite loss, or not even one
    sample fits, 2 bad usage or workload, or an exception of its code, 3 could not be measured or kept, 130 Ctrl-C, 143
    SIGTERM, 129 SIGHUP, all three with the trials kept.
    """
    outputs = TuneOutputs(output, plot, force=force)
    outputs.check(workload, asked["storage"])
    seen = Seen()
    try:
        tuning = _tune(workload, asked, seen, quiet=quiet)
        _show(tuning, outputs, as_json=as_json, quiet=quiet)
    except KeyboardInterrupt:
        seen.tell_end("interrupted")
        raise click.exceptions.Exit(_CODE_INTERRUPTED) from None
    except SystemExit as leaving:
        if leaving.code in _SIGNALLED:
            seen.tell_end("ended")
        raise
    except AutoaccumError:
        seen.tell_kept()
        raise
    if outputs.unwritten is not None:
        say(f"note: {outputs.unwritten} was not written: there is no best setting")
    if tuning.best is None:
        raise click.exceptions.Exit(_CODE_NOTHING_FOUND)


def _tune(workload: str, asked: dict[str, Any], seen: Seen, *, quiet: bool) -> Tuning:
    from autoaccum.reporting.tuned import tune

    return tune(workload, progress=not quiet, on_event=seen.hear, **asked)


def _show(tuning: Tuning, outputs: TuneOutputs, *, as_json: bool, quiet: bool) -> None:
    from autoaccum.reporting.consoles import make_console
    from autoaccum.reporting.tune_record import tuning_record
    from autoaccum.reporting.tune_table import print_tuning

    stderr = make_console(stderr=True)
    offer = offers(tuning)
    try:
        outputs.write(tuning)
    except BaseException:
        # The trials took their time: what they found is shown even where it cannot be kept.
        print_tuning(stderr, tuning, **offer | outputs.written)
        raise
    if as_json:
        click.echo(json.dumps(tuning_record(tuning), indent=2, allow_nan=False))
        return
    if not quiet:
        stderr.print()
    print_tuning(make_console(), tuning, **offer | outputs.written)

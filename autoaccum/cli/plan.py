"""`autoaccum plan`: the main job."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from autoaccum.cli.flags import count, options
from autoaccum.cli.outputs import Outputs, running_words

if TYPE_CHECKING:
    from autoaccum.planning.plan_events import Event

_OUTPUTS = ("as_json", "output", "emit", "plot", "force", "quiet", "verbose")
"""What only concerns this run's output."""


@click.command("plan", short_help="Find the micro-batch that fits, and the schedule.")
@click.argument("workload")
@click.option("--target-batch", type=count, metavar="N", required=True, help="Samples per update, over all ranks.")
@options(
    "device",
    "gpu",
    "memory",
    "reserve",
    "precision",
    "batchnorm",
    "accumulate_in",
    "optimizer",
    "keeps",
    "evaluation_batch",
    "worst_of",
    "world_size",
    "multiple_of",
    "equal",
)
@click.option("--max-micro-batch", type=count, metavar="N", help="Try no larger one.")
@click.option("--max-trials", type=count, metavar="N", help="The search ends after so many; what ran is confirmed.")
@options("time_limit", "trial_limit", time_limit="Likewise, after so many seconds.")
@click.option("--least", is_flag=True, help="Measure the least budget at which the schedule still runs.")
@click.option(
    "--explain",
    is_flag=True,
    help="Tell where the memory of the card goes, and what would change that. Told of plans: where nothing fits, plan "
    "with a larger --memory or --gpu to see it.",
)
@click.option("--json", "as_json", is_flag=True, help="The plan as JSON on stdout, and nothing else there.")
@click.option("-o", "--output", metavar="FILE", help="Keep the plan in a file.")
@click.option("--emit", metavar="FILE", help="Write the training step as plain PyTorch, without autoaccum.")
@click.option(
    "--plot", metavar="FILE", help="Draw where the memory of a card goes, or the trials of a CPU, as .svg or .png."
)
@click.option("--force", is_flag=True, help="Overwrite those files.")
@click.option("-v", "--verbose", is_flag=True, help="All that is known of the plan, and every warning and note.")
@click.option("-q", "--quiet", is_flag=True, help="No progress; warnings and errors remain.")
def command(
    workload: str,
    as_json: bool,
    output: str | None,
    emit: str | None,
    plot: str | None,
    force: bool,
    verbose: bool,
    quiet: bool,
    **request: Any,
) -> None:
    """Find out how to train WORKLOAD with batches of a given size: by real trials, or for a --gpu by prediction.

    WORKLOAD is model.py, model.py:name or package.module:name. Trials grow until memory is really out; the plan is
    the largest micro-batch that ran, and the fewest of them that make up the batch, confirmed from a clean state.
    With --gpu nothing runs on a card: one training step is traced, and its allocations replayed in that card's memory.

    Exit code: 0 a plan was made, 1 nothing fits, 2 bad usage or workload, 3 could not be measured.
    """
    from autoaccum.accumulation.argument_checks import check_launch
    from autoaccum.api import plan
    from autoaccum.reporting.console import make_console, print_labelled
    from autoaccum.reporting.plan_report import PlanProgress, print_plan

    check_launch()
    outputs = Outputs(output, emit, plot, force=force)
    outputs.check(workload, request["world_size"])
    stderr = make_console(stderr=True)
    with PlanProgress(stderr, quiet=quiet) as progress:

        def listen(event: Event) -> None:
            progress.notify(event)
            outputs.listen(event)

        on_output = progress.print_output if stderr.can_redraw else None
        began = time.monotonic()
        found = plan(workload, picture=plot is not None, on_event=listen, on_output=on_output, **request)
    offer: dict[str, Any] = {
        "command": running_words(without=_OUTPUTS),
        "name": _free_name(),
        "seconds": time.monotonic() - began,
        "verbose": verbose,
    }
    try:
        outputs.write(found)
    except BaseException:
        # The trials took their time: what they found is shown even where it cannot be kept.
        print_plan(stderr, found, **offer | outputs.written)
        raise
    if as_json:
        for warning in found.warnings:
            print_labelled(stderr, "warning", warning, "yellow")
        click.echo(found.to_json(), nl=False)
        return
    if not quiet:
        stderr.print()
    print_plan(make_console(), found, **offer | outputs.written)


def _free_name() -> str:
    """The name of a plan file that is not there yet."""
    name, number = "plan.json", 1
    while Path(name).exists():
        number += 1
        name = f"plan-{number}.json"
    return name

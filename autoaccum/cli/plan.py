"""`autoaccum plan`: find the micro-batch that fits, and the schedule of the batch."""

from __future__ import annotations

import os
import signal
import time
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from autoaccum.checks import is_one_of_ranks, join_words
from autoaccum.cli.flags import CountOrRange, HelpWithHeadings, count, options
from autoaccum.cli.outputs import PlanFiles, running_words
from autoaccum.errors import AutoaccumError, RankLostError, UsageError
from autoaccum.integrations.arguments_from_plan import FRAMEWORKS, check_framework, for_framework, has_coarse_parts
from autoaccum.options import Options, resolve_spec, taken_by

if TYPE_CHECKING:
    from autoaccum.planning.plan_events import Event

_CODE_INTERRUPTED = 128 + signal.SIGINT
_OUTPUTS = ("as_json", "output", "emit", "plot", "report", "force", "quiet", "verbose")
"""The flags that concern only the output of this run."""


@click.command("plan", cls=HelpWithHeadings, short_help="Find the micro-batch that fits, and the schedule.")
@click.argument("workload")
@options(
    "plan",
    *("target_batch", "max_micro_batch", "fit_micro_batch", "exact_max", "as_json", "output", "report", "force"),
    *("verbose", "quiet"),
    world_size={"type": CountOrRange()},
    output="Write the plan to a file, for `fit --plan` and Plan.load.",
)
@click.option(
    "--explain", is_flag=True, help="Show where the memory goes at the peak, and which changes would save some."
)
@click.option(
    "--for",
    "framework",
    type=click.Choice(FRAMEWORKS),
    metavar="FRAMEWORK",
    help=f"Show the arguments that make a framework train by the plan: {join_words(FRAMEWORKS, 'or')}.",
)
@click.option(
    "--prefer",
    type=click.Choice(["largest", "fastest"]),
    metavar="largest|fastest",
    default="largest",
    show_default=True,
    help="Of the micro-batches that fit, take the largest, or the smallest that is as fast as any.",
)
@click.option("--max-trials", type=count, metavar="N", help="End the search after N trials, with the largest that ran.")
@click.option("--emit", metavar="FILE", help="Write the training step to a .py file that needs only PyTorch.")
@click.option("--plot", metavar="FILE", help="Draw the memory over an update (on a CPU, the trials) as .svg or .png.")
def command(
    workload: str,
    as_json: bool,
    output: str | None,
    emit: str | None,
    plot: str | None,
    report: str | None,
    framework: str | None,
    force: bool,
    verbose: bool,
    quiet: bool,
    **request: Any,
) -> None:
    """Find the largest micro-batch of WORKLOAD that fits into memory, and the schedule of an update.

    WORKLOAD is model.py or model.py:name. The file defines `model`, `batch(size)`, and
    `loss(model, batch)` or `criterion`. It may also define `optimizer(params)`, `precision`, `weight(batch)` (for a
    mean that is not over samples), and most of the flags below by name.

    Each trial makes two updates in a child process, with the Accumulator that will train. With --gpu they are predicted
    from traces of the step. Under torchrun every rank plans on its own card: omit --world-size.

    What the outcomes of trials mean:
      ok      it ran
      tight   it ran only because the allocator released its cache and retried
      oom     it ran out of memory, in the phase named; "no fit" where it is predicted

    Examples:
      autoaccum plan model.py --target-batch 256                          on this machine
      autoaccum plan model.py --target-batch 256 --gpu rtx4090 --explain  for a card that is not here
      autoaccum plan model.py --target-batch 256 -o plan.json --emit train_step.py
      autoaccum plan model.py --target-batch 256 --for transformers       for a Trainer
      autoaccum compare model.py --target-batch 256 --gpu all             for many cards, in a table

    Exit codes:
      0  a plan was made
      1  not even one sample fits; with --savers auto, not with any savers
      2  wrong usage, or the workload is missing or raises
      3  the trials gave no answer
    """
    from autoaccum.api import plan
    from autoaccum.reporting.console import make_console, print_labelled
    from autoaccum.reporting.plan_report import print_plan
    from autoaccum.reporting.progress import PlanProgress

    _check_is_one_plan(request)
    files = {"-o": output, "--emit": emit, "--plot": plot, "--report": report}
    of_ranks = is_one_of_ranks()
    source = click.get_current_context().get_parameter_source("world_size")
    if request["parallel"] == "fsdp2" and source is ParameterSource.DEFAULT and not of_ranks:
        raise UsageError("--parallel fsdp2 shards over ranks, and there is one", hint="say how many (--world-size N)")
    if framework is not None:
        request["equal"] = True
        options = _read_options(request)
        asked: dict[str, Any] = {name: getattr(options, name) for name in ("parallel", "mesh", "chooses_savers")}
        check_framework(framework, resolve_spec(options.spec), **asked)
        request["exact_max"] |= has_coarse_parts(request["target_batch"] // request["world_size"])
    outputs = PlanFiles(files, framework=framework, force=force)
    request |= {"picture": plot is not None, "report": report is not None}
    outputs.check(workload, 2 if of_ranks else request["world_size"])
    if of_ranks and os.environ.get("RANK", "0") != "0":
        _plan_silently(workload, **request)
        return
    if request["world_size"] > 1 and not of_ranks and _run_ranks(request):
        return
    stderr = make_console(stderr=True)
    with PlanProgress(stderr, quiet=quiet) as progress:

        def listen(event: Event) -> None:
            progress.notify(event)
            outputs.listen(event)

        began = time.monotonic()
        found = plan(workload, on_event=listen, on_output=progress.print_output, **request)
    if framework is not None:
        found = for_framework(found, framework)
    seconds = time.monotonic() - began
    try:
        outputs.write(found, seconds)
    finally:  # The trials took their time: what they found is shown even where it cannot be kept.
        if as_json:
            for warning in found.warnings:
                print_labelled(stderr, "warning", str(warning), "yellow")
            click.echo(found.to_json(), nl=False)
        else:
            if not quiet:
                stderr.print()
            again = running_words(without=_OUTPUTS)
            about: dict[str, Any] = {"seconds": seconds, "verbose": verbose}
            print_plan(make_console(), found, command=again, written=outputs.written, **about)


def _check_is_one_plan(request: dict[str, Any]) -> None:
    """Refuse what asks for several plans."""
    gpu = request["gpu"] or ""
    several = isinstance(request["world_size"], range) or "all" in (gpu.strip().casefold(), *(request["savers"] or ()))
    if "," in gpu or several:
        raise UsageError("plan makes one plan, and these options ask for several", hint="run `autoaccum compare`")


def _read_options(request: dict[str, Any]) -> Options:
    return Options.of("plan", {name: value for name, value in request.items() if name in taken_by("plan")})


def _run_ranks(request: dict[str, Any]) -> bool:
    """Run this command on a rank for each device, if there are enough; leave with their exit code unless it is 0."""
    from autoaccum.devices.device_choice import has_device_for_each

    options = _read_options(request)
    if not has_device_for_each(options):
        return False
    from autoaccum.accumulation.ranks.launch import run_ranks

    words = running_words()
    if code := run_ranks(options.world_size, ["-m", "autoaccum", *words[words.index("plan") :]]):
        raise click.exceptions.Exit(code)
    return True


def _plan_silently(workload: str, **request: Any) -> None:
    """Plan as a rank that is not the first, which says and writes what comes of it, errors too, unless it has ended."""
    from autoaccum.api import plan

    try:
        plan(workload, **request)
    except RankLostError:
        raise
    except AutoaccumError:
        return
    except KeyboardInterrupt:
        raise click.exceptions.Exit(_CODE_INTERRUPTED) from None

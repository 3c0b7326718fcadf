"""`autoaccum plan`: find the micro-batch that fits, and the schedule of the batch."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from autoaccum.cli.flags import CountOrRange, HelpWithHeadings, count, options, report_option
from autoaccum.cli.outputs import Outputs, running_words
from autoaccum.errors import AutoaccumError, DoesNotFitError, RankLostError, UsageError
from autoaccum.options import Options, taken_by
from autoaccum.planning.framework_arguments import FRAMEWORKS, check_framework, for_framework, has_coarse_parts

if TYPE_CHECKING:
    from autoaccum.planning.plan_comparison import PlanRow
    from autoaccum.planning.plan_events import Event

_CODE_INTERRUPTED = 128 + signal.SIGINT
_SHOW = "show"
_OUTPUTS = ("as_json", "output", "emit", "plot", "report", "force", "quiet", "verbose")
"""The flags that concern only the output of this run."""


@click.command("plan", cls=HelpWithHeadings, short_help="Find the micro-batch that fits, and the schedule.")
@click.argument("workload")
@click.option(
    "--target-batch",
    type=count,
    metavar="N",
    required=True,
    help="Samples per update (optimizer step), over all ranks.",
)
@options(
    "plan",
    gpu={
        "metavar": "NAME[,NAME...]|all",
        "help": "Predict for this card instead, without a GPU: a name of `autoaccum gpus`, or a size such as 24GiB. "
        "Several cards, or all, give a table with one row per card.",
    },
    world_size={
        "type": CountOrRange(),
        "metavar": "N|N..M",
        "help": "Ranks that share the target batch. With --gpu also a range: one row per power of two, and the "
        "smallest number of ranks that works (per card).",
    },
)
@click.option("--max-micro-batch", type=count, metavar="N", help="Try no larger micro-batch.")
@click.option(
    "--micro-batch",
    type=count,
    metavar="N",
    help="With --savers auto: choose savers with which micro-batches of N fit.  [default: with which one sample fits]",
)
@click.option("--max-trials", type=count, metavar="N", help="End the search after N trials, as --time-limit does.")
@click.option(
    "--sort",
    type=click.Choice(["card", "ranks", "micro-batch", "iter_size", "needed", "peak", "headroom", "speed", "cost"]),
    metavar="COLUMN",
    help="With several cards: the column to order their table by, the best first.  [default: cost with --prices, "
    "else by generation and memory]",
)
@click.option(
    "--prices",
    metavar="FILE",
    help="With several cards: what an hour of each costs, as CSV with the columns name and per_hour; the table then "
    "has the cost of a million samples, by the estimated speed.",
)
@click.option("--ceiling", is_flag=True, help="Find the largest size that fits to the sample; this takes more trials.")
@click.option("--least", is_flag=True, help="Also measure the smallest budget at which the schedule still runs.")
@click.option(
    "--prefer",
    type=click.Choice(["largest", "fastest"]),
    metavar="largest|fastest",
    default="largest",
    show_default=True,
    help="The micro-batch to take of those that fit. largest: the fewest per update; fastest: the smallest within 2 % "
    "of the most samples per second, by timed updates; with --gpu by an estimate.",
)
@click.option(
    "--explain",
    is_flag=True,
    help="Show where the memory of the card is at the peak, by purpose and by module, and which changes would save "
    "some. Where nothing fits, a larger --memory or --gpu shows it.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the plan as JSON on stdout, and nothing else there.")
@click.option("-o", "--output", metavar="FILE", help="Write the plan to a file, for `fit --plan` and Plan.load.")
@click.option("--emit", metavar="FILE", help="Write the training step as plain PyTorch that needs no autoaccum.")
@click.option(
    "--for",
    "framework",
    type=click.Choice(FRAMEWORKS),
    metavar="FRAMEWORK",
    help=f"Plan for the loop of a framework: equal micro-batches, and the arguments that make it train so. "
    f"{', '.join(FRAMEWORKS)}.",
)
@click.option(
    "--plot",
    metavar="FILE",
    help="Draw the memory of a card over one update, or the trials on a CPU: .svg or .png. With --savers show, "
    "draw the sets.",
)
@report_option
@click.option("--force", is_flag=True, help="Overwrite these files.")
@click.option("-v", "--verbose", is_flag=True, help="Show everything known of the plan, every warning and note.")
@click.option("-q", "--quiet", is_flag=True, help="Show no progress; warnings and errors remain.")
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
    sort: str | None,
    prices: str | None,
    **request: Any,
) -> None:
    """Find the largest micro-batch of WORKLOAD that fits into memory, and the schedule of an update.

    WORKLOAD is model.py, model.py:name or package.module:name. The file defines `model`, `batch(size)`, and
    `loss(model, batch)` or `criterion`, or for a loss that compares samples `outputs(model, batch)` and
    `coupled_loss(outputs, batch)`. Optional are `optimizer(params)`, `precision`, `weight(batch)`, which is the
    divisor of a mean other than over samples, and most of the flags below by name.

    Each trial makes two updates in a child process, with the Accumulator that will train. The first trial grows its
    micro-batches to see where memory ends; then only sizes that change the schedule are tried. The plan has run in a
    fresh process, and the schedule with fewer parts ran out of memory. Its updates have the full batch's gradient, so
    keep your learning rate.

    With --gpu nothing runs on a card: one training step is traced on tensors without values, and its allocations
    are replayed by a model of PyTorch's allocator in that card's memory. Such a plan is marked `predicted`, with a
    margin of error.

    With --gpu and --world-size N the plan is for the first of N ranks. The model is replicated or sharded by FSDP2
    (--parallel), block by block or by the file's `parallelize(model, mesh)`.

    With several cards, or --gpu all, a table has one row per card. Cards with equal kernels share a trace. Speeds are
    estimates, relative to the fastest card.

    With --savers auto the plan takes the least costly savers with which one sample fits; with --micro-batch N, the
    least costly with which N samples fit.

    With --world-size N and N cards, or with --device cpu and --memory for each rank, N ranks run trials at the same
    time, and the smallest of their micro-batches counts. Under torchrun, omit --world-size.

    What the outcomes of trials mean:
      ok      it ran
      tight   it ran only because the allocator released its cache and retried
      oom     it ran out of memory, in the phase named; "no fit" where it is predicted

    What the lines of the plan mean:
      micro-batch   the most samples run at once
      iter_size     micro-batches per update
      peak          the most memory that the allocator reserved, without the CUDA context that
                    nvidia-smi shows too; on a CPU, resident memory
      least budget  the smallest budget at which this schedule still runs; it may lie below the peak,
                    since the allocator packs more closely before it gives up

    Examples:
      autoaccum plan model.py --target-batch 256                          on this machine
      autoaccum plan model.py --target-batch 256 --gpu rtx4090 --explain  for a card that is not here
      autoaccum plan model.py --target-batch 256 -o plan.json --emit train_step.py
      autoaccum plan model.py --target-batch 256 --for transformers       for a Trainer
      autoaccum plan model.py --target-batch 512 --gpu h100 --world-size 1..64 --parallel fsdp2
      autoaccum plan model.py --target-batch 256 --gpu rtx4090 --savers show --plot savers.svg
      autoaccum plan model.py --target-batch 256 --gpu all --sort speed   which cards would train it

    Exit codes:
      0  a plan was made
      1  not even one sample fits; with --savers auto, not with any savers
      2  wrong usage, or the workload is missing or raises
      3  the trials gave no answer
    """
    from autoaccum.api import plan
    from autoaccum.checks import is_one_of_ranks
    from autoaccum.reporting.console import make_console, print_labelled
    from autoaccum.reporting.plan_report import PlanProgress, print_plan

    shows_savers = request["savers"] == (_SHOW,)
    several = _names_several(request["gpu"])
    files = {"-o": output, "--emit": emit, "--plot": plot, "--report": report}
    chosen: dict[str, Any] = {"--explain": request["explain"], "--prefer fastest": request["prefer"] == "fastest"}
    chosen |= {"--least": request["least"], "--for": framework is not None}
    of_ranks = is_one_of_ranks()
    source = click.get_current_context().get_parameter_source("world_size")
    if request["parallel"] == "fsdp2" and source is ParameterSource.DEFAULT and not of_ranks:
        raise UsageError("--parallel fsdp2 shards over ranks, and there is one", hint="say how many (--world-size N)")
    if several or isinstance(request["world_size"], range):
        chosen = files | chosen | {"--savers show": shows_savers}
        _check_table(chosen, request["gpu"], request["world_size"], request["mesh"], sort, prices)
        _compare(workload, sort, prices, as_json=as_json, quiet=quiet, **request)
        return
    if sort is not None or prices is not None:
        flag = "--sort" if prices is None else "--prices"
        raise UsageError(f"{flag} is for the table of several cards", hint="name them (--gpu all, --gpu rtx4090,h100)")
    if shows_savers:
        chosen = files | chosen | {"--plot": None}
        chosen |= {f"--{name.replace('_', '-')}": request[name] for name in ("micro_batch", "max_trials", "time_limit")}
        _show_savers(workload, chosen, plot, as_json=as_json, force=force, quiet=quiet, **request)
        return
    if framework is not None:
        request["equal"] = True
        options = _read_options(request)
        check_framework(
            framework, options.overrides | {"savers": options.savers}, parallel=options.parallel, mesh=options.mesh
        )
        request["ceiling"] |= has_coarse_parts(request["target_batch"] // request["world_size"])
    outputs = Outputs(files, framework=framework, force=force)
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
    offer: dict[str, Any] = {
        "command": running_words(without=_OUTPUTS),
        "name": _free_name(),
        "seconds": time.monotonic() - began,
        "verbose": verbose,
    }
    try:
        outputs.write(found, offer["seconds"])
    except BaseException:
        # The trials took their time: what they found is shown even where it cannot be kept.
        print_plan(stderr, found, written=outputs.written, **offer)
        raise
    if as_json:
        for warning in found.warnings:
            print_labelled(stderr, "warning", warning, "yellow")
        click.echo(found.to_json(), nl=False)
        return
    if not quiet:
        stderr.print()
    print_plan(make_console(), found, written=outputs.written, **offer)


def _names_several(gpu: str | None) -> bool:
    return gpu is not None and ("," in gpu or gpu.strip().casefold() == "all")


def _check_table(
    chosen: dict[str, Any],
    gpu: str | None,
    size: int | range,
    mesh: str | None,
    sort: str | None,
    prices: str | None,
) -> None:
    """Refuse what goes with no table of cards or numbers of ranks; `chosen` are flags that go with one plan only."""
    from autoaccum.checks import check_alone

    given = next((flag for flag, value in chosen.items() if value), None)
    if isinstance(size, range) and not (_names_several(gpu) and given):
        one, hint, text = "number of ranks", "give one number", f"--world-size {size[0]}..{size[-1]}"
        of_cards = {} if _names_several(gpu) else {"--sort": sort, "--prices": prices}
        given = given or next((flag for flag, value in {"--mesh": mesh, **of_cards}.items() if value), None)
    else:
        one, hint, text = "card", "give one name", f"--gpu {gpu}"
    if gpu is None:
        raise UsageError(f"{text} compares numbers of ranks in a simulation", hint="name a card (--gpu NAME)")
    if given is not None:
        raise UsageError(f"{text} makes a table, and {given} goes with one {one}", hint=hint)
    check_alone(text)
    if sort == "cost" and prices is None:
        raise UsageError("--sort cost needs the prices of cards", hint="give them (--prices FILE)")


def _compare(
    workload: str, sort: str | None, prices: str | None, *, as_json: bool, quiet: bool, **request: Any
) -> None:
    """Show what several cards or numbers of ranks would train; also what was found before an error."""
    from autoaccum.devices.simulated.cards import find_cards
    from autoaccum.planning.plan_comparison import CardPlans, choose_world_sizes, compare_plans, find_least
    from autoaccum.planning.plan_request import PlanRequest
    from autoaccum.planning.prices import read_prices
    from autoaccum.reporting.console import make_console, print_labelled
    from autoaccum.reporting.plan_table import (
        plan_table_json,
        print_cards_table,
        print_ranks_table,
        row_line,
        sort_rows,
        table_warnings,
    )
    from autoaccum.reporting.progress import Progress

    gpu, size = request["gpu"], request.pop("world_size")
    within = size if isinstance(size, range) else range(size, size + 1)
    several, ranged = _names_several(gpu), isinstance(size, range)
    cards = {card.name: card for card in find_cards(gpu)}
    stderr = make_console(stderr=True)
    known, unknown = ({}, []) if prices is None else read_prices(prices)
    for text in unknown:
        print_labelled(stderr, "warning", text, "yellow")
    if prices is not None and not known.keys() & cards.keys():
        raise UsageError(f"{prices} has no price of {gpu}", hint="name a card that it has, or --gpu all")
    options = _read_options(request | {"gpu": next(iter(cards)), "world_size": within[0]})
    fields = ("max_micro_batch", "max_trials", "ceiling", "micro_batch")
    asked = PlanRequest(request["target_batch"], options, **{name: request[name] for name in fields})
    rows: list[PlanRow] = []

    def listen(row: PlanRow) -> None:
        rows.append(row)
        progress.say(row_line(row, names_card=several, names_ranks=ranged), "dim")

    def show(found: list[PlanRow], *, is_whole: bool) -> None:
        found = sort_rows(found, sort or ("cost" if prices is not None else None))
        if found and as_json:
            click.echo(plan_table_json(found, is_whole=is_whole), nl=False)
        elif found and several:
            print_cards_table(make_console(), found, names_ranks=ranged)
        elif found:
            print_ranks_table(make_console(), found, is_whole=is_whole)

    try:
        with Progress(stderr, quiet=quiet) as progress:
            plans = CardPlans(
                workload,
                asked,
                cards,
                prices=known,
                on_start=lambda card, ranks: progress.show(
                    f"planning for {f'{ranks} x {card}' if ranged else card} ..."
                ),
                on_output=progress.print_output,
            )
            rows = compare_plans(plans, list(cards), choose_world_sizes(within), listen)
            for text in table_warnings(rows):
                progress.warn(text)
    except BaseException:
        # Their traces took their time. The least number of ranks is not known, since rows are missing.
        show(sorted(rows, key=lambda row: (list(cards).index(row.card), row.world_size)), is_whole=False)
        raise
    show(rows, is_whole=True)
    if not find_least(rows):
        who = f"{within[0]} to {within[-1]} ranks" if ranged else "these cards"
        closest = max(rows, key=lambda row: (row.limit_bytes or 0, row.world_size))
        where = f"on {closest.card}, " if several else ""
        raise DoesNotFitError(f"none of {who} trains the model: {where}{closest.message}")


def _show_savers(
    workload: str,
    chosen: dict[str, Any],
    plot: str | None,
    *,
    as_json: bool,
    force: bool,
    quiet: bool,
    **request: Any,
) -> None:
    """Show the sets of savers that no other beats; `chosen` are flags that go with a plan only."""
    from autoaccum.checks import check_alone
    from autoaccum.files import write_bytes
    from autoaccum.planning.plan_request import PlanRequest
    from autoaccum.planning.plan_setup import make_setup
    from autoaccum.planning.saver_table import compare_savers
    from autoaccum.planning.saver_trials import SaverTrials
    from autoaccum.planning.trial_runner import SearchLimits
    from autoaccum.reporting.console import make_console
    from autoaccum.reporting.figures.style import picture_format
    from autoaccum.reporting.plan_report import PlanProgress
    from autoaccum.reporting.plan_table import print_savers, savers_json

    if request["gpu"] is None:
        raise UsageError("--savers show compares sets of savers in a simulation", hint="name a card (--gpu NAME)")
    check_alone("--savers show")
    if given := next((flag for flag, value in chosen.items() if value), None):
        raise UsageError(f"--savers show makes a table, and {given} goes with a plan", hint="name savers, or none")
    Outputs({"--plot": plot}, force=force).check(workload, request["world_size"])
    options = _read_options(request | {"savers": None})
    asked = PlanRequest(request["target_batch"], options, max_micro_batch=request["max_micro_batch"])
    stderr = make_console(stderr=True)
    with PlanProgress(stderr, quiet=quiet) as progress:
        setup = make_setup(workload, asked, on_output=progress.print_output)
        with setup.device:
            trials = SaverTrials(setup.device, asked, SearchLimits(None, None), progress.notify)
            table = compare_savers(trials, setup.reference)
    if plot is not None:
        from autoaccum.reporting.figures.memory_figure import draw_savers

        write_bytes(Path(plot), draw_savers(table, picture_format(plot)), force=force)
    if as_json:
        click.echo(savers_json(table), nl=False)
    else:
        print_savers(make_console(), table)


def _read_options(request: dict[str, Any]) -> Options:
    return Options.of("plan", {name: value for name, value in request.items() if name in taken_by("plan")})


def _run_ranks(request: dict[str, Any]) -> bool:
    """Run this command on a rank for each device, if there are enough; leave with their exit code unless it is 0."""
    from autoaccum.planning.device_choice import has_device_for_each

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


def _free_name() -> str:
    name, number = "plan.json", 1
    while Path(name).exists():
        number += 1
        name = f"plan-{number}.json"
    return name

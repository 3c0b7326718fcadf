"""`autoaccum compare`: plans for cards, values, numbers of ranks and sets of savers, in one table."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from autoaccum.cli.flags import WORKLOAD_OR_COMMAND, CountOrRange, HelpWithHeadings, options, split_overrides
from autoaccum.cli.outputs import Outputs
from autoaccum.errors import DoesNotFitError
from autoaccum.reporting.console import make_console

if TYPE_CHECKING:
    from autoaccum.planning.comparison_record import Comparison, ComparisonRow


@click.command("compare", cls=HelpWithHeadings, short_help="Plan for several cards, parameter values, ranks or savers.")
@click.argument("workload", metavar=WORKLOAD_OR_COMMAND)
@options(
    "compare",
    *("target_batch", "max_micro_batch", "fit_micro_batch", "exact_max", "as_json", "output", "force", "quiet"),
    target_batch={"required": False},
    gpu={"metavar": "NAME[,NAME...]|all", "required": True, "help": "The cards to compare, by name or size."},
    world_size={"type": CountOrRange(), "metavar": "N|N..M", "help": "The number of ranks, or a range to compare."},
    savers={
        "metavar": "SAVER|auto|all",
        "help": "Savers of each plan, as for `autoaccum plan`. all: a row for each Pareto-optimal set.",
    },
    overrides={
        "metavar": "NAME=VALUE[,VALUE...]",
        "callback": split_overrides,
        "help": "As for `autoaccum plan`; several values give a row each. Quote a value that contains a comma.",
    },
    as_json="Print the table as JSON on stdout, with complete plans.",
    output="Write that JSON to a file.",
)
@click.option("--sort", metavar="COLUMN", help="Column to sort the rows by, the best first.")
@click.option("--prices", metavar="FILE", help="CSV file with the columns name and per_hour, for the cost.")
@click.option("--plot", metavar="FILE", help="Draw the rows: .svg or .png.")
def command(workload: str | tuple[str, ...], **request: Any) -> None:
    """Plan WORKLOAD or COMMAND for several cards, parameter values, ranks or savers, with one row for each.

    Both are as for `autoaccum plan`; for COMMAND, only cards and values are compared. Nothing runs on a card: plans
    are predicted. Cards that choose the same kernels share their traces, so all cards take about four times as long as
    one; each value takes traces of its own. A range of ranks gives one row per power of two, and the smallest number of
    ranks that works.

    Examples:
      autoaccum compare --gpu all -- python train.py --batch-size={micro_batch}
      autoaccum compare model.py --target-batch 256 --gpu all --sort speed
      autoaccum compare model.py --target-batch 64 --gpu t4 --set LENGTH=1024,2048,4096
      autoaccum compare model.py --target-batch 256 --gpu rtx4090,h100 --prices prices.csv
      autoaccum compare model.py --target-batch 512 --gpu h100 --world-size 1..64 --parallel fsdp2
      autoaccum compare model.py --target-batch 256 --gpu rtx4090 --savers all

    Exit codes:
      0  at least one row fits
      1  none fits
      2  wrong usage, or the workload or command is missing or fails
      3  the trials gave no answer
    """
    from autoaccum.api import compare
    from autoaccum.planning.comparison_record import Comparison
    from autoaccum.reporting.comparison_table import comparison_blocks, comparison_warnings, row_line
    from autoaccum.reporting.progress import PlanProgress

    outputs = Outputs(request, workload)
    rows: list[ComparisonRow] = []

    def listen(row: ComparisonRow) -> None:
        rows.append(row)
        progress.notify(row)

    try:
        with PlanProgress(make_console(stderr=True), quiet=outputs.quiet) as progress:
            on_output = progress.print_output if isinstance(workload, str) else None
            callbacks: dict[str, Any] = {"on_event": progress.notify, "on_output": on_output}
            table = compare(workload, on_row=listen, **callbacks, **request)
            for text in comparison_warnings(table.rows):
                progress.warn(text)
    except BaseException:
        if rows:  # They took their time. As some are missing, the least number of ranks is not known.
            some = Comparison(tuple(rows), None)
            outputs.show(some.to_json, lambda: comparison_blocks(some))
        raise
    outputs.show(
        table.to_json,
        lambda: comparison_blocks(table),
        files={"-o": lambda _: table.to_json(), "--plot": lambda file: _picture(table, file)},
    )
    if not any(row.fits for row in table.rows):
        closest = max(table.rows, key=lambda row: (row.limit_bytes, row.world_size))
        raise DoesNotFitError(f"no row fits: {row_line(closest)}, since {closest.message}")


def _picture(table: Comparison, file: str) -> bytes:
    from autoaccum.reporting.figures import draw_comparison, picture_format

    return draw_comparison(table, picture_format(file))

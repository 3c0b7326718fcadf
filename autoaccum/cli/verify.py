"""`autoaccum verify`: is the accumulated gradient the full batch's, and if not, why."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from autoaccum.cli.flags import count, options
from autoaccum.cli.outputs import check_apart, running_words, stdout_kept

_CODE_DIFFERENT = 1
_OUTPUTS = ("as_json", "output", "force", "quiet", "verbose")


@click.command("verify", short_help="Tell whether accumulating is the same as the full batch.")
@click.argument("workload")
@click.option("--target-batch", type=count, metavar="N", default=16, show_default=True, help="Samples per update.")
@click.option("--micro-batch", type=count, metavar="N", help="The most samples to run at once.  [default: a quarter]")
@click.option(
    "--precision",
    metavar="fp64|fp32|bf16|fp16",
    help="Of the comparison.  [default: fp64, whatever the workload trains in]",
)
@options(
    "device",
    "optimizer",
    "batchnorm",
    "multiple_of",
    "worst_of",
    device={"default": "cpu", "metavar": "cpu|cuda|cuda:N", "help": "Where to compare."},
)
@click.option("--json", "as_json", is_flag=True, help="The record as JSON on stdout, and nothing else there.")
@click.option("-o", "--output", metavar="FILE", help="Keep the record in a file.")
@click.option("--force", is_flag=True, help="Overwrite that file.")
@click.option("-v", "--verbose", is_flag=True, help="All that was compared, and every note.")
@click.option("-q", "--quiet", is_flag=True, help="No progress; warnings and errors remain.")
def command(
    workload: str, as_json: bool, output: str | None, force: bool, verbose: bool, quiet: bool, **asked: Any
) -> None:
    """Compare an update of WORKLOAD accumulated in micro-batches with the full batch's.

    WORKLOAD is model.py, model.py:name or package.module:name. Loss, every gradient, every buffer and one update are
    compared, from equal copies and under the same random draws, for a whole window and a shorter one. Where they
    differ, experiments find the cause and the change that makes it equal. A function `accumulate(model,
    micro_batches)` in the file, a loop of your own, is compared as well.

    Exit code: 0 equivalent, 1 not equivalent, 2 bad usage or workload, 3 could not be measured.
    """
    from autoaccum.api import verify
    from autoaccum.files import check_output, write_text
    from autoaccum.reporting.console import make_console
    from autoaccum.reporting.verify_report import VerificationProgress, print_verification

    if output is not None:
        check_output(output, force=force, hint="for the record on stdout, use --json")
        check_apart("-o", output, workload)
    stderr = make_console(stderr=True)
    with stdout_kept(), VerificationProgress(stderr, quiet=quiet) as progress:
        found = verify(workload, on_event=progress.notify, **asked)
    if as_json:
        click.echo(found.to_json(), nl=False)
    else:
        print_verification(make_console(), found, again=running_words(without=_OUTPUTS), verbose=verbose)
    if output is not None:
        write_text(Path(output), found.to_json(), force=force)
        if not as_json:
            make_console().print(f"kept in {output}", soft_wrap=True)
    if not found.equivalent:
        raise click.exceptions.Exit(_CODE_DIFFERENT)

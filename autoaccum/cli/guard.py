"""`autoaccum guard`: compare the memory of an update with a lock file, so that CI fails when it grew."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from autoaccum.cli.flags import WORKLOAD_OR_COMMAND, HelpWithHeadings, options
from autoaccum.cli.outputs import Contents, Outputs, page
from autoaccum.cli.settings import Settings, find_settings, key_of
from autoaccum.errors import AutoaccumError, MissingLockError, UsageError
from autoaccum.reporting.console import make_console, print_labelled

if TYPE_CHECKING:
    from autoaccum.guarding.cases import Case
    from autoaccum.guarding.guard_result import Report


@click.command("guard", cls=HelpWithHeadings, short_help="Fail in CI when a change takes more memory than is locked.")
@click.argument("workload", required=False, metavar=f"[{WORKLOAD_OR_COMMAND}]")
@click.option(
    "--gpu", "gpus", metavar="NAME", multiple=True, help="Simulate this card, a name of `autoaccum gpus`. Repeatable."
)
@options(
    "guard",
    *("target_batch", "micro_batch", "as_json", "output", "report", "force", "quiet"),
    gpu=None,
    time_limit="Time limit of all searches together.",
    target_batch={"required": False},
    micro_batch="The most samples to run at once.  [default: planned]",
    output="Also write the report to a file.",
    force="Overwrite existing files, and with --update a lock that cannot be read.",
)
@click.option(
    "--tolerance",
    metavar="SHARE|SIZE",
    default="1%",
    show_default=True,
    help="Growth that passes, such as 0.5% or 50MiB.",
)
@click.option("--update", is_flag=True, help="Plan and measure anew, and write the lock.")
@click.option(
    "--baseline", metavar="REV", help="Compare with this git revision, which is measured too, instead of a lock."
)
@click.option(
    "--table",
    metavar="FILE",
    help="Write a table of the micro-batches in the lock into a file, between <!-- autoaccum --> and"
    " <!-- /autoaccum -->. Nothing is measured.",
)
def command(
    workload: str | tuple[str, ...] | None,
    gpus: tuple[str, ...],
    tolerance: str,
    update: bool,
    baseline: str | None,
    table: str | None,
    time_limit: float | None,
    **asked: Any,
) -> None:
    """Measure again what an update takes, compare it with the lock, and name the modules that grew.

    WORKLOAD is model.py or model.py:name. COMMAND is a training command, as for `autoaccum plan`; it runs in the folder
    of the lock. Without either, everything in the lock is measured: autoaccum.lock in this folder or the nearest above;
    and the cases that `[tool.autoaccum.guard]` of pyproject.toml lists, each as the words of this command.

    A simulated card gives the same bytes on every machine, so no GPU is needed in CI. The locked schedule is
    measured as it is, and the largest micro-batch that fits is searched anew.

    Run it once, not under torchrun; --world-size guards the largest share of several ranks. In GitHub Actions the
    report also has annotations, and is added to the step's summary.

    Examples:
      autoaccum guard model.py --gpu rtx3090 --target-batch 256 --update  write the lock; commit it
      autoaccum guard --gpu rtx3090 --micro-batch 8 --update -- python train.py --bs={micro_batch}
      autoaccum guard                                                     compare with it, in CI
      autoaccum guard --baseline origin/main                              compare with a revision
      autoaccum guard --table README.md                                   write what fits into the README

    Exit codes (of several cases, 1 comes before 3, and 3 before 2):
      0  nothing that counts grew by more than the tolerance
      1  the peak, the smallest budget or the peak by tokens grew, the locked micro-batch no longer
         fits, the largest that fits fell, or what is to be locked does not fit
      2  wrong usage, a workload or command that fails, or a lock that is damaged or newer
      3  a case could not be measured, is not locked, or is locked for another torch or autoaccum
    """
    from autoaccum.guarding.cases import make_case, read_reference
    from autoaccum.guarding.guard_result import parse_tolerance
    from autoaccum.guarding.guard_run import guard
    from autoaccum.guarding.project import LOCK_NAME, find_folder
    from autoaccum.reporting.guard_report import GuardProgress, describe_counts, harmless, report_blocks, report_text

    on_github = os.environ.get("GITHUB_ACTIONS") == "true"
    annotates = on_github and not asked["as_json"]
    with _annotating() if annotates else nullcontext():
        allowed, settings = parse_tolerance(tolerance), find_settings(Path.cwd())
        listing = settings.file.parent if settings and settings.cases else None
        folder = find_folder(Path.cwd(), listing)
        if table is not None:
            _write_table(Path(table), folder / LOCK_NAME, quiet=asked["quiet"])
            return
        listed = _listed_cases(settings) if settings and folder == listing else []
        outputs = Outputs(asked, workload, {"the lock itself": folder / LOCK_NAME})
        reference = read_reference(workload)
        wanted = [make_case(workload=reference, gpu=gpu, **asked) for gpu in gpus or (None,)]
        safe = harmless if on_github else None
        with GuardProgress(make_console(stderr=True), quiet=outputs.quiet, harmless=safe) as progress:
            result = guard(
                wanted,
                folder,
                listed=listed,
                update=update,
                baseline=baseline,
                tolerance=allowed,
                time_limit=time_limit,
                force=outputs.force,
                on_event=progress.notify,
                on_output=progress.print_output,
            )
        files: Contents = {
            "-o": lambda _: result.to_json() if outputs.as_json else report_text(result),
            "--report": lambda _: page(describe_counts(result), {"Report": list(report_blocks(result))}),
        }
        if annotates:
            _show_on_github(result, folder)
            outputs.write(files)
        else:
            outputs.show(result.to_json, lambda: report_blocks(result), files=files, apart=True)
    if result.exit_code:
        raise click.exceptions.Exit(result.exit_code)


def _listed_cases(settings: Settings) -> list[Case]:
    """Return the cases of the settings, which are written as words of this command."""
    from autoaccum.guarding.cases import CASE_FIELDS, check_case, check_complete, make_case, read_reference
    from autoaccum.guarding.project import place_within

    cases, folder = [], settings.file.parent
    for text in settings.cases:
        try:
            context = command.make_context("guard", shlex.split(text))
            given = context.params
            asked = {name for name in given if context.get_parameter_source(name) is ParameterSource.COMMANDLINE}
            if others := asked - {*CASE_FIELDS, "gpus"}:
                raise UsageError(f"{key_of(min(others))} is no part of a case", hint="give it on the command line")
            reference = read_reference(given["workload"])
            if not reference:
                raise UsageError("it names no workload", hint="write such as model.py --gpu NAME --target-batch N")
            if isinstance(given["workload"], str):
                reference = place_within(folder, reference, folder)
            options = {name: given[name] for name in CASE_FIELDS if name in given} | {"workload": reference}
            for gpu in given["gpus"] or (None,):
                cases.append(check_case(make_case(**options, gpu=gpu)))
                check_complete(cases[-1])
        except (click.exceptions.Exit, click.ClickException, UsageError, ValueError) as error:
            unread = f"it cannot be read as a case ({error or 'it asks for help'})"
            told = f"has the case {text!r}, and {getattr(error, 'message', unread).rstrip('.')}"
            raise settings.error("guard", told, getattr(error, "hint", "see `autoaccum guard --help`")) from None
    return cases


def _write_table(path: Path, lock: Path, *, quiet: bool) -> None:
    """Write the table of the lock into a file, and say whether that changed it."""
    from autoaccum.guarding.cases import Case, guard_command
    from autoaccum.guarding.lock import read_lock
    from autoaccum.reporting.lock_table import write_lock_table

    context = click.get_current_context()
    given = {name for name in context.params if context.get_parameter_source(name) is ParameterSource.COMMANDLINE}
    if given - {"table", "quiet"}:
        raise UsageError("--table measures nothing, and other options are given", hint="give it alone, or with -q")
    if not (entries := read_lock(lock)):
        hint = f"lock something by `{guard_command(Case(), lock.parent, '--update')}`"
        raise MissingLockError(f"there is no {lock.name} in {lock.parent}", hint=hint)
    changed = write_lock_table(path, entries)
    if not quiet:
        click.echo(f"{path}: the table {'was rewritten' if changed else 'is up to date'}")


def _show_on_github(report: Report, folder: Path) -> None:
    """Print the report with annotations, and add it to the summary of the step."""
    from autoaccum.reporting.guard_report import annotation_lines, harmless, report_markdown, report_text

    click.echo(harmless(report_text(report)), nl=False)
    for line in annotation_lines(report, folder, os.environ):
        click.echo(line)
    _add_to_summary(report_markdown(report))


def _add_to_summary(markdown: str) -> None:
    from autoaccum.reporting.guard_report import write_summary

    if warning := write_summary(markdown, os.environ):
        print_labelled(make_console(stderr=True), "warning", str(warning), "yellow")


@contextmanager
def _annotating() -> Iterator[None]:
    """Tell GitHub of an error, too, in the form that it shows."""
    from autoaccum.reporting.guard_report import TITLE, error_markdown, harmless
    from autoaccum.reporting.guard_report import command as workflow_command

    try:
        yield
    except AutoaccumError as error:
        click.echo(workflow_command("error", str(error), title=TITLE))
        _add_to_summary(error_markdown(error))
        error.args = (harmless(str(error)),)  # It is printed once more, as every error is.
        raise

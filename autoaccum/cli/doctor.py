"""`autoaccum doctor`: what a report of a problem needs to say about the machine and the last plan."""

from __future__ import annotations

from typing import Any

import click

from autoaccum.cli.flags import HelpWithHeadings
from autoaccum.cli.outputs import Outputs


@click.command("doctor", cls=HelpWithHeadings, short_help="Show what to paste into an issue.")
@click.argument("plan", required=False)
@click.option("--json", "as_json", is_flag=True, help="Print the same as JSON on stdout, and nothing else there.")
def command(plan: str | None, **asked: Any) -> None:
    """Show versions, cards, allocator settings, memory and the last plan, to be pasted into an issue.

    PLAN is a file of `autoaccum plan -o`. By default, it is the newest one in the current folder.

    Nothing is run or sent. Of environment variables, only those that change what memory is needed are shown. Your home
    folder is shown as ~, and values of options and variables that end in token, secret, password or api_key as ***.

    Examples:
      autoaccum doctor
      autoaccum doctor plan.json

    Exit codes:
      0  always: what cannot be read is shown as not available
    """
    from autoaccum.integrations import LIBRARIES
    from autoaccum.reporting.doctor_report import doctor_blocks, doctor_record, find_plan

    found = find_plan(plan)
    record = doctor_record(LIBRARIES, found)
    Outputs(asked).show(lambda: record, lambda: doctor_blocks(record, found))

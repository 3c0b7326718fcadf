"""`autoaccum plan --savers show` as a person runs it."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from click.testing import CliRunner
from command_line import Command
from small_blocks import blocks_source

from autoaccum.cli import main
from autoaccum.planning.saver_choice import format_savers
from autoaccum.planning.saver_table import SaverTable
from autoaccum.reporting.console import make_console
from autoaccum.reporting.plan_table import print_savers
from autoaccum.serialization import read_record

MODEL = blocks_source(3, hidden=512, length=1024, width=128)
WORDS = ("plan", "model.py", "--target-batch", "8", "--gpu", "rtx3090", "--memory", "126MiB", "--savers", "show")


@pytest.mark.slow
def test_the_sets_that_no_other_beats(folder: Path, command: Command) -> None:
    done = command(folder, *WORDS, "--json", "--plot", "savers.svg")
    assert done.returncode == 0, done.stderr
    table = read_record(json.loads(done.stdout), SaverTable)
    assert table.rows[0].savers == ()
    assert [row.micro_batch for row in table.rows] == sorted({row.micro_batch for row in table.rows})
    assert len(table.rows) > 1
    file = io.StringIO()
    print_savers(make_console(file=file, width=200), table)
    lines = [line.split() for line in file.getvalue().splitlines()]
    assert lines[1] == ["peak", "at", "1", "micro-batch", "iter_size", "FLOPs", "moved", "time", "savers"]
    shown = lines[2 : 2 + len(table.rows)]
    assert [" ".join(line[9:]) for line in shown] == [format_savers(row.savers) for row in table.rows]
    drawn = (folder / "savers.svg").read_text()
    assert all(format_savers(row.savers) in drawn for row in table.rows)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ((), "--savers show compares sets of savers in a simulation: name a card (--gpu NAME)"),
        (("--gpu", "rtx3090", "-o", "plan.json"), "--savers show makes a table, and -o goes with a plan"),
        (("--gpu", "rtx3090", "--prefer", "fastest"), "makes a table, and --prefer fastest goes with a plan"),
        (("--gpu", "rtx3090", "--savers", "recompute"), "'show' is no saver"),
        (
            ("--gpu", "rtx3090", "--world-size", "1..4"),
            "makes a table, and --savers show goes with one number of ranks",
        ),
    ],
)
def test_what_does_not_go_with_a_table_is_refused(folder: Path, more: tuple[str, ...], message: str) -> None:
    words = ["plan", str(folder / "model.py"), "--target-batch", "16", "--savers", "show", *more]
    done = CliRunner().invoke(main, words)
    assert done.exit_code == 2
    assert message in done.stderr

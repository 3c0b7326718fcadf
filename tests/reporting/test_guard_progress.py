"""A guard's progress: a line for each case, in whatever order they end."""

from __future__ import annotations

import dataclasses
import io

from guard_reports import CASE, REGRESSED, UNCHANGED

from autoaccum.guarding.events import CaseFinished, CaseStarted, CheckedOut
from autoaccum.reporting.consoles import make_console
from autoaccum.reporting.guard_github import harmless
from autoaccum.reporting.guard_progress import GuardProgress

OTHER = dataclasses.replace(CASE, gpu="a100-80gb")


def test_a_line_for_each_case_with_its_own_time() -> None:
    text, now = io.StringIO(), iter([0.0, 1.0, 4.5, 10.25])
    with GuardProgress(make_console(file=text), clock=lambda: next(now)) as progress:
        progress.tell(CheckedOut("HEAD~1"))
        progress.tell(CaseStarted(CASE, 1, 12))
        progress.tell(CaseStarted(OTHER, 2, 12))
        progress.tell(CaseFinished(2, 12, UNCHANGED))
        progress.tell(CaseFinished(1, 12, REGRESSED))
    assert text.getvalue().splitlines() == [
        " 2/12    3.5 s  unchanged         train.py on a100-80gb, target 256, bf16",
        " 1/12   10.2 s  regressed         train.py on rtx3090, target 256, bf16  +1.25 GiB (+8.9 %)",
    ]


def test_quiet_passes_on_only_what_a_workload_prints() -> None:
    text = io.StringIO()
    with GuardProgress(make_console(file=text), quiet=True) as progress:
        progress.tell(CaseStarted(CASE, 1, 1))
        progress.pass_on("loading\x1b[31m data")
        progress.tell(CaseFinished(1, 1, REGRESSED))
    assert text.getvalue() == "loading data\n"


def test_what_a_workload_prints_is_made_harmless() -> None:
    text = io.StringIO()
    with GuardProgress(make_console(file=text), harmless=harmless) as progress:
        progress.pass_on("epoch 1\r::error::no")
        progress.tell(
            CaseFinished(1, 1, dataclasses.replace(UNCHANGED, case=dataclasses.replace(CASE, workload="##[a]")))
        )
    assert text.getvalue().startswith("epoch 1\n: :error::no\n")
    assert "##[" not in text.getvalue()

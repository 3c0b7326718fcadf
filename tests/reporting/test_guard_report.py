"""A guard's report on a terminal and in a pipe."""

from __future__ import annotations

import dataclasses
import io

import pytest
from guard_reports import ALL, BEFORE, CASE, LOCKED, NOW, REGRESSED, UNCHANGED, UNMEASURED, report

from autoaccum.guarding.guard_result import CaseFinished, CaseStarted, Verdict
from autoaccum.reporting.console import make_console
from autoaccum.reporting.guard_report import GuardProgress, harmless, print_report, report_text


def lines_of(verdict: Verdict) -> list[str]:
    return report_text(report(verdict)).splitlines()


def test_a_regression_shows_figures_growths_reasons_and_the_command() -> None:
    assert lines_of(REGRESSED) == [
        "regressed: train.py on rtx3090, target batch 256, precision bf16",
        "  +1.25 GiB (+8.9 %): activations of blocks.*.mlp +1.20 GiB (bf16 -> fp32); rtx3090 now holds 24",
        "                   before        now     change",
        "  peak          14.00 GiB  15.25 GiB  +1.25 GiB  +8.9 %",
        "  most held     13.00 GiB  14.00 GiB  +1.00 GiB  +7.7 %",
        "  least budget  13.50 GiB  14.50 GiB  +1.00 GiB  +7.4 %",
        "  largest fit          32         24         -8",
        "     change  for what",
        "  +1.17 GiB  activations of blocks.*.mlp (bf16 -> fp32)",
        "   +100 MiB  optimizer state of head_|<b>`x (new)",
        "  -20.0 MiB  unused",
        "  why        the peak grew by 8.9 %, allowed are 1 %",
        "  why        rtx3090 now holds 24 instead of 32",
        "  way out    if meant, lock it:",
        "    autoaccum guard train.py --gpu rtx3090 --target-batch 256 --precision bf16 --update",
        "",
        "1 case: 1 regressed; against autoaccum.lock, tolerance 1%",
    ]


def test_what_is_well_takes_two_lines() -> None:
    assert lines_of(UNCHANGED) == [
        "passed: train.py on a100-80gb, target batch 256, precision bf16",
        "  peak 14.00 GiB, least budget 13.50 GiB, largest fit 32, parts 8 x 32",
        "",
        "1 case: 1 passed; against autoaccum.lock, tolerance 1%",
    ]
    assert report_text(report(LOCKED, updated="autoaccum.lock")).splitlines() == [
        "locked: train.py on rtx3090, target batch 256, precision bf16",
        "  peak 14.00 GiB, least budget 13.50 GiB, largest fit 32, parts 8 x 32",
        "",
        "1 case: 1 locked; written to autoaccum.lock",
    ]


def test_the_users_own_frames_and_the_reason_are_shown() -> None:
    lines = lines_of(UNMEASURED)
    assert lines[:3] == [
        "not measured: package.broken:model on rtx3090, target batch 256, precision bf16",
        '  File "broken.py", line 3, in model',
        '      raise ValueError("50 %")',
    ]
    assert "  why        model() raised ValueError: 50 %, ::error::told" in lines
    assert "  warning    its weight was not looked at" in lines


def test_figures_that_are_not_to_be_compared_stand_alone() -> None:
    other = dataclasses.replace(UNMEASURED, before=BEFORE, now=NOW, reasons=("locked with torch 2.11.0",))
    assert "  peak 15.25 GiB, least budget 14.50 GiB, largest fit 24, parts 8 x 32" in lines_of(other)
    text = io.StringIO()
    with GuardProgress(make_console(file=text)) as progress:
        progress.notify(CaseFinished(1, 1, other))
    assert "1.25 GiB" not in text.getvalue()


def test_it_is_plain_in_a_pipe_and_coloured_on_a_terminal() -> None:
    piped, shown = io.StringIO(), io.StringIO()
    print_report(make_console(file=piped, width=60), ALL)
    print_report(make_console(file=shown, width=60, force_terminal=True, color_system="standard"), ALL)
    assert "\x1b" not in piped.getvalue()
    assert "\x1b[1;31mregressed" in shown.getvalue()
    assert (
        "    autoaccum guard train.py --gpu rtx3090 --target-batch 256 --precision bf16 --update\n" in piped.getvalue()
    )


def test_names_cannot_command_a_terminal() -> None:
    odd = dataclasses.replace(REGRESSED, explanation="a\x1b[31mred", reasons=("b\x1b[2J",), now=NOW)
    assert "\x1b" not in report_text(report(odd))


OTHER = UNCHANGED.case


def test_a_line_for_each_case_with_its_own_time(monkeypatch: pytest.MonkeyPatch) -> None:
    text, now = io.StringIO(), iter([0.0, 3.5, 4.0, 14.25])
    monkeypatch.setattr("time.monotonic", lambda: next(now))
    with GuardProgress(make_console(file=text)) as progress:
        progress.notify(CaseStarted(OTHER))
        progress.notify(CaseFinished(2, 12, UNCHANGED))
        progress.notify(CaseStarted(CASE))
        progress.notify(CaseFinished(3, 12, REGRESSED))
    assert text.getvalue().splitlines() == [
        " 2/12    3.5 s  passed        train.py on a100-80gb, target batch 256, precision bf16",
        " 3/12   10.2 s  regressed     train.py on rtx3090, target batch 256, precision bf16  +1.25 GiB (+8.9 %)",
    ]


def test_quiet_passes_on_only_what_a_workload_prints() -> None:
    text = io.StringIO()
    with GuardProgress(make_console(file=text), quiet=True) as progress:
        progress.notify(CaseStarted(CASE))
        progress.print_output("loading\x1b[31m data")
        progress.notify(CaseFinished(1, 1, REGRESSED))
    assert text.getvalue() == "loading data\n"


def test_what_a_workload_prints_is_made_harmless() -> None:
    text = io.StringIO()
    with GuardProgress(make_console(file=text), harmless=harmless) as progress:
        progress.print_output("epoch 1\r::error::no")
        progress.notify(
            CaseFinished(1, 1, dataclasses.replace(UNCHANGED, case=dataclasses.replace(CASE, workload="##[a]")))
        )
    assert text.getvalue().startswith("epoch 1\n: :error::no\n")
    assert "##[" not in text.getvalue()

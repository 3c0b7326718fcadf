"""A guard's report on a terminal, in a pipe, and for GitHub: what the runner takes for commands, and the summary."""

from __future__ import annotations

import dataclasses
import io
import os
from html import unescape
from pathlib import Path

import pytest
from consoles import told
from guard_reports import ALL, BEFORE, CASE, LOCKED, NOW, REGRESSED, UNCHANGED, UNMEASURED, report
from hypothesis import given
from hypothesis import strategies as st
from markdown_it import MarkdownIt

from autoaccum.guarding.guard_result import CaseFinished, CaseStarted, Verdict
from autoaccum.messages import message
from autoaccum.reporting.console import make_console
from autoaccum.reporting.guard_report import (
    GuardProgress,
    annotation_lines,
    command,
    harmless,
    report_markdown,
    report_text,
    write_summary,
)


def lines_of(verdict: Verdict) -> list[str]:
    return report_text(report(verdict)).splitlines()


def test_a_regression_shows_figures_growths_reasons_and_the_command() -> None:
    assert lines_of(REGRESSED) == [
        "regressed: train.py --gpu rtx3090 --target-batch 256 --precision bf16",
        "  +1.25 GiB (+8.9 %); rtx3090 now holds 24 instead of 32",
        "                      before        now     change",
        "  peak             14.00 GiB  15.25 GiB  +1.25 GiB  +8.9 %",
        "  most held        13.00 GiB  14.00 GiB  +1.00 GiB  +7.7 %",
        "  smallest budget  13.50 GiB  14.50 GiB  +1.00 GiB  +7.4 %",
        "  largest fit             32         24         -8",
        "     change  for what",
        "  +1.17 GiB  activations of blocks.{0..11}.mlp (bf16 -> fp32)",
        "   +100 MiB  optimizer state of head_|<b>`x (new)",
        "  -20.0 MiB  unused",
        "  why        the peak grew by 1.25 GiB (8.9 %), 1% is allowed",
        "  why        the largest micro-batch that fits fell from 32 to 24",
        "  way out    if the change is intended, lock it:",
        "    autoaccum guard train.py --gpu rtx3090 --target-batch 256 --precision bf16 --update",
        "",
        "1 case: 1 regressed; against autoaccum.lock, tolerance 1%",
    ]


def test_what_is_well_takes_two_lines() -> None:
    assert lines_of(UNCHANGED) == [
        "passed: train.py --gpu a100-80gb --target-batch 256 --precision bf16",
        "  peak 14.00 GiB, smallest budget 13.50 GiB, largest fit 32, parts 8 x 32",
        "",
        "1 case: 1 passed; against autoaccum.lock, tolerance 1%",
    ]
    assert report_text(report(LOCKED, updated="autoaccum.lock")).splitlines() == [
        "locked: train.py --gpu rtx3090 --target-batch 256 --precision bf16",
        "  peak 14.00 GiB, smallest budget 13.50 GiB, largest fit 32, parts 8 x 32",
        "",
        "1 case: 1 locked; written to autoaccum.lock",
    ]


def test_the_users_own_frames_and_the_reason_are_shown() -> None:
    lines = lines_of(UNMEASURED)
    assert lines[:3] == [
        "not measured: broken.py:model --gpu rtx3090 --target-batch 256 --precision bf16",
        '  File "broken.py", line 3, in model',
        '      raise ValueError("50 %")',
    ]
    assert "  why        model() raised ValueError: 50 %, ::error::told" in lines


def test_figures_that_are_not_to_be_compared_stand_alone() -> None:
    now = dataclasses.replace(NOW, warnings=(message("not_verified"),))
    other = dataclasses.replace(UNMEASURED, before=BEFORE, now=now)
    assert "  peak 15.25 GiB, smallest budget 14.50 GiB, largest fit 24, parts 8 x 32" in lines_of(other)
    assert f"  warning    {now.warnings[0]}" in lines_of(other)
    assert "1.25 GiB" not in told(GuardProgress, CaseFinished(1, 1, other))


def test_a_line_for_each_case_with_its_own_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter([0.0, 3.5, 4.0, 14.25])
    monkeypatch.setattr("time.monotonic", lambda: next(now))
    first = CaseStarted(UNCHANGED.case), CaseFinished(2, 12, UNCHANGED)
    second = CaseStarted(CASE), CaseFinished(3, 12, REGRESSED)
    assert told(GuardProgress, *first, *second).splitlines() == [
        " 2/12    3.5 s  passed        train.py --gpu a100-80gb --target-batch 256 --precision bf16",
        " 3/12   10.2 s  regressed     train.py --gpu rtx3090 --target-batch 256 --precision bf16  +1.25 GiB (+8.9 %)",
    ]


def test_what_a_workload_prints_is_made_harmless_and_passed_on_if_quiet() -> None:
    odd = dataclasses.replace(UNCHANGED, case=dataclasses.replace(CASE, workload="##[a]"))
    for quiet in (False, True):
        text = io.StringIO()
        with GuardProgress(make_console(file=text), harmless=harmless, quiet=quiet) as progress:
            progress.print_output("epoch\x1b[31m 1\r::error::no")
            progress.notify(CaseFinished(1, 1, odd))
        first, second, *rest = text.getvalue().splitlines()
        assert (first, second) == ("epoch 1", ": :error::no")
        assert len(rest) == (not quiet)
        assert "##[" not in text.getvalue()


def undone(text: str, *escapes: str) -> str:
    for escape in (*escapes, "%0D", "%0A", "%25"):
        text = text.replace(escape, bytes.fromhex(escape[1:]).decode())
    return text


def taken(line: str) -> tuple[str, dict[str, str], str] | None:
    """A line as actions/runner takes it apart: name, properties, message; None: it is no command."""
    line = line.lstrip()
    if not line.startswith("::") or "::" not in line[2:]:
        return None
    head, _, message = line[2:].partition("::")
    name, _, given = head.partition(" ")
    pairs = (pair.split("=", 1) for pair in given.split(",") if pair)
    return name, {key: undone(value, "%3A", "%2C") for key, value in pairs}, undone(message)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "broken.py").write_text("import torch\n\ndef model():\n    pass\n")
    (tmp_path / "train.py").write_text("import torch\nmodel = torch.nn.Linear(1, 1)\n")
    return tmp_path


def test_the_worst_come_first_at_their_lines(folder: Path) -> None:
    lines = list(annotation_lines(ALL, folder, {"GITHUB_WORKSPACE": str(folder)}))
    regressed, unmeasured = (taken(line) for line in lines)
    assert regressed == (
        "error",
        {
            "file": "train.py",
            "line": "2",
            "title": "autoaccum guard: regressed, train.py --gpu rtx3090 --target-batch 256 --precision bf16",
        },
        "\n".join(
            [
                "+1.25 GiB (+8.9 %); rtx3090 now holds 24 instead of 32",
                *map(str, REGRESSED.reasons),
                f"{REGRESSED.hint}: {REGRESSED.command}",
            ]
        ),
    )
    assert unmeasured is not None
    assert unmeasured[:1] == ("error",)
    assert (unmeasured[1]["file"], unmeasured[1]["line"]) == ("broken.py", "3")
    assert unmeasured[2] == "model() raised ValueError: 50 %, ::error::told"


@pytest.mark.parametrize(
    ("line", "place"),
    [("nets/net.py:7", ("nets/net.py", "7")), ("../elsewhere.py:7", ("train.py", "2")), ("", ("train.py", "2"))],
)
def test_the_line_of_the_module_that_grew_most_is_annotated(folder: Path, line: str, place: tuple[str, str]) -> None:
    for file in (folder / "nets" / "net.py", folder.parent / "elsewhere.py"):
        file.parent.mkdir(exist_ok=True)
        file.write_text("")
    largest, other, unused = REGRESSED.growths
    growths = (unused, dataclasses.replace(largest, line=line), dataclasses.replace(other, line="nets/net.py:9"))
    (told,) = annotation_lines(report(dataclasses.replace(REGRESSED, growths=growths)), folder, {})
    found = taken(told)
    assert found is not None
    assert (found[1]["file"], found[1]["line"]) == place


@pytest.mark.slow
@given(st.text(), st.text())
def test_what_a_command_carries_comes_back(message: str, title: str) -> None:
    line = command("error", message, title=title)
    assert not set(line) & set("\r\n")
    assert "##[" not in line
    found = taken(line)
    assert found is not None
    assert found[0] == "error"
    assert found[2] == message.replace("##[", "## [")
    assert list(found[1]) == ["title"]


@given(st.text(st.sampled_from(":#[] \t\r\nea\x1b\x85\u200b")))
def test_nothing_in_a_log_is_a_command(text: str) -> None:
    for line in harmless(text).split("\n"):
        assert "\r" not in line
        assert taken(line) is None
        assert "##[" not in line


def test_a_report_whose_names_are_commands_has_none_in_its_text() -> None:
    lines = harmless(report_text(ALL)).splitlines()
    assert [line for line in lines if taken(line) or "##[" in line] == []
    assert "  : :error::raised" in lines


def test_the_summary_is_appended(tmp_path: Path) -> None:
    path = tmp_path / "summary.md"
    path.write_text("of another step\n")
    assert write_summary(report_markdown(ALL), {"GITHUB_STEP_SUMMARY": str(path)}) is None
    assert path.read_text() == "of another step\n" + report_markdown(ALL)
    assert write_summary(report_markdown(ALL), {}) is None


def test_a_summary_that_cannot_be_written_is_reported(tmp_path: Path) -> None:
    told = write_summary(report_markdown(ALL), {"GITHUB_STEP_SUMMARY": os.fspath(tmp_path / "nowhere" / "summary.md")})
    assert told == message("summary_not_written", error="No such file or directory")
    assert write_summary(report_markdown(ALL), {"GITHUB_STEP_SUMMARY": "a\0b"}) is not None


def rendered(markdown: str) -> str:
    """Its HTML, by the parser that rich brings along."""
    return str(MarkdownIt("commonmark", {"html": True}).render(markdown))


def test_the_summary_shows_the_report_as_it_is() -> None:
    text = report_markdown(ALL)
    assert text.startswith("### autoaccum guard: 1 regressed, 1 not measured, 2 passed")
    html = rendered(text)
    assert unescape(html[html.index("<pre>\n") + 6 : html.index("</pre>")]) == report_text(ALL)
    odd = Verdict(case=CASE, outcome="unmeasured", exit_code=2, traceback="a\n\n</pre>\n```\n| b |")
    assert rendered(report_markdown(report(odd))).count("</pre>") == 1

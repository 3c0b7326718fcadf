"""A guard's report for GitHub: what the runner takes for a command, and what a reader sees of the markdown."""

from __future__ import annotations

import os
from html import unescape
from pathlib import Path

import pytest
from guard_reports import ALL, CASE, REGRESSED, report
from hypothesis import given
from hypothesis import strategies as st
from markdown_it import MarkdownIt

from autoaccum.guarding.guard_result import Verdict
from autoaccum.reporting.guard_report import (
    annotation_lines,
    command,
    harmless,
    report_markdown,
    report_text,
    write_summary,
)


def undone(text: str, *escapes: str) -> str:
    for one in (*escapes, "%0D", "%0A", "%25"):
        text = text.replace(one, bytes.fromhex(one[1:]).decode())
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
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "broken.py").write_text("import torch\n\ndef model():\n    pass\n")
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
            "title": "autoaccum guard: regressed, train.py on rtx3090, target batch 256, precision bf16",
        },
        "\n".join([REGRESSED.explanation, *REGRESSED.reasons, f"{REGRESSED.hint}: {REGRESSED.command}"]),
    )
    assert unmeasured is not None
    assert unmeasured[:1] == ("error",)
    assert (unmeasured[1]["file"], unmeasured[1]["line"]) == ("package/broken.py", "3")
    assert unmeasured[2] == "model() raised ValueError: 50 %, ::error::told"


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
    assert write_summary(ALL, {"GITHUB_STEP_SUMMARY": str(path)}) is None
    assert path.read_text() == "of another step\n" + report_markdown(ALL)
    assert write_summary(ALL, {}) is None


def test_a_summary_that_cannot_be_written_is_reported(tmp_path: Path) -> None:
    told = write_summary(ALL, {"GITHUB_STEP_SUMMARY": os.fspath(tmp_path / "nowhere" / "summary.md")})
    assert told == "the step's summary cannot be written (No such file or directory)"
    assert write_summary(ALL, {"GITHUB_STEP_SUMMARY": "a\0b"}) is not None


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

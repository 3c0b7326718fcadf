"""A guard's report under GitHub Actions: what the runner takes for a command, and for nothing else."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from guard_reports import ALL, IMPROVED, REGRESSED, UNCHANGED, UNMEASURED, report
from hypothesis import given
from hypothesis import strategies as st

from autoaccum.errors import UsageError
from autoaccum.reporting.guard_github import annotation_lines, command, error_annotation, harmless, write_summary
from autoaccum.reporting.guard_markdown import report_markdown
from autoaccum.reporting.guard_text import report_text


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
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "broken.py").write_text("import torch\n\ndef model():\n    pass\n")
    (tmp_path / "train.py").write_text("import torch\nmodel = torch.nn.Linear(1, 1)\n")
    return tmp_path


def test_the_worst_come_first_at_their_lines(folder: Path) -> None:
    lines = list(annotation_lines(ALL, folder, {"GITHUB_WORKSPACE": str(folder)}))
    regressed, unmeasured, improved = (taken(line) for line in lines)
    assert regressed == (
        "error",
        {"file": "train.py", "line": "2", "title": "autoaccum guard: regressed, train.py on rtx3090, target 256, bf16"},
        "\n".join([REGRESSED.explanation, *REGRESSED.reasons, f"{REGRESSED.hint}: {REGRESSED.command}"]),
    )
    assert unmeasured is not None
    assert unmeasured[:1] == ("error",)
    assert (unmeasured[1]["file"], unmeasured[1]["line"]) == ("package/broken.py", "3")
    assert unmeasured[2] == "model() raised ValueError: 50 %, ::error::told"
    assert improved is not None
    assert improved[0] == "notice"


def test_what_is_well_is_not_annotated(folder: Path) -> None:
    assert list(annotation_lines(report(UNCHANGED), folder, {})) == []


def test_a_workload_that_is_not_there_is_annotated_without_a_place(tmp_path: Path) -> None:
    (line,) = annotation_lines(report(UNMEASURED), tmp_path, {})
    found = taken(line)
    assert found is not None
    assert list(found[1]) == ["title"]


def test_an_error_before_the_report_is_annotated() -> None:
    found = taken(error_annotation(UsageError("100 % is no size", hint="write\nanother")))
    assert found == ("error", {"title": "autoaccum guard"}, "100 % is no size: write\nanother")


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


def test_a_summary_that_would_be_too_long_loses_its_details_then_all(tmp_path: Path) -> None:
    path = tmp_path / "summary.md"
    whole, table = (len(report_markdown(ALL, details=details).encode()) for details in (True, False))
    path.write_bytes(b"x" * (2**20 - whole + 1))
    assert write_summary(ALL, {"GITHUB_STEP_SUMMARY": str(path)}) is None
    assert path.stat().st_size == 2**20 - whole + 1 + table
    path.write_bytes(b"x" * (2**20 - 10))
    told = write_summary(report(IMPROVED), {"GITHUB_STEP_SUMMARY": str(path)})
    assert told is not None
    assert "has no room" in told


def test_a_summary_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    told = write_summary(ALL, {"GITHUB_STEP_SUMMARY": os.fspath(tmp_path / "nowhere" / "summary.md")})
    assert told == "the step's summary cannot be written (No such file or directory)"
    assert write_summary(ALL, {"GITHUB_STEP_SUMMARY": "a\0b"}) is not None

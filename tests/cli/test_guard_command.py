"""`autoaccum guard` as a person or a runner types it: what it asks for, prints, writes, and how it ends."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from command_line import invoke
from guard_reports import ALL, CASE, LOCKED, REGRESSED, UNCHANGED, UNMEASURED, report
from small_locks import WHOLE, a_lock

from autoaccum.errors import MissingLockError
from autoaccum.guarding import guard_run
from autoaccum.guarding.cases import Case, case_name, make_case
from autoaccum.guarding.guard_result import CaseFinished, CaseStarted, Report
from autoaccum.guarding.lock import write_lock
from autoaccum.reporting.guard_report import error_markdown, report_markdown, report_text
from autoaccum.units import MemorySize


class Guard:
    """Answers in place of `guard`, which has tests of its own, and keeps what it was asked."""

    def __init__(self) -> None:
        self.answer: Report | BaseException = report(UNCHANGED)
        self.asked: dict[str, Any] = {}

    def __call__(self, wanted: list[Case], folder: Path, **options: Any) -> Report:
        self.asked = {"wanted": wanted, "folder": folder, **options}
        options["on_event"](CaseStarted(CASE))
        if options["on_output"] is not None:
            options["on_output"]("::error::of the workload")
        if isinstance(self.answer, BaseException):
            raise self.answer
        options["on_event"](CaseFinished(1, 1, self.answer.verdicts[0]))
        return self.answer


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "train.py").write_text("def model():\n    pass\n")
    monkeypatch.chdir(tmp_path)
    for name in ("GITHUB_ACTIONS", "GITHUB_WORKSPACE", "GITHUB_STEP_SUMMARY"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


@pytest.fixture
def guard(monkeypatch: pytest.MonkeyPatch) -> Guard:
    found = Guard()
    monkeypatch.setattr(guard_run, "guard", found)
    return found


@pytest.mark.parametrize(
    ("found", "code"),
    [
        (report(UNCHANGED), 0),
        (report(LOCKED, updated="autoaccum.lock"), 0),
        (ALL, 1),
        (report(UNMEASURED), 3),
        (report(UNMEASURED, REGRESSED), 1),
    ],
    ids=["unchanged", "locked", "all", "unmeasured", "unmeasured and regressed"],
)
def test_the_report_is_on_stdout_progress_on_stderr(guard: Guard, found: Report, code: int) -> None:
    guard.answer = found
    result = invoke("guard")
    assert result.exit_code == code
    assert result.stdout.splitlines()[-1] == report_text(found).splitlines()[-1]
    assert re.match(r"::error::of the workload\n1/1 +\d+\.\d s  ", result.stderr)
    assert invoke("guard", "-q").stderr == "::error::of the workload\n"


def test_what_is_asked_for_reaches_the_guard(guard: Guard, folder: Path) -> None:
    rest = "--gpu t4 --tolerance 2% --update --time-limit 60 --force"
    assert invoke("guard", *shlex.split(case_name(WHOLE)), *rest.split()).exit_code == 0
    assert guard.asked["wanted"] == [WHOLE, make_case(**{**WHOLE.to_record(), "gpu": "t4"})]
    expected = {"folder": folder.resolve(), "update": True, "baseline": None, "time_limit": 60.0, "force": True}
    assert {name: guard.asked[name] for name in expected} == expected
    assert guard.asked["tolerance"] == MemorySize(fraction=0.02)


def test_cases_of_the_project_reach_the_guard(guard: Guard, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    by_words = "--gpu t4 --micro-batch 8 -- python train.py --bs {micro_batch}"
    listed = [case_name(WHOLE), "train.py:small --gpu t4 --gpu rtx3090 --target-batch 8", by_words]
    (folder / "pyproject.toml").write_text(f"[tool.autoaccum.guard]\ntolerance = '3%'\ncases = {listed}")
    (folder / "part").mkdir()
    monkeypatch.chdir(folder / "part")
    assert invoke("guard").exit_code == 0
    small: dict[str, Any] = {"workload": "train.py:small", "target_batch": 8}
    command = make_case(workload="-- python train.py --bs {micro_batch}", gpu="t4", micro_batch=8)
    assert guard.asked["listed"] == [WHOLE, make_case(gpu="t4", **small), make_case(gpu="rtx3090", **small), command]
    assert (guard.asked["folder"], guard.asked["wanted"]) == (folder.resolve(), [Case()])
    assert guard.asked["tolerance"] == MemorySize(fraction=0.03)
    (folder / "part" / "autoaccum.lock").touch()
    assert invoke("guard").exit_code == 0
    assert (guard.asked["folder"], guard.asked["listed"]) == (folder.resolve() / "part", []), "of another project"


@pytest.mark.parametrize(
    ("case", "told"),
    [
        ("train.py --target-batch 3", "no card is given to guard train.py on: name one to simulate"),
        ("--gpu t4 --target-batch 3", "it names no workload: write such as model.py"),
        ("train.py --gpu t4", "train.py has no target batch: say how many"),
        ("train.py --gpu t4 --target-batch x", "'x' is not a valid integer range: see `autoaccum guard --help`"),
        ("train.py --gpu t4 --target-batch 3 --update", "update is no part of a case: give it on the command line"),
        ("../train.py --gpu t4 --target-batch 3", "../train.py lies outside of"),
        ("train.py '", "it cannot be read as a case (No closing quotation)"),
        ("--gpu t4 -- python train.py", "the command has no {micro_batch}"),
        ("--help", "it cannot be read as a case"),
    ],
)
def test_a_case_of_the_project_is_refused_with_its_place(guard: Guard, folder: Path, case: str, told: str) -> None:
    (folder / "pyproject.toml").write_text(f"[tool.autoaccum.guard]\ncases = [{json.dumps(case)}]")
    result = invoke("guard")
    said = " ".join(result.stderr.split())
    assert (result.exit_code, guard.asked) == (2, {})
    assert said.startswith(f"error: pyproject.toml: [tool.autoaccum.guard] has the case {case!r}, and {told}")


@pytest.mark.parametrize("env", [{}, {"GITHUB_ACTIONS": "true"}], ids=["shell", "github"])
def test_json_is_alone_on_stdout(guard: Guard, env: dict[str, str]) -> None:
    guard.answer = ALL
    result = invoke("guard", "--json", env=env)
    assert (result.exit_code, result.stdout) == (1, ALL.to_json())
    assert json.loads(result.stdout)["exit_code"] == 1
    assert ("\n: :error::of" in f"\n{result.stderr}") == bool(env), "the runner reads stderr, too"


def test_under_github_actions_the_form_is_githubs(guard: Guard, folder: Path) -> None:
    guard.answer = ALL
    summary = folder / "summary.md"
    result = invoke(
        "guard", env={"GITHUB_ACTIONS": "true", "GITHUB_WORKSPACE": str(folder), "GITHUB_STEP_SUMMARY": str(summary)}
    )
    assert result.exit_code == 1
    lines = result.stdout.splitlines()
    assert lines[0] == "passed: train.py --gpu a100-80gb --target-batch 256 --precision bf16"
    commands = [line for line in lines if line.startswith("::")]
    assert [line.partition(" ")[0] for line in commands] == ["::error", "::error"]
    assert commands[0].startswith("::error file=train.py,line=1,title=autoaccum guard%3A regressed")
    assert lines[-2:] == commands
    assert summary.read_text() == report_markdown(ALL)
    assert not any(line.lstrip().startswith("::") for line in result.stderr.splitlines())
    assert ": :error::of the workload" in result.stderr


def test_an_error_in_place_of_a_report_is_annotated_too(guard: Guard, folder: Path) -> None:
    guard.answer = MissingLockError("there is no ##[lock]", hint="write one")
    summary, markdown = folder / "summary.md", error_markdown(guard.answer)
    result = invoke("guard", "-q", env={"GITHUB_ACTIONS": "true", "GITHUB_STEP_SUMMARY": str(summary)})
    assert summary.read_text() == markdown
    assert result.exit_code == 3
    assert result.stdout == "::error title=autoaccum guard::there is no ## [lock]: write one\n"
    assert result.stderr.endswith("error: there is no ## [lock]: write one\n")
    assert invoke("guard", "-q").stdout == ""


@pytest.mark.parametrize(("words", "written"), [([], report_text(ALL)), (["--json"], ALL.to_json())])
def test_a_file_keeps_the_report(guard: Guard, folder: Path, words: list[str], written: str) -> None:
    guard.answer = ALL
    assert invoke("guard", *words, "-o", "report", "--report", "p.html").exit_code == 1
    page = (folder / "p.html").read_text(encoding="utf-8")
    assert "activations of blocks.{0..11}.mlp" in page
    assert "head_|&lt;b&gt;" in page, "a name is no markup"
    assert (folder / "report").read_text() == written
    again = invoke("guard", *words, "-o", "report")
    assert again.exit_code == 2
    assert "report exists already: add --force" in again.stderr
    assert invoke("guard", *words, "-o", "report", "--force").exit_code == 1


def test_a_table_of_the_lock_is_written_once(folder: Path) -> None:
    readme = folder / "README.md"
    readme.write_text("<!-- autoaccum -->\n<!-- /autoaccum -->")
    missing = invoke("guard", "--table", "README.md")
    assert (missing.exit_code, missing.stdout) == (3, "")
    assert "there is no autoaccum.lock" in missing.stderr
    write_lock(folder / "autoaccum.lock", a_lock())
    told = [invoke("guard", "--table", "README.md", *words) for words in ([], [], ["-q"])]
    assert [(done.exit_code, done.stdout) for done in told] == [
        (0, "README.md: the table was rewritten\n"),
        (0, "README.md: the table is up to date\n"),
        (0, ""),
    ]
    assert "| `train.py --target-batch 256` | 32 (8) | 32 (8) |" in readme.read_text()

"""The ready workflow of examples/, as far as it can be checked without GitHub: its shape, and its steps by running."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from command_line import Command, environment
from small_classifier import MODEL
from small_repository import commit, git

from autoaccum.cli import guard as guard_command

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "examples" / "guard_workflow.yml").read_text(encoding="utf-8")
WORKFLOW: dict[Any, Any] = yaml.safe_load(TEXT)
JOB: dict[str, Any] = WORKFLOW["jobs"]["guard"]
STEPS: list[dict[str, Any]] = JOB["steps"]
SCRIPTS = {step["name"]: step["run"] for step in STEPS if "run" in step}
EVENTS = WORKFLOW[True]
"""YAML 1.1 reads `on` as true; GitHub does not."""


def step(name: str) -> dict[str, Any]:
    (found,) = [step for step in STEPS if name in (step.get("name"), step.get("uses"))]
    return found


def test_it_runs_on_pull_requests_with_no_more_rights_than_it_needs() -> None:
    assert EVENTS == {"pull_request": None, "push": {"branches": ["main"]}, "workflow_dispatch": None}
    assert WORKFLOW["permissions"] == {"contents": "read"}
    assert "permissions" not in JOB
    assert "secrets." not in TEXT
    assert step("actions/checkout@v5")["with"] == {"fetch-depth": 0, "persist-credentials": False}
    assert JOB["timeout-minutes"] <= 15


@pytest.mark.parametrize("name", SCRIPTS)
def test_scripts_are_bash_and_get_what_others_name_by_the_environment(name: str) -> None:
    subprocess.run(["bash", "-n", "-c", SCRIPTS[name]], check=True)
    assert "${{" not in SCRIPTS[name], "a branch's name could be a command"


def test_every_command_is_one_that_there_is() -> None:
    lines = [line for script in SCRIPTS.values() for line in script.splitlines() if line.startswith("autoaccum ")]
    assert len(lines) == 3
    for line in lines:
        _, command, *words = shlex.split(line)
        assert command == "guard"
        guard_command.command.make_context(command, words)


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a repository."""
    folder = tmp_path_factory.mktemp("project")
    commit(folder / "repository", {"train.py": MODEL})
    return folder


def lock_and_enlarge(repository: Path, command: Command) -> None:
    """Lock the model by the command of the workflow's own comment, then make it larger."""
    (line,) = [line[1:].strip() for line in TEXT.splitlines() if line.startswith("#   ")]
    (repository / "train.py").write_text(MODEL)
    done = command(repository, *shlex.split(line)[1:])
    assert done.returncode == 0, done.stderr
    (repository / "train.py").write_text(MODEL.replace("256", "262144"))


def run(project: Path, name: str, **further: str) -> subprocess.CompletedProcess[str]:
    """A step as the runner runs it (`bash --noprofile --norc -eo pipefail`), with `autoaccum` on the path."""
    repository, program = project / "repository", project / "autoaccum"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m autoaccum "$@"\n')
    program.chmod(0o755)
    variables = environment(
        PATH=f"{project}:{os.environ['PATH']}",
        GITHUB_ACTIONS="true",
        GITHUB_WORKSPACE=str(repository),
        GITHUB_STEP_SUMMARY=str(project / "summary.md"),
        **further,
    )
    return subprocess.run(
        ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", SCRIPTS[name]],
        cwd=repository,
        env=variables,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


@pytest.mark.slow
def test_the_steps_lock_and_fail(project: Path, command: Command) -> None:
    repository = project / "repository"
    lock_and_enlarge(repository, command)
    failed = run(project, "Compare with the lock")
    assert failed.returncode == 1, failed.stdout + failed.stderr
    assert "::error file=train.py,line=5,title=autoaccum guard%3A regressed" in failed.stdout
    assert "regressed: train.py" in (project / "summary.md").read_text()
    locked = run(project, "Lock anew")
    assert locked.returncode == 0, locked.stderr
    assert (repository / step("actions/upload-artifact@v4")["with"]["path"]).is_file()
    assert run(project, "Compare with the lock").returncode == 0


@pytest.mark.slow
def test_what_a_branch_adds_is_reported_and_nothing_is_left_behind(project: Path, command: Command) -> None:
    repository = project / "repository"
    lock_and_enlarge(repository, command)
    before = git(repository, "status", "--porcelain")
    failed = run(project, "Compare with the base branch", BASE="HEAD")
    assert failed.returncode == 1, failed.stdout + failed.stderr
    assert "::error file=train.py,line=5,title=autoaccum guard%3A regressed" in failed.stdout
    assert "against HEAD" in failed.stdout
    assert git(repository, "status", "--porcelain") == before
    assert len(git(repository, "worktree", "list").splitlines()) == 1
    assert not (repository / ".git" / "worktrees").exists()

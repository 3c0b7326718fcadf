"""The GitHub action, the workflow that uses it, and the hooks of pre-commit: their steps run, without GitHub."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from command_line import ROOT, Command, Done, environment
from guard_reports import ALL
from small_locks import a_lock
from small_repository import commit, git

from autoaccum.guarding.lock import write_lock
from autoaccum.reporting.guard_report import report_markdown

ACTION_FILE = ROOT / ".github" / "actions" / "guard" / "action.yml"
ACTION: dict[str, Any] = yaml.safe_load(ACTION_FILE.read_text(encoding="utf-8"))
SCRIPTS: dict[str, dict[str, Any]] = {step["name"]: step for step in ACTION["runs"]["steps"] if "run" in step}
INSTALL, MEASURE, COMMENT = SCRIPTS
HOOKS: list[dict[str, Any]] = yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text(encoding="utf-8"))

MODEL = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.wide = nn.Linear(64, 256)
        self.head = nn.Linear(256, 10)

    def forward(self, x):
        return self.head(self.wide(x).relu())

model = Net

def batch(size):
    return torch.randn(size, 64), torch.randint(0, 10, (size,))

criterion = nn.CrossEntropyLoss()
"""
GROWN = MODEL.replace("256", "262144")

GH = """
import json, os, sys
from pathlib import Path

words, file = sys.argv[1:], Path(os.environ["GITHUB"])
site = json.loads(file.read_text())
comments = site["comments"]
options = {name: words[words.index(name) + 1] for name in ("--method", "--field") if name in words}
places = [word for word in words if word.startswith("repos/")]
assert words[0] == "api" and len(places) == 1 and os.environ["GH_TOKEN"] == "token", words
assert places[0].startswith("repos/me/mine/issues/")
place = places[0].removeprefix("repos/me/mine/issues/")
if site["forbids"] and (site["forbids"] == "all" or options):
    print('{"message": "Resource not accessible by integration"}')
    sys.exit("gh: Resource not accessible by integration (HTTP 403)\\nmore")
if not options:
    assert place == "7/comments?per_page=100" and "--paginate" in words and "--slurp" in words
    print(json.dumps([comments[at : at + 2] for at in range(0, len(comments), 2)] or [[]]))
    sys.exit()
name, _, body = options["--field"].partition("=@")
assert name == "body" and "--silent" in words
if options.get("--method") == "PATCH":
    (comment,) = (each for each in comments if place == f"comments/{each['id']}")
else:
    assert place == "7/comments" and "--method" not in options
    comment = {"id": len(comments), "user": {"login": "github-actions[bot]"}}
    comments.append(comment)
comment["body"] = Path(body).read_text()
file.write_text(json.dumps(site))
"""
"""Answers as `gh api` does, from a file of comments, which it keeps."""

Run = Callable[..., Done]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Run a step as the runner does, in a repository, with these inputs, other contexts and programs."""

    def program(name: str, text: str) -> None:
        path = tmp_path / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)

    program("autoaccum", f'#!/bin/sh\nexec "{sys.executable}" -m autoaccum "$@"\n')
    program("gh", f"#!{sys.executable}\n{GH}")
    # Everything but an installation is run.
    program("python", f'#!/bin/sh\n[ "$2" = pip ] || exec "{sys.executable}" "$@"\nprintf "%s\\n" "$@" >pip.txt\n')

    def run_step(name: str, contexts: dict[str, str] | None = None, **inputs: str) -> Done:
        given = {f"inputs.{name}": text for name, text in {**defaults(), **inputs}.items()}
        values = {**given, "github.token": "token", "github.job": "guard", **(contexts or {})}
        step, repository = SCRIPTS[name], tmp_path / "repository"
        (repository / ".git").exists() or commit(repository, {"train.py": MODEL})
        (tmp_path / "summary.md").write_text("")
        variables = environment(
            PATH=f"{tmp_path / 'bin'}:{os.environ['PATH']}",
            GITHUB=str(tmp_path / "github.json"),
            GITHUB_ACTIONS="true",
            GITHUB_ACTION_PATH=str(ACTION_FILE.parent),
            GITHUB_REPOSITORY="me/mine",
            GITHUB_STEP_SUMMARY=str(tmp_path / "summary.md"),
            GITHUB_WORKSPACE=str(repository),
            RUNNER_TEMP=str(tmp_path),
            **{key: filled(text, values) for key, text in step["env"].items()},
        )
        return subprocess.run(
            ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", step["run"]],
            cwd=repository / filled(step.get("working-directory", "."), values),
            env=variables,
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
        )

    return run_step


def defaults() -> dict[str, str]:
    return {name: given["default"] for name, given in ACTION["inputs"].items()}


def filled(text: str, values: dict[str, str]) -> str:
    """A value with its expressions replaced; all that there are, are names."""
    return re.sub(r"\$\{\{ (.*?) \}\}", lambda found: values[found[1]], text)


def test_the_workflow_uses_the_action_with_no_more_rights_than_it_needs() -> None:
    text = (ROOT / "examples" / "guard_workflow.yml").read_text(encoding="utf-8")
    workflow: dict[Any, Any] = yaml.safe_load(text)
    assert workflow["permissions"] == {"contents": "read", "pull-requests": "write"}
    assert workflow[True] == {"pull_request": None, "push": {"branches": ["main"]}}  # YAML 1.1 reads `on` as true.
    (job,) = workflow["jobs"].values()
    checkout, guard = job["steps"]
    assert checkout == {"uses": "actions/checkout@v5", "with": {"fetch-depth": 2, "persist-credentials": False}}
    assert guard["uses"] == f"OWNER/autoaccum/{ACTION_FILE.parent.relative_to(ROOT)}@main"
    offered = set(re.findall(r"^ +#? ?([a-z-]+): ", text.partition("/guard@main")[2], re.MULTILINE))
    assert guard["with"].keys() <= offered <= ACTION["inputs"].keys()


@pytest.mark.parametrize("name", SCRIPTS)
def test_scripts_get_what_others_name_by_the_environment(name: str) -> None:
    assert "${{" not in SCRIPTS[name]["run"], "a branch's name could be a command"
    assert ("github.token" in str(SCRIPTS[name])) == (name == COMMENT), "the workloads do not get it"


@pytest.mark.parametrize(("locked", "torch"), [(True, "torch==2.13.0"), (False, "torch")])
def test_the_torch_of_the_lock_is_installed_with_autoaccum(run: Run, tmp_path: Path, locked: bool, torch: str) -> None:
    folder = tmp_path / "repository" / "nets"
    commit(folder.parent, {"nets/train.py": MODEL})
    if locked:
        write_lock(folder / "autoaccum.lock", a_lock())
    for requirements in ("", "needs/a b.txt"):
        done = run(INSTALL, **{"working-directory": "nets", "requirements": requirements})
        assert done.returncode == 0, done.stderr
        words = (folder.parent / "pip.txt").read_text().splitlines()
        assert words[:5] == ["-m", "pip", "install", "--extra-index-url", "https://download.pytorch.org/whl/cpu"]
        assert words[5] == torch
        assert Path(words[6]).resolve() == ROOT
        assert words[7:] == (["--requirement", requirements] if requirements else [])


def test_the_inputs_reach_guard(run: Run, tmp_path: Path) -> None:
    assert run(MEASURE).returncode == 3, "there is no lock"
    words = ["#!/bin/sh", 'printf "%s|" "$@"', 'echo told >>"$GITHUB_STEP_SUMMARY"', "exit 5", ""]
    (tmp_path / "bin" / "autoaccum").write_text("\n".join(words))
    done = run(MEASURE, tolerance="2 %", baseline="HEAD^1", args="-q -- python 'a b.py' $(x)")
    assert (done.returncode, done.stdout) == (
        5,
        "guard|--tolerance|2 %|--baseline|HEAD^1|-q|--|python|a b.py|$(x)|",
    )
    assert (tmp_path / "autoaccum-guard.md").read_text() == "told\n"
    assert run(MEASURE).stdout == "guard|"
    refused = run(MEASURE, args="-q -- python don't.py")
    assert refused.returncode == 2
    assert refused.stdout.startswith("::error title=autoaccum guard::args cannot be split into words")


@pytest.mark.slow
def test_what_grew_is_annotated_at_its_line_summarised_and_kept_for_the_comment(
    run: Run, tmp_path: Path, command: Command
) -> None:
    repository, report = tmp_path / "repository", tmp_path / "autoaccum-guard.md"
    commit(repository, {"nets/train.py": MODEL})
    locked = command(repository / "nets", "guard", "train.py", "--gpu", "t4", "--target-batch", "8", "--update")
    assert locked.returncode == 0, locked.stderr
    commit(repository, {"nets/train.py": GROWN})
    before = git(repository, "status", "--porcelain")
    failed = run(MEASURE, **{"working-directory": "nets"})
    assert failed.returncode == 1, failed.stdout + failed.stderr
    assert "::error file=nets/train.py,line=8,title=autoaccum guard%3A regressed" in failed.stdout
    assert report.read_text() == (tmp_path / "summary.md").read_text()
    assert "regressed: train.py" in report.read_text()
    assert git(repository, "status", "--porcelain") == before


OWN = {"id": 8, "user": {"login": "github-actions[bot]"}, "body": "<!-- autoaccum guard guard .  -->\nof yesterday"}
OTHERS = [
    {"id": 1, "user": None, "body": "of a user who left"},
    {"id": 2, "user": {"login": "me"}, "body": OWN["body"]},
    {"id": 3, "user": OWN["user"], "body": "of another action"},
    {"id": 4, "user": OWN["user"], "body": "<!-- autoaccum guard guard nets  -->\nof another lock"},
]
WRITTEN = f"<!-- autoaccum guard guard .  -->\n{report_markdown(ALL)}"


@pytest.mark.parametrize(
    ("outcome", "comments", "forbids", "after"),
    [
        ("failure", OTHERS, "", [*OTHERS, {"id": 4, "user": OWN["user"], "body": WRITTEN}]),
        ("failure", [*OTHERS, OWN], "", [*OTHERS, {**OWN, "body": WRITTEN}]),
        ("success", [*OTHERS, OWN], "", [*OTHERS, {**OWN, "body": WRITTEN}]),
        ("success", OTHERS, "", OTHERS),
        ("failure", OTHERS, "writing", OTHERS),
        ("failure", OTHERS, "all", OTHERS),
    ],
    ids=["first", "again", "mended", "never grew", "fork", "no permission"],
)
def test_the_pull_request_has_one_comment_of_each_lock(
    run: Run, tmp_path: Path, outcome: str, comments: list[Any], forbids: str, after: list[Any]
) -> None:
    site = tmp_path / "github.json"
    site.write_text(json.dumps({"comments": comments, "forbids": forbids}))
    (tmp_path / "autoaccum-guard.md").write_text(report_markdown(ALL))
    done = run(COMMENT, {"github.event.pull_request.number": "7", "steps.guard.outcome": outcome})
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(site.read_text())["comments"] == after
    told = done.stdout.splitlines()
    assert len(told) == bool(forbids)
    assert all(line.startswith("::warning title=") and line.endswith("(HTTP 403)") for line in told)


def test_without_a_report_nothing_is_asked_of_github(run: Run, tmp_path: Path) -> None:
    (tmp_path / "autoaccum-guard.md").write_text("")
    done = run(COMMENT, {"github.event.pull_request.number": "7", "steps.guard.outcome": "failure"})
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.fixture
def try_hook(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Done]:
    """Run a hook as pre-commit does, from a repository that offers it, in one that has a lock."""
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setenv("PRE_COMMIT_HOME", str(tmp_path / "pre-commit"))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    commit(tmp_path / "hooks", {".pre-commit-hooks.yaml": (ROOT / ".pre-commit-hooks.yaml").read_text()})
    repository = tmp_path / "repository"
    commit(repository, {"train.py": MODEL, "README.md": "# Mine\n<!-- autoaccum -->\n<!-- /autoaccum -->\n"})

    def run_hook(name: str) -> Done:
        git(repository, "add", "--all")
        words = [sys.executable, "-m", "pre_commit", "try-repo", "../hooks", name, "--all-files", "--verbose"]
        return subprocess.run(words, cwd=repository, capture_output=True, text=True, check=False, timeout=120)

    return run_hook


@pytest.mark.slow
def test_the_hook_of_the_table_fails_once_after_a_new_lock(try_hook: Callable[[str], Done], tmp_path: Path) -> None:
    write_lock(tmp_path / "repository" / "autoaccum.lock", a_lock())
    failed = try_hook("autoaccum-table")
    assert failed.returncode == 1, failed.stdout + failed.stderr
    assert "README.md: the table was rewritten" in failed.stdout
    assert try_hook("autoaccum-table").returncode == 0


@pytest.mark.slow
def test_the_hook_of_the_guard_ends_as_the_guard_does(try_hook: Callable[[str], Done], tmp_path: Path) -> None:
    failed = try_hook("autoaccum-guard")
    assert failed.returncode == 1
    assert "there is no autoaccum.lock" in failed.stdout
    assert [hook["id"] for hook in HOOKS] == ["autoaccum-guard", "autoaccum-table"]

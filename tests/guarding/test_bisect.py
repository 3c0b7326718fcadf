"""`git bisect run autoaccum guard --bisect`, as examples/guard.md has it, finds the commit that takes more memory."""

from __future__ import annotations

from pathlib import Path

import pytest
from command_line import Command
from served_command import with_program
from small_repository import commit, git

MODEL = """{first_line}
import torch
from torch import nn

WIDTH = {width}  # Of revision {revision}.


def model():
    return nn.Sequential(nn.Linear(64, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 64))


def batch(size):
    return torch.randn(size, 64), torch.randn(size, 64)


criterion = nn.MSELoss()
"""
REVISIONS, PLANTED, BROKEN = 40, 26, 29
"""A bisection of 40 begins with 19 and 29, which cannot be imported."""


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_planted_commit_is_found_in_a_history_of_40(tmp_path: Path, command: Command) -> None:
    repository = tmp_path / "project"
    commits = []
    for revision in range(REVISIONS):
        width, first_line = 512 if revision < PLANTED else 1024, "import gone" if revision == BROKEN else ""
        text = MODEL.format(first_line=first_line, width=width, revision=revision)
        commits.append(commit(repository, {"train.py": text}, f"revision {revision}"))
    git(repository, "checkout", "-q", commits[0])
    locked = ("train.py", "--gpu", "rtx3090", "--target-batch", "4096", "--lock", "../good.lock", "--update")
    assert command(repository, "guard", *locked).returncode == 0
    git(repository, "bisect", "start", commits[-1], commits[0])
    words = ("guard", "-q", "--bisect", "--lock", "../good.lock")
    told = with_program(
        tmp_path, command, lambda program: git(repository, "bisect", "run", str(program), *words, seconds=500)
    )
    assert f"{commits[PLANTED]} is the first bad commit" in told
    log = git(repository, "bisect", "log")
    assert f"# skip: [{commits[BROKEN]}]" in log

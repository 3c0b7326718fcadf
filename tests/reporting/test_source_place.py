"""Where a workload is defined, found without importing it."""

from __future__ import annotations

from pathlib import Path

import pytest

from autoaccum.reporting.source_place import SourcePlace, find_place

SOURCE = """import torch
from elsewhere import net as lent

if True:
    small, (large, *rest) = make()
try:
    typed: int = 3
except ImportError:
    typed = None

@decorated
def model():
    hidden = 1

class Net: ...
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    for name in ("train.py", "src/inner/deep.py", "src/inner/__init__.py", "pkg/sub.py", "broken.py"):
        path = tmp_path / "repository" / "sub" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("def model(:" if name == "broken.py" else SOURCE)
    return tmp_path / "repository" / "sub"


@pytest.mark.parametrize(
    ("workload", "file", "line"),
    [
        ("train.py", "sub/train.py", 12),
        ("train.py:Net", "sub/train.py", 15),
        ("train.py:large", "sub/train.py", 5),
        ("train.py:rest", "sub/train.py", 5),
        ("train.py:lent", "sub/train.py", 2),
        ("train.py:typed", "sub/train.py", 7),
        ("train.py:hidden", "sub/train.py", 1),
        ("inner.deep:Net", "sub/src/inner/deep.py", 15),
        ("inner:Net", "sub/src/inner/__init__.py", 15),
        ("pkg.sub:small", "sub/pkg/sub.py", 5),
        ("broken.py", "sub/broken.py", 1),
    ],
)
def test_file_and_line(project: Path, workload: str, file: str, line: int) -> None:
    environment = {"GITHUB_WORKSPACE": str(project.parent)}
    assert find_place(workload, project, environment) == SourcePlace(file, line)


def test_without_a_runner_the_root_is_gits_or_the_project(project: Path) -> None:
    assert find_place("train.py", project, {}) == SourcePlace("train.py", 12)
    (project.parent / ".git").mkdir()
    assert find_place("train.py", project, {}) == SourcePlace("sub/train.py", 12)
    elsewhere = {"GITHUB_WORKSPACE": "/nowhere"}
    assert find_place("train.py", project, elsewhere) == SourcePlace("sub/train.py", 12)


def test_what_is_not_in_the_repository_has_no_place(project: Path) -> None:
    assert find_place("gone.py", project, {}) is None
    assert find_place("torch.nn:Linear", project, {}) is None
    (project / "linked.py").symlink_to(__file__)
    assert find_place("linked.py", project, {}) is None

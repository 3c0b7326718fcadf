from __future__ import annotations

import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

WriteWorkload = Callable[[str], str]


@pytest.fixture(scope="module")
def write_workload(tmp_path_factory: pytest.TempPathFactory) -> WriteWorkload:
    """Puts a workload file into a folder of its own and returns what refers to it."""

    def write(source: str) -> str:
        path: Path = tmp_path_factory.mktemp("workload") / "model.py"
        path.write_text(textwrap.dedent(source))
        return str(path)

    return write

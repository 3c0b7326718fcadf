"""What tests of the command line share."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A folder with the test module's MODEL as a file."""
    (tmp_path / "model.py").write_text(request.module.MODEL)
    return tmp_path

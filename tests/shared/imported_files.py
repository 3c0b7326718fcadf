"""Files of Python that a test wrote, or the repository has, as modules."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType


def import_file(path: Path) -> ModuleType:
    """A new module of that file, which no other can import by name."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module

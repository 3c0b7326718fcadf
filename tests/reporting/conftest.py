from __future__ import annotations

from collections.abc import Callable
from itertools import count
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from emitted_variants import plan_by_hand
from imported_files import import_file

from autoaccum.reporting.emit import emit_wrapper
from autoaccum.sources.workload import Workload

Emit = Callable[..., ModuleType]


@pytest.fixture
def emit(tmp_path: Path) -> Emit:
    """Emit the file for a workload (and `target`, `ceiling`), and import it."""
    numbers = count()

    def make(workload: Workload, target: int = 18, ceiling: int = 6, **changes: Any) -> ModuleType:
        path = tmp_path / f"train_step_{next(numbers)}.py"
        path.write_text(emit_wrapper(plan_by_hand(workload, target, ceiling, **changes)), encoding="utf-8")
        return import_file(path)

    return make

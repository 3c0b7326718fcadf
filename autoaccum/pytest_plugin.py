"""The fixture `assert_fits`: a test that fails where a training step does not fit into a card's memory.

    def test_fits(assert_fits):
        assert_fits("model.py", gpu="rtx3090", micro_batch=32, limit="20GiB")

Nothing is imported before a test calls it. PYTEST_DONT_REWRITE
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def assert_fits(request: pytest.FixtureRequest) -> Callable[..., None]:
    """Fail where a training step does not fit: `assert_fits("model.py", gpu="rtx3090", micro_batch=32)`.

    What cannot be measured fails, too; it is never a pass, and never skipped. `limit` is the budget (`20GiB`, `80%`),
    all of the card's where none is given; further arguments are `target_batch` and other
    options of `autoaccum.plan`. A file is looked for from pytest's root folder, then beside the test.
    """
    root, beside = request.config.rootpath, request.path.parent

    def check(workload: str | os.PathLike[str], *, limit: str | None = None, **asked: Any) -> None:
        __tracebackhide__ = True
        from autoaccum.errors import AutoaccumError, UsageError
        from autoaccum.guarding.guard_run import check_fits

        failure = ""
        try:
            if not isinstance(workload, (str, os.PathLike)):
                raise UsageError(f"the workload is {workload!r}", hint="name a file such as model.py, or a module")
            if "memory" in asked:
                raise UsageError("there is no argument 'memory'", hint='the budget is limit="20GiB" here')
            check_fits(_find(os.fspath(workload), root, beside), root, memory=limit, **asked)
        except AutoaccumError as error:
            traceback: str | None = getattr(error, "user_traceback", None)
            failure = f"{traceback.rstrip()}\n{error}" if traceback else str(error)
        if failure:
            pytest.fail(failure, pytrace=False)

    return check


def _find(workload: str, root: Path, beside: Path) -> str:
    """Return the reference with its file's absolute path; raise WorkloadError for no such file."""
    from autoaccum.errors import WorkloadError
    from autoaccum.sources.source import NamedSource, find_source

    source = find_source(workload)
    if isinstance(source, NamedSource):
        return workload
    for folder in (root, beside):
        if (folder / source.file).is_file():
            return source.at(folder / source.file).name
    places = " or in ".join(dict.fromkeys((str(root), str(beside))))
    raise WorkloadError(
        f"there is no file {source.file} in {places}", hint="name it from pytest's root or from the test"
    )

"""Examples in docstrings give what they show; only modules that have some are imported."""

from __future__ import annotations

import doctest
import importlib
from pathlib import Path

import pytest

import autoaccum

ROOT = Path(autoaccum.__file__).parent.parent
IMPORTED_FROM = {"autoaccum": ROOT, "tests/gpu": ROOT, "tests/benchmarks": ROOT / "tests/benchmarks"}
MODULES = [
    ".".join(path.relative_to(start).with_suffix("").parts)
    for folder, start in IMPORTED_FROM.items()
    for path in sorted(ROOT.joinpath(folder).rglob("*.py"))
    if ">>> " in path.read_text()
]


@pytest.mark.parametrize("name", MODULES)
def test_examples_give_what_they_show(name: str) -> None:
    wrong: list[str] = []
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    for examples in doctest.DocTestFinder(exclude_empty=True).find(importlib.import_module(name)):
        runner.run(examples, out=wrong.append)
    assert runner.tries > 0
    assert not wrong, "".join(wrong)

"""The notebook of the examples runs in a real Jupyter kernel, and shows what it promises."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

ROOT = Path(__file__).parents[1]
NOTEBOOK = ROOT / "examples" / "quickstart.ipynb"
WARM = """
from contextlib import ExitStack
from warm_children import Nurseries, warmed
_warm = ExitStack()
_warm.enter_context(warmed(_warm.enter_context(Nurseries().running()).__getitem__))
"""
"""A kernel runs it at its start: the children that it starts are copies."""


def texts(cell: Any, kind: str = "text/plain") -> list[str]:
    """Return the outputs of a cell of one kind, or those that were printed."""
    return [output.text if output.output_type == "stream" else output.data[kind] for output in cell.outputs]


@pytest.mark.slow
def test_it_plans_trains_and_verifies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{ROOT / 'tests' / 'shared'}")
    (startup := tmp_path / "profile_default" / "startup").mkdir(parents=True)
    (startup / "warm.py").write_text(WARM)
    notebook = nbformat.read(NOTEBOOK, as_version=4)  # type: ignore[no-untyped-call]
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell for cell in cells if cell.outputs or cell.execution_count] == [], "outputs are stripped"
    NotebookClient(notebook, timeout=200, resources={"metadata": {"path": str(tmp_path)}}).execute()
    _, _, planned, simulated, trained, looped, equal, wrong = cells

    streams = [output for cell in cells for output in cell.outputs if output.output_type == "stream"]
    assert [stream.name for stream in streams] == ["stdout"] * 3, "nothing but what the cells print"
    progress, answer = texts(planned)
    assert "from a clean state" in progress
    assert " ..." not in progress, "the live line is gone"
    found = re.fullmatch(r"<Plan: target_batch 128, micro_batch (\d+), .* measured on cpu, .*>", answer)
    assert found is not None
    assert 1 < int(found[1]) < 128, "the budget binds"
    assert "micro_batch 512, iter_size 2, predicted on t4 (simulated)" in texts(simulated)[1]
    for cell in (planned, simulated):
        shown = cell.outputs[1].data["text/html"]
        assert shown.count("<img") == 1

    progress, printed = texts(trained)
    assert re.fullmatch(r"training SmallGPT on cpu: 128 .*\nupdate (\d+) of \1, epoch 3 of 3  loss .*\n", progress)
    assert float(printed.split()[-1]) < 4
    assert texts(looped)[0].startswith("128 samples as (")
    for cell, answer in ((equal, "equivalent"), (wrong, "not equivalent (accumulate)")):
        progress, answered = texts(cell)
        assert progress.endswith("; compared in fp64 on cpu\n")
        assert answered.startswith(f"<Verification: {answer}, ")
    assert "proved" in wrong.outputs[1].data["text/html"]

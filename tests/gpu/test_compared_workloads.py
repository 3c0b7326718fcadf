"""Every workload that is compared can be simulated, whole."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from autoaccum.devices.simulated.cards import find_card
from autoaccum.devices.simulated.simulated_child import SimulatedChild
from autoaccum.devices.simulated.trace import Trace
from tests.gpu.cases import CASES, FOLDER

WHERE = {"cwd": os.getcwd(), "sys_path": sys.path, "pythonpath": os.environ.get("PYTHONPATH")}  # noqa: PTH109
NAMES = {file: sorted({case.name for case in CASES if case.file == file}) for file in {case.file for case in CASES}}


@contextmanager
def loaded(reference: str) -> Iterator[SimulatedChild]:
    child = SimulatedChild()
    try:
        card = dataclasses.asdict(find_card("h100"))
        answer = child.answer({"job": "load", "card": card, "reference": reference, "precision": None, **WHERE})
        assert "failure" not in answer, answer
        yield child
    finally:
        child.close()


def trace(child: SimulatedChild, size: int) -> Trace:
    answer: dict[str, Any] = child.answer({"job": "trace", "parts": (size, size), "share": 2 * size, "optimizer": None})
    assert "failure" not in answer, answer
    return Trace.from_record(answer["trace"])


@pytest.mark.parametrize("file", sorted(NAMES))
def test_all_of_a_family_can_be_traced(file: str) -> None:
    for name in NAMES[file]:
        with loaded(f"{FOLDER / file}.py:{name}") as child:
            made = trace(child, 2)
        assert len(made.events) > 100, name


def test_every_workload_of_the_files_is_compared() -> None:
    for file, names in NAMES.items():
        source = (FOLDER / f"{file}.py").read_text()
        defined = [line.split(" = ")[0] for line in source.splitlines() if line.startswith(("fp32", "bf16", "fp16"))]
        assert sorted(defined) == names

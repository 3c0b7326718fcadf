"""Every workload that is compared can be simulated, whole."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from autoaccum.devices.child.import_paths import ImportPaths
from autoaccum.devices.simulated.simulated_child import SimulatedChild
from autoaccum.devices.simulated.simulation_requests import LoadOnCard, TraceParts
from autoaccum.devices.trial_requests import Loaded
from autoaccum.simulation.cards import find_card
from autoaccum.simulation.trace_records import Trace
from tests.gpu.cases import CASES, FOLDER

NAMES = {file: sorted({case.name for case in CASES if case.file == file}) for file in {case.file for case in CASES}}

SLOW = pytest.mark.slow


@contextmanager
def loaded(reference: str) -> Iterator[SimulatedChild]:
    child = SimulatedChild()
    try:
        load = LoadOnCard(
            card=find_card("h100"), device="h100", paths=ImportPaths.of(), reference=reference, share=4, options={}
        )
        assert isinstance(loaded := child.handle(load), Loaded), loaded
        yield child
    finally:
        child.close()


def trace(child: SimulatedChild, size: int) -> Trace:
    traced = child.handle(TraceParts(parts=(size,)))
    assert isinstance(traced, Trace), traced
    return traced


@pytest.mark.parametrize("file", [file if file == "lstm" else pytest.param(file, marks=SLOW) for file in sorted(NAMES)])
def test_all_of_a_family_can_be_traced(file: str) -> None:
    with loaded(f"{FOLDER / file}.py:{NAMES[file][0]}") as child:
        assert len(trace(child, 2).events) > 100


def test_every_workload_of_the_files_is_compared() -> None:
    for file, names in NAMES.items():
        source = (FOLDER / f"{file}.py").read_text()
        defined = [line.split(" = ")[0] for line in source.splitlines() if line.startswith(("fp32", "bf16", "fp16"))]
        assert sorted(defined) == names

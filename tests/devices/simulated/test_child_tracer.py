"""A child process that simulates a card, from its parent's side."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from factories import codes
from planned import make_settings

from autoaccum.devices.simulated.simulation_requests import TraceParts, Tracer
from autoaccum.devices.trial_requests import Inspect
from autoaccum.errors import NotMeasuredError, WorkloadError
from autoaccum.simulation.cards import find_card

pytestmark = pytest.mark.usefixtures("warm_children")

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
Make = Callable[..., Tracer]


@pytest.fixture
def make() -> Iterator[Make]:
    made: list[Tracer] = []

    def tracer(reference: str | Path, **options: Any) -> Tracer:
        settings = make_settings(str(reference), 64, **options)
        made.append(Tracer(settings, find_card("rtx4090")))
        return made[-1]

    yield tracer
    for one in made:
        one.close()


def test_a_trace_has_both_updates_and_grows_with_the_batch(make: Make) -> None:
    tracer = make(EXAMPLES / "digits_cnn.py")
    inspection = tracer.call(Inspect())
    assert (inspection.workload.parameters, inspection.least_size, inspection.workload.optimizer) == (
        19_658,
        1,
        "AdamW",
    )
    assert "batchnorm_of_parts" in codes(inspection.accumulation_warnings)
    small, large = tracer.call(TraceParts(parts=(2, 2))), tracer.call(TraceParts(parts=(8, 8)))
    assert (small.parts, large.parts) == ((2, 2), (8, 8))
    assert small.events == large.events
    assert small.phases == large.phases
    names = [phase for _, phase in small.phases]
    assert [names.count(phase) for phase in ("backward", "update")] == [3, 2]
    assert small.phases[names.index("update")][0] < small.last_update < len(small.events)
    ints = [(a, b) for a, b in zip(small.sizes, large.sizes, strict=True) if isinstance(a, int) and isinstance(b, int)]
    assert all(a <= b <= 4 * a for a, b in ints)
    assert tracer.call(TraceParts(parts=(2, 2))) == small


def test_a_bad_file_is_told_at_once(make: Make, tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_text("import nothing_of_that_name\n")
    with pytest.raises(WorkloadError, match="nothing_of_that_name"):
        make(tmp_path / "bad.py")


def test_a_dead_child_is_no_answer(make: Make, tmp_path: Path) -> None:
    (tmp_path / "dies.py").write_text(
        "import os, torch\nfrom torch import nn\nmodel = lambda: nn.Linear(2, 1)\n"
        "def batch(n): os._exit(7)\ndef loss(m, b): return m(b).sum()\n"
    )
    with pytest.raises(NotMeasuredError, match="exit code 7|with code 7|7"):
        make(tmp_path / "dies.py").call(Inspect())

"""What tests of a simulated card share."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from autoaccum.devices.child.failures import Failure
from autoaccum.devices.child.requests import Request
from autoaccum.devices.explanation import Explanation
from autoaccum.devices.installed_torch import read_torch_release
from autoaccum.devices.simulated.breakdown import MemoryBreakdown
from autoaccum.devices.simulated.simulated_child import SimulatedChild
from autoaccum.devices.simulated.simulation_requests import LabelParts, LoadOnCard
from autoaccum.options import make_options
from autoaccum.simulation.allocator.caching_allocator import AllocatorSettings
from autoaccum.simulation.allocator.replay import Replayer
from autoaccum.simulation.cards import find_card
from autoaccum.simulation.trace_records import LabelledTrace
from autoaccum.simulation.tracing.dispatch_mode import FakeCudaMode
from autoaccum.simulation.tracing.simulation import simulate
from autoaccum.sources.source import FileSource

HEAD = """
import copy
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

def batch(n):
    return torch.randn(n, 8), torch.randint(0, 4, (n,))

criterion = nn.CrossEntropyLoss()
"""

Ask = Callable[[Request[Any]], Any]


@pytest.fixture
def simulated(tmp_path: Path) -> Iterator[Callable[[str], Ask]]:
    """From the lines of a workload file to a function that runs a request on a simulated RTX 3090, here."""
    children = [SimulatedChild()]

    def load(lines: str, precision: Any = None, **asked: Any) -> Ask:
        children[-1].close()
        children.append(child := SimulatedChild())
        path = tmp_path / "model.py"
        path.write_text(HEAD + lines)
        card, options = find_card("rtx3090"), make_options(precision=precision, **asked)
        load = LoadOnCard(
            card=card,
            source=FileSource(str(path)).to_record(),
            rank_samples=256,
            options=options.to_record(),
        )
        loaded = child.handle(load)
        return lambda request: loaded if isinstance(loaded, Failure) else child.handle(request)

    yield load
    children[-1].close()


@pytest.fixture
def mode() -> Iterator[FakeCudaMode]:
    """A simulated RTX 3090, in this process."""
    with simulate(find_card("rtx3090")) as mode:
        yield mode


@dataclasses.dataclass(frozen=True)
class Explained:
    """A labelled trace on a simulated RTX 3090, and all that is made of it."""

    labelled: LabelledTrace
    breakdown: MemoryBreakdown
    explanation: Explanation

    def before(self, phase: str) -> dict[str, int]:
        """What is held, by category, when `phase` begins for the last time."""
        at = [index for index, name in self.labelled.trace.phases if name == phase][-1] - 1
        return {category: held[at] for category, held in self.breakdown.totals.items()}

    def path(self, module: int) -> str:
        return self.labelled.modules[module].path


def make_explained(labelled: LabelledTrace) -> Explained:
    replayer = Replayer(find_card("rtx3090"), AllocatorSettings(), read_torch_release())
    breakdown = MemoryBreakdown(labelled, replayer)
    explanation = breakdown.explain_peak(card="rtx3090 (simulated)", context_bytes=0)
    return Explained(labelled, breakdown, explanation)


@pytest.fixture
def explained(simulated: Callable[..., Ask]) -> Callable[..., Explained]:
    """From the lines of a workload file to what is known of the memory of two parts of `size`, or of `parts`."""

    def make(lines: str, precision: str | None = None, size: int = 64, parts: Sequence[int] | None = None) -> Explained:
        labelled = simulated(lines, precision)(LabelParts(parts=tuple(parts or (size, size))))
        assert not isinstance(labelled, Failure), labelled
        return make_explained(labelled)

    return make

"""`torch.cuda.empty_cache` and its kin release what is free, in the trace and in its replay."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from autoaccum.devices.installed_torch import read_torch_release
from autoaccum.devices.simulated.simulation_requests import TraceParts
from autoaccum.simulation.allocator.caching_allocator import AllocatorSettings
from autoaccum.simulation.allocator.replay import Replayer
from autoaccum.simulation.cards import find_card
from autoaccum.simulation.trace_records import EMPTY_CACHE, Trace, Workspace
from autoaccum.simulation.tracing.trace_scaling import fit_affine_trace
from autoaccum.units import MIB

EMPTIES = Workspace("empty_cache", (EMPTY_CACHE,))
MODEL = """
def model():
    layer = nn.Linear(8, 4)
    scratch = torch.empty(48 << 20, dtype=torch.uint8, device="cuda")
    del scratch
    {call}
    layer.extra = nn.Parameter(torch.empty(5 << 20, device="cuda"))
    return layer
"""
OF_STEP = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 4)

    def forward(self, x):
        wide = x.repeat(1, 100_000)
        y = x + wide.mean()
        del wide
        torch.cuda.empty_cache()
        return self.layer(y)

model = Net
"""


def replayer() -> Replayer:
    return Replayer(find_card("rtx3090"), AllocatorSettings(), read_torch_release())


@pytest.mark.parametrize(
    "call",
    [
        "torch.cuda.empty_cache()",
        "torch.cuda.memory.empty_cache()",
        "torch.accelerator.empty_cache()",
        "torch.accelerator.memory.empty_cache()",
        "torch._C._accelerator_emptyCache()",
    ],
)
def test_what_building_frees_goes_back_to_the_card(simulated: Callable[..., Callable[..., Trace]], call: str) -> None:
    kept, released = (
        simulated(MODEL.format(call=line))(TraceParts(parts=(4, 4))) for line in ("torch.cuda.synchronize()", call)
    )
    assert (EMPTIES in kept.sizes, released.sizes.count(EMPTIES)) == (False, 1)
    # Segments for small blocks, for the parameter of 20 MiB, and for cuBLAS; or all large ones in the cached 48 MiB.
    held = [replayer().with_sizes(trace).reserved_over_time()[trace.last_update - 1] for trace in (kept, released)]
    assert held == [(2 + 48) * MIB, (2 + 20 + 20) * MIB]
    assert [replayer().with_sizes(trace).uncertainty_bytes for trace in (kept, released)] == [0, 0]


def test_calls_of_the_step_are_part_of_extrapolated_traces(simulated: Callable[..., Callable[..., Trace]]) -> None:
    ask = simulated(OF_STEP)
    traces = [ask(TraceParts(parts=(size, size))) for size in (2, 5, 3)]
    grown = fit_affine_trace(traces).at(64)
    assert grown.sizes.count(EMPTIES) == 3, "one in each micro-batch"
    sized = replayer().with_sizes(grown)
    assert sized.replacements is not None
    over_time = sized.reserved_over_time()
    for block in (block for block, size in enumerate(grown.sizes) if size == EMPTIES):
        at = grown.events.index(block)
        assert over_time[at - 1] - over_time[at] >= 64 * 8 * 100_000 * 4

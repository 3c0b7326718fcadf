"""Compare the blocks that `--savers auto` recomputes with the fewest that fit, by trying all numbers of them.

`python tests/benchmarks/fewest_blocks.py`: a GPT of 24 layers on an RTX 3090, of which not one sample fits without, and
at two smaller budgets; about two minutes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from measuring import ROOT, format_markdown

from autoaccum.devices.base import TrialSettings
from autoaccum.devices.device_choice import read_torch_release
from autoaccum.devices.simulated.simulated_device import SimulatedDevice, predict_trial
from autoaccum.devices.simulated.simulation_requests import TraceParts, Tracer
from autoaccum.devices.trial_requests import Inspect
from autoaccum.options import make_options
from autoaccum.planning.plan_request import PlanRequest
from autoaccum.planning.plan_setup import PlanSetup
from autoaccum.planning.planner import plan_on_device
from autoaccum.simulation.allocator.caching_allocator import AllocatorSettings
from autoaccum.simulation.allocator.replay import Replayer
from autoaccum.simulation.cards import find_card
from autoaccum.units import GIB, MemorySize, format_bytes

CARD = "rtx3090"


@dataclass(frozen=True)
class Row:
    """A budget, the fewest blocks with which one sample fits into it, and the savers that a plan chose."""

    limit_bytes: int
    fewest: int
    chosen: tuple[str, ...]


class _Tracer(Tracer):
    """One for several devices, which keeps its traces."""

    def close(self) -> None:
        """Leave it to `end`."""

    def end(self) -> None:
        super().close()


def compare_with_all(reference: str, limits: tuple[int, ...] = ()) -> list[Row]:
    """Plan one sample at each budget, and try all numbers of blocks; by default at that which half of them need."""
    with _tracing(reference) as tracer:
        blocks = tracer.call(Inspect()).workload.blocks
        card = find_card(CARD)
        replayer = Replayer(card, AllocatorSettings(total_bytes=card.total_bytes), read_torch_release())
        traces = [
            tracer.call(TraceParts(parts=(1,), savers=(f"recompute={count}",) if count else ()))
            for count in range(blocks + 1)
        ]
        limits = limits or (replayer.least_bytes([traces[blocks // 2]], card.total_bytes),)
        return [
            Row(
                limit,
                min(count for count, trace in enumerate(traces) if predict_trial(replayer, [trace], limit).ran),
                _choose(tracer, limit),
            )
            for limit in limits
        ]


@contextmanager
def _tracing(reference: str) -> Iterator[_Tracer]:
    tracer = _Tracer(TrialSettings(reference=reference, share=1), find_card(CARD))
    try:
        yield tracer
    finally:
        tracer.end()


def _choose(tracer: _Tracer, limit_bytes: int) -> tuple[str, ...]:
    card, memory = find_card(CARD), MemorySize(bytes=limit_bytes)
    release = read_torch_release()
    with SimulatedDevice(card, lambda: tracer, share=1, torch_version=release, memory=memory, environment={}) as device:
        plan = plan_on_device(PlanSetup(device, "gpt"), PlanRequest(1, make_options(gpu=CARD, savers=("auto",))))
    return tuple(plan.spec.savers)


def main() -> None:
    """Print a line for each budget."""
    reference = f"{ROOT / 'tests' / 'shared' / 'workloads' / 'long_gpt.py'}:card"
    rows = compare_with_all(reference, (22 * GIB + GIB // 2, 21 * GIB, 20 * GIB))
    found = [(format_bytes(row.limit_bytes), str(row.fewest), " + ".join(row.chosen)) for row in rows]
    print(format_markdown([("budget", "fewest blocks that fit", "chosen"), *found]))


if __name__ == "__main__":
    main()

"""What parts that need each other cost: seconds beside plain accumulation, bytes on the card and in host memory.

Run it with `python tests/benchmarks/whole_batch.py`.

On one thread, updates of a convolutional net with BatchNorm take turns: in plain micro-batches, with exact BatchNorm,
and with a coupled loss in two passes. The medians of the paired ratios of this process's CPU seconds
are printed (aims at 4 parts: 1.6 for exact BatchNorm, 2.1 for the two passes). On a CPU nothing is copied to host
memory, so the ratios leave out the transfers of a card.

Then updates in more and more parts of one size are traced on a simulated card: what tensors hold at once there, and
what they leave in host memory.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable
from statistics import median
from time import process_time
from typing import Any

import torch
from measuring import ROOT, load_model, take_turns
from torch import nn

from autoaccum import Accumulator
from autoaccum.devices.base import TrialSettings
from autoaccum.devices.simulated.cards import find_card
from autoaccum.devices.simulated.simulation_requests import TraceParts, Tracer
from autoaccum.devices.simulated.trace_records import Trace
from autoaccum.devices.trial_record import Inspect
from autoaccum.options import Options
from autoaccum.units import MIB

MODEL, SAMPLES, PARTS = "conv_batchnorm", 16, (2, 4, 8)
TRACED, TRACED_SAMPLES, CARD = (1, 2, 4, 8, 16), 4, "rtx3090"
MODES: dict[str, dict[str, Any]] = {
    "micro": {},
    "exact BatchNorm": {"batchnorm": "exact"},
    "two passes": {"coupled": True},
}


def update(parts: int, options: dict[str, Any]) -> Callable[[], float]:
    """Return a function that makes an update in `parts` parts, and returns its CPU seconds."""
    made = load_model(MODEL)
    model: nn.Module = made.model()
    accumulator = Accumulator(
        model,
        torch.optim.SGD(model.parameters(), lr=0.01),
        criterion=made.criterion,
        micro_batch=SAMPLES // parts,
        **options,
    )
    batch = made.batch(SAMPLES)

    def run() -> float:
        start = process_time()
        accumulator.step(batch)
        return process_time() - start

    return run


def held_bytes(trace: Trace) -> int:
    """Return the most that tensors hold at once, without workspaces."""
    held, most = 0, 0
    for event in trace.events:
        size = trace.sizes[event if event >= 0 else ~event]
        held += (size if event >= 0 else -size) if isinstance(size, int) else 0
        most = max(most, held)
    return most


def main() -> None:
    """Print ratios of seconds, then bytes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--updates", type=int, default=20)
    updates = parser.parse_args().updates
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # Of BatchNorm, which plain micro-batches change.
    print(f"{SAMPLES} images, CPU seconds over those of micro:")
    for parts in PARTS:
        taken = take_turns(*(update(parts, options) for options in MODES.values()), times=updates)
        ratios = [median(a / b for a, b in zip(seconds, taken[0], strict=True)) for seconds in taken]
        print(f"{parts} parts  " + ", ".join(f"{name} {ratio:.2f}" for name, ratio in zip(MODES, ratios, strict=True)))
    print(f"\nparts of {TRACED_SAMPLES}, MiB on a simulated card (in host memory):")
    workload = str(ROOT / f"tests/benchmarks/models/{MODEL}.py")
    for name, asked in MODES.items():
        settings = TrialSettings(
            reference=workload, share=max(TRACED) * TRACED_SAMPLES, options=Options(gpu=CARD, **asked)
        )
        tracer = Tracer(settings, find_card(CARD))
        tracer.call(Inspect())
        requests = [TraceParts(parts=(TRACED_SAMPLES,) * parts, joined=name != "micro") for parts in TRACED]
        traces = [tracer.call(request) for request in requests]
        tracer.close()
        cells = [f"{held_bytes(one) / MIB:.0f} ({(one.host_bytes or 0) / MIB:.0f})" for one in traces]
        print(f"{name:16} " + ", ".join(f"{parts}: {cell}" for parts, cell in zip(TRACED, cells, strict=True)))


if __name__ == "__main__":
    main()

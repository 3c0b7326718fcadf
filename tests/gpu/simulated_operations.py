"""`python -m tests.gpu.simulated_operations CARD MATCH`: what a simulated card is asked for by operations.

It answers in JSON lines, for those with a title in which the pattern MATCH is found.

A process of its own: a simulation changes PyTorch for the whole process, and this one must not touch a card.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

import torch

from autoaccum.devices.child.process import PACKAGE_ROOT
from autoaccum.simulation.cards import Card
from autoaccum.simulation.operators.workspace_rules import estimate
from autoaccum.simulation.torch_patches import torch_release
from autoaccum.simulation.trace_records import Workspace
from autoaccum.simulation.tracing.fake_cuda import DEVICE
from autoaccum.simulation.tracing.recorder import Recorder
from autoaccum.simulation.tracing.simulation import simulate
from tests.gpu.alignment import TENSOR, Expected, peak_bytes
from tests.gpu.operation import Operation
from tests.gpu.operations import all_operations


@dataclasses.dataclass(frozen=True)
class Simulated:
    """The requests of one operation to a simulated card; or the reason why it cannot be simulated."""

    title: str
    blocks: tuple[Expected, ...] = ()
    peak_bytes: int = 0
    error: str | None = None


def ask_simulation(card: Card, match: str) -> dict[str, Simulated]:
    """Simulate operations whose rows `match` finds on `card` in a process of its own; return them by title."""
    command = [sys.executable, "-m", "tests.gpu.simulated_operations", json.dumps(dataclasses.asdict(card)), match]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        command, capture_output=True, text=True, check=True, cwd=PACKAGE_ROOT, timeout=200, env=environment
    )
    found = [_read(json.loads(line)) for line in done.stdout.splitlines()]
    return {simulated.title: simulated for simulated in found}


def simulate_operation(operation: Operation, card: Card, recorder: Recorder) -> Simulated:
    """Run it where `card` is simulated; what it asks for while it runs, after its tensors are made."""
    try:
        work = operation.prepare(DEVICE)
        if operation.warm:
            work()
            work = operation.prepare(DEVICE)
        recorder.begin(lambda: "forward")
        first, start = len(recorder.sizes), len(recorder.events)
        kept = work()
    except Exception as error:
        said = (str(error).splitlines() or [""])[0]
        return Simulated(operation.title, error=f"{type(error).__name__}: {said}")
    events, sizes = tuple(recorder.events[start:]), [_weigh(size, card) for size in recorder.sizes]
    del kept
    return Simulated(operation.title, tuple(sizes[first:]), peak_bytes(events, [size.bytes for size in sizes]))


def _weigh(size: int | Workspace, card: Card) -> Expected:
    if isinstance(size, int):
        return Expected(TENSOR, (), size)
    found = estimate(size, card, torch_release())
    return Expected(size.rule, size.numbers, found.bytes, found.band_bytes)


def _read(record: Mapping[str, Any]) -> Simulated:
    blocks = (Expected(**{**block, "numbers": tuple(block["numbers"])}) for block in record["blocks"])
    return Simulated(**{**record, "blocks": tuple(blocks)})


def main() -> None:
    """Answer for the card of the command line."""
    record = json.loads(sys.argv[1])
    card, recorder = Card(**{**record, "capability": tuple(record["capability"])}), Recorder()
    wanted = re.compile(sys.argv[2])
    with simulate(card, recorder):
        torch.manual_seed(0)
        for operation in all_operations():
            if wanted.search(f"constants: {operation.title}"):
                print(json.dumps(dataclasses.asdict(simulate_operation(operation, card, recorder))), flush=True)


if __name__ == "__main__":
    main()

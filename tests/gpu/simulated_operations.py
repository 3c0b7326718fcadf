"""`python -m tests.gpu.simulated_operations CARD MATCH`: what a simulated card is asked for by operations.

It answers in JSON lines, for those with a title in which the pattern MATCH is found.

A process of its own: a simulation changes PyTorch for the whole process, and this one must not touch a card.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import torch

from autoaccum.devices.child.process import PACKAGE_ROOT
from autoaccum.simulation.cards import Card
from autoaccum.simulation.operators.workspace_sizes import estimate
from autoaccum.simulation.torch_patches import torch_release
from autoaccum.simulation.trace_records import Workspace
from autoaccum.simulation.tracing.fake_cuda import DEVICE
from autoaccum.simulation.tracing.recorder import Recorder
from autoaccum.simulation.tracing.simulation import simulate
from tests.gpu.operations import Operation, all_operations

TENSOR = "tensor"
_GRAIN = 512


@dataclass(frozen=True)
class Expected:
    """A block of a simulation.

    Attributes:
        rule: A rule of `workspace_sizes.RULES`; `tensor` for an output of an operator.
        numbers: The arguments of the rule; none for a tensor.
        bytes: The predicted size; 0 if the rule predicts no block.
        uncertainty_bytes: The uncertainty of the prediction.
    """

    rule: str
    numbers: tuple[int, ...]
    bytes: int
    uncertainty_bytes: int = 0


@dataclass(frozen=True)
class Simulated:
    """The requests of one operation to a simulated card; or the reason why it cannot be simulated."""

    title: str
    blocks: tuple[Expected, ...] = ()
    peak_bytes: int = 0
    error: str | None = None


def ask_simulation(card: Card, match: str) -> dict[str, Simulated]:
    """Simulate operations whose rows `match` finds on `card` in a process of its own; return them by title."""
    command = [sys.executable, "-m", "tests.gpu.simulated_operations", msgspec.json.encode(card).decode(), match]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, capture_output=True, check=True, cwd=PACKAGE_ROOT, timeout=200, env=environment)
    found = [msgspec.json.decode(line, type=Simulated) for line in done.stdout.splitlines()]
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


def peak_bytes(events: Sequence[int], sizes: Sequence[int]) -> int:
    """Return the peak of the bytes in blocks, each rounded up to 512 bytes.

    Args:
        events: The number of a block that is allocated, or `~number` of one that is freed; others are not counted.
        sizes: By block, in bytes.

    >>> peak_bytes((0, 1, ~1, 2, ~7), (512, 1, 600))
    1536
    """
    held = most = 0
    alive: set[int] = set()
    for event in events:
        number, rounded = max(event, ~event), 0
        if event >= 0 or number in alive:
            rounded = -(-sizes[number] // _GRAIN) * _GRAIN
            alive ^= {number}
        held += rounded if event >= 0 else -rounded
        most = max(most, held)
    return most


def _weigh(size: int | Workspace, card: Card) -> Expected:
    if isinstance(size, int):
        return Expected(TENSOR, (), size)
    found = estimate(size, card, torch_release())
    return Expected(size.rule, size.numbers, found.bytes, found.uncertainty_bytes)


def main() -> None:
    """Answer for the card of the command line."""
    card, recorder = msgspec.json.decode(sys.argv[1], type=Card), Recorder()
    wanted = re.compile(sys.argv[2])
    with simulate(card, recorder):
        torch.manual_seed(0)
        for operation in all_operations():
            if wanted.search(f"constants: {operation.title}"):
                answer = simulate_operation(operation, card, recorder)
                print(msgspec.json.encode(answer).decode(), flush=True)


if __name__ == "__main__":
    main()

"""Measure the time of a plan for a simulated card, compared with importing PyTorch.

`python tests/benchmarks/simulated_plans.py [NAME ...]`: whole commands in fresh processes, three times each, on
an idle machine. The ratio is that of a command without its traces to a process that imports PyTorch and its
optimizers.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from typing import Any

from measuring import ROOT, environment, seconds_of

from autoaccum.devices.base import TrialSettings
from autoaccum.devices.child.requests import Request
from autoaccum.devices.simulated.simulation_requests import TraceParts, Tracer
from autoaccum.devices.trial_requests import Inspect
from autoaccum.options import Options
from autoaccum.simulation.cards import find_card
from autoaccum.sources.source import FileSource

PLANS = {
    "resnet50": ("tests/gpu/compared.py:cnn_fp32_sgd", "1024", "rtx3090"),
    "gpt2": ("examples/gpt2.py", "256", "rtx4090"),
    "llama_8b": ("tests/shared/workloads/llama_8b.py", "64", "b200"),
}
FLOOR = "import torch; torch.optim.AdamW"
SMALL_PARTS = (5, 5)
"""What every plan traces after the inspection, to extrapolate from."""
REPEATS = 3


def main(names: list[str]) -> None:
    """Print one line for each workload."""
    for name in names or list(PLANS):
        path, target, card = PLANS[name]
        workload, rounds = str(ROOT / path), []
        for _ in range(REPEATS):
            printed: list[str] = []
            words = ["-m", "autoaccum", "plan", workload, "--target-batch", target, "--gpu", card, "--json"]
            seconds = seconds_of(lambda: printed.append(run(words)))  # noqa: B023 - called at once.
            floor = seconds_of(lambda: run(["-c", FLOOR]))
            plan = json.loads(printed[0])
            traces = trace_seconds(workload, int(target), card, (plan["micro_batch"], min(plan["micro_batches"])))
            rounds.append((seconds, traces, (seconds - traces) / floor))
        seconds, traces, ratio = map(statistics.median, zip(*rounds, strict=True))
        print(
            f"{name:<9} on {card:<8} {seconds:5.1f} s, {traces:.1f} s of it traces: the rest {ratio:.2f} x importing,"
            f" {plan['iter_size']} x {plan['micro_batch']}, {len(plan['trials'])} trials"
        )


def trace_seconds(workload: str, target: int, card: str, last: tuple[int, ...]) -> float:
    """Return the seconds of a plan's traces alone: those of its inspection, of a small size, and of its schedule."""
    tracer = Tracer(
        TrialSettings(source=FileSource(workload), rank_samples=target, options=Options(gpu=card)), find_card(card)
    )
    requests: tuple[Request[Any], ...] = Inspect(), TraceParts(parts=SMALL_PARTS), TraceParts(parts=last)
    try:
        return seconds_of(lambda: [tracer.call(request) for request in requests])
    finally:
        tracer.close()


def run(words: list[str]) -> str:
    """Run Python with these words; return what it prints."""
    return subprocess.run(
        [sys.executable, *words], capture_output=True, text=True, env=environment(), check=True
    ).stdout


if __name__ == "__main__":
    main(sys.argv[1:])

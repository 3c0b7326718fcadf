"""Measure time and memory of a plan for a simulated card, compared with importing PyTorch.

`python tests/benchmarks/simulated_plans.py [NAME ...]`: whole commands in fresh processes, three times each, on
an idle machine. The ratio is that of a command without its traces to a process that imports PyTorch and its
optimizers. Then what `--explain` adds, in CPU time of all processes; commands without it and with it take turns.
"""

from __future__ import annotations

import json
import os
import resource
import statistics
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from measuring import ROOT, environment, seconds_of

from autoaccum.devices.base import TrialSettings
from autoaccum.devices.child.requests import Request
from autoaccum.devices.simulated.cards import find_card
from autoaccum.devices.simulated.simulation_requests import TraceParts, Tracer
from autoaccum.devices.trial_record import Inspect
from autoaccum.options import Options

AUTOACCUM = [sys.executable, "-m", "autoaccum"]
PLANS = {
    "resnet50": ("tests/gpu/compared/cnn.py:fp32_sgd", "1024", "rtx3090"),
    "gpt2": ("examples/gpt2.py", "256", "rtx4090"),
    "llama_8b": ("tests/shared/workloads/llama_8b.py", "64", "b200"),
}
FLOOR = "import torch; torch.optim.AdamW"
SMALL_PARTS = (5, 5)
"""What every plan traces after the inspection, to extrapolate from."""
REPEATS = 3
_POLL_SECONDS = 0.02


def main(names: list[str]) -> None:
    """Print one line for each workload."""
    floors = [run([sys.executable, "-c", FLOOR]).seconds for _ in range(REPEATS)]
    print(f"importing PyTorch and its optimizers: {statistics.median(floors):.1f} s")
    for name in names or list(PLANS):
        workload, target, card = PLANS[name]
        words = ["plan", str(ROOT / workload), "--target-batch", target, "--gpu", card, "--json"]
        rounds, beside = [], []
        for _ in range(REPEATS):
            rounds.append((run([*AUTOACCUM, *words]), run([*AUTOACCUM, *words, "--explain"])))
            floor = run([sys.executable, "-c", FLOOR]).seconds
            plan = json.loads(rounds[-1][0].printed)
            traces = trace_seconds(
                str(ROOT / workload), int(target), card, (plan["micro_batch"], min(plan["micro_batches"]))
            )
            beside.append((traces, (rounds[-1][0].seconds - traces) / floor))
        plain, explained = zip(*rounds, strict=True)
        seconds = statistics.median(one.seconds for one in plain)
        traces, ratio = map(statistics.median, zip(*beside, strict=True))
        most_bytes = max(one.most_bytes for one in plain)
        more = statistics.median(one.cpu_seconds for one in explained)
        more /= statistics.median(one.cpu_seconds for one in plain)
        print(
            f"{name:<9} on {card:<8} {seconds:5.1f} s, {traces:.1f} s of it traces: the rest {ratio:.2f} x importing, "
            f"{most_bytes / 2**20:.0f} MiB: {plan['iter_size']} x {plan['micro_batch']}, {len(plan['trials'])} trials, "
            f"with --explain {more:.2f} x"
        )


def trace_seconds(workload: str, target: int, card: str, last: tuple[int, ...]) -> float:
    """Return the seconds of a plan's traces alone: those of its inspection, of a small size, and of its schedule."""
    tracer = Tracer(TrialSettings(reference=workload, share=target, options=Options(gpu=card)), find_card(card))
    requests: tuple[Request[Any], ...] = (Inspect(), *(TraceParts(parts=parts) for parts in (SMALL_PARTS, last)))
    try:
        return seconds_of(lambda: [tracer.call(request) for request in requests])
    finally:
        tracer.close()


@dataclass(frozen=True)
class Run:
    """The cost of a command: wall and CPU seconds and the most bytes; and its output."""

    seconds: float
    cpu_seconds: float
    most_bytes: int
    printed: str


def run(command: list[str]) -> Run:
    """Run a command; its bytes are those resident in the process and its children together."""
    began, before = time.monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN)
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment())
    most = [0]
    watcher = threading.Thread(target=watch, args=(process, most))
    watcher.start()
    printed, _ = process.communicate()
    watcher.join()
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {process.returncode}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return Run(time.monotonic() - began, cpu_seconds, most[0], printed)


def watch(process: subprocess.Popen[str], most: list[int]) -> None:
    """Keep the most that the process and its descendants held at one time."""
    while process.poll() is None:
        most[0] = max(most[0], sum(map(resident_bytes, family(process.pid))))
        time.sleep(_POLL_SECONDS)


def family(pid: int) -> list[int]:
    """A process and its descendants."""
    try:
        text = Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii")
    except OSError:
        return []
    return [pid, *(one for child in text.split() for one in family(int(child)))]


def resident_bytes(pid: int) -> int:
    """Return the bytes that a process holds; 0 after it has ended."""
    try:
        pages = Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1]
    except OSError:
        return 0
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


if __name__ == "__main__":
    main(sys.argv[1:])

"""How long planning a command takes beside one run of it: python tests/benchmarks/command_plans.py

Prints the seconds of `autoaccum plan --gpu`, those of one run of the command in the planned micro-batches to its third
update on the same simulated card, and their ratio.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import autoaccum
from autoaccum.devices.base import TrialSettings
from autoaccum.devices.command.command_runs import CommandRun
from autoaccum.options import Options
from autoaccum.simulation.cards import find_card
from autoaccum.sources.command import CommandSource

ROOT = Path(__file__).parents[2]
SCRIPTS = ROOT / "tests" / "devices" / "command" / "scripts"
GPU = "rtx4090"
COMMANDS = {
    "GPT-2, 256 samples": (f"{ROOT}/examples/train.py --batch {{micro_batch}} --accum {{iter_size}}", 256),
    "ResNet, 512 samples": (f"{SCRIPTS}/imagenet.py --images 4096 -b {{micro_batch}} --accum {{iter_size}}", 512),
    "MLP, 1024 samples": (f"{SCRIPTS}/right.py --batch-size {{micro_batch}} --accum {{iter_size}}", 1024),
}


def main() -> None:
    """Print a line for each command."""
    for name, (words, target) in COMMANDS.items():
        source = CommandSource.of([sys.executable, *words.split()])
        began = time.monotonic()
        plan = autoaccum.plan(source.words, target_batch=target, gpu=GPU)
        planning = time.monotonic() - began
        settings = TrialSettings(source=source, rank_samples=target, options=Options(gpu=GPU))
        began = time.monotonic()
        run = CommandRun(settings, plan.micro_batches, card=find_card(GPU))
        trial, _ = run.finish(GPU)
        assert trial.ran, trial.message
        running = time.monotonic() - began
        print(f"{name}: {planning:.1f} s to plan, {running:.1f} s for one run: {planning / running:.2f} times as long")


if __name__ == "__main__":
    main()

"""Compare plans for ranks that are not here with the peaks that torchtitan published of real ones.

`python tests/benchmarks/published_ranks.py`: Llama 3 8B under FSDP2 on H100 of 96 GB. What torchtitan prints and
publishes is `reserved_bytes.all.peak`, the memory that PyTorch's allocator took from the card.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass

from measuring import ROOT, environment, format_markdown

WORKLOAD = ROOT / "tests" / "shared" / "workloads" / "torchtitan_llama3.py"
CARD = "h100-nvl"
"""The card of the catalogue next to theirs, of 94 GB: what is reserved is the same on any card where all fits."""


@dataclass(frozen=True)
class Run:
    """A run on real cards, its peak to as many digits as were published, and the setting of the allocator."""

    ranks: int
    samples: int
    published_gib: str
    allocator: str = ""


PUBLISHED = Run(8, 2, "82.4"), Run(128, 2, "67.0")
"""benchmarks/llama3_h100_202412_torchtitan.md, tables 1 and 3, without compilation."""
LOGGED = Run(8, 1, "49.66", "expandable_segments:True")
"""A log in torchtitan's pull request 1287 of June 2025; ranks, batch and allocator are assumed, as its run_train.sh and
llama3_8b.toml have them."""


def main() -> None:
    """Print a line for each run, and the difference of the published ones."""
    rows = [("ranks", "samples each", "allocator", "published GiB", "predicted GiB", "error")]
    predicted = {run: reserved_gib(run) for run in (*PUBLISHED, LOGGED)}
    for run, gib in predicted.items():
        settings = str(run.ranks), str(run.samples), run.allocator or "default"
        error = f"{100 * (gib / float(run.published_gib) - 1):+.1f} %"
        rows.append((*settings, run.published_gib, f"{gib:.2f}", error))
    print(format_markdown(rows))
    few, many = PUBLISHED
    published, found = float(few.published_gib) - float(many.published_gib), predicted[few] - predicted[many]
    print(f"difference of the published peaks: {published:.1f} GiB, predicted {found:.2f} GiB")


def reserved_gib(run: Run) -> float:
    """Return the reserved peak of the plan for a run, whose schedule is one micro-batch on each rank."""
    words = ["plan", str(WORKLOAD), "--target-batch", str(run.samples * run.ranks), "--gpu", CARD, "--json"]
    command = [sys.executable, "-m", "autoaccum", *words, "--world-size", str(run.ranks), "--parallel", "fsdp2"]
    variables = environment() | {"PYTORCH_ALLOC_CONF": run.allocator}
    plan = json.loads(subprocess.run(command, check=True, env=variables, stdout=subprocess.PIPE).stdout)
    if plan["micro_batches"] != [run.samples]:
        raise SystemExit(f"for {run.ranks} ranks, the plan has {plan['micro_batches']}, unlike torchtitan")
    trial = next(one for one in plan["trials"] if one["parts"] == [run.samples])
    return float(trial["peak_reserved_bytes"] / 2**30)


if __name__ == "__main__":
    main()

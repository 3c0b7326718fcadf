"""Compare plans for ranks that are not here with the peaks that torchtitan published of real ones.

`python tests/benchmarks/published_ranks.py`: Llama 3 8B under FSDP2 on H100 of 96 GB. What torchtitan prints and
publishes is `reserved_bytes.all.peak`, the memory that PyTorch's allocator took from the card.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import dataclass

from measuring import ROOT, environment, format_markdown

WORKLOAD = ROOT / "tests" / "shared" / "workloads" / "torchtitan_llama3.py"
CARD = "h100-nvl"
"""The card of the catalogue next to theirs, of 94 GB: what is reserved is the same on any card where all fits."""


@dataclass(frozen=True)
class Run:
    """A run on real cards, and its peak.

    Attributes:
        allocator: The setting of the allocator.
        published_gib: The peak, to as many digits as were published.
    """

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
    rows = [("ranks", "samples each", "allocator", "published GiB", "predicted GiB", "error", "seconds of the command")]
    predicted = {}
    for run in (*PUBLISHED, LOGGED):
        began = time.monotonic()
        predicted[run] = reserved_gib(run)
        seconds = f"{time.monotonic() - began:.1f}"
        settings = str(run.ranks), str(run.samples), run.allocator or "default"
        rows.append((*settings, run.published_gib, f"{predicted[run]:.2f}", error(predicted[run], run), seconds))
    print(format_markdown(rows))
    published, found = difference(predicted)
    print(f"difference of the published peaks: {published:.1f} GiB, predicted {found:.2f} GiB")


def difference(predicted: dict[Run, float]) -> tuple[float, float]:
    """Return what fewer ranks take more, as published and as predicted."""
    few, many = PUBLISHED
    return float(few.published_gib) - float(many.published_gib), predicted[few] - predicted[many]


def reserved_gib(run: Run) -> float:
    """Return the reserved peak of the plan for a run, as the command predicts it."""
    command = [sys.executable, "-m", "autoaccum", *words_of(run)]
    variables = environment() | {"PYTORCH_ALLOC_CONF": run.allocator}
    return read_gib(run, subprocess.run(command, check=True, env=variables, stdout=subprocess.PIPE, text=True).stdout)


def words_of(run: Run) -> list[str]:
    """Return the words of the command that plans a run."""
    words = ["plan", str(WORKLOAD), "--target-batch", str(run.samples * run.ranks), "--gpu", CARD]
    return [*words, "--world-size", str(run.ranks), "--parallel", "fsdp2", "--json"]


def read_gib(run: Run, text: str) -> float:
    """Return the reserved peak of a plan, whose schedule is one micro-batch on each rank."""
    plan = json.loads(text)
    if plan["micro_batches"] != [run.samples]:
        raise SystemExit(
            f"for {run.ranks} ranks, the plan has micro-batches {plan['micro_batches']}, unlike torchtitan"
        )
    trial = next(one for one in plan["trials"] if one["parts"] == [run.samples])
    return float(trial["peak_reserved_bytes"] / 2**30)


def error(predicted: float, run: Run) -> str:
    """The error in percent."""
    return f"{100 * (predicted / float(run.published_gib) - 1):+.1f} %"


if __name__ == "__main__":
    main()

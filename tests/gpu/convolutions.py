"""Measure what convolutions take beside their tensors, and what cuDNN answers without a card.

    python -m tests.gpu.convolutions tests/gpu/data/h100_convolutions.csv > new.csv

runs the rows of a table again, on the card, in two minutes. `measured_bytes` is the largest request to the allocator
after that for the output; `answer_bytes` is the first of `plan_workspaces` for this card, empty if there is none.
"""

from __future__ import annotations

import csv
import sys
from pathlib import Path
from typing import Any

import torch

from autoaccum.simulation.operators.cudnn import DATA_TYPES, Convolution, plan_workspaces

KINDS = ("forward", "data", "weight")
_FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}


def read_rows(path: Path) -> list[dict[str, str]]:
    """Return the rows of a table."""
    with path.open(encoding="utf-8", newline="") as lines:
        return list(csv.DictReader(lines))


def convolution_of(row: dict[str, str]) -> Convolution:
    """Return the convolution of a row."""
    geometry = tuple(map(int, row["geometry"].split()))
    data_type = DATA_TYPES[f"torch.{row['dtype']}"]
    return Convolution(KINDS.index(row["kind"]), data_type, int(row["channels_last"]), 1, 0, geometry)


def measure(row: dict[str, str]) -> int:
    """Return the bytes of the largest workspace."""
    asked = convolution_of(row)
    weight_sizes, sizes, output_sizes = asked.tensors

    def tensor(shape: Any) -> torch.Tensor:
        made = torch.randn(*shape, device="cuda", dtype=getattr(torch, row["dtype"]))
        return made.contiguous(memory_format=_FORMATS[made.dim()]) if asked.channels_last else made

    inputs, weight, grad = map(tensor, (sizes, weight_sizes, output_sizes))
    groups = sizes[1] // weight_sizes[1]
    numbers = *map(list, asked.windows), False, [0] * len(asked.windows[0]), groups
    seen = len(_requests())
    if row["kind"] == "forward":
        torch.ops.aten.convolution(inputs, weight, None, *numbers)
    else:
        mask = [row["kind"] == "data", row["kind"] == "weight", False]
        torch.ops.aten.convolution_backward(grad, inputs, weight, [0], *numbers, mask)
    return max(_requests()[seen + 1 :], default=0)


def _requests() -> list[int]:
    events = torch.cuda.memory._snapshot()["device_traces"][0]
    return [event["size"] for event in events if event["action"] == "alloc"]


def main() -> None:
    """Measure the rows of the table that is named, and print it."""
    rows = read_rows(Path(sys.argv[1]))
    table = csv.DictWriter(sys.stdout, list(rows[0]), lineterminator="\n")
    table.writeheader()
    capability = torch.cuda.get_device_capability()
    for row in rows:
        torch.cuda.memory._record_memory_history(None)
        torch.cuda.memory._record_memory_history("all", context=None)
        answers = plan_workspaces(capability, convolution_of(row))
        table.writerow(row | {"measured_bytes": measure(row), "answer_bytes": answers[0] if answers else ""})


if __name__ == "__main__":
    main()

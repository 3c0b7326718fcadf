"""Record training by a plain loop with PyTorch's own allocator on the fake card, where no kernel runs.

In the environment that `fake_card.py` prints for the RTX 3090, a CUDA build of torch writes the snapshot that
tests/cli/test_explain_command.py reads: `python record_snapshot.py snapshot.pickle.xz`.
"""

from __future__ import annotations

import lzma
import pickle
import sys
from pathlib import Path
from typing import Any

import torch

WORKLOAD = Path(__file__).parents[1] / "workloads" / "recorded_net.py"
UPDATES, PARTS, SIZE = 3, 2, 24

LOOP = """
def train(model, optimizer, criterion, batches, updates, parts):
    for _ in range(updates):
        for _ in range(parts):
            inputs, targets = (each.cuda() for each in next(batches))
            loss = criterion(model(inputs), targets) / parts
            loss.backward()
            del inputs, targets, loss
        optimizer.step()
        optimizer.zero_grad()
"""


def main() -> None:
    """Train, and write the snapshot to the file that the command line names."""
    names: dict[str, Any] = {"__name__": "net"}
    for name, text in (("net.py", WORKLOAD.read_text()), ("train.py", LOOP)):
        exec(compile(text, name, "exec"), names)  # noqa: S102
    torch.cuda.memory._record_memory_history(stacks="python")
    batches = iter(names["batch"](SIZE) for _ in range(UPDATES * PARTS))
    model = names["Net"]().cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    names["train"](model, optimizer, names["criterion"], batches, UPDATES, PARTS)
    Path(sys.argv[1]).write_bytes(lzma.compress(pickle.dumps(torch.cuda.memory._snapshot())))


if __name__ == "__main__":
    main()

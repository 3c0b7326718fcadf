"""Record training by a plain loop with PyTorch's own allocator on the fake card, where no kernel runs.

In the environment that `fake_card.py` prints, a CUDA build of torch writes a snapshot of a workload's updates, such as
that of tests/cli/test_explain_command.py (on the RTX 3090):
`python record_snapshot.py ../workloads/recorded_net.py snapshot.pickle.xz --micro-batch 24 --parts 2`. For
two_streams.pickle.xz, batches are copied on another stream (--side-stream --micro-batch 16 --parts 1).
"""

from __future__ import annotations

import argparse
import lzma
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

UPDATES = 3
LOOP = """
def train(model, optimizer, loss_of, batches, parts, autocast):
    for _ in range(updates):
        for _ in range(parts):
            batch = next(batches)
            with autocast():
                loss = loss_of(model, batch) / parts
            loss.backward()
            del batch, loss
        optimizer.step()
        optimizer.zero_grad()
"""


def to_card(batch: Any, side: torch.cuda.Stream | None) -> Any:
    """Return a tensor, or a tuple of them, on the card; copied on a stream of its own if there is one."""
    if isinstance(batch, tuple):
        return tuple(to_card(part, side) for part in batch)
    with torch.cuda.stream(side):
        moved = batch.cuda()
    moved.record_stream(torch.cuda.current_stream())
    return moved


def main() -> None:
    """Train, and write the snapshot to the file that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("workload", type=Path)
    parser.add_argument("output", type=Path)
    for name in ("--micro-batch", "--parts"):
        parser.add_argument(name, type=int, required=True)
    parser.add_argument("--side-stream", action="store_true")
    asked = parser.parse_args()
    torch.backends.cudnn.enabled = False  # cuDNN finds no card.
    # Lines are recorded without the folder of this checkout.
    net: dict[str, Any] = {"__name__": "net"}
    exec(compile(asked.workload.read_text(), "net.py", "exec"), net)
    loop: dict[str, Any] = {"updates": UPDATES}
    exec(compile(LOOP, "train.py", "exec"), loop)
    loss: Callable[[Any, Any], torch.Tensor] = net.get("loss") or (
        lambda model, batch: net["criterion"](model(batch[0]), batch[1])
    )
    lower = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(net.get("precision", ""))
    torch.cuda.memory._record_memory_history(stacks="python")
    model = net["model"]().cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    side = torch.cuda.Stream() if asked.side_stream else None  # type: ignore[no-untyped-call]
    batches = (to_card(net["batch"](asked.micro_batch), side) for _ in range(UPDATES * asked.parts))
    loop["train"](
        model,
        optimizer,
        loss,
        batches,
        asked.parts,
        lambda: torch.autocast("cuda", lower or torch.bfloat16, enabled=lower is not None),
    )
    data = pickle.dumps(torch.cuda.memory._snapshot())
    asked.output.write_bytes(lzma.compress(data) if asked.output.suffix == ".xz" else data)


if __name__ == "__main__":
    main()

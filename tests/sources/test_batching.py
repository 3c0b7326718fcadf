"""Batches whose samples are not rows, such as the boxes of images."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import autoaccum
from autoaccum.errors import UsageError, WorkloadError
from autoaccum.reporting.emit import emit_wrapper
from autoaccum.sources.batches import Batching
from autoaccum.sources.source import FileSource
from autoaccum.sources.workload import Workload


class Detector(nn.Module):
    """One box per image, matched with its mean target."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Conv2d(3, 4, 3), nn.Linear(4, 5)

    def forward(self, images: Tensor) -> Tensor:
        return torch.as_tensor(self.head(self.body(images).relu().mean((2, 3))))


def detections(size: int) -> dict[str, Tensor]:
    """Boxes of all images in one tensor (image, class, x, y, w, h), as YOLO collates them; 1 to 3 per image."""
    generator = torch.Generator().manual_seed(size)
    image = torch.arange(size).repeat_interleave(1 + torch.arange(size) % 3)
    boxes = torch.rand(len(image), 5, generator=generator)
    return {"images": torch.randn(size, 3, 8, 8, generator=generator), "targets": torch.cat([image[:, None], boxes], 1)}


def box_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    targets = batch["targets"]
    return F.mse_loss(model(batch["images"])[targets[:, 0].long()], targets[:, 1:])


def box_count(batch: dict[str, Tensor]) -> int:
    return len(batch["targets"])


def split_detections(batch: dict[str, Tensor], sizes: list[int]) -> list[dict[str, Tensor]]:
    parts, start = [], 0
    for size in sizes:
        image = batch["targets"][:, 0]
        targets = batch["targets"][(image >= start) & (image < start + size)].clone()
        targets[:, 0] -= start
        parts.append({"images": batch["images"][start : start + size], "targets": targets})
        start += size
    return parts


DETECTION: dict[str, Any] = {
    "model": Detector,
    "batch": detections,
    "loss": box_loss,
    "weight": box_count,
    "split": split_detections,
    "size": lambda batch: len(batch["images"]),
}


def test_the_gradient_equals_that_of_the_full_batch() -> None:
    whole = Detector().double()
    parts = copy.deepcopy(whole)
    full = {name: value.double() for name, value in detections(11).items()}
    box_loss(whole, full).backward()  # type: ignore[no-untyped-call]
    largest = max(float(parameter.grad.abs().max()) for parameter in whole.parameters() if parameter.grad is not None)
    torch.optim.SGD(whole.parameters(), lr=0.5).step()
    named = {name: DETECTION[name] for name in ("weight", "split", "size")}
    optimizer = torch.optim.SGD(parts.parameters(), lr=0.5)
    accumulator = autoaccum.Accumulator(parts, optimizer, box_loss, micro_batch=4, **named)
    assert accumulator.step(full).micro_batches == (4, 4, 3)
    for one, other in zip(whole.parameters(), parts.parameters(), strict=True):
        assert float((one - other).detach().abs().max()) <= 1e-10 * largest


@pytest.mark.usefixtures("warm_children")
def test_is_planned_and_verified() -> None:
    workload = Workload(**DETECTION)
    plan = autoaccum.plan(workload, target_batch=10, max_micro_batch=4, device="cpu")
    assert plan.micro_batches == (4, 3, 3)
    assert autoaccum.verify(workload).equivalent
    with pytest.raises(UsageError, match=r"split by the workload's own split\(batch, sizes\)"):
        emit_wrapper(plan)


def test_a_wrong_weight_is_found() -> None:
    found = autoaccum.verify(Workload(**{**DETECTION, "weight": None}))
    assert not found.equivalent
    assert any("targets" in cause.change.facts["code"] for cause in found.causes)


def test_needs_both_functions() -> None:
    with pytest.raises(WorkloadError, match="split and size must be two functions") as error:
        Workload(**{**DETECTION, "size": None})
    assert error.value.hint == "write both: def split(batch, sizes) and def size(batch)"
    with pytest.raises(WorkloadError, match=r"size\(batch\) is 'many'"):
        Workload(**{**DETECTION, "size": lambda batch: "many"}).build_batch(4)
    with pytest.raises(WorkloadError, match=r"batch\(4\) returned 5 samples"):
        Workload(**{**DETECTION, "size": lambda batch: 5}).build_batch(4)


def written(folder: Path, text: str) -> str:
    head = "from torch import nn, rand\ndef model(): return nn.Linear(2, 1)\ncriterion = nn.MSELoss()\n"
    (folder / "named.py").write_text(f"{head}def batch(size): return rand(size, 2), rand(size, 1)\n{text}\n")
    return str(folder / "named.py")


@pytest.mark.parametrize(
    ("text", "taken"),
    [
        ("size = 224\ndef split(data): ...", False),
        ("def size(module): ...", False),
        ("def split(batch, sizes): ...\ndef size(batch): ...", True),
        ("def split(graphs, counts): ...\ndef size(batch): ...", True),
    ],
)
def test_other_functions_named_split_or_size_are_ignored(tmp_path: Path, text: str, taken: bool) -> None:
    assert isinstance(FileSource(written(tmp_path, text)).load().batching, Batching) is taken

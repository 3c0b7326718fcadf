"""timm and torchvision as their users have them: only beside a CUDA build of torch, which needs no card."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torchvision

import autoaccum
from autoaccum.accumulation.accumulator import Accumulator

MIXUP_AND_LAMB = """
    import timm, torch
    from timm.data import Mixup
    from timm.loss import SoftTargetCrossEntropy
    from timm.optim import create_optimizer_v2

    mixup = Mixup(mixup_alpha=0.2, cutmix_alpha=1.0, num_classes=10)
    soft_target = SoftTargetCrossEntropy()

    def model():
        return timm.create_model("test_vit", img_size=32, num_classes=10)

    def batch(size):
        return torch.randn(size, 3, 32, 32), torch.randint(0, 10, (size,))

    def loss(model, batch):
        images, targets = mixup(*batch)
        return soft_target(model(images), targets)

    def optimizer(params):
        return create_optimizer_v2(params, opt="lamb", lr=1e-3)
"""


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_mixup_and_lamb_are_planned_for_a_card_in_even_micro_batches(write_workload: Callable[[str], str]) -> None:
    plan = autoaccum.plan(write_workload(MIXUP_AND_LAMB), target_batch=32, gpu="rtx3090", max_micro_batch=12)

    assert plan.kind == "predicted"
    assert plan.multiple_of == 2
    assert sum(plan.micro_batches) == 32
    assert all(part % 2 == 0 for part in plan.micro_batches)


@pytest.mark.filterwarnings("ignore:BatchNorm normalises by the micro-batch")
def test_a_detector_is_trained_without_a_word_on_what_it_keeps() -> None:
    torch.manual_seed(0)
    detector = torchvision.models.detection.fasterrcnn_mobilenet_v3_large_320_fpn(
        weights=None, weights_backbone=None, num_classes=3, min_size=64, max_size=64, box_batch_size_per_image=16
    ).train()

    def loss(model: torch.nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        images, boxes = batch
        labels = torch.ones(1, dtype=torch.int64)
        targets = [{"boxes": box[None], "labels": labels} for box in boxes]
        losses: dict[str, torch.Tensor] = model(list(images), targets)
        return torch.stack(list(losses.values())).sum()

    boxes = torch.tensor([8.0, 8.0, 40.0, 40.0]).repeat(4, 1)
    optimizer = torch.optim.SGD(detector.parameters(), lr=1e-3)
    # Warnings are errors here: none may come of attributes that torchvision keeps (`box_roi_pool.scales`).
    result = Accumulator(detector, optimizer, loss, micro_batch=2).step((torch.rand(4, 3, 64, 64), boxes))

    assert result.micro_batches == (2, 2)

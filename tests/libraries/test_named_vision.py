"""timm and torchvision: models by name, small ones verified and real ones equal to arithmetic; what people take."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import autoaccum
from autoaccum.accumulation.accumulator import Accumulator
from autoaccum.errors import WorkloadError

pytestmark = pytest.mark.usefixtures("warm_children")
IMPORTED = (
    "timm",
    "torchvision",
    "torchvision.models.segmentation",
    "torchvision.models.video",
    "torchvision.models.detection",
)

SMALL: dict[str, dict[str, Any]] = {
    "timm:test_vit": {"image_size": 32, "drop_path": 0.1, "gradient_checkpointing": True},
    "timm:test_convnext": {"image_size": 32, "classes": 4, "channels_last": True},
    "torchvision:squeezenet1_1": {"image_size": 32, "classes": 4},
    "torchvision:deeplabv3_mobilenet_v3_large": {"image_size": 16},
    "torchvision:mc3_18": {"image_size": 16, "frames": 2},
    "torchvision:retinanet_resnet50_fpn": {"image_size": 32},
}
FROZEN = ("torchvision:deeplabv3_mobilenet_v3_large", "torchvision:mc3_18", "torchvision:retinanet_resnet50_fpn")
"""Those with BatchNorm, of which the full batch's gradient is asked in this mode."""


@pytest.mark.parametrize("name", SMALL)
def test_an_update_of_a_small_one_is_the_full_batch(name: str) -> None:
    mode = "frozen" if name in FROZEN else None
    result = autoaccum.verify(name, target_batch=2, micro_batch=1, batchnorm=mode, overrides=SMALL[name])

    assert result.equivalent
    assert result.precision == "fp64"


def test_a_batchnorm_is_named_as_the_cause() -> None:
    result = autoaccum.verify("timm:test_resnet", target_batch=4, micro_batch=2, overrides={"image_size": 32})

    assert not result.equivalent
    assert [cause.kind for cause in result.causes] == ["batchnorm"]


# Numbers of parameters as their authors publish them; channels and layers of BatchNorm; states of the optimizer.
REAL = {
    "torchvision:resnet50": (25_557_032, 26_560, 53, 1),
    "timm:vit_base_patch16_224": (86_567_656, 0, 0, 2),
    "timm:convnext_tiny": (28_589_128, 0, 0, 2),
    "timm:efficientnet_b0": (5_288_548, 21_008, 49, 2),
}


@pytest.mark.parametrize("name", REAL)
def test_one_of_real_size_takes_what_arithmetic_says(name: str) -> None:
    numbers, channels, layers, states = REAL[name]
    plan = autoaccum.plan(name, target_batch=4, max_micro_batch=2, gpu="rtx3090", explain=True)

    assert (plan.kind, sum(plan.micro_batches)) == ("predicted", 4)
    assert plan.explanation is not None
    held = plan.explanation.categories
    assert held["parameters"] == 4 * numbers + 8 * channels + 8 * layers
    assert (held["gradients"], held["optimizer_state"]) == (4 * numbers, 4 * states * numbers)


@pytest.mark.parametrize(
    ("name", "overrides", "text"),
    [
        ("timm:resnet5O", {}, "timm has no model of this name: did you mean resnet50"),
        ("torchvision:resnet5O", {}, "did you mean resnet50"),
        ("torchvision:raft_small", {}, "torchvision has no such model for classification"),
        ("torchvision:mvit_v2_s", {"frames": 32}, "takes one size alone: leave out image_size and frames"),
        ("torchvision:retinanet_resnet50_fpn", {"image_size": 64}, "a simulated card computes no values"),
    ],
)
def test_what_cannot_be_planned_is_refused_in_a_sentence(name: str, overrides: dict[str, Any], text: str) -> None:
    with pytest.raises(WorkloadError, match=text):
        autoaccum.plan(name, target_batch=4, gpu="rtx3090", overrides=overrides)


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
    import torchvision

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

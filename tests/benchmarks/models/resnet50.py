"""ResNet-50 of Hugging Face with random weights, on images of 3 x 128 x 128 of 1,000 classes; it computes its loss."""

import torch
from torch import Tensor, nn
from torch.utils.data import default_collate
from transformers import ResNetConfig, ResNetForImageClassification

CLASSES, IMAGES, PIXELS = 1000, 48, 128
generator = torch.Generator().manual_seed(0)
images = torch.randn(IMAGES, 3, PIXELS, PIXELS, generator=generator)
labels = torch.randint(0, CLASSES, (IMAGES,), generator=generator)
dataset = [{"pixel_values": image, "labels": label} for image, label in zip(images, labels, strict=True)]


def model() -> nn.Module:
    """`ResNetConfig` has the widths and depths of ResNet-50."""
    made: nn.Module = ResNetForImageClassification(ResNetConfig(num_labels=CLASSES))
    return made


def batch(size: int) -> dict[str, Tensor]:
    """`size` images and their labels."""
    made: dict[str, Tensor] = default_collate([dataset[index % IMAGES] for index in range(size)])
    return made

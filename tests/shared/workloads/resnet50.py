"""ResNet-50 (He and others 2015, the stride on the 3 x 3 convolution) on 224 x 224 images of 1000 classes, in fp32."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

SIDE, CLASSES, EXPANSION = 224, 1000, 4
STAGES = ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2))
criterion = nn.CrossEntropyLoss()


def convolution(inputs: int, outputs: int, kernel: int, stride: int = 1) -> nn.Sequential:
    """A convolution that keeps the size, but for its stride, and its normalisation."""
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2, bias=False), nn.BatchNorm2d(outputs)
    )


class Bottleneck(nn.Module):
    """1 x 1 down, 3 x 3, 1 x 1 up, around a shortcut."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = width * EXPANSION
        self.down = convolution(inputs, width, 1)
        self.middle = convolution(width, width, 3, stride)
        self.up = convolution(width, outputs, 1)
        self.relu = nn.ReLU(inplace=True)
        self.shortcut = nn.Identity() if inputs == outputs else convolution(inputs, outputs, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        """[samples, inputs, height, width] to [samples, 4 x width, height / stride, width / stride]."""
        out = self.up(self.relu(self.middle(self.relu(self.down(x)))))
        return torch.as_tensor(self.relu(out + self.shortcut(x)))


def model() -> nn.Module:
    """25,557,032 parameters."""
    layers: list[nn.Module] = [convolution(3, 64, 7, 2), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)]
    inputs = 64
    for width, blocks, stride in STAGES:
        for block in range(blocks):
            layers.append(Bottleneck(inputs, width, stride if block == 0 else 1))
            inputs = width * EXPANSION
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, CLASSES))


def batch(size: int) -> tuple[Tensor, Tensor]:
    """Random images and classes."""
    return torch.randn(size, 3, SIDE, SIDE), torch.randint(0, CLASSES, (size,))


def optimizer(params: Iterable[Tensor]) -> torch.optim.Optimizer:
    """As in the paper."""
    return torch.optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=1e-4)

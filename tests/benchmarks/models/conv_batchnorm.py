"""The small convolutional net of `conv_net` with BatchNorm."""

import torch
from torch import Tensor, nn

CLASSES, IMAGES = 10, 96
generator = torch.Generator().manual_seed(0)
images = torch.randn(IMAGES, 3, 64, 64, generator=generator)
dataset = torch.utils.data.TensorDataset(images, torch.arange(IMAGES) % CLASSES)
criterion = nn.CrossEntropyLoss()


def block(inputs: int, outputs: int, stride: int) -> nn.Module:
    """Convolution, normalisation over the batch, ReLU."""
    convolution = nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(outputs), nn.ReLU(inplace=True))


def model() -> nn.Module:
    """[samples, 3, 64, 64] to [samples, CLASSES]."""
    widths = [(3, 32, 1), (32, 32, 1), (32, 64, 2), (64, 64, 1), (64, 128, 2), (128, 128, 1)]
    return nn.Sequential(
        *[block(*width) for width in widths], nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, CLASSES)
    )


def batch(size: int) -> tuple[Tensor, Tensor]:
    """`size` images of noise, and labels."""
    chosen = torch.arange(size) % IMAGES
    return images[chosen], chosen % CLASSES

"""Digits from updates of 4 x 64 images: what BatchNorm's mode and the micro-batch do to accuracy.

autoaccum verify examples/batchnorm_modes.py --micro-batch 1 --batchnorm exact
python examples/batchnorm_modes.py
"""

import sys

import torch
from sklearn.datasets import load_digits
from torch import nn

digits = load_digits()
images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16  # [1797, 1, 8, 8]
labels = torch.tensor(digits.target)  # [1797]
shuffled = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
held_out, kept = shuffled[:360], shuffled[360:]
criterion = nn.CrossEntropyLoss()


def model(norm=nn.BatchNorm2d):
    """Return a network whose second norm sees 2 x 2 values of each channel and image."""
    first = nn.Conv2d(1, 16, 3, stride=2, padding=1), norm(16), nn.ReLU()
    second = nn.Conv2d(16, 32, 3, stride=2, padding=1), norm(32), nn.ReLU()
    return nn.Sequential(*first, *second, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10))


def batch(size):
    return images[kept[:size]], labels[kept[:size]]


def accuracy(mode, micro_batch, updates):
    """Return the share of held-out digits that are right after training."""
    from autoaccum import Accumulator

    torch.manual_seed(0)
    grouped = mode == "GroupNorm"
    net = model((lambda channels: nn.GroupNorm(4, channels)) if grouped else nn.BatchNorm2d)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.02)
    modes = {"batchnorm": "micro" if grouped else mode}
    accumulator = Accumulator(net, optimizer, criterion, micro_batch=micro_batch, **modes)
    for _ in range(updates):
        chosen = kept[torch.randperm(len(kept))[: 4 * 64]]
        accumulator.step((images[chosen], labels[chosen]))
    net.eval()
    with torch.no_grad():
        return (net(images[held_out]).argmax(1) == labels[held_out]).float().mean()


if __name__ == "__main__":
    updates, *sizes = map(int, sys.argv[1:] or (20, 1, 16, 256))
    print("micro-batch " + "".join(f"{size:>8}" for size in sizes))
    for mode in ("micro", "running", "exact", "GroupNorm"):
        print(f"{mode:<12}" + "".join(f"{accuracy(mode, size, updates):>8.1%}" for size in sizes), flush=True)

"""A convolutional network with BatchNorm on scikit-learn's 1,797 images of handwritten digits.

autoaccum plan examples/digits_cnn.py --target-batch 128 --gpu rtx3090 --memory 64MiB
python examples/digits_cnn.py
"""

import torch
from sklearn.datasets import load_digits
from torch import nn

digits = load_digits()
images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16  # [1797, 1, 8, 8]
labels = torch.tensor(digits.target)  # [1797]
dataset = torch.utils.data.TensorDataset(images, labels)
criterion = nn.CrossEntropyLoss()


def model():
    return nn.Sequential(
        nn.Upsample(scale_factor=4),  # enlarge the 8 x 8 digits, to use some memory
        nn.Conv2d(1, 32, 3, padding=1),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, stride=2, padding=1),
        nn.BatchNorm2d(64),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(64, 10),
    )


def batch(size):
    chosen = torch.arange(size) % len(labels)
    return images[chosen], labels[chosen]


def optimizer(params):
    return torch.optim.AdamW(params, lr=3e-3)


if __name__ == "__main__":
    from autoaccum import Accumulator

    torch.manual_seed(0)
    net = model()
    accumulator = Accumulator(net, optimizer(net.parameters()), criterion, micro_batch=100)
    for window in torch.randperm(len(labels)).split(512):  # the last batch is shorter
        result = accumulator.step((images[window], labels[window]))
        print(f"{result.samples} samples in {len(result.micro_batches)} micro-batches, loss {result.loss:.3f}")
    net.eval()
    with torch.no_grad():
        print(f"{(net(images).argmax(1) == labels).float().mean():.1%} of the digits it has seen are right")

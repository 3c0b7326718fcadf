"""A dict batch and two losses with different divisors: digits of which two in three have no label.

autoaccum plan examples/two_losses.py --target-batch 512 --gpu rtx3090 --memory 40MiB --json
python examples/two_losses.py
"""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F

digits = load_digits()
pixels = torch.tensor(digits.data, dtype=torch.float32) / 16  # [1797, 64]
labels = torch.tensor(digits.target).where(torch.arange(len(pixels)) % 3 == 0, -1)  # two in three have no label


class Autoencoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.encode = nn.Sequential(nn.Linear(64, 4096), nn.GELU(), nn.Linear(4096, 16))
        self.decode = nn.Sequential(nn.Linear(16, 4096), nn.GELU(), nn.Linear(4096, 64))
        self.classify = nn.Linear(16, 10)

    def forward(self, pixels):
        code = self.encode(pixels)
        return {"pixels": self.decode(code), "digit": self.classify(code)}


model = Autoencoder


def batch(size):
    chosen = torch.arange(size) % len(pixels)
    return {"pixels": pixels[chosen], "digit": labels[chosen]}


def loss(model, batch):
    output = model(batch["pixels"])
    return {
        "rebuild": F.mse_loss(output["pixels"], batch["pixels"]),
        "classify": F.cross_entropy(output["digit"], batch["digit"], ignore_index=-1),
    }


def weight(batch):
    """Return the number that each mean in `loss` divides by."""
    return {"rebuild": batch["pixels"].numel(), "classify": (batch["digit"] != -1).sum()}


if __name__ == "__main__":
    from autoaccum import Accumulator

    torch.manual_seed(0)
    net = model()
    accumulator = Accumulator(net, torch.optim.AdamW(net.parameters(), lr=3e-3), loss, weight=weight, micro_batch=100)
    for window in torch.randperm(len(pixels)).repeat(4).split(512):
        result = accumulator.step({"pixels": pixels[window], "digit": labels[window]})
        print(" ".join(f"{name} {value:.3f}" for name, value in result.terms.items()))

"""`Accumulator` with accelerate, which keeps placing the model, wrapping the optimizer and writing checkpoints.

python examples/accelerate_loop.py

The loader yields effective batches. Leave accelerate's own accumulation and mixed precision off, so that its optimizer
steps once per batch and scales nothing; for bf16 or fp16, give `precision` to the Accumulator.
"""

import torch
from accelerate import Accelerator
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from autoaccum import Accumulator


def model():
    return nn.Sequential(nn.Linear(64, 512), nn.GELU(), nn.Linear(512, 10))


def train(accelerator, net, optimizer, loader, micro_batch):
    # Batches stay on the CPU: the Accumulator moves one micro-batch at a time.
    placed = accelerator.prepare(net, optimizer, loader, device_placement=[True, True, False])
    net, optimizer, loader = placed
    accumulator = Accumulator(net, optimizer, nn.CrossEntropyLoss(), micro_batch=micro_batch)
    for batch in loader:
        yield accumulator.step(batch)


if __name__ == "__main__":
    digits = load_digits()
    pixels = torch.tensor(digits.data, dtype=torch.float32) / 16  # [1797, 64]
    dataset = TensorDataset(pixels, torch.tensor(digits.target))
    accelerator = Accelerator()
    accelerator.print(f"on {accelerator.device}")
    net = model()
    optimizer = torch.optim.AdamW(net.parameters(), lr=3e-3)
    loader = DataLoader(dataset, batch_size=512, shuffle=True)
    for result in train(accelerator, net, optimizer, loader, micro_batch=100):
        print(f"{result.samples} samples in {len(result.micro_batches)} micro-batches, loss {result.loss:.3f}")

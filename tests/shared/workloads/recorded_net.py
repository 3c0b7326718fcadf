"""A small classifier, whose training real_allocator/record_snapshot.py records."""

import torch
from torch import nn


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(512)
        self.up, self.down, self.head = nn.Linear(512, 2048), nn.Linear(2048, 512), nn.Linear(512, 1000)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = nn.functional.gelu(self.up(self.norm(x)))
        x = x + self.down(wide)
        logits: torch.Tensor = self.head(x.mean(1))
        return logits


model = Net
criterion = nn.CrossEntropyLoss()


def batch(size: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(size, 64, 512), torch.randint(0, 1000, (size,))

"""A small GPT, most of whose memory is what each sample keeps in its blocks."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autoaccum import Workload

HEADS = 8


class Block(nn.Module):
    """Causal attention and a perceptron, each behind its normalisation and around a shortcut with dropout."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out, self.drop = nn.Linear(width, 3 * width), nn.Linear(width, width), nn.Dropout(0.1)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU("tanh"), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        """[samples, length, width] in and out."""
        query, key, value = self.qkv(self.first(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.drop(self.out(mixed.transpose(1, 2).flatten(2)))
        return x + torch.as_tensor(self.drop(self.mlp(self.second(x))))


class GPT(nn.Module):
    """Token ids [samples, length] to logits [samples, length, vocabulary]."""

    def __init__(self, layers: int, width: int, length: int, vocabulary: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks, self.norm = nn.Sequential(*(Block(width) for _ in range(layers))), nn.LayerNorm(width)

    def forward(self, ids: Tensor) -> Tensor:
        """Logits."""
        x = self.tokens(ids) + self.positions.weight[: ids.shape[1]]
        logits: Tensor = self.norm(self.blocks(x)) @ self.tokens.weight.T
        return logits


def batch(length: int, vocabulary: int, size: int) -> Tensor:
    """Random tokens [size, length + 1]."""
    return torch.randint(0, vocabulary, (size, length + 1))


def loss(model: nn.Module, ids: Tensor) -> Tensor:
    """The mean over all tokens, of which each sample has as many."""
    return F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())


def make(layers: int, width: int, length: int, vocabulary: int, dtype: torch.dtype) -> Workload:
    """Return a workload of these sizes."""
    return Workload(
        model=lambda: GPT(layers, width, length, vocabulary).to(dtype),
        batch=partial(batch, length, vocabulary),
        loss=loss,
        optimizer=partial(torch.optim.AdamW, lr=1e-3),
        precision="bf16" if dtype == torch.float32 else "fp32",
    )


sister = make(4, 96, 640, 512, torch.float64)

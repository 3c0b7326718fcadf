"""A small GPT, most of whose memory is what each sample keeps in its blocks."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

LAYERS, WIDTH, HEADS, LENGTH, VOCABULARY = 4, 96, 8, 640, 512


class Block(nn.Module):
    """Causal attention and a perceptron, each behind its normalisation and around a shortcut with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out, self.drop = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH), nn.Dropout(0.1)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU("tanh"), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        """[samples, length, WIDTH] in and out."""
        query, key, value = self.qkv(self.first(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.drop(self.out(mixed.transpose(1, 2).flatten(2)))
        return x + torch.as_tensor(self.drop(self.mlp(self.second(x))))


class GPT(nn.Module):
    """Token ids [samples, LENGTH] to logits [samples, LENGTH, VOCABULARY]."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks, self.norm = nn.Sequential(*(Block() for _ in range(LAYERS))), nn.LayerNorm(WIDTH)

    def forward(self, ids: Tensor) -> Tensor:
        """Logits."""
        x = self.tokens(ids) + self.positions.weight[: ids.shape[1]]
        logits: Tensor = self.norm(self.blocks(x)) @ self.tokens.weight.T
        return logits


def model() -> nn.Module:
    """In double precision."""
    return GPT().double()


def batch(size: int) -> Tensor:
    """Random tokens [size, LENGTH + 1]."""
    return torch.randint(0, VOCABULARY, (size, LENGTH + 1))


def loss(model: nn.Module, ids: Tensor) -> Tensor:
    """The mean over all tokens, of which each sample has as many."""
    return F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())


optimizer = partial(torch.optim.AdamW, lr=1e-3)

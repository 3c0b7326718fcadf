"""GPT-2 124M (Radford and others 2019) on 1024 tokens, under bf16 autocast."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

VOCABULARY, LENGTH, WIDTH, HEADS, LAYERS, DROPOUT = 50257, 1024, 768, 12, 12, 0.1
precision = "bf16"


class Block(nn.Module):
    """Attention and a perceptron, each behind its normalisation and around a shortcut."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.wide, self.narrow = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(DROPOUT)

    def attend(self, x: Tensor) -> Tensor:
        """Causal attention; [samples, length, WIDTH] in and out."""
        heads = self.qkv(x).unflatten(-1, (3, HEADS, WIDTH // HEADS)).permute(2, 0, 3, 1, 4)
        query, key, value = heads.unbind(0)
        dropout = DROPOUT if self.training else 0.0
        mixed = F.scaled_dot_product_attention(query, key, value, dropout_p=dropout, is_causal=True)
        return torch.as_tensor(self.out(mixed.transpose(1, 2).flatten(2)))

    def forward(self, x: Tensor) -> Tensor:
        """[samples, length, WIDTH] in and out."""
        x = x + self.dropout(self.attend(self.first(x)))
        inner = F.gelu(self.wide(self.second(x)), approximate="tanh")
        return torch.as_tensor(x + self.dropout(self.narrow(inner)))


class GPT2(nn.Module):
    """124,439,808 parameters: token ids [samples, length] to logits [samples, length, VOCABULARY]."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.dropout = nn.Dropout(DROPOUT)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.tokens.weight
        nn.init.normal_(self.tokens.weight, std=0.02)

    def forward(self, ids: Tensor) -> Tensor:
        """Logits."""
        positions = self.positions(torch.arange(ids.shape[1], device=ids.device))
        x = self.blocks(self.dropout(self.tokens(ids) + positions))
        logits: torch.Tensor = self.head(self.norm(x))
        return logits


model = GPT2


def batch(size: int) -> tuple[Tensor, Tensor]:
    """Random tokens, and those that follow."""
    ids = torch.randint(0, VOCABULARY, (size, LENGTH + 1))
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """The mean over all tokens, of which each sample has as many."""
    inputs, targets = batch
    return F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())


def optimizer(params: Iterable[Tensor]) -> torch.optim.Optimizer:
    """As such models are trained."""
    return torch.optim.AdamW(params, lr=6e-4, betas=(0.9, 0.95), weight_decay=0.1)

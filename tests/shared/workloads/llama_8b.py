"""A Llama-style model of 8 billion bf16 parameters on 2048 tokens: grouped queries, rotary positions, gated layers."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

VOCABULARY, LENGTH, WIDTH, INNER, LAYERS, HEADS, KEY_HEADS = 128256, 2048, 4096, 14336, 32, 32, 8
HEAD = WIDTH // HEADS
THETA, EPSILON = 500_000.0, 1e-5
DTYPE = torch.bfloat16


def linear(inputs: int, outputs: int) -> nn.Linear:
    """A bf16 product without bias."""
    return nn.Linear(inputs, outputs, bias=False, dtype=DTYPE)


class Norm(nn.Module):
    """Root mean square normalisation, computed in fp32."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH, dtype=DTYPE))

    def forward(self, x: Tensor) -> Tensor:
        """Any shape that ends in WIDTH."""
        wide = x.float()
        scaled = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPSILON)
        return self.weight * scaled.to(x.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn halves of [samples, heads, length, HEAD] by their positions' angles."""
    left, right = x.chunk(2, -1)
    return x * cos + torch.cat((-right, left), -1) * sin


class Layer(nn.Module):
    """Attention and a gated perceptron, each behind its normalisation and around a shortcut."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Norm(), Norm()
        self.query, self.out = linear(WIDTH, WIDTH), linear(WIDTH, WIDTH)
        self.key, self.value = linear(WIDTH, KEY_HEADS * HEAD), linear(WIDTH, KEY_HEADS * HEAD)
        self.gate, self.up, self.down = linear(WIDTH, INNER), linear(WIDTH, INNER), linear(INNER, WIDTH)

    def attend(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Causal attention, four query heads to a key; [samples, length, WIDTH] in and out."""
        projected = (self.query(x), self.key(x), self.value(x))
        query, key, value = (each.unflatten(-1, (-1, HEAD)).transpose(1, 2) for each in projected)
        query, key = rotate(query, cos, sin), rotate(key, cos, sin)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        return torch.as_tensor(self.out(mixed.transpose(1, 2).flatten(2)))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """[samples, length, WIDTH] in and out."""
        x = x + self.attend(self.first(x), cos, sin)
        wide = self.second(x)
        return x + torch.as_tensor(self.down(F.silu(self.gate(wide)) * self.up(wide)))


class Llama(nn.Module):
    """8,030,261,248 parameters: token ids [samples, length] to logits [samples, length, VOCABULARY]."""

    cos: Tensor
    sin: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH, dtype=DTYPE)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.norm = Norm()
        self.head = linear(WIDTH, VOCABULARY)
        turns = THETA ** (-torch.arange(0, HEAD, 2) / HEAD)
        angles = torch.outer(torch.arange(LENGTH), turns).repeat(1, 2)
        self.register_buffer("cos", angles.cos().to(DTYPE), persistent=False)
        self.register_buffer("sin", angles.sin().to(DTYPE), persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        """Logits."""
        x = self.tokens(ids)
        cos, sin = self.cos[: ids.shape[1]], self.sin[: ids.shape[1]]
        for layer in self.layers:
            x = layer(x, cos, sin)
        logits: torch.Tensor = self.head(self.norm(x))
        return logits


model = Llama


def batch(size: int) -> tuple[Tensor, Tensor]:
    """Random tokens, and those that follow."""
    ids = torch.randint(0, VOCABULARY, (size, LENGTH + 1))
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """The mean over all tokens in fp32, of which each sample has as many."""
    inputs, targets = batch
    return F.cross_entropy(model(inputs).flatten(0, 1).float(), targets.flatten())


def optimizer(params: Iterable[Tensor]) -> torch.optim.Optimizer:
    """As such models are tuned."""
    return torch.optim.AdamW(params, lr=1e-5, betas=(0.9, 0.95), weight_decay=0.1)

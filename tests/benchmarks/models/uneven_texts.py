"""A small GPT on texts of random tokens, whose lengths are drawn lognormally; attention is fused, or written out."""

from __future__ import annotations

import math
import random

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset

SAMPLES = 10_000
MEDIAN = 300
LONGEST = 8_192
VOCABULARY = 2_000
WIDTH = 64
HEADS = 4
LAYERS = 2
EAGER = False
rng = random.Random(0)
LENGTHS = [max(2, min(LONGEST, round(MEDIAN * math.exp(rng.gauss(0, 0.95))))) for _ in range(SAMPLES)]
Batch = dict[str, Tensor]


class Block(nn.Module):
    """Attention and a perceptron, both residual."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        """Take and return (samples, length, WIDTH)."""
        query, key, value = self.qkv(self.first(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        if EAGER:
            mixed = (query @ key.transpose(-1, -2) / query.shape[-1] ** 0.5).softmax(-1) @ value
        else:
            mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return torch.as_tensor(x + self.mlp(self.second(x)))


class SmallGPT(nn.Module):
    """Take (samples, length), and return the logits of the next token at each."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LONGEST, WIDTH)
        self.blocks, self.norm = nn.Sequential(*(Block() for _ in range(LAYERS))), nn.LayerNorm(WIDTH)

    def forward(self, ids: Tensor) -> Tensor:
        """As the class says."""
        x = self.tokens(ids) + self.positions.weight[: ids.shape[1]]
        return torch.as_tensor(self.norm(self.blocks(x)) @ self.tokens.weight.T)


model = SmallGPT


class Texts(Dataset[Tensor]):
    """Texts of these lengths."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Tensor:
        return torch.randint(VOCABULARY, (LENGTHS[index],), generator=torch.Generator().manual_seed(index))


dataset = Texts()


def length(text: Tensor) -> int:
    """Return the tokens of a text."""
    return len(text)


def collate(texts: list[Tensor]) -> Batch:
    """Pad texts to the longest."""
    ids = nn.utils.rnn.pad_sequence(texts, batch_first=True)
    mask = torch.arange(ids.shape[1]) < torch.tensor([len(text) for text in texts])[:, None]
    return {"input_ids": ids, "attention_mask": mask.long(), "labels": ids.masked_fill(~mask, -100)}


def loss(model: nn.Module, batch: Batch) -> Tensor:
    """Return the mean over the tokens that follow others."""
    logits, following = model(batch["input_ids"])[:, :-1], batch["labels"][:, 1:]
    return functional.cross_entropy(logits.flatten(0, 1), following.flatten())


def weight(batch: Batch) -> Tensor:
    """Return the tokens of that mean."""
    return (batch["labels"][:, 1:] != -100).sum()

"""The sample project whose memory is guarded: a small GPT with a convolutional stem."""

from __future__ import annotations

from typing import Final

BASE: Final = '''
"""A small GPT over spectrograms: a stem, checkpointed blocks, and a head over a vocabulary."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

WIDTH, HEADS, LENGTH, VOCABULARY, CHANNELS = 256, 4, 128, 1024, 1024
precision = "bf16"


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        samples, length, _ = x.shape
        q, k, v = self.qkv(x).view(samples, length, 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(samples, length, WIDTH))


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.act = nn.GELU()
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        return self.down(self.act(self.up(x)))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.attn = nn.LayerNorm(WIDTH), Attention()
        self.norm2, self.mlp = nn.LayerNorm(WIDTH), MLP()
        self.drop = nn.Dropout(0.1)

    def forward(self, x):
        x = x + self.drop(self.attn(self.norm1(x)))
        return x + self.drop(self.mlp(self.norm2(x)))


class Stem(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv1d(16, CHANNELS, 3, padding=1)
        self.norm = nn.BatchNorm1d(CHANNELS)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv1d(CHANNELS, WIDTH, 1)

    def forward(self, x):
        return self.conv2(self.relu(self.norm(self.conv1(x)))).transpose(1, 2)


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = Stem()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.register_buffer("positions", torch.ones(LENGTH, WIDTH))
        self.early = nn.ModuleList([Block()])
        self.blocks = nn.ModuleList([Block(), Block()])
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens, sound):
        x = (self.tokens(tokens) + self.stem(sound)) * self.positions
        for block in self.early:
            x = checkpoint(block, x, use_reentrant=False)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def model():
    return GPT()


def batch(size):
    tokens = torch.zeros(size, LENGTH, dtype=torch.long)
    return tokens, torch.zeros(size, 16, LENGTH), tokens


def loss(model, batch):
    tokens, sound, targets = batch
    logits = model(tokens, sound)
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def optimizer(params):
    return torch.optim.AdamW(params, lr=1e-3)
'''

"""GPT-2 with 124 million parameters and batches of 256, planned for a simulated card.

autoaccum plan examples/gpt2.py --target-batch 256 --gpu rtx4090
python examples/gpt2.py
"""

import torch
from torch import nn
from torch.nn import functional as F

VOCABULARY, LENGTH, WIDTH, HEADS, LAYERS = 50257, 1024, 768, 12, 12
precision = "bf16"


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU("tanh"), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x):
        query, key, value = self.qkv(self.first(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.mlp(self.second(x))


class GPT2(nn.Module):
    def __init__(self, layers=LAYERS):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks, self.norm = nn.Sequential(*(Block() for _ in range(layers))), nn.LayerNorm(WIDTH)
        nn.init.normal_(self.tokens.weight, std=0.02)

    def forward(self, ids):
        x = self.tokens(ids) + self.positions.weight[: ids.shape[1]]
        return self.norm(self.blocks(x)) @ self.tokens.weight.T


model = GPT2


def batch(size, length=LENGTH):
    return torch.randint(0, VOCABULARY, (size, length + 1))


def loss(model, ids):
    return F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())


if __name__ == "__main__":
    from autoaccum import Accumulator

    net, ids = GPT2(layers=1), batch(4, length=32)
    accumulator = Accumulator(net, torch.optim.AdamW(net.parameters(), lr=1e-4), loss, micro_batch=2)
    for update in range(1, 4):  # one layer and one small batch, since a CPU is slow
        print(f"update {update}: loss {accumulator.step(ids).loss:.2f}")

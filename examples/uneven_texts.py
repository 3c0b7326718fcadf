"""A small GPT on Python's docstrings at full length: half have fewer than 60 bytes, the longest has about 6,000.

autoaccum plan examples/uneven_texts.py --target-batch 64 --gpu t4 --memory 256MiB
python examples/uneven_texts.py
"""

import builtins

import torch
from torch import nn
from torch.nn import functional as F

LONGEST, WIDTH = 8192, 64
items = [getattr(owner, name, None) for owner in vars(builtins).values() for name in dir(owner)]
texts = sorted({text for item in (*vars(builtins).values(), *items) if isinstance(text := item.__doc__, str)})
dataset = [torch.tensor(list(text.encode()[:LONGEST])) for text in texts if len(text) > 1]


class SmallGPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(256, WIDTH), nn.Embedding(LONGEST, WIDTH)
        self.qkv, self.head = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, 256)

    def forward(self, ids):  # [samples, length] -> [samples, length, 256]
        x = self.tokens(ids) + self.positions.weight[: ids.shape[1]]
        query, key, value = self.qkv(x).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.head(F.gelu(x + mixed.transpose(1, 2).flatten(2)))


model = SmallGPT


def length(text):
    return len(text)


def collate(chosen):
    ids = nn.utils.rnn.pad_sequence(chosen, batch_first=True)
    mask = torch.arange(ids.shape[1]) < torch.tensor([[len(text)] for text in chosen])
    return {"input_ids": ids, "attention_mask": mask.long(), "labels": ids.masked_fill(~mask, -100)}


def loss(model, batch):
    return F.cross_entropy(model(batch["input_ids"])[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())


def weight(batch):
    return (batch["labels"][:, 1:] != -100).sum()


if __name__ == "__main__":
    from autoaccum import Accumulator

    net = model()
    accumulator = Accumulator(net, torch.optim.AdamW(net.parameters()), loss, micro_tokens=16384, weight=weight)
    for chosen in torch.randperm(len(dataset)).split(64)[:4]:
        result = accumulator.step(collate([dataset[index] for index in chosen]))
        print(f"{result.samples} texts, parts {result.micro_batches}, loss {result.loss:.3f}")

"""A small GPT on Python's docstrings. They are padded, so the loss is a mean over tokens and not over samples.

autoaccum plan examples/docstring_gpt.py --target-batch 64 --memory 128MiB
python examples/docstring_gpt.py
"""

import builtins

import torch
from torch import nn
from torch.nn import functional as F

LENGTH, PADDING, WIDTH = 128, -100, 64
texts = [text.encode()[: LENGTH + 1] for name in sorted(vars(builtins)) if (text := getattr(builtins, name).__doc__)]
texts = sorted(texts, key=len, reverse=True)  # longest first: a plan must see the worst case


class SmallGPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(256, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.1, batch_first=True, norm_first=True)
            for _ in range(3)
        )
        self.head = nn.Linear(WIDTH, 256)

    def forward(self, tokens):  # [samples, length] -> [samples, 256, length]
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], device=tokens.device, dtype=x.dtype)
        for block in self.blocks:
            x = block(x, src_mask=mask, is_causal=True)
        return self.head(x).transpose(1, 2)


model = SmallGPT
criterion = nn.CrossEntropyLoss(ignore_index=PADDING)  # the mean divides by the tokens that are not padding


def pad(chosen):
    """Return the bytes of each text and the byte that follows each one, both of shape [samples, LENGTH]."""
    rows = [torch.tensor(list(text)) for text in chosen]
    inputs = [F.pad(row[:-1], (0, LENGTH + 1 - len(row)), value=0) for row in rows]
    targets = [F.pad(row[1:], (0, LENGTH + 1 - len(row)), value=PADDING) for row in rows]
    return torch.stack(inputs), torch.stack(targets)


def batch(size):
    return pad([texts[i % len(texts)] for i in range(size)])


if __name__ == "__main__":
    from autoaccum import Accumulator

    torch.manual_seed(0)
    net = model()
    accumulator = Accumulator(net, torch.optim.AdamW(net.parameters(), lr=3e-3), criterion, micro_batch=10, clip_norm=1)
    for chosen in torch.randperm(len(texts)).repeat(2).split(64):
        result = accumulator.step(pad([texts[i] for i in chosen]))
        print(f"{result.samples} texts, parts {result.micro_batches}, {result.loss:.3f} nats a byte")

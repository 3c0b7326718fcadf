"""How far off is the gradient of an update? Common mistakes beside the full batch of 16 samples, in float64.

python examples/accumulation_mistakes.py
"""

import torch
from torch import nn
from torch.nn import functional as F

torch.manual_seed(0)
x, partner, classes = torch.randn(16, 8).double(), torch.randn(16, 8).double(), torch.randint(5, (16,))
texts = torch.randint(50, (16, 33)).masked_fill(torch.arange(33) >= torch.randint(4, 34, (16, 1)), -100)


def perceptron(normalisation=nn.Identity):
    return nn.Sequential(nn.Linear(8, 32), normalisation(32), nn.Tanh(), nn.Linear(32, 5)).double()


def class_loss(model, part):
    return F.cross_entropy(model(x[part]), classes[part])


def token_loss(model, part):  # the mean over the tokens of this micro-batch
    return F.cross_entropy(model(texts[part, :-1].clamp(0)).flatten(0, 1), texts[part, 1:].flatten())


def pair_loss(model, part):  # finds the partner of each sample in this micro-batch
    return F.cross_entropy(model(x[part]) @ model(partner[part]).T, torch.arange(len(part)))


def gradient(model, loss, parts, factor=1.0, clip=None):
    model.zero_grad()
    for part in parts:
        (loss(model, part) * factor).backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])


def show(name, wrong, right):
    print(f"{name:22}{(wrong.double() - right).norm() / right.norm():7.1%}")


batch = torch.arange(16)
parts, model, tokens = batch.split(4), perceptron(), nn.Sequential(nn.Embedding(50, 16), nn.Linear(16, 50)).double()
right = gradient(model, class_loss, [batch])
show("divided once", gradient(model, class_loss, parts, 1 / 4), right)
show("not divided", gradient(model, class_loss, parts), right)
show("divided twice", gradient(model, class_loss, parts, 1 / 16), right)
show("short last window", gradient(model, class_loss, parts[:2], 1 / 4), gradient(model, class_loss, [batch[:8]]))
show("mean of token means", gradient(tokens, token_loss, parts, 1 / 4), gradient(tokens, token_loss, [batch]))
normed, limit = perceptron(nn.BatchNorm1d), float(right.norm()) / 2
show("BatchNorm", gradient(normed, class_loss, parts, 1 / 4), gradient(normed, class_loss, [batch]))
show("in-batch negatives", gradient(model, pair_loss, parts, 1 / 4), gradient(model, pair_loss, [batch]))
clipped = gradient(model, class_loss, [batch], clip=limit)
show("clipped every time", gradient(model, class_loss, parts, 1 / 4, clip=limit), clipped)
total = torch.zeros_like(right, dtype=torch.bfloat16)
for sample in batch.repeat(16).split(1):
    total += gradient(model, class_loss, [sample], 1 / 256)
show("256 sums in bfloat16", total, right)

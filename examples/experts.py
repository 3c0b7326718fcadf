"""A mixture of experts with a load-balancing loss (Switch Transformer, 2021): exact with `autoaccum.whole_batch`.

autoaccum verify examples/experts.py
python examples/experts.py
"""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F

import autoaccum

digits = load_digits()
pixels, labels = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)  # [1797, 64]


class Experts(nn.Module):
    def __init__(self, experts=4, balanced_over=autoaccum.whole_batch):
        super().__init__()
        self.gate = nn.Linear(64, experts)
        self.experts = nn.ModuleList([nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(experts)])
        self.classify, self.balanced_over = nn.Linear(64, 10), balanced_over

    def forward(self, pixels):
        shares = self.gate(pixels).softmax(-1)
        best = F.one_hot(shares.argmax(-1), len(self.experts))
        hidden = sum((best * shares)[:, [index]] * expert(pixels) for index, expert in enumerate(self.experts))
        # The share of samples that each expert got, times its mean probability: not a mean over samples.
        got, meant = self.balanced_over(best.to(shares.dtype)).mean(0), self.balanced_over(shares).mean(0)
        return self.classify(hidden), len(self.experts) * (got * meant).sum()


model = Experts


def batch(size):
    return pixels[:size], labels[:size]


def loss(model, batch):
    outputs, balance = model(batch[0])
    return {"digits": F.cross_entropy(outputs, batch[1]), "balance": 0.1 * balance}


def by_micro_batch():  # How it is usually written: each micro-batch balances its own samples.
    return Experts(balanced_over=lambda x: x)


usual = autoaccum.Workload(model=by_micro_batch, batch=batch, loss=loss)

if __name__ == "__main__":
    for name, workload in {"whole batch": __file__, "each micro-batch": usual}.items():
        found = autoaccum.verify(workload, target_batch=32)
        error = max(one.error for one in found.comparisons[0].differences if one.quantity == "gradients")
        print(f"balanced over {name}: the gradient is off by {error:.1e} of its largest entry")

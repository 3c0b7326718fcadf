"""A language model with an LSTM whose hidden state comes with the batch, as truncated backpropagation hands it on.

The samples are its first dimension, as they are of every tensor of a batch; `usual` has them second, as an LSTM wants.
"""

import torch
from torch import nn

from autoaccum import Workload


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(128, 32), nn.Linear(64, 128)
        self.lstm = nn.LSTM(32, 64, num_layers=2, batch_first=True)

    def forward(self, tokens, hidden):
        found, hidden = self.lstm(self.embed(tokens), hidden)
        return self.head(found), hidden


model = Net


def batch(size):
    return torch.randint(0, 128, (size, 33)), torch.zeros(size, 2, 64), torch.zeros(size, 2, 64)


def loss(model, batch):
    tokens, *hidden = batch
    found, _ = model(tokens[:, :-1], tuple(one.transpose(0, 1).contiguous() for one in hidden))
    return nn.functional.cross_entropy(found.flatten(0, 1), tokens[:, 1:].flatten())


def usual_batch(size):
    return torch.randint(0, 128, (size, 33)), (torch.zeros(2, size, 64), torch.zeros(2, size, 64))


def usual_loss(model, batch):
    tokens, hidden = batch
    found, _ = model(tokens[:, :-1], hidden)
    return nn.functional.cross_entropy(found.flatten(0, 1), tokens[:, 1:].flatten())


usual = Workload(model=model, batch=usual_batch, loss=usual_loss)

"""Small models and losses that couple the samples of a batch, or only look as if they did."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import spectral_norm
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

WIDTH, WORDS, TIME = 6, 11, 5
LENGTHS = (3, 5, 2, 4)


def rows(size: int) -> tuple[Tensor, Tensor]:
    return torch.randn(size, WIDTH), torch.randn(size, 3)


def classes(size: int) -> tuple[Tensor, Tensor]:
    return torch.randn(size, WIDTH), torch.arange(size) % 3


def sequences(size: int) -> tuple[Tensor, Tensor]:
    return torch.randn(size, TIME, WIDTH), torch.randn(size, 3)


def text(size: int) -> dict[str, Tensor]:
    lengths = torch.tensor([LENGTHS[index % 4] for index in range(size)])
    ids = torch.randint(1, WORDS, (size, TIME))
    mask = torch.arange(TIME)[None] < lengths[:, None]
    return {
        "ids": ids * mask,
        "mask": mask,
        "labels": torch.where(mask, ids, torch.full_like(ids, -100)),
        "lengths": lengths,
    }


def pairs(size: int) -> tuple[Tensor, Tensor]:
    return torch.randn(size, WIDTH), torch.randn(size, WIDTH)


def mean_square(model: nn.Module, batch: Any) -> Tensor:
    return functional.mse_loss(model(batch[0]), batch[1])


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 8), nn.ReLU(inplace=True), nn.Linear(8, 3))


def normed_mlp(norm: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 8), norm, nn.Tanh(), nn.Linear(8, 3))


class Normaliser(nn.Module):
    """A batch normalisation by another name."""

    def forward(self, x: Tensor) -> Tensor:
        return (x - x.mean(0)) / (x.std(0) + 0.1)


class Centring(nn.Module):
    """Mixes rows in its own forward, before one of its modules and not within it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        return self.last(hidden - hidden.mean(0))  # type: ignore[no-any-return]


class Stateful(nn.Module):
    """Keeps the state of its RNN from call to call."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.head = nn.GRU(WIDTH, 7, batch_first=True), nn.Linear(7, 3)
        self.state: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        out, state = self.rnn(x, self.state)
        self.state = state.detach()
        return self.head(out[:, -1])  # type: ignore[no-any-return]


class Packed(nn.Module):
    """Sorts its batch by length, packs it, and pads to the longest of the batch."""

    def __init__(self, *, norm: bool = False, drop: float = 0.0) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(WORDS, 8), nn.Linear(7, WORDS)
        self.lstm = nn.LSTM(8, 7, num_layers=2 if drop else 1, dropout=drop, batch_first=True)
        self.norm = nn.BatchNorm1d(8) if norm else nn.Identity()

    def forward(self, ids: Tensor, lengths: Tensor) -> Tensor:
        order = lengths.argsort(descending=True, stable=True)
        packed = pack_padded_sequence(self.embed(ids[order]), lengths[order].cpu(), batch_first=True)
        packed = packed._replace(data=self.norm(packed.data))
        out, (state, _) = self.lstm(packed)
        padded, _ = pad_packed_sequence(out, batch_first=True)
        logits = self.head(padded) + self.head(state[-1])[:, None]
        return logits[order.argsort()]  # type: ignore[no-any-return]


def packed_loss(model: nn.Module, batch: Any) -> Tensor:
    logits = model(batch["ids"], batch["lengths"])
    labels = batch["labels"][:, : logits.shape[1]]
    return functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


class TimeFirst(nn.Module):
    """Flattens to (time * batch, features) on the way."""

    def __init__(self, drop: float = 0.0) -> None:
        super().__init__()
        self.first, self.last, self.drop = nn.Linear(WIDTH, 8), nn.Linear(8, 3), nn.Dropout(drop)

    def forward(self, x: Tensor) -> Tensor:
        size, time = x.shape[:2]
        hidden = self.drop(self.first(x.transpose(0, 1).reshape(time * size, -1)).tanh())
        return self.last(hidden).view(time, size, -1).mean(0)  # type: ignore[no-any-return]


class Experts(nn.Module):
    """Each token goes to the expert it likes best; with a capacity, to the first that come."""

    def __init__(self, capacity: int | None = None) -> None:
        super().__init__()
        self.gate, self.capacity = nn.Linear(WIDTH, 3), capacity
        self.experts = nn.ModuleList(nn.Linear(WIDTH, 3) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        weights = self.gate(tokens).softmax(-1)
        chosen = weights.argmax(-1)
        out = tokens.new_zeros(tokens.shape[0], 3)
        for index, expert in enumerate(self.experts):
            taken = (chosen == index).nonzero()[: self.capacity, 0]
            if len(taken):
                out[taken] = expert(tokens[taken]) * weights[taken, index, None]
        return out.view(*x.shape[:2], 3).mean(1)


class Towers(nn.Module):
    """Two towers; with a temperature it returns the similarities of all with all."""

    def __init__(self, *, similarities: bool = True) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(WIDTH, 5), nn.Linear(WIDTH, 5)
        self.temperature = nn.Parameter(torch.tensor(1.0))
        self.similarities = similarities

    def forward(self, left: Tensor, right: Tensor) -> Any:
        one, other = functional.normalize(self.left(left), dim=-1), functional.normalize(self.right(right), dim=-1)
        return self.temperature.exp() * one @ other.T if self.similarities else (one, other)


def clip_loss(model: nn.Module, batch: Any) -> Tensor:
    logits = model(*batch)
    targets = torch.arange(logits.shape[0])
    return (functional.cross_entropy(logits, targets) + functional.cross_entropy(logits.T, targets)) / 2


def negatives_loss(model: nn.Module, batch: Any) -> Tensor:
    one, other = model(*batch)
    return functional.cross_entropy(one @ other.T, torch.arange(one.shape[0]))


def root_loss(model: nn.Module, batch: Any) -> Tensor:
    return mean_square(model, batch).sqrt()


def regularised_loss(model: nn.Module, batch: Any) -> Tensor:
    return mean_square(model, batch) + sum(parameter.square().sum() for parameter in model.parameters())


def spectral_mlp() -> nn.Module:
    return nn.Sequential(spectral_norm(nn.Linear(WIDTH, 8)), nn.Tanh(), nn.Linear(8, 3))


def hardest_loss(model: nn.Module, batch: Any) -> Tensor:
    each = functional.cross_entropy(model(batch[0]), batch[1], reduction="none")
    return torch.topk(each, len(each) // 2).values.mean()


def two_views_loss(model: nn.Module, batch: Any) -> Tensor:
    outputs: Tensor = model(torch.cat([batch[0], batch[0] + 1]))
    return functional.mse_loss(outputs, batch[1].repeat(2, 1))


def mixup_loss(model: nn.Module, batch: Any) -> Tensor:
    order = torch.randperm(len(batch[0]))
    inputs, targets = (0.5 * tensor + 0.5 * tensor[order] for tensor in batch)
    return functional.mse_loss(model(inputs), targets)


def advantages(size: int) -> tuple[Tensor, Tensor, Tensor]:
    return torch.randn(size, WIDTH), torch.arange(size) % 3, torch.randn(size)


def advantage_loss(model: nn.Module, batch: Any) -> Tensor:
    inputs, actions, advantage = batch
    chosen = model(inputs).log_softmax(-1).gather(1, actions[:, None])[:, 0]
    loss: Tensor = -((advantage - advantage.mean()) / advantage.std() * chosen).mean()
    return loss


def spread_loss(model: nn.Module, batch: Any) -> Tensor:
    return functional.mse_loss(model(batch[0])[:, :1], batch[1][:, 0])

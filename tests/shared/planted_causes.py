"""Planted causes: models and losses whose accumulated gradient is not the full batch's, made from `small_verified`."""

from __future__ import annotations

import random
from typing import Any

import torch
from small_verified import (
    CLASSES,
    FEATURES,
    Clip,
    Gpt,
    Mlp,
    Recurrent,
    class_loss,
    penalty,
    summed_loss,
    token_loss,
)
from torch import Tensor, nn
from torch.nn import functional

CALLS = [0]
TEACHER = nn.Sequential(nn.Linear(FEATURES, CLASSES), nn.BatchNorm1d(CLASSES))
WEIGHTS = torch.tensor([1.0, 2.0, 5.0])


class Standardised(nn.Module):
    """Normalises by the batch without being a BatchNorm class."""

    def forward(self, x: Tensor) -> Tensor:
        return (x - x.mean(0)) / (x.std(0, unbiased=False) + 1) if self.training else x


def standardised() -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, 6), Standardised(), nn.Tanh(), nn.Linear(6, CLASSES))


class Stubborn(Standardised):
    """Normalises by the batch in eval mode too."""

    def forward(self, x: Tensor) -> Tensor:
        return (x - x.mean(0)) / (x.std(0, unbiased=False) + 1)


def stubborn() -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, 6), Stubborn(), nn.Tanh(), nn.Linear(6, CLASSES))


class Keeping(Recurrent):
    """Continues from the state of the batch before."""

    hidden: Tensor | None = None

    def run(self, ids: Tensor) -> Tensor:
        start = None if self.hidden is None else self.hidden.expand(1, len(ids), 6).contiguous()
        outputs, hidden = self.cell(self.embed(ids), start)
        self.hidden = hidden.mean(1, keepdim=True).detach()
        return torch.as_tensor(outputs)


class KeepingSize(Keeping):
    """Keeps a state for each sample, so that the next batch must have the same size."""

    def run(self, ids: Tensor) -> Tensor:
        outputs, hidden = self.cell(self.embed(ids), self.hidden)
        self.hidden = hidden.detach()
        return torch.as_tensor(outputs)


class Remembering(Mlp):
    """Shifts by the mean of the batch before, which is kept in a buffer."""

    before: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("before", torch.zeros(FEATURES))

    def forward(self, x: Tensor) -> Tensor:
        moved = x + self.before
        self.before = x.mean(0).detach()
        return super().forward(moved)


class Following(Mlp):
    """Weights that follow others, updated in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.target = nn.Linear(FEATURES, 6).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            for mine, theirs in zip(self.target.parameters(), self.first.parameters(), strict=True):
                mine.lerp_(theirs, 0.1)
        return torch.as_tensor(self.last(self.hidden(x) + self.target(x)))


class Counting(Mlp):
    """Counts its calls, and does nothing with the number."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x)


class Caching(Mlp):
    """Computes a feature of its weights once, and keeps its value."""

    kept: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        feature = self.first.weight.square().sum(0) if self.kept is None else self.kept
        self.kept = feature.detach()
        return super().forward(x * feature)


class KeepingNormalised(nn.Module):
    """State and BatchNorm at once."""

    def __init__(self) -> None:
        super().__init__()
        self.body = Remembering()
        self.norm = nn.BatchNorm1d(CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return torch.as_tensor(self.norm(self.body(x)))


class Mixing(Mlp):
    """Mixes each sample with another of its batch."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(0.7 * x + 0.3 * x[torch.randperm(len(x))])


class Shuffling(Mlp):
    """Mixes samples by the order of random numbers that are drawn one per sample."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(0.7 * x + 0.3 * x[torch.rand(len(x)).argsort()])


class ShufflingLoss(nn.Module):
    """Mixes samples in a model that returns only its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.model = Mlp()

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        mixed = 0.7 * x + 0.3 * x[torch.rand(len(x)).argsort()]
        return functional.cross_entropy(self.model(mixed), targets)


class Restless(nn.Module):
    """A factor that does not depend on any seed."""

    def forward(self, x: Tensor) -> Tensor:
        return x * (1 + random.SystemRandom().random())


def restless() -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, 6), Restless(), nn.Tanh(), nn.Linear(6, CLASSES))


class Watching(Mlp):
    """A BatchNorm whose outputs are not used."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(FEATURES)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.norm(x)
        return super().forward(x)


def numbers(size: int) -> tuple[Tensor, Tensor]:
    return torch.randn(size, FEATURES), torch.randn(size)


def regressor() -> nn.Module:
    return nn.Linear(FEATURES, 1)


def penalised_sum(model: nn.Module, batch: Any) -> Tensor:
    return summed_loss(model, batch) + penalty(model)


def penalised_terms(model: nn.Module, batch: Any) -> dict[str, Tensor]:
    return {"classes": summed_loss(model, batch), "penalty": penalty(model)}


def counted_loss(model: nn.Module, batch: Any) -> Tensor:
    """Grows with the calls of the function, which a variable of its module counts."""
    CALLS[0] += 1
    return class_loss(model, batch) * CALLS[0]


def secret_loss(model: nn.Module, batch: Any) -> Tensor:
    """A mean with weights that nothing in the batch shows."""
    each = functional.cross_entropy(model(batch[0]), batch[1], reduction="none")
    weights = batch[0][:, 0].square() + 1
    return torch.as_tensor((each * weights).sum() / weights.sum())


def one_more_loss(model: nn.Module, batch: Any) -> Tensor:
    """Divides by one sample more than there is."""
    return summed_loss(model, batch) / (len(batch[0]) + 1)


def contrastive_loss(model: nn.Module, batch: Any) -> Tensor:
    image, text = model(batch["image"], batch["text"])
    logits = torch.as_tensor(model.temperature).exp() * image @ text.T
    return functional.cross_entropy(logits, torch.arange(len(logits)))


def spread_loss(model: nn.Module, batch: Any) -> Tensor:
    """Compares outputs with their variance within the batch."""
    outputs = model(batch[0])
    return torch.as_tensor(functional.cross_entropy(outputs, batch[1]) + outputs.var(0, unbiased=False).mean())


def constant_term(model: nn.Module, batch: Any) -> dict[str, Tensor]:
    return {"a": class_loss(model, batch), "b": torch.tensor(0.5)}


def mixed_reductions(model: nn.Module, batch: Any) -> dict[str, Tensor]:
    return {"classes": class_loss(model, batch), "size": model(batch[0]).square().sum()}


class Masked(Gpt):
    """Hides words at random, and gives the mean over those that are hidden."""

    def forward(self, ids: Tensor) -> Tensor:
        hidden = torch.rand(ids.shape) < 0.4
        return functional.cross_entropy(super().forward(ids.masked_fill(hidden, 0))[hidden], ids[hidden])


def masked() -> nn.Module:
    return Masked(dropout=0.0)


def own_loss(model: nn.Module, batch: Any) -> Tensor:
    return torch.as_tensor(model(batch["input_ids"]))


def root_loss(model: nn.Module, batch: Any) -> Tensor:
    return torch.sqrt(class_loss(model, batch))


class Weighted(Mlp):
    """Keeps the weights of classes for its loss."""

    weights: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("weights", WEIGHTS.clone())


def buffer_weighted_loss(model: Any, batch: Any) -> Tensor:
    return functional.cross_entropy(model(batch[0]), batch[1], weight=model.weights)


class Experts(nn.Module):
    """Two experts, and a term that balances how often they are used."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(FEATURES, 2)
        self.experts = nn.ModuleList([nn.Linear(FEATURES, CLASSES) for _ in range(2)])

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        shares = self.gate(x).softmax(-1)
        called = functional.one_hot(shares.argmax(-1), 2).to(shares.dtype).mean(0)
        outputs = [shares[:, index, None] * expert(x) for index, expert in enumerate(self.experts)]
        return torch.stack(outputs).sum(0), (called * shares.mean(0)).sum()


def balanced_loss(model: nn.Module, batch: Any) -> Tensor:
    outputs, balance = model(batch[0])
    return torch.as_tensor(functional.cross_entropy(outputs, batch[1]) + balance)


def advantage_loss(model: nn.Module, batch: Any) -> Tensor:
    """Weighs samples by a column that it normalises by the batch."""
    outputs, advantage = model(batch["image"]), batch["text"][:, 0]
    return torch.as_tensor((outputs[:, 0] * (advantage - advantage.mean()) / advantage.std()).mean())


class Similarities(Clip):
    """Gives the similarities of all images and texts, as CLIP models of libraries do."""

    def forward(self, image: Tensor, text: Tensor) -> Any:
        image, text = super().forward(image, text)
        return image @ text.T


def similarity_loss(model: nn.Module, batch: Any) -> Tensor:
    similarities = model(batch["image"], batch["text"])
    return functional.cross_entropy(similarities, torch.arange(len(similarities)))


def teacher_loss(model: nn.Module, batch: Any) -> Tensor:
    """Compares outputs with those of a teacher that was left in training mode."""
    with torch.no_grad():
        taught = TEACHER(batch[0])
    return functional.mse_loss(model(batch[0]), taught)


def mixed_counts(model: nn.Module, batch: Any) -> Tensor:
    """A mean over tokens and one over samples, added up."""
    return torch.as_tensor(token_loss(model, batch) + model(batch["input_ids"]).square().mean())


def mean_and_sum(model: nn.Module, batch: Any) -> Tensor:
    return torch.as_tensor(class_loss(model, batch) + model(batch[0]).square().sum())

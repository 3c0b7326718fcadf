"""Models, losses and loops whose accumulated gradient is not the full batch's."""

from __future__ import annotations

from typing import Any

import torch
from small_verified import FEATURES, Clip, Mlp, class_loss, penalty, summed_loss, token_loss
from torch import Tensor, nn
from torch.nn import functional

CALLS = [0]


def standardise(x: Tensor) -> Tensor:
    """Normalise by the batch."""
    return (x - x.mean(0)) / (x.std(0, unbiased=False) + 1)


class Standardise(nn.Module):
    """A BatchNorm by another name, in eval mode too."""

    def forward(self, x: Tensor) -> Tensor:
        return standardise(x)


class Standardising(Mlp):
    """Normalises in the forward of the model itself."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(standardise(x))


class Similarities(Clip):
    """Returns the similarities of all images with all texts."""

    def forward(self, image: Tensor, text: Tensor) -> Any:
        image, text = super().forward(image, text)
        return self.temperature.exp() * image @ text.T


class Mixing(Mlp):
    """Mixes each sample with another of its batch."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(0.7 * x + 0.3 * x[torch.randperm(len(x))])


class Shuffling(Mlp):
    """Mixes samples by the order of random numbers that are drawn one per sample."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(0.7 * x + 0.3 * x[torch.rand(len(x)).argsort()])


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


class RememberingNormalised(nn.Sequential):
    """State and BatchNorm at once."""

    def __init__(self) -> None:
        super().__init__(Remembering(), nn.BatchNorm1d(3))


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
    """Computes a feature of its weights once, and keeps its value without its graph."""

    kept: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        feature = self.first.weight.square().sum(0) if self.kept is None else self.kept
        self.kept = feature.detach()
        return super().forward(x * feature)


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


def hooked() -> nn.Module:
    model = Mlp()
    model.first.weight.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))  # type: ignore[no-untyped-call]
    return model


def penalised_sum(model: nn.Module, batch: Any) -> Tensor:
    return summed_loss(model, batch) + penalty(model)


def counted_loss(model: nn.Module, batch: Any) -> Tensor:
    """Grows with the calls of the function, which a variable of its module counts."""
    CALLS[0] += 1
    return class_loss(model, batch) * CALLS[0]


def root_loss(model: nn.Module, batch: Any) -> Tensor:
    return torch.sqrt(class_loss(model, batch))


def contrastive_loss(model: nn.Module, batch: Any) -> Tensor:
    image, text = model(batch["image"], batch["text"])
    logits = torch.as_tensor(model.temperature).exp() * image @ text.T
    return functional.cross_entropy(logits, torch.arange(len(logits)))


def similarity_loss(model: nn.Module, batch: Any) -> Tensor:
    logits = model(batch["image"], batch["text"])
    return functional.cross_entropy(logits, torch.arange(len(logits)))


def hardest_loss(model: nn.Module, batch: Any) -> Tensor:
    losses = functional.cross_entropy(model(batch[0]), batch[1], reduction="none")
    return torch.topk(losses, len(losses) // 2).values.mean()


def advantage_loss(model: nn.Module, batch: Any) -> Tensor:
    """Weighs samples by their first feature, normalised over the batch."""
    advantage = batch[0][:, 0]
    chosen = model(batch[0]).log_softmax(-1).gather(1, batch[1][:, None])[:, 0]
    return torch.as_tensor(-((advantage - advantage.mean()) / advantage.std() * chosen).mean())


def broadcast_loss(model: nn.Module, batch: Any) -> Tensor:
    """Compares each output with the target of each sample."""
    return functional.mse_loss(model(batch[0])[:, :1], batch[0][:, 0])


def mixed_counts(model: nn.Module, batch: Any) -> Tensor:
    """A mean over tokens and one over samples, added up."""
    return torch.as_tensor(token_loss(model, batch) + model(batch["input_ids"]).square().mean())


def mixed_reductions(model: nn.Module, batch: Any) -> dict[str, Tensor]:
    return {"classes": class_loss(model, batch), "size": model(batch[0]).square().sum()}


def backward(loss: Tensor) -> None:
    torch.autograd.backward(loss)


def samples(parts: Any) -> int:
    return sum(len(part[1]) for part in parts)


def right_loop(model: nn.Module, parts: Any) -> None:
    for part in parts:
        backward(class_loss(model, part) * len(part[1]) / samples(parts))


def undivided_loop(model: nn.Module, parts: Any) -> None:
    for part in parts:
        backward(class_loss(model, part))


def twice_divided_loop(model: nn.Module, parts: Any) -> None:
    for part in parts:
        backward(class_loss(model, part) * len(part[1]) / samples(parts) / len(parts))


def loop_of_means(model: nn.Module, parts: Any) -> None:
    for part in parts:
        backward(token_loss(model, part) / len(parts))


def configured_loop(model: nn.Module, parts: Any) -> None:
    """Divides by the number of parts of a whole window, however many there are."""
    for part in parts:
        backward(class_loss(model, part) / 4)


def zeroing_loop(model: nn.Module, parts: Any) -> None:
    for part in parts:
        model.zero_grad()
        backward(class_loss(model, part) * len(part[1]) / samples(parts))


def clipping_loop(model: nn.Module, parts: Any) -> None:
    for part in parts:
        backward(class_loss(model, part) * len(part[1]) / samples(parts))
        nn.utils.clip_grad_norm_(model.parameters(), 0.05)


def penalised_loop(model: nn.Module, parts: Any) -> None:
    """Adds a regulariser for each part."""
    for part in parts:
        backward(class_loss(model, part) * len(part[1]) / samples(parts) + penalty(model))

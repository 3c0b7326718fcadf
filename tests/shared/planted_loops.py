"""User loops `accumulate(model, micro_batches)`: one that is right, and wrong ones."""

from __future__ import annotations

from typing import Any

import torch
from small_verified import class_loss, penalty, text_losses, token_loss
from torch import Tensor, nn
from torch.nn import functional


def undivided(model: nn.Module, parts: Any) -> None:
    for part in parts:
        backward(class_loss(model, part))


def mean_of_means(model: nn.Module, parts: Any) -> None:
    for part in parts:
        backward(token_loss(model, part) / len(parts))


def configured(model: nn.Module, parts: Any) -> None:
    """Divides by the number of parts of a whole window, however many there are."""
    for part in parts:
        backward(class_loss(model, part) / 4)


def forgetting(model: nn.Module, parts: Any) -> None:
    """Leaves out the last part."""
    for part in list(parts)[:-1]:
        backward(class_loss(model, part) * len(part[1]) / samples(parts))


def zeroing(model: nn.Module, parts: Any) -> None:
    for part in parts:
        model.zero_grad()
        backward(class_loss(model, part) * len(part[1]) / samples(parts))


def late(model: nn.Module, parts: Any) -> None:
    """Calls backward once after the loop."""
    losses = [class_loss(model, part) * len(part[1]) / samples(parts) for part in parts]
    backward(losses[-1])


def clipping_parts(model: nn.Module, parts: Any) -> None:
    for part in parts:
        backward(class_loss(model, part) * len(part[1]) / samples(parts))
        nn.utils.clip_grad_norm_(model.parameters(), 0.05)


def scaled(model: nn.Module, parts: Any) -> None:
    scaler = torch.amp.GradScaler("cpu")
    for part in parts:
        backward(scaler.scale(class_loss(model, part) * len(part[1]) / samples(parts)))


def penalised(model: nn.Module, parts: Any) -> None:
    for part in parts:
        backward(class_loss(model, part) * len(part[1]) / samples(parts) + penalty(model))


def detaching(model: Any, parts: Any) -> None:
    """Uses only one of two losses."""
    for inputs, classes in parts:
        hidden = model.hidden(inputs)
        loss = functional.cross_entropy(model.last(hidden), classes)
        loss = loss + functional.mse_loss(model.decoder(hidden), inputs).detach()
        backward(loss * len(classes) / samples(parts))


def right(model: nn.Module, parts: Any) -> None:
    for part in parts:
        backward(class_loss(model, part) * len(part[1]) / samples(parts))


def samples(parts: Any) -> int:
    return sum(len(part[1]) for part in parts)


def backward(loss: Tensor) -> None:
    torch.autograd.backward(loss)


def terms_alike(model: nn.Module, parts: Any) -> None:
    """Gives terms with different divisors the same share."""
    for part in parts:
        backward(torch.stack(list(text_losses(model, part).values())).sum() / len(parts))

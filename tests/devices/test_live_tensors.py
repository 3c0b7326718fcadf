"""What a live model and its optimizer hold waits in host memory, and comes back bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from factories import Classifier
from torch import Tensor, nn

from autoaccum.devices.live_objects import LiveTensors


def trained() -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model with tied weights, gradients and optimizer state."""
    model: Any = nn.Sequential(Classifier(norm=True), nn.Linear(4, 4), nn.Linear(4, 4))
    model[2].weight = model[1].weight
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.randn(5, 6)).sum().backward()
    optimizer.step()
    return model, optimizer


def sizes(tensors: list[Tensor]) -> set[int]:
    return {tensor.untyped_storage().nbytes() for tensor in tensors}


@pytest.mark.parametrize("end", [None, ValueError, KeyboardInterrupt])
def test_everything_is_freed_and_comes_back(end: type[BaseException] | None) -> None:
    model, optimizer = trained()
    state = [value for entry in optimizer.state.values() for value in entry.values()]
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    held: list[Tensor] = [*model.parameters(), *model.buffers(), *gradients, *state]
    held.append(next(model.parameters()).detach()[:2])  # A view of the caller's.
    before = [tensor.detach().clone() for tensor in held]
    ended = False
    try:
        with LiveTensors.of(model, optimizer).on_host():
            assert sizes(held) == {0}
            if end is not None:
                raise end
    except (ValueError, KeyboardInterrupt):
        ended = True
    assert ended == (end is not None)
    assert all(map(torch.equal, held, before))
    assert model[2].weight is model[1].weight  # type: ignore[index]


def test_what_cannot_be_resized_stays() -> None:
    model = nn.Linear(4, 4)
    model.register_buffer("shared", torch.ones(3).share_memory_())  # type: ignore[no-untyped-call]
    with LiveTensors.of(model).on_host():
        assert sizes([model.shared]) == {12}  # type: ignore[list-item]
    assert torch.equal(model.shared, torch.ones(3))  # type: ignore[arg-type]

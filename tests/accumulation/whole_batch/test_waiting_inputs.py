"""Inputs of a part that waits are freed and filled again: gradients stay exact, and nothing else finds them empty.

On a card tensors wait in host memory; here the CPU is treated as one.
"""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from factories import class_loss, labelled_images
from torch import Tensor, nn
from whole_batches import Recorded, check_equal

from autoaccum import whole_batch
from autoaccum.accumulation import host_storage
from autoaccum.accumulation.host_storage import HostStorage
from autoaccum.accumulation.step_result import StepObserver

SAMPLES, MICRO_BATCH = 7, 2
EXACT: dict[str, Any] = {"batchnorm": "exact", "micro_batch": MICRO_BATCH}


BANK: list[Tensor] = []


@pytest.fixture(autouse=True)
def _as_on_a_card(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HostStorage, "host", "none")
    monkeypatch.setattr(host_storage, "_LEAST_EMPTIED", 1)


class Block(nn.Module):
    """A skip connection around layers that wait, of which `kind` says what they get."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.conv, self.norm = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.rows, self.act = nn.BatchNorm1d(64), nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "view":
            return torch.as_tensor(x + self.rows(self.conv(x).view(-1, 64)).view_as(x))
        if self.kind == "channels last":
            return torch.as_tensor(self.norm(self.conv(x).contiguous(memory_format=torch.channels_last)).contiguous())
        if self.kind == "bank":  # Other parts read it while this one waits.
            hidden = self.conv(x)
            BANK.append(hidden.detach())
            assert all(one.isfinite().all() and one.untyped_storage().nbytes() for one in BANK)
            return torch.as_tensor(self.norm(hidden))
        if self.kind == "no gradient":
            with torch.no_grad():
                return torch.as_tensor(self.norm(self.conv(x)) + x)
        if self.kind == "whole batch":
            return torch.as_tensor(x - whole_batch(x.mean((2, 3))).mean(0)[:, None, None])
        hidden = self.norm(self.conv(x))
        return torch.as_tensor(x + self.act(hidden))


def net(kind: str) -> nn.Module:
    body = nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.Sequential(Block(kind), nn.ReLU(inplace=True))
    return nn.Sequential(*body, Block("skip"), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 5)).double()


@pytest.mark.parametrize("kind", ["skip", "view", "channels last", "bank", "no gradient", "whole batch"])
@pytest.mark.parametrize("coupled", [False, True])
def test_the_gradient_is_the_full_batch_s(kind: str, coupled: bool) -> None:
    BANK.clear()
    model, batch = net(kind), labelled_images(SAMPLES, side=4)
    options = {"criterion": nn.CrossEntropyLoss(), "coupled": True} if coupled else {"loss": class_loss}
    recorded = Recorded(model, **options, **EXACT)
    recorded.step(batch)
    check_equal(recorded, model, class_loss, batch)


class Watching(StepObserver):
    """Counts, whenever a part goes on, what convolutions of other parts have returned and is alive."""

    def __init__(self) -> None:
        self.index = 0
        self.made: list[tuple[int, weakref.ref[Tensor]]] = []
        self.waiting: list[tuple[int, int]] = []

    def part(self, index: int) -> None:
        self.index = index
        alive = [tensor for part, ref in self.made if part != index and (tensor := ref()) is not None]
        self.waiting += [(one.nbytes, one.untyped_storage().nbytes()) for one in alive]

    def watch(self, model: nn.Module) -> None:
        for module in model.modules():
            if isinstance(module, nn.Conv2d):
                module.register_forward_hook(lambda _, __, made: self.made.append((self.index, weakref.ref(made))))


def test_what_waits_is_empty() -> None:
    watching = Watching()
    recorded = Recorded(net("skip"), class_loss, **EXACT, observer=watching)
    watching.watch(recorded.model)
    recorded.step(labelled_images(SAMPLES, side=4))
    assert len(watching.waiting) > 20
    assert {held for _, held in watching.waiting} == {0}


def test_parts_that_wait_when_another_fails_find_their_inputs_again() -> None:
    calls, found = [0], list[bool]()

    class Looking(Block):
        def forward(self, x: Tensor) -> Tensor:
            before = x.detach().clone()
            try:
                calls[0] += 1
                if calls[0] == 3:
                    raise ValueError("the third part fails")
                return super().forward(x)
            finally:
                found.append(torch.equal(before, x))

    model = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), Looking("skip"), nn.Flatten(), nn.Linear(64, 5)).double()
    recorded = Recorded(model, class_loss, **EXACT)
    with pytest.raises(ValueError, match="the third part fails"):
        recorded.step(labelled_images(SAMPLES, side=4))
    assert found == [True] * 3

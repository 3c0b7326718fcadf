"""Updates whose parts need each other: exact BatchNorm, coupled losses and whole_batch(x), under replayed numbers."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from autoaccum import Workload, verify, whole_batch
from autoaccum.verification.verification_result import Verification

WIDTH = 6


class Towers(nn.Module):
    """Two towers with dropout, a BatchNorm and a temperature."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(WIDTH, 8), nn.Dropout(0.3), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.2))
        self.second = nn.Linear(WIDTH, 8)
        self.temperature = nn.Parameter(torch.tensor(0.5))

    def forward(self, batch: Any) -> Any:
        return self.first(batch[0]), self.second(batch[1]), self.temperature


class Repeating(Towers):
    """Runs its first tower again in backward, with the same dropout."""

    def forward(self, batch: Any) -> Any:
        return checkpoint(self.first, batch[0], use_reentrant=False), self.second(batch[1]), self.temperature


class Chancy(Towers):
    """Draws from Python's generator as well, once before and once after its BatchNorm."""

    def forward(self, batch: Any) -> Any:
        one, two, temperature = super().forward((batch[0] * (1 + random.random()), batch[1]))
        return one * (1 + random.random()), two, temperature


class Gated(nn.Module):
    """Experts whose gates are balanced over the whole batch."""

    def __init__(self) -> None:
        super().__init__()
        self.drop, self.gate, self.out = nn.Dropout(0.3), nn.Linear(WIDTH, 4), nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        shares = whole_batch(self.gate(self.drop(x)).softmax(-1)).mean(0)
        return self.out(self.drop(x)), shares.square().sum()


def couples(size: int) -> tuple[Tensor, Tensor]:
    return torch.randn(size, WIDTH), torch.randn(size, WIDTH)


def labelled(size: int) -> tuple[Tensor, Tensor]:
    index = torch.arange(size)
    return torch.randn(size, WIDTH), torch.where(index % 3 == 0, -1, index % 4 % 3)  # -1: no label


def labelled_first(size: int) -> tuple[Tensor, Tensor]:
    return torch.randn(size, WIDTH), torch.where(torch.arange(size) == 0, 1, -1)


def outputs(model: nn.Module, batch: Any) -> Any:
    return model(batch)


def contrast(found: Any, batch: Any) -> Tensor:
    one, two, temperature = found
    table = functional.normalize(one) @ functional.normalize(two).T * temperature.exp()
    return functional.cross_entropy(table, torch.arange(len(table)))


def balanced_loss(model: nn.Module, batch: Any) -> dict[str, Tensor]:
    found, balance = model(batch[0])
    return {"labels": functional.cross_entropy(found, batch[1], ignore_index=-1), "balance": balance}


def added_loss(model: nn.Module, batch: Any) -> Tensor:
    return torch.stack(list(balanced_loss(model, batch).values())).sum()


def labels(batch: Any) -> Any:
    return (batch[1] != -1).sum()


def weights(batch: Any) -> dict[str, Any]:
    return {"labels": (batch[1] != -1).sum(), "balance": len(batch[1])}


def contrastive(model: Any = Towers, **more: Any) -> Workload:
    return Workload(model=model, batch=couples, outputs=outputs, coupled_loss=contrast, **more)


def deep(**more: Any) -> Workload:
    def model() -> nn.Module:
        body = [nn.Linear(WIDTH, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 8), nn.BatchNorm1d(8)]
        return nn.Sequential(*body, nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 4))

    more.setdefault("criterion", nn.CrossEntropyLoss(ignore_index=-1))
    return Workload(model=model, batch=labelled, batchnorm="exact", **more)


WELL = {
    "exact BatchNorm": deep(),
    "two passes": contrastive(coupled=True, batchnorm="frozen"),
    "two passes that run a tower again": contrastive(Repeating, coupled=True, batchnorm="frozen"),
    "a coupled loss and exact BatchNorm": contrastive(coupled=True, batchnorm="exact"),
    "Python's numbers between meetings": contrastive(Chancy, coupled=True, batchnorm="exact"),
    "a balance of the whole batch, one of whose parts counts": Workload(
        model=Gated, batch=labelled_first, loss=added_loss, weight=labels
    ),
    "a balance of the whole batch": Workload(model=Gated, batch=labelled, loss=balanced_loss, weight=weights),
}


def found(workload: Workload, micro_batch: int = 2, **more: Any) -> Verification:
    return verify(workload, target_batch=8, micro_batch=micro_batch, **more)


@pytest.mark.parametrize(
    ("case", "micro_batch"), [*((case, 3) for case in WELL), ("a coupled loss and exact BatchNorm", 1)]
)
def test_is_the_full_batchs_with_the_same_random_numbers(case: str, micro_batch: int) -> None:
    verification = found(WELL[case], micro_batch)
    assert verification.equivalent, verification.comparisons
    assert verification.notes == (), "random numbers were replayed, not replaced"


def test_a_wrong_weight_is_found_under_exact_batchnorm() -> None:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        return functional.cross_entropy(model(batch[0]), batch[1], ignore_index=-1)

    (cause,) = found(deep(criterion=None, loss=loss)).causes
    assert (cause.kind, cause.proved) == ("weight", True)
    assert cause.change.facts["code"] == "(batch[1] != -1).sum()"


def test_batchnorm_under_a_coupled_loss_is_cured_by_lock_step() -> None:
    (cause,) = found(contrastive(coupled=True)).causes
    assert (cause.kind, cause.proved, cause.mode) == ("batchnorm", True, {"batchnorm": "exact"})


@pytest.mark.slow
def test_both_cures_are_needed_and_proved_together() -> None:
    plain = Workload(model=Towers, batch=couples, loss=lambda model, batch: contrast(model(batch), batch))
    norm, loss = found(plain).causes
    assert [norm.mode, loss.mode] == [{"batchnorm": "exact"}, {"coupled": True}]
    assert norm.proved
    assert loss.proved


def test_exact_is_not_advised_where_it_does_not_run() -> None:
    class Recomputed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(nn.Linear(WIDTH, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 4))

        def forward(self, x: Tensor) -> Any:
            return checkpoint(self.body, x, use_reentrant=False)

    (cause,) = found(Workload(model=Recomputed, batch=labelled, criterion=nn.CrossEntropyLoss(ignore_index=-1))).causes
    assert (cause.kind, cause.proved, cause.mode) == ("batchnorm", True, {"batchnorm": "frozen"})

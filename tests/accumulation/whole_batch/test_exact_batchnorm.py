"""`batchnorm="exact"`: gradients and running statistics of an update in parts are the full batch's."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from factories import class_loss, labelled_images
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from whole_batches import Recorded, check_buffers, check_equal

from autoaccum.errors import UsageError, WorkloadError


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Sequential(
            nn.Conv2d(width, width, 3, padding=1),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.Conv2d(width, width, 3, padding=1),
            nn.BatchNorm2d(width, momentum=None),
        )

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x + self.inner(x))


class OwnForward(nn.BatchNorm2d):
    """Normalises and activates at once, as BatchNormAct2d of timm does."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(super().forward(x))


def net(norm: nn.Module | None = None) -> nn.Module:
    """Return a residual net; its first BatchNorm's input needs no gradient."""
    return nn.Sequential(
        nn.BatchNorm2d(3),
        nn.Conv2d(3, 6, 3),
        norm or nn.BatchNorm2d(6),
        nn.ReLU(),
        Residual(6),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(6, 5),
    ).double()


def shaped(norm: Any, convolution: Any, *shape: int) -> tuple[nn.Module, Any]:
    batch = torch.randn(7, *shape, dtype=torch.float64), torch.randint(0, 5, (7,))
    model = nn.Sequential(convolution(5, 5, 1), norm(5), nn.Flatten(), nn.LazyLinear(5)).double()
    model[2:](batch[0])
    return model, batch


NORMS: dict[str, Callable[[], tuple[nn.Module, Any]]] = {
    "no momentum": lambda: (net(nn.BatchNorm2d(6, momentum=None)), labelled_images(7)),
    "no statistics": lambda: (net(nn.BatchNorm2d(6, track_running_stats=False)), labelled_images(7)),
    "no statistics in eval": lambda: (net(nn.BatchNorm2d(6, track_running_stats=False).eval()), labelled_images(7)),
    "not affine": lambda: (net(nn.BatchNorm2d(6, affine=False, eps=0.1)), labelled_images(7)),
    "frozen": lambda: (net(nn.BatchNorm2d(6).eval()), labelled_images(7)),
    "frozen weight": lambda: (net(nn.BatchNorm2d(6).requires_grad_(False)), labelled_images(7)),
    "a forward of its own": lambda: (net(OwnForward(6, momentum=None)), labelled_images(7)),
    "one dimension": lambda: shaped(nn.BatchNorm1d, nn.Conv1d, 5, 4),
    "three dimensions": lambda: shaped(nn.BatchNorm3d, nn.Conv3d, 5, 2, 3, 2),
}


@settings(max_examples=12, deadline=None)
@given(cuts=st.lists(st.integers(1, 5), min_size=1, max_size=4), seed=st.integers(0, 99))
def test_every_split_gives_the_full_batch_s_gradients_and_statistics(cuts: list[int], seed: int) -> None:
    torch.manual_seed(seed)
    model, batch = net(), labelled_images(max(sum(cuts), 2))
    cuts[-1] += len(batch[1]) - sum(cuts)
    recorded = Recorded(model, class_loss, micro_batch=99, batchnorm="exact")
    parts = zip(torch.split(batch[0], cuts), torch.split(batch[1], cuts), strict=True)
    assert recorded.accumulator.step_parts(list(parts)).micro_batches == tuple(cuts)
    check_equal(recorded, model, class_loss, batch)


@pytest.mark.parametrize("name", NORMS)
@pytest.mark.parametrize("micro_batch", [1, 3])
def test_a_norm_of_any_kind(name: str, micro_batch: int) -> None:
    model, batch = NORMS[name]()
    recorded = Recorded(model, class_loss, micro_batch=micro_batch, batchnorm="exact")
    for _ in range(2):
        recorded.step(batch)
        check_equal(recorded, model, class_loss, batch)
        class_loss(model, batch)  # The second update begins with the statistics after the first.


class Siamese(nn.Module):
    """Calls one tower twice, the second time without a gradient; a head's output counts in some parts only."""

    def __init__(self) -> None:
        super().__init__()
        self.tower = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 5))
        self.tower[3].weight.requires_grad_(False)
        self.head = nn.Sequential(nn.Linear(5, 5), nn.BatchNorm1d(5))
        self.head[0].weight = nn.Parameter(torch.eye(5))
        self.tied = nn.Linear(5, 5)
        self.tied.weight = self.head[0].weight

    def forward(self, left: Tensor, right: Tensor, labels: Tensor) -> Tensor:
        with torch.no_grad():
            target = self.tower(right)
        out = self.tied(self.tower(left))
        extra = self.head(out)
        return functional.cross_entropy(out + target + extra * (labels >= 0).any(), labels, reduction="sum")


def masked_loss(model: nn.Module, batch: Any) -> Tensor:
    return torch.as_tensor(model(**batch) / (batch["labels"] >= 0).sum().clamp(min=1))


@pytest.mark.parametrize("micro_batch", [1, 2, 3])
def test_ignored_samples_count_in_the_moments(micro_batch: int) -> None:
    model = Siamese().double()
    batch = {name: torch.randn(8, 4, dtype=torch.float64) for name in ("left", "right")}
    batch["labels"] = torch.tensor([0, 1, 2, -100, -100, -100, -100, 3])
    recorded = Recorded(
        model, masked_loss, weight=lambda part: (part["labels"] >= 0).sum(), micro_batch=micro_batch, batchnorm="exact"
    )
    recorded.step(batch)
    check_equal(recorded, model, masked_loss, batch)


def test_the_criterion_s_batchnorm() -> None:
    class Criterion(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(5).double()

        def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
            return functional.cross_entropy(self.norm(outputs), targets)

    model, batch, criterion = net(), labelled_images(6), Criterion()
    whole = copy.deepcopy(criterion)
    recorded = Recorded(model, criterion=criterion, micro_batch=2, batchnorm="exact", clip_norm=1e9)
    assert recorded.step(batch).grad_norm
    check_equal(recorded, model, lambda model, batch: whole(model(batch[0]), batch[1]), batch)
    check_buffers(criterion, whole)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_under_autocast_only_rounding_differs(precision: Any) -> None:
    model = net().float()
    batch = labelled_images(8)[0].float(), torch.randint(0, 5, (8,))
    dtype = torch.bfloat16 if precision == "bf16" else torch.float16

    def loss(model: nn.Module, batch: Any) -> Tensor:
        with torch.autocast("cpu", dtype):
            return class_loss(model, batch)

    recorded = Recorded(model, class_loss, micro_batch=2, batchnorm="exact", precision=precision)
    assert recorded.step(batch).updated
    check_equal(recorded, model, loss, batch, tolerance=0.01)
    exact = Recorded(model, class_loss, micro_batch=2, batchnorm="exact")
    exact.step(batch)
    assert any(not torch.equal(exact.gradients[name], one) for name, one in recorded.gradients.items())


class Branching(nn.Module):
    """Its parts call their BatchNorms in different order, or not at all."""

    def __init__(self, *, skips: bool) -> None:
        super().__init__()
        self.first, self.second, self.skips = nn.BatchNorm1d(4), nn.BatchNorm1d(4), skips

    def forward(self, x: Tensor) -> Tensor:
        if x[0, 0] > 0:
            return x * 0 + self.first.weight if self.skips else self.first(self.second(x))
        return self.second(self.first(x))  # type: ignore[no-any-return]


class Recomputed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.inner = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        return torch.as_tensor(checkpoint(self.inner, self.first(x), use_reentrant=False))


BRANCHES = r"a part of the batch is at BatchNorm second while another is at {}, so that they cannot be joined: let"


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (Branching(skips=False), BRANCHES.format("BatchNorm first")),
        (Branching(skips=True), "at the end of its loss while another is at BatchNorm first, so that they"),
        (Recomputed(), r"BatchNorm inner.1 runs within backward \(activation checkpointing\), where it cannot wait"),
    ],
)
def test_what_cannot_be_joined_is_refused_and_undone(model: nn.Module, message: str) -> None:
    rows = torch.arange(1.0, 17).reshape(4, 4) * torch.tensor([1.0, 1, -1, -1])[:, None]
    recorded = Recorded(model, lambda model, batch: model(batch).square().mean(), micro_batch=2, batchnorm="exact")
    before = {name: value.clone() for name, value in recorded.model.state_dict().items()}
    with pytest.raises(WorkloadError, match=message):
        recorded.step(rows)
    for name, value in recorded.model.state_dict().items():
        assert torch.equal(value, before[name])
    assert functional.batch_norm.__module__ == "torch.nn.functional"


class Masked(nn.Module):
    """Normalises those rows of a part that are above zero, which may be none."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(4, 5), nn.BatchNorm1d(5)

    def forward(self, x: Tensor) -> Tensor:
        return torch.zeros(len(x), 5, dtype=x.dtype).index_put((x[:, 0] > 0,), self.norm(self.first(x[x[:, 0] > 0])))


def test_parts_without_rows() -> None:
    model = Masked().double()
    batch = torch.randn(6, 4, dtype=torch.float64), torch.randint(0, 5, (6,))
    batch[0][:, 0] = torch.tensor([1.0, 2, -1, -1, -1, 1])
    recorded = Recorded(model, class_loss, micro_batch=2, batchnorm="exact")
    recorded.step(batch)
    check_equal(recorded, model, class_loss, batch)
    batch[0][1:, 0] = -1
    with pytest.raises(WorkloadError, match="the whole batch has 1 value per channel, and BatchNorm needs more: take"):
        recorded.step(batch)


def test_half_precision_parameters_need_sums_in_their_dtype() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).bfloat16()
    with pytest.raises(UsageError, match="in lock step, which sums gradients of half-precision parameters in their dt"):
        Recorded(model, class_loss, micro_batch=2, batchnorm="exact")
    recorded = Recorded(model, class_loss, micro_batch=2, batchnorm="exact", accumulate_in="parameters")
    batch = torch.randn(7, 4, dtype=torch.bfloat16), torch.randint(0, 4, (7,))
    with pytest.warns(UserWarning, match="gradients are summed in bfloat16"):
        recorded.step(batch)
    check_equal(recorded, model, class_loss, batch, tolerance=0.02)


def test_a_batchnorm_that_only_the_loss_uses_normalises_by_the_whole_batch() -> None:
    teacher = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.LazyLinear(5)).double()
    model, batch = nn.Sequential(nn.Flatten(), nn.Linear(192, 5)).double(), labelled_images(7)
    teacher(batch[0])
    before = copy.deepcopy(teacher.state_dict())

    def distil(model: nn.Module, batch: Any) -> Tensor:
        return nn.functional.mse_loss(model(batch[0]), teacher(batch[0]))

    recorded = Recorded(model, distil, batchnorm="exact", micro_batch=3)
    recorded.step(batch)
    after = copy.deepcopy(dict(teacher.named_buffers()))
    teacher.load_state_dict(before)
    check_equal(recorded, model, distil, batch)
    for name, buffer in teacher.named_buffers():
        torch.testing.assert_close(after[name], buffer, rtol=0, atol=1e-12, msg=name)

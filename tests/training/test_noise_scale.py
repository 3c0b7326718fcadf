from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from autoaccum.accumulation.accumulator import Accumulator
from autoaccum.errors import NonFiniteError
from autoaccum.training.noise_scale import NoiseEstimator, NoiseObserver
from autoaccum.workload.weights import Objective, resolve_objective

# --- the estimator --------------------------------------------------------------------------------------------------

MU = np.array([0.5, -0.25, 0.1])
SPREAD = np.array([[1.0, 0.0, 0.0], [0.8, 0.5, 0.0], [-0.3, 0.2, 2.0]])
NOISE, SQUARE = float(np.trace(SPREAD @ SPREAD.T)), float(MU @ MU)


def feed(estimator: NoiseEstimator, cuts: Sequence[Sequence[int]], draw: np.random.Generator) -> None:
    """An update for each cut, of samples whose own gradients are normal around MU."""
    for sizes in cuts:
        gradients = MU + draw.standard_normal((sum(sizes), 3)) @ SPREAD.T
        means = [part.mean(0) for part in np.split(gradients, np.cumsum(sizes)[:-1])]
        whole = gradients.mean(0)
        estimator.add(list(sizes), [float(mean @ mean) for mean in means], sum(sizes), float(whole @ whole))


@pytest.mark.parametrize("sizes", [(4, 4, 4, 4), (7, 1), (1,) * 6, (3, 3, 2)], ids=str)
def test_noise_and_true_gradient_are_estimated_without_bias(sizes: tuple[int, ...]) -> None:
    draws = 4000
    estimator = NoiseEstimator(window=draws)
    feed(estimator, [sizes] * draws, np.random.default_rng(0))
    rows = np.array(estimator.state()["rows"])
    errors = np.abs(rows.mean(0) - [NOISE, SQUARE]) / (rows.std(0) / math.sqrt(draws))
    assert (errors < 4).all(), errors


def test_the_interval_covers_as_often_as_it_says() -> None:
    draw, true, covered, runs = np.random.default_rng(1), NOISE / SQUARE, 0, 400
    for _ in range(runs):
        estimator = NoiseEstimator()
        feed(estimator, [(16, 16)] * 60, draw)
        scale = estimator.estimate()
        if scale.value is None:
            covered += 1  # it claims nothing
        else:
            assert scale.low is None or scale.low <= scale.value
            assert scale.high is None or scale.high >= scale.value
            covered += (scale.low or 0.0) <= true <= (scale.high or math.inf)
    assert covered / runs == pytest.approx(0.9, abs=4 * math.sqrt(0.09 / runs))


@pytest.mark.parametrize(
    ("updates", "reason"),
    [
        ([([8.0], [1.0], 8.0, 1.0)] * 30, "each update is one micro-batch"),
        ([([4.0, 4.0], [1.0, 1.0], 8.0, 0.9)] * 9, "9 updates are too few, 10 are needed"),
        ([([4.0, 4.0], [2.0, 2.0], 8.0, 0.5)] * 30, "the noise drowns the gradient in the last 30 updates"),
        ([([4.0, 4.0], [math.inf, 2.0], 8.0, math.inf)] * 30, "gradients were not finite"),
    ],
)
def test_where_it_is_unavailable_it_says_why(updates: list[Any], reason: str) -> None:
    estimator = NoiseEstimator()
    for update in updates:
        estimator.add(*update)
    scale = estimator.estimate()
    assert (scale.value, scale.low, scale.high) == (None, None, None)
    assert scale.reason is not None
    assert scale.reason.startswith(reason)


# --- the observer ---------------------------------------------------------------------------------------------------


class Tied(nn.Module):
    """One weight used in three places."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.inner = nn.Embedding(7, 5), nn.Linear(5, 5)
        self.unused = nn.Linear(3, 3)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.inner(torch.tanh(self.inner(self.table(ids))))
        return torch.as_tensor(x @ self.table.weight.T)


class Recomputed(Tied):
    reentrant = False

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids)
        for _ in range(2):
            x = checkpoint(self.inner, x, use_reentrant=self.reentrant)
        return torch.as_tensor(x @ self.table.weight.T)


class InPieces(Recomputed):
    reentrant = True


def tokens(samples: int) -> tuple[Tensor, Tensor]:
    """Of three tokens each, some without a target."""
    ids, targets = torch.randint(0, 7, (samples, 3)), torch.randint(0, 7, (samples, 3))
    targets[torch.rand(targets.shape) < 0.3] = -100
    return ids, targets


def cross_entropy(model: nn.Module, batch: Any) -> Tensor:
    return functional.cross_entropy(model(batch[0]).flatten(0, 1).float(), batch[1].flatten())


def count(batch: Any) -> float:
    return float((batch[1] != -100).sum())


def summed(model: nn.Module, batch: Any) -> Tensor:
    return functional.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten(), reduction="sum")


MEAN = resolve_objective(cross_entropy, weight=count)
SUM = resolve_objective(summed, reduction="sum")


def gradient(model: nn.Module, objective: Objective, part: Any, divisor: float) -> Tensor:
    (loss,) = objective.terms(model, part).values()
    found = torch.autograd.grad(loss / divisor, list(model.parameters()), allow_unused=True)
    return torch.cat([g.to_dense().flatten().double() for g in found if g is not None])


def expected(model: nn.Module, objective: Objective, parts: Sequence[Any]) -> tuple[float, float]:
    """Noise and true square of one update, from the spread of its parts' gradients about their mean."""
    samples = sum(len(part[0]) for part in parts)
    is_sum = objective.reduction == "sum"
    weights = [len(part[0]) if is_sum else count(part) for part in parts]
    sizes = [samples * weight / sum(weights) for weight in weights]
    own = [gradient(model, objective, part, len(part[0]) if is_sum else 1.0) for part in parts]
    whole = torch.stack([size * g for size, g in zip(sizes, own, strict=True)]).sum(0) / samples
    noise = sum(size * float((g - whole).square().sum()) for size, g in zip(sizes, own, strict=True)) / (len(parts) - 1)
    return noise, float(whole.square().sum()) - noise / samples


def observed(model: nn.Module, objective: Objective, windows: Sequence[Sequence[Any]], **options: Any) -> NoiseObserver:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    observer = NoiseObserver(model.parameters(), objective.reduction)
    settings = {"micro_batch": 100, "clip_norm": math.inf, **options}
    accumulator = Accumulator(model, optimizer, objective, observer=observer, **settings)
    for window in windows:
        observer.take(accumulator.step_parts(window))
    return observer


@pytest.mark.parametrize(
    ("make", "objective", "options", "tolerance"),
    [
        (Tied, MEAN, {}, 1e-5),
        (Tied, SUM, {}, 1e-5),
        (Recomputed, MEAN, {}, 1e-5),
        (Tied, MEAN, {"scaler": torch.amp.GradScaler("cpu", init_scale=512.0)}, 1e-5),
        (lambda: Tied().bfloat16(), MEAN, {}, 2e-2),
        (lambda: Tied().double(), MEAN, {"clip_norm": 1e-3}, 1e-5),
    ],
    ids=["tied", "sum", "recomputed", "scaled", "bf16", "clipped"],
)
def test_it_hears_each_parts_own_gradient(
    make: Callable[[], nn.Module], objective: Objective, options: Any, tolerance: float
) -> None:
    torch.manual_seed(0)
    model = make()
    model.get_parameter("table.weight").data *= 3
    windows = [[tokens(size) for size in sizes] for sizes in [(4, 4), (5, 3, 1), (2, 6, 3, 3)]]
    rows = observed(model, objective, windows, **options).estimator.state()["rows"]
    assert rows == [
        [pytest.approx(value, rel=tolerance, abs=tolerance) for value in expected(model, objective, window)]
        for window in windows
    ]


def refused(observer: NoiseObserver) -> list[str]:
    assert observer.estimator.state()["rows"] == []
    return list(observer.estimator.state()["refused"])


def test_what_is_no_mean_of_samples_is_refused() -> None:
    windows = [[tokens(4), tokens(3)]]
    (said,) = refused(observed(InPieces(), MEAN, windows))
    assert said.startswith("a parameter's gradient comes in several pieces (reentrant checkpointing)")
    (said,) = refused(observed(Tied(), MEAN, windows, clip_norm=None))
    assert said.startswith("the norm of the gradient is not measured")
    (said,) = refused(observed(Tied(), MEAN, [[tokens(4)]]))
    assert said.startswith("each update is one micro-batch")
    blank = torch.zeros(4, 3, dtype=torch.long), torch.full((4, 3), -100)
    (said,) = refused(observed(Tied(), MEAN, [[blank, blank]]))
    assert said.startswith("no update was made")


def test_an_attempt_that_was_rolled_back_does_not_count() -> None:
    model, x, calls = nn.Linear(3, 1, bias=False), torch.randn(8, 3), list[int]()

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        calls.append(len(batch))
        if calls[2:] == [4, 4]:  # the second part of the second step, for the first time
            torch.empty(1 << 50)
        return torch.as_tensor(model(batch).mean())

    observer = NoiseObserver(model.parameters())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    accumulator = Accumulator(
        model, optimizer, loss, micro_batch=4, clip_norm=math.inf, check_finite=True, observer=observer
    )
    with pytest.raises(NonFiniteError):
        accumulator.step(torch.full((8, 3), math.nan))
    observer.take(accumulator.step(x))
    assert calls == [4, 4, 4, 4, 3, 3, 2]
    own = [(len(part), part.mean(0)) for part in torch.split(x, [3, 3, 2])]
    noise = sum(size * float((mean - x.mean(0)).square().sum()) for size, mean in own) / 2
    assert [row[0] for row in observer.estimator.state()["rows"]] == [pytest.approx(noise, rel=1e-5)]
    assert observer.estimator.state()["refused"] == {}

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from autoaccum.errors import WorkloadError
from autoaccum.sources.batches import split_batch
from autoaccum.sources.criteria import CLASSES as KNOWN
from autoaccum.sources.objective import Objective, resolve_objective

Builder = Callable[[int], Any]
CLASSES = 5


class Given(nn.Module):
    """A model that returns its input, so that a batch holds the outputs for a criterion."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones((), dtype=torch.float64))

    def forward(self, *outputs: Tensor) -> Any:
        scaled = tuple(output * self.scale for output in outputs)
        return scaled[0] if len(scaled) == 1 else scaled


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def rand(*shape: int) -> Tensor:
    return torch.rand(*shape, dtype=torch.float64) * 0.8 + 0.1


def classes(*shape: int, ignored: int | None = None) -> Tensor:
    targets = torch.randint(0, CLASSES, shape)
    if ignored is not None:
        targets[torch.rand(shape) < 0.4] = ignored
        targets.flatten()[::7] = 1
    return targets


def log_probabilities(*shape: int) -> Tensor:
    return randn(*shape).log_softmax(1)


CLASS_WEIGHTS = torch.tensor([0.3, 2.0, 1.0, 0.1, 4.0], dtype=torch.float64)
F = functional


def labelled(*shape: int, ignored: int | None = -100) -> Builder:
    """Logits over `shape` and classes, some of them ignored."""
    return lambda n: (randn(n, CLASSES, *shape), classes(n, *shape, ignored=ignored))


def multilabelled(n: int) -> Any:
    return randn(n, CLASSES), rand(n, CLASSES)


CASES: dict[str, tuple[Any, Builder]] = {
    "CrossEntropy, all of it": (
        nn.CrossEntropyLoss(weight=CLASS_WEIGHTS, ignore_index=2, label_smoothing=0.2),
        labelled(3, 4, ignored=2),
    ),
    "CrossEntropy, weighted smoothed probabilities": (
        nn.CrossEntropyLoss(weight=CLASS_WEIGHTS, label_smoothing=0.1),
        lambda n: (randn(n, CLASSES), randn(n, CLASSES).softmax(1)),
    ),
    "NLL, all of it": (
        nn.NLLLoss(weight=CLASS_WEIGHTS, ignore_index=1),
        lambda n: (log_probabilities(n, CLASSES, 2, 3), classes(n, 2, 3, ignored=1)),
    ),
    "BCE, weighted columns": (nn.BCELoss(weight=CLASS_WEIGHTS), lambda n: (rand(n, CLASSES), rand(n, CLASSES))),
    "BCEWithLogits, pos_weight": (
        nn.BCEWithLogitsLoss(pos_weight=CLASS_WEIGHTS, weight=CLASS_WEIGHTS[None]),
        multilabelled,
    ),
    "KLDiv, batchmean": (
        nn.KLDivLoss(reduction="batchmean"),
        lambda n: (log_probabilities(n, CLASSES, 2), rand(n, CLASSES, 2)),
    ),
    "MultiLabelSoftMargin, more dimensions": (
        nn.MultiLabelSoftMarginLoss(),
        lambda n: (randn(n, 4, CLASSES), rand(n, 4, CLASSES)),
    ),
    "partial of cross_entropy": (
        functools.partial(F.cross_entropy, ignore_index=4, weight=CLASS_WEIGHTS, label_smoothing=0.1),
        labelled(ignored=4),
    ),
}


def assert_parts_give_the_whole(objective: Objective, model: nn.Module, batch: Any, sizes: list[int]) -> None:
    whole = objective.terms(model, batch)["loss"].item()
    counted = []
    for part, size in zip(split_batch(batch, sizes), sizes, strict=True):
        if size and isinstance(weight := objective.weight(part), float) and weight:
            counted.append((objective.terms(model, part)["loss"].item(), weight))
    total = sum(weight for _, weight in counted)
    combined = sum(loss if objective.reduction == "sum" else loss * weight / total for loss, weight in counted)
    assert combined == pytest.approx(whole, rel=1e-12, abs=1e-12)
    if objective.reduction == "mean":
        assert objective.weight(batch) == pytest.approx(total, rel=1e-12)


@pytest.mark.filterwarnings("ignore:reduction. 'mean' divides the total loss:UserWarning")
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("sizes", [[1, 5, 3], [1] * 9, [2, 0, 7]])
def test_weighted_parts_give_the_loss_of_the_whole(case: str, sizes: list[int]) -> None:
    criterion, build = CASES[case]
    torch.manual_seed(0)
    batch = build(9)
    assert_parts_give_the_whole(resolve_objective(criterion), Given(), batch, sizes)


OTHERS = {
    "GaussianNLLLoss",
    "MarginRankingLoss",
    "CosineEmbeddingLoss",
    "TripletMarginLoss",
    "TripletMarginWithDistanceLoss",
    "CTCLoss",
}


def test_every_criterion_of_torch_is_tested_or_refused() -> None:
    tried = {criterion.__name__ for criterion in KNOWN}
    known = {name for name in nn.modules.loss.__all__ if name not in ("NLLLoss2d", "LinearCrossEntropyLoss")}
    assert known == (tried & known) | OTHERS
    for other in (*(getattr(nn, name)() for name in OTHERS), nn.AdaptiveLogSoftmaxWithLoss(4, 10, [5]), F.ctc_loss):
        with pytest.raises(WorkloadError, match=r"is not a criterion of outputs and targets .*: write a loss\(model"):
            resolve_objective(other)


@pytest.mark.needs_torch(2, 13)
def test_linear_cross_entropy() -> None:
    criterion = nn.LinearCrossEntropyLoss(3, CLASSES, weight=CLASS_WEIGHTS, dtype=torch.float64)
    batch = randn(9, 3), classes(9, ignored=-100)
    assert_parts_give_the_whole(resolve_objective(criterion), Given(), batch, [2, 7])


class Focal(nn.CrossEntropyLoss):
    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        each = F.cross_entropy(input, target, reduction="none")
        return ((1 - (-each).exp()) * each).mean()


class Configured(nn.CrossEntropyLoss):
    def __init__(self) -> None:
        super().__init__(ignore_index=0)


def test_a_subclass_is_known_only_if_it_keeps_forward() -> None:
    batch = randn(6, CLASSES), torch.tensor([0, 0, 1, 2, 3, 4])
    focal, configured = resolve_objective(Focal()), resolve_objective(Configured())
    assert focal.weight(batch) == 6.0
    assert focal.divisor_label == "samples (Focal is no criterion autoaccum knows)"
    assert configured.weight(batch) == 4.0
    replaced = nn.CrossEntropyLoss()
    replaced.forward = lambda input, target: input.mean()  # type: ignore[method-assign]
    assert "no criterion autoaccum knows" in resolve_objective(replaced).divisor_label
    assert_parts_give_the_whole(focal, Given(), batch, [1, 5])


def test_knows_a_compiled_criterion() -> None:
    compiled = torch.compile(nn.CrossEntropyLoss(ignore_index=2), backend="eager")
    assert resolve_objective(compiled).divisor_label == "targets != 2 (CrossEntropyLoss)"


def test_calls_the_model_with_positional_or_keyword_inputs() -> None:
    class Sum(nn.Module):
        def forward(self, left: Tensor, right: Tensor) -> Tensor:
            return left + right

    objective = resolve_objective(nn.MSELoss())
    left, right, targets = randn(4, 2), randn(4, 2).requires_grad_(), randn(4, 2)
    in_order = objective.terms(Sum(), ((left, right), targets))["loss"]
    by_name = objective.terms(Sum(), [{"right": right, "left": left}, targets])["loss"]
    assert torch.equal(in_order, by_name)


def weigh(criterion: Any, batch: Any) -> Any:
    return resolve_objective(criterion).weight(batch)


REFUSED: dict[str, tuple[Any, Any, str]] = {
    "no reduction": (nn.MSELoss(reduction="none"), None, r"MSELoss has reduction='none'"),
    "not a loss": (F.softmax, None, r"softmax is not a criterion"),
    "smoothed classes without weight": (
        nn.CrossEntropyLoss(torch.tensor([1.0, 0.0, 2.0]), label_smoothing=0.1),
        None,
        r"CrossEntropyLoss smooths labels, and a class has weight 0, .*: set ignore_index",
    ),
    "deprecated sum": (functools.partial(F.cross_entropy, size_average=False), None, r"deprecated size_average"),
    "targets without classes": (
        nn.CrossEntropyLoss(),
        (rand(4, 2), rand(4)),
        r"targets of shape \(4,\) and torch\.float64 are neither classes nor probabilities",
    ),
    "too many classes": (
        nn.NLLLoss(weight=torch.ones(2)),
        (rand(4, 2), torch.tensor([0, 1, 2, 0])),
        r"the targets hold classes from 0 to 2, the criterion has weights for 2: give one weight",
    ),
    "targets in a dict": (
        nn.MSELoss(),
        (rand(4), {"y": rand(4)}),
        r"MSELoss needs its targets as one tensor, batch\[1\] is a dict",
    ),
    "a dict batch": (nn.MSELoss(), {"x": rand(4)}, r"a batch is \(inputs, targets\), this one is a dict"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_says_what_a_criterion_needs(case: str) -> None:
    criterion, batch, message = REFUSED[case]
    with pytest.raises(WorkloadError, match=message):
        weigh(criterion, batch)


def test_class_weights_are_summed_without_rounding() -> None:
    criterion = nn.CrossEntropyLoss(weight=torch.tensor([0.1, 1e-4], dtype=torch.float32))
    targets = torch.cat([torch.zeros(100_001, dtype=torch.long), torch.ones(3, dtype=torch.long)])
    exact = 100_001 * float(torch.tensor(0.1)) + 3 * float(torch.tensor(1e-4))
    assert weigh(criterion, (torch.zeros(100_004, 2), targets)) == pytest.approx(exact, rel=1e-15)

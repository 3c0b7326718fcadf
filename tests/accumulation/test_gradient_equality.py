"""The accumulated gradient is the full batch's, to 1e-10 in float64, whatever the criterion, weight, split or form."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - as torch's documentation has it

from autoaccum.accumulation.accumulator import Accumulator
from autoaccum.accumulation.step_result import StepResult
from autoaccum.sources.criteria import CLASSES

SAMPLES = 7
SPLITS = {"all": 7, "one": 1, "uneven": 3, "almost": 6, "even-of-8": 4}
TOLERANCE = 1e-10


class Shaped(nn.Module):
    """Two linear maps, and `shape`, which turns the output into what a criterion wants."""

    def __init__(self, outputs: int, shape: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(5, 6), nn.Linear(6, outputs)
        self.shape = shape

    def forward(self, x: Tensor) -> Tensor:
        return self.shape(self.head(torch.tanh(self.body(x))))


@dataclass(frozen=True)
class Case:
    name: str
    criterion: Any
    targets: Callable[[int], Any]
    outputs: int = 4
    shape: Callable[[Tensor], Tensor] = torch.nn.Identity()


def classes(count: int) -> Callable[[int], Tensor]:
    return lambda size: torch.randint(0, count, (size,))


def partly_ignored(size: int) -> Tensor:
    targets = torch.randint(0, 4, (size, 3))
    targets[torch.rand(size, 3) < 0.4] = -100
    targets[0], targets[-1, 0] = -100, 1
    return targets


def reals(*shape: int) -> Callable[[int], Tensor]:
    return lambda size: torch.randn(size, *shape, dtype=torch.float64)


def fractions(*shape: int) -> Callable[[int], Tensor]:
    return lambda size: torch.rand(size, *shape, dtype=torch.float64)


def signs(*shape: int) -> Callable[[int], Tensor]:
    return lambda size: torch.randint(0, 2, (size, *shape)).double() * 2 - 1


def by_position(outputs: Tensor) -> Tensor:
    return outputs.reshape(len(outputs), 4, 3)


def log_probabilities(outputs: Tensor) -> Tensor:
    return outputs.log_softmax(-1)


WEIGHTS = torch.tensor([0.5, 2.0, 1.0, 0.25], dtype=torch.float64)
CASES = [
    Case("cross entropy", nn.CrossEntropyLoss(), classes(4)),
    Case("cross entropy by function", F.cross_entropy, classes(4)),
    Case("cross entropy by partial", functools.partial(F.cross_entropy, label_smoothing=0.1), classes(4)),
    Case("ignored tokens", nn.CrossEntropyLoss(), partly_ignored, 12, shape=by_position),
    Case("ignored class 2", nn.CrossEntropyLoss(ignore_index=2), classes(4)),
    Case("class weights", nn.CrossEntropyLoss(weight=WEIGHTS), classes(4)),
    Case("smoothing", nn.CrossEntropyLoss(label_smoothing=0.2), classes(4)),
    Case(
        "all of them",
        nn.CrossEntropyLoss(weight=WEIGHTS, label_smoothing=0.2),
        partly_ignored,
        12,
        shape=by_position,
    ),
    Case("summed tokens", nn.CrossEntropyLoss(reduction="sum"), partly_ignored, 12, shape=by_position),
    Case("probabilities", nn.CrossEntropyLoss(), lambda size: reals(4)(size).softmax(-1)),
    Case("nll", nn.NLLLoss(weight=WEIGHTS), classes(4), shape=log_probabilities),
    Case("mse", nn.MSELoss(), reals(4)),
    Case("mse sum", nn.MSELoss(reduction="sum"), reals(4)),
    Case("l1", nn.L1Loss(), reals(4)),
    Case("smooth l1", nn.SmoothL1Loss(), reals(4)),
    Case("huber", nn.HuberLoss(), reals(4)),
    Case("bce", nn.BCELoss(), fractions(4), shape=torch.sigmoid),
    Case("bce with logits", nn.BCEWithLogitsLoss(pos_weight=WEIGHTS), fractions(4)),
    Case("poisson", nn.PoissonNLLLoss(), fractions(4)),
    Case("soft margin", nn.SoftMarginLoss(), signs(4)),
    Case("hinge embedding", nn.HingeEmbeddingLoss(), signs(4)),
    Case("kl div", nn.KLDivLoss(), fractions(4), shape=log_probabilities),
    Case("kl div batchmean", nn.KLDivLoss(reduction="batchmean"), fractions(4), shape=log_probabilities),
    Case("multi margin", nn.MultiMarginLoss(), classes(4)),
    Case("multilabel margin", nn.MultiLabelMarginLoss(), lambda size: torch.tensor([[1, 3, -1, 0]] * size)),
    Case("multilabel soft margin", nn.MultiLabelSoftMarginLoss(), fractions(4)),
]


def gradients_of(model: nn.Module, run: Callable[[torch.optim.Optimizer], Any]) -> list[Tensor]:
    """The gradients the optimizer is handed, once."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    seen: list[list[Tensor]] = []
    optimizer.register_step_pre_hook(
        lambda *_: seen.append(
            [torch.zeros_like(one) if one.grad is None else one.grad.clone() for one in model.parameters()]
        )
    )
    run(optimizer)
    [gradients] = seen
    return gradients


def check_equal(
    model: nn.Module, step: Callable[[torch.optim.Optimizer], StepResult], full: Callable[[], Any]
) -> StepResult:
    """Check gradients and terms of the loss against `full`, the full batch's loss or its terms."""
    results: list[StepResult] = []
    mine = gradients_of(model, lambda optimizer: results.append(step(optimizer)))
    value = full()
    terms: dict[str, Tensor] = value if isinstance(value, dict) else {"loss": value}
    theirs = torch.autograd.grad(
        torch.stack(list(terms.values())).sum(), list(model.parameters()), allow_unused=True, materialize_grads=True
    )
    scale = max(float(gradient.abs().max()) for gradient in theirs)
    assert scale > 0
    assert max(float((a - b).abs().max()) for a, b in zip(mine, theirs, strict=True)) <= TOLERANCE * scale
    expected = {name: float(term.detach()) for name, term in terms.items()}
    assert results[0].terms == pytest.approx(expected, rel=TOLERANCE)
    assert results[0].loss == pytest.approx(sum(expected.values()), rel=TOLERANCE)
    return results[0]


def check_split(model: nn.Module, batch: Any, split: str, full: Callable[[], Any], loss: Any, **options: Any) -> None:
    size, most = size_of(split), SPLITS[split]
    result = check_equal(
        model, lambda opt: Accumulator(model, opt, loss, micro_batch=most, **options).step(batch), full
    )
    assert sum(result.micro_batches) == result.samples == size
    assert max(result.micro_batches) <= most


def size_of(split: str) -> int:
    return 8 if split == "even-of-8" else SAMPLES


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.filterwarnings("ignore:reduction")
def test_every_criterion(case: Case, split: str) -> None:
    model = Shaped(case.outputs, case.shape).double()
    x, targets = reals(5)(size_of(split)), case.targets(size_of(split))
    check_split(model, (x, targets), split, lambda: case.criterion(model(x), targets), case.criterion)


def test_no_criterion_is_forgotten() -> None:
    covered = {type(case.criterion) for case in CASES}
    assert {kind for kind in CLASSES if kind.__name__ != "LinearCrossEntropyLoss"} <= covered


class Pair(NamedTuple):
    x: Tensor
    y: Tensor


@dataclass
class Record:
    x: Tensor
    y: Tensor
    note: str = "kept"


FORMS: dict[str, tuple[Callable[[Tensor, Tensor], Any], Callable[[Any], tuple[Tensor, Tensor]]]] = {
    "tuple": (lambda x, y: (x, y), lambda batch: batch),
    "list": (lambda x, y: [x, y], lambda batch: (batch[0], batch[1])),
    "dict": (lambda x, y: {"x": x, "y": y, "step": 3}, lambda batch: (batch["x"], batch["y"])),
    "named tuple": (Pair, lambda batch: (batch.x, batch.y)),
    "dataclass": (Record, lambda batch: (batch.x, batch.y)),
    "nested": (lambda x, y: {"in": [{"x": x}], "out": (y, None)}, lambda batch: (batch["in"][0]["x"], batch["out"][0])),
    "tensor": (lambda x, y: torch.cat([x, y[:, None].double()], 1), lambda batch: (batch[:, :5], batch[:, 5].long())),
    "samples": (
        lambda x, y: [{"x": a, "y": b} for a, b in zip(x, y, strict=True)],
        lambda batch: (torch.stack([s["x"] for s in batch]), torch.stack([s["y"] for s in batch])),
    ),
}


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_a_batch(form: str, split: str) -> None:
    make, read = FORMS[form]
    model = Shaped(4, nn.Identity()).double()
    batch = make(reals(5)(size_of(split)), classes(4)(size_of(split)))

    def loss(model: nn.Module, batch: Any) -> Tensor:
        x, y = read(batch)
        return F.cross_entropy(torch.as_tensor(model(x)), y)

    check_split(model, batch, split, lambda: loss(model, batch), loss)


def token_mean(model: nn.Module, batch: Any) -> Tensor:
    losses = F.cross_entropy(by_position(model(batch[0])), batch[1], reduction="none")
    return torch.as_tensor(losses.sum() / (batch[1] != -100).sum())


def two_terms(model: nn.Module, batch: Any) -> dict[str, Tensor]:
    x, targets = batch
    outputs = model(x)
    return {"tokens": token_mean(model, batch), "size": outputs.square().mean()}


def count_tokens(batch: Any) -> int:
    return int((batch[1] != -100).sum())


WEIGHTINGS: dict[str, tuple[Any, Any, str]] = {
    "tokens": (token_mean, count_tokens, "mean"),
    "terms": (two_terms, lambda batch: {"tokens": count_tokens(batch), "size": len(batch[0])}, "mean"),
    "sum": (lambda model, batch: model(batch[0]).square().sum(), None, "sum"),
    "sum of terms": (lambda m, b: {"a": m(b[0]).square().sum(), "b": m(b[0]).sin().sum()}, None, "sum"),
    "one weight for terms": (
        lambda m, b: {"a": m(b[0]).square().mean(), "b": m(b[0]).sin().mean()},
        lambda batch: len(batch[0]),
        "mean",
    ),
}


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("weighting", WEIGHTINGS)
def test_every_weighting(weighting: str, split: str) -> None:
    loss, weight, reduction = WEIGHTINGS[weighting]
    model = Shaped(12, nn.Identity()).double()
    batch = reals(5)(size_of(split)), partly_ignored(size_of(split))
    check_split(model, batch, split, lambda: loss(model, batch), loss, weight=weight, reduction=reduction)


def test_a_window_of_unequal_micro_batches() -> None:
    model = Shaped(12, nn.Identity()).double()
    sizes = (4, 1, 5, 2)
    window = [(torch.randn(size, 5, dtype=torch.float64), partly_ignored(size + 1)[1:]) for size in sizes]
    joined = (torch.cat([x for x, _ in window]), torch.cat([y for _, y in window]))
    options: dict[str, Any] = {"micro_batch": 3, "weight": count_tokens}
    result = check_equal(
        model,
        lambda optimizer: Accumulator(model, optimizer, token_mean, **options).step_parts(window),
        lambda: token_mean(model, joined),
    )
    assert result.micro_batches == (2, 2, 1, 3, 2, 2)
    assert result.samples == 12

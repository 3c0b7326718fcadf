"""The loss that a model computes itself if none is given, and ignored labels if no weight is given."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD

from autoaccum import Accumulator, Workload
from autoaccum.errors import WorkloadError
from autoaccum.sources.model_loss import ModelLoss
from autoaccum.sources.objective import resolve_objective
from autoaccum.sources.weight_check import check_weighting


@dataclass
class Output:
    logits: Tensor
    loss: Tensor | None = None


class Regression(nn.Module):
    """Return the loss in a dict, an object or a tuple."""

    def __init__(self, form: str = "dict") -> None:
        super().__init__()
        self.layer, self.form = nn.Linear(3, 1), form

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:
        logits = self.layer(x)[:, 0]
        loss = None if labels is None else F.mse_loss(logits, labels)
        forms = {"dict": {"loss": loss, "logits": logits}, "object": Output(logits, loss), "tuple": (loss, logits)}
        return forms.get(self.form, logits)


def batch(size: int) -> dict[str, Tensor]:
    return {"x": torch.randn(size, 3), "labels": torch.randn(size)}


@pytest.mark.parametrize(("form", "access"), [("dict", '["loss"]'), ("object", ".loss"), ("tuple", "[0]")])
def test_the_loss_of_what_a_model_returns(form: str, access: str) -> None:
    model, data = Regression(form), batch(5)
    objective = resolve_objective(model=model)
    assert torch.equal(objective.terms(model, data)["loss"], F.mse_loss(model.layer(data["x"])[:, 0], data["labels"]))
    own = objective.model_loss
    assert isinstance(own, ModelLoss)
    assert (own.access, objective.weight(data), objective.divisor_label) == (access, 5.0, "samples (Regression)")
    assert check_weighting(Workload(model=lambda: Regression(form), batch=batch)) == []


def ForCausalLMLoss(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


class Decoder(nn.Module):
    """Computes its loss as transformers' decoders do."""

    loss_function = staticmethod(ForCausalLMLoss)

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 5)

    def forward(self, x: Tensor, labels: Tensor) -> Output:
        logits = self.layer(x)
        return Output(logits, self.loss_function(logits, labels))


def test_a_decoder_divides_by_the_labels_after_the_first() -> None:
    """The count differs from that of all labels, and from that of all but the last."""
    data = tokens([6, 2, 3, 1, 4])
    objective = resolve_objective(model=Decoder())
    assert (objective.weight(data), objective.divisor_label) == (11.0, "labels[..., 1:] != -100 (Decoder)")
    assert check_weighting(Workload(model=Decoder, batch=lambda size: tokens([6, 2, 3, 1, 4][:size]))) == []


@pytest.mark.parametrize(
    ("form", "data", "message"),
    [
        ("dict", (torch.zeros(2, 3), torch.zeros(2)), "neither loss nor criterion is given, and the batch is a tuple"),
        ("dict", {"x": torch.zeros(2, 3)}, "no loss is given, and Regression returned a dict without one"),
        ("tensor", {"x": torch.zeros(2, 3)}, "no loss is given, and Regression returned a Tensor without one"),
    ],
)
def test_refuses_a_model_or_batch_without_a_loss(form: str, data: Any, message: str) -> None:
    model = Regression(form)
    with pytest.raises(WorkloadError, match=message) as seen:
        Accumulator(model, SGD(model.parameters(), lr=0.1), micro_batch=1).step(data)
    assert "loss(model, batch)" in (seen.value.hint or "")


def tokens(counts: list[int], ignored: int = -100) -> dict[str, Tensor]:
    labels = torch.full((len(counts), 6), ignored)
    for row, count in zip(labels, counts, strict=True):
        row[:count] = 1
    return {"x": torch.randn(len(counts), 6, 4), "labels": labels}

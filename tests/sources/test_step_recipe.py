from __future__ import annotations

import functools
import json
from collections import UserDict
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from autoaccum.serialization import read_record, to_plain
from autoaccum.sources.batches import wrap_batch
from autoaccum.sources.objective import resolve_objective
from autoaccum.sources.step_recipe import describe_form, describe_recipe, find_divisor
from autoaccum.spec import StepRecipe

LABELS = (torch.zeros(3, 4), torch.tensor([0, 1, 2]))
REAL = (torch.zeros(3, 4), torch.zeros(3, 4))


class Attributes(dict[str, Tensor]):
    """A batch with attributes, which a loss may read."""


def mean(model: nn.Module, batch: Any) -> Tensor:
    return torch.as_tensor(model(batch[0])).mean()


@pytest.mark.parametrize(
    ("given", "batch", "divisor"),
    [
        ({"loss": mean}, LABELS, "samples"),
        ({"loss": mean, "weight": lambda batch: 3}, LABELS, "weight"),
        ({"loss": mean, "reduction": "sum"}, LABELS, "nothing"),
        ({"criterion": nn.CrossEntropyLoss()}, LABELS, "targets"),
        ({"criterion": nn.CrossEntropyLoss()}, (LABELS[0], torch.softmax(LABELS[0], 1)), "samples"),
        ({"criterion": nn.CrossEntropyLoss(weight=torch.ones(4))}, LABELS, "class weights"),
        ({"criterion": nn.CrossEntropyLoss(), "weight": lambda batch: 3}, LABELS, "weight"),
        ({"criterion": nn.CrossEntropyLoss(reduction="sum")}, LABELS, "nothing"),
        ({"criterion": functional.nll_loss}, LABELS, "targets"),
        ({"criterion": nn.MSELoss()}, REAL, "samples"),
        ({"criterion": nn.MultiLabelSoftMarginLoss()}, REAL, "samples"),
        ({"criterion": nn.KLDivLoss(reduction="batchmean")}, REAL, "samples"),
        ({"criterion": lambda outputs, targets: outputs.mean()}, REAL, "samples"),
    ],
)
def test_divisors(given: dict[str, Any], batch: Any, divisor: str) -> None:
    assert find_divisor(resolve_objective(**given), batch) == divisor


def recipe(given: dict[str, Any], batch: Any = LABELS, model: nn.Module | None = None, terms: Any = ("loss",)) -> Any:
    found = describe_recipe(resolve_objective(**given), model or nn.Linear(4, 4), batch, terms)
    assert read_record(json.loads(json.dumps(to_plain(found))), StepRecipe) == found
    return found


def test_describes_criteria() -> None:
    found = recipe({"criterion": nn.CrossEntropyLoss(ignore_index=7)})
    assert (found.ignore_index, found.calls_criterion) == (7, True)
    found = recipe({"criterion": functools.partial(functional.cross_entropy, ignore_index=2)})
    assert found.ignore_index == 2
    assert not recipe({"loss": mean}).calls_criterion


def test_names_the_half_dtypes_of_trainable_parameters() -> None:
    assert recipe({"loss": mean}).half == ()
    assert recipe({"loss": mean}, model=nn.Linear(4, 4).bfloat16()).half == ("bfloat16",)
    frozen = nn.Linear(4, 4).half().requires_grad_(False)
    assert recipe({"loss": mean}, model=nn.Sequential(frozen, nn.Linear(4, 4))).half == ()


X = torch.zeros(3, 2)


@dataclass
class Record:
    x: Tensor


@pytest.mark.parametrize(
    ("batch", "form"),
    [
        (X, "tensor"),
        ((X, X), {"tuple": ["tensor", "tensor"]}),
        ([X, X], {"list": ["tensor", "tensor"]}),
        ({"x": X, "n": 3}, {"dict": {"x": "tensor", "n": "other"}}),
        (UserDict(x=X), {"mapping": {"x": "tensor"}}),
        (Attributes(x=X), {"mapping": {"x": "tensor"}}),
        (({"ids": X}, X), {"tuple": [{"dict": {"ids": "tensor"}}, "tensor"]}),
        ((X, ["a", "b", "c"]), {"tuple": ["tensor", "other"]}),
        ([{"x": torch.ones(2)}] * 3, "other"),
        (wrap_batch([{"x": X}, {"x": X}], None), {"list": [{"dict": {"x": "tensor"}}] * 2}),
        (wrap_batch(({"x": X}, {"x": X}), None), {"tuple": [{"dict": {"x": "tensor"}}] * 2}),
        (Record(X), "other"),
        ({1: X}, "other"),
        ({'a"b': X}, "other"),
        ({"a\nb": X}, "other"),
    ],
)
def test_forms(batch: Any, form: Any) -> None:
    found = describe_form(batch, 3)
    assert found == form
    assert json.loads(json.dumps(found)) == form

from __future__ import annotations

import json
from collections import OrderedDict, namedtuple
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from autoaccum.workload.forms import describe_form

Point = namedtuple("Point", ["x", "y"])
X = torch.zeros(3, 2)


@dataclass
class Record:
    x: Tensor
    name: str = "all"


@dataclass
class Derived:
    x: Tensor
    twice: Any = field(init=False, default=None)


@pytest.mark.parametrize(
    ("batch", "form"),
    [
        (X, "tensor"),
        (np.zeros((3, 2)), "array"),
        ((X, X), {"tuple": ["tensor", "tensor"]}),
        ([X, X], {"list": ["tensor", "tensor"]}),
        ({"x": X, "scale": torch.ones(()), "n": 3}, {"dict": {"x": "tensor", "scale": "scalar", "n": "value"}}),
        (OrderedDict(x=X), {"dict": {"x": "tensor"}}),
        (({"ids": X}, X), {"tuple": [{"dict": {"ids": "tensor"}}, "tensor"]}),
        ((X, (224, 224)), {"tuple": ["tensor", "value"]}),
        ((X, ["a", "b", "c"]), {"tuple": ["tensor", {"samples": "value"}]}),
        ((X, [torch.ones(2), torch.ones(4), torch.ones(1)]), {"tuple": ["tensor", {"samples": "tensor"}]}),
        ([{"x": torch.ones(2)}] * 3, {"samples": {"dict": {"x": "tensor"}}}),
        ([{"x": torch.ones(2)}, {"x": torch.ones(2)}, {"x": torch.ones(())}], {"samples": "other"}),
        ((X, [np.ones(2), np.ones(4), np.ones(1)]), {"tuple": ["tensor", {"samples": "value"}]}),
        (Point(X, 1), {"namedtuple": {"x": "tensor", "y": "value"}}),
        (Record(X), {"dataclass": {"x": "tensor", "name": "value"}}),
        (Derived(X), "other"),
        ({1: X}, "other"),
        ({'a"b': X}, "other"),
        ({"a\nb": X}, "other"),
    ],
)
def test_forms(batch: Any, form: Any) -> None:
    found = describe_form(batch, 3)
    assert found == form
    assert json.loads(json.dumps(found)) == form

from __future__ import annotations

import json
from collections import OrderedDict, UserDict, defaultdict, namedtuple
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from autoaccum.workload.recipes import describe_form

Point = namedtuple("Point", ["x", "y"])
X = torch.zeros(3, 2)


class ByAttribute(dict[str, Any]):
    def __getattr__(self, name: str) -> Any:
        if name not in self:
            raise AttributeError(name)
        return self[name]


class Counted(dict[str, Any]):
    """Not made from a dict alone."""

    def __init__(self, count: int, **items: Any) -> None:
        super().__init__(**items)
        if not isinstance(count, int):
            raise TypeError("count")


class Doubled(UserDict[str, Any]):
    """Not made of what it holds."""

    def __setitem__(self, name: str, value: Any) -> None:
        super().__setitem__(name, value * 2)


class Pair(tuple[Tensor, ...]):
    """A class of its own."""


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
        (defaultdict(X.clone, x=X), {"dict": {"x": "tensor"}}),
        (UserDict(x=X), {"mapping": {"x": "tensor"}}),
        (ByAttribute(x=X, n=1), {"mapping": {"x": "tensor", "n": "value"}}),
        (Counted(1, x=X), "other"),
        (Doubled(x=X), "other"),
        (Pair((X, X)), "other"),
        (({"ids": X}, X), {"tuple": [{"dict": {"ids": "tensor"}}, "tensor"]}),
        ((X, (224, 224)), {"tuple": ["tensor", "value"]}),
        ((X, ["a", "b", "c"]), {"tuple": ["tensor", {"samples": "value"}]}),
        ((X, [np.ones(2), np.ones(4), np.ones(1)]), {"tuple": ["tensor", {"samples": "value"}]}),
        ([{"x": torch.ones(2)}] * 3, {"samples": {"dict": {"x": "tensor"}}}),
        ([{"x": torch.ones(2)}, {"x": torch.ones(2)}, {"x": torch.ones(())}], {"samples": "other"}),
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

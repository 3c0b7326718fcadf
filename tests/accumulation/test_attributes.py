from __future__ import annotations

from abc import ABC
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from autoaccum.accumulation.changes import ForwardWatch, OwnAttributes, batch_versions


class Holder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.register_buffer("counted", torch.zeros(1))
        self.calls = 0
        self.ratio = float("nan")
        self.name = "x"
        self.cache: Any = None
        self.history: list[Any] = []
        self.queue: deque[int] = deque([1, 2, 3], maxlen=3)
        self.table: dict[str, Any] = {"a": [1, 2], "b": {"c": 1}}
        self.ids = {1, 2}
        self.tensor = torch.zeros(2)
        self.generator = torch.Generator()


CHANGES: dict[str, Callable[[Any], Any]] = {
    "calls": lambda m: setattr(m, "calls", 1),
    "ratio": lambda m: setattr(m, "ratio", 0.5),
    "name": lambda m: setattr(m, "name", "y"),
    "cache": lambda m: setattr(m, "cache", torch.ones(2)),
    "history": lambda m: m.history.append(0.5),
    "queue": lambda m: m.queue.append(3),
    "table": lambda m: m.table["b"].update(c=2),
    "ids": lambda m: m.ids.add(3),
    "tensor": lambda m: m.tensor.add_(1),
    "fresh": lambda m: setattr(m, "fresh", 1),
}


@pytest.mark.parametrize("name", CHANGES)
def test_names_the_attribute_that_changed(name: str) -> None:
    inner = Holder()
    model = nn.Sequential(inner)
    before = OwnAttributes({"": model})
    CHANGES[name](inner)
    assert before.changed() == [f"0.{name}"]


def test_names_one_that_went() -> None:
    model = Holder()
    before = OwnAttributes({"": model})
    del model.calls
    assert before.changed() == ["calls"]


class Extended(Holder, ABC):
    """A user's class that extends a library's, as of a `PreTrainedModel`: what only that names is the library's."""

    def count(self) -> None:
        self.counted_here = 1


def test_of_a_librarys_class_nothing_is_named() -> None:
    layer: Any = nn.Linear(2, 2)
    before = OwnAttributes({"": layer})
    layer.installed = True
    assert before.changed() == []
    model: Any = Extended()
    before = OwnAttributes({"": model})
    model._hooks_installed = True
    model.count()
    assert before.changed() == ["counted_here"]


def test_what_is_rolled_back_elsewhere_is_not_named() -> None:
    model = Holder()
    before = ForwardWatch(model, [])
    assert isinstance(model.counted, torch.Tensor)
    model.counted += 1
    model.eval()
    torch.rand(1, generator=model.generator)
    assert before.warning() is None


def test_names_parameters_that_changed() -> None:
    model = Holder()
    batch = torch.zeros(2)
    before = ForwardWatch(model, [batch])
    model.layer.weight.data.clamp_(0, 0)
    batch.add_(1)
    text = before.warning()
    assert text is not None
    assert "parameters (layer.weight) and the batch it is given" in text


def test_a_long_list_of_names_is_cut() -> None:
    model = Holder()
    before = ForwardWatch(model, [])
    for index in range(20):
        setattr(model, f"extra{index}", index)
    text = before.warning()
    assert text is not None
    assert "extra4 and 15 more)" in text


def test_counts_changes_of_a_batch_in_place() -> None:
    x = torch.zeros(4, 2)
    batch = {"x": x, "rest": [(torch.ones(1), None, "text")]}
    part = x[:2]
    before = batch_versions([batch])
    assert len(before) == 2
    part.add_(1)
    assert batch_versions([batch]) != before

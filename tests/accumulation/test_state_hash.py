"""Every change of a training state changes the digest, and is named."""

from __future__ import annotations

import copy
import random
from abc import ABC
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from state_digests import state_digest
from torch import nn

from autoaccum.accumulation.state_hash import PlainAttributes, state_entries


def build() -> tuple[Any, torch.optim.Optimizer]:
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))
    return model, torch.optim.AdamW(model.parameters())


CHANGES: dict[str, Callable[[Any, Any], Any]] = {
    "value": lambda model, _: model[0].weight.data[0, 0].add_(1e-7),
    "dtype": lambda model, _: setattr(model[0].weight, "data", model[0].weight.data.double()),
    "hook": lambda model, _: model[0].register_forward_hook(lambda *_: None),
    "state dict hook": lambda model, _: model.register_state_dict_post_hook(lambda *_: None),
    "tensor hook": lambda model, _: model[0].weight.register_hook(lambda grad: grad),
    "gradient": lambda model, _: setattr(model[0].weight, "grad", torch.zeros(3, 2)),
    "mode": lambda model, _: model[1].eval(),
    "name": lambda model, _: model.register_buffer("late", None),
    "persistence": lambda model, _: model[1]._non_persistent_buffers_set.add("running_mean"),
    "order": lambda model, _: model._modules.update({"0": model._modules.pop("0")}),
    "rate": lambda _, optimizer: optimizer.param_groups[0].update(lr=0.5),
    "flag": lambda _, optimizer: setattr(optimizer, "_opt_called", True),
    "step hook": lambda _, optimizer: optimizer.register_step_post_hook(lambda *_: None),
    "Python's generator": lambda *_: random.random(),
    "NumPy's generator": lambda *_: np.random.rand(),
    "torch's generator": lambda *_: torch.rand(1),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_every_change_is_seen(change: Callable[[Any, Any], Any]) -> None:
    model, optimizer = build()
    before = state_digest(model, optimizer)
    assert state_digest(model, optimizer) == before
    change(model, optimizer)
    assert state_digest(model, optimizer) != before


def test_equal_values_are_equal_unless_identity_is_compared() -> None:
    model, optimizer = build()
    twin = copy.deepcopy(model)
    made = torch.optim.AdamW(twin.parameters())
    assert state_digest(model, optimizer) == state_digest(twin, made)
    assert state_entries({"": model}) == state_entries({"": twin})
    assert state_entries({"": model}, identity=True) == state_entries({"": model}, identity=True)
    assert state_entries({"": model}, identity=True) != state_entries({"": twin}, identity=True)


def test_a_difference_has_a_name() -> None:
    model, optimizer = build()
    before = state_entries({"net": model}, optimizer)
    model[1].running_mean += 1
    model[0].register_forward_hook(lambda *_: None)
    after = state_entries({"net": model}, optimizer)
    assert {key for key in after if before[key] != after[key]} == {
        "buffer net.1.running_mean",
        "the hooks of net.0",
    }


def test_tensors_of_every_kind_are_read() -> None:
    model: Any = nn.Module()
    kinds = {
        "complex": torch.ones(2, dtype=torch.complex64),
        "conjugate": torch.ones(2, dtype=torch.complex64).conj(),
        "negative": torch.ones(2, dtype=torch.complex64).conj().imag,
        "float8": torch.ones(2).to(torch.float8_e4m3fn),
        "boolean": torch.tensor([True]),
        "empty": torch.ones(0),
        "scalar": torch.tensor(1.0),
        "wide": torch.ones(1).expand(3),
        "sparse": torch.ones(2, 2).to_sparse(),
        "meta": torch.ones(2, device="meta"),
    }
    for key, tensor in kinds.items():
        model.register_buffer(key, tensor)
    entries = state_entries({"": model})
    assert entries == state_entries({"": model})
    assert len({entries[f"buffer {key}"] for key in kinds}) == len(kinds)


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


ATTRIBUTES: dict[str, Callable[[Any], Any]] = {
    "calls": lambda m: setattr(m, "calls", 1),
    "ratio": lambda m: setattr(m, "ratio", 0.5),
    "name": lambda m: delattr(m, "name"),
    "cache": lambda m: setattr(m, "cache", torch.ones(2)),
    "history": lambda m: m.history.append(0.5),
    "queue": lambda m: m.queue.append(3),
    "table": lambda m: m.table["b"].update(c=2),
    "ids": lambda m: m.ids.add(3),
    "tensor": lambda m: m.tensor.add_(1),
    "fresh": lambda m: setattr(m, "fresh", 1),
}


@pytest.mark.parametrize("name", ATTRIBUTES)
def test_a_changed_attribute_is_named(name: str) -> None:
    inner = Holder()
    model = nn.Sequential(inner)
    before = PlainAttributes({"": model})
    ATTRIBUTES[name](inner)
    assert before.changed() == [f"0.{name}"]


class Extended(Holder, ABC):
    """A user's class that extends a library's, such as `PreTrainedModel`, which has attributes of its own."""

    def count(self) -> None:
        self.counted_here = 1


def test_attributes_of_a_library_s_class_are_not_named() -> None:
    layer: Any = nn.Linear(2, 2)
    before = PlainAttributes({"": layer})
    layer.installed = True
    assert before.changed() == []
    model: Any = Extended()
    before = PlainAttributes({"": model})
    model._hooks_installed = True
    model.count()
    assert before.changed() == ["counted_here"]

"""Auxiliary modules are found in the user's code, moved to the device, counted as frozen, and restored."""

from __future__ import annotations

import collections
import copy
import functools
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from autoaccum import Accumulator, Plan, Workload, fit, plan, verify
from autoaccum.accumulation.reachable_objects import (
    find_auxiliary_modules,
    find_reachable,
    find_used_modules,
    is_user_class,
)
from autoaccum.errors import WorkloadError
from autoaccum.sources.objective import resolve_objective
from autoaccum.sources.source import FileSource


class Own(nn.Module):
    """A class of this file."""


TEACHERS: dict[str, Any] = {"large": Own(), "small": [nn.Linear(1, 1)]}
LAZY = collections.ChainMap({"inside": nn.Linear(1, 1)})


@torch.no_grad()
def taught(batch: Any) -> Any:
    return TEACHERS["large"](batch)


def reaching_loss(model: nn.Module, batch: Any) -> Any:
    return LAZY[model(batch) - taught(batch)]


def test_user_classes_are_told_from_a_library_s() -> None:
    assert is_user_class(Own)
    assert not any(map(is_user_class, (nn.Linear, np.ndarray, Fraction, collections.ChainMap, Accumulator, dict)))


def test_modules_are_found_behind_decorators_and_in_plain_containers() -> None:
    modules, _ = find_reachable([functools.partial(reaching_loss)])
    assert modules == {"large": TEACHERS["large"], "small": TEACHERS["small"][0]}


def test_modules_and_generators_of_functions_are_found() -> None:
    inner, bound, given = nn.Linear(1, 1), nn.Linear(1, 1), nn.Linear(1, 1)
    generator, numpy_generator = torch.Generator(), np.random.default_rng()

    class Loss:
        def __init__(self) -> None:
            self.teacher, self.generator = bound, generator

        def __call__(self, model: nn.Module, batch: Any) -> Tensor:
            return model(batch)  # type: ignore[no-any-return]

        def method(self, model: nn.Module, batch: Any) -> Tensor:
            return model(batch)  # type: ignore[no-any-return]

    def closing(model: nn.Module, batch: Any, noise: Any = numpy_generator) -> Tensor:
        return TEACHERS["large"](inner(batch))  # type: ignore[no-any-return]

    modules, generators = find_reachable(
        [closing, Loss(), Loss().method, functools.partial(closing, model=given), None]
    )
    assert {id(module) for module in modules.values()} == {
        id(one) for one in (TEACHERS["large"], TEACHERS["small"][0], inner, bound, given)
    }
    assert {"large", "inner", "teacher"} <= set(modules)
    assert {id(one) for one in generators} == {id(generator), id(numpy_generator)}


HEAD = """
import torch
from torch import nn
from torch.nn import functional as F

def net(width=1024):
    return nn.Sequential(nn.Embedding(512, 128), nn.Linear(128, width), nn.Tanh(), nn.Linear(width, 512))

model = net
dataset = [(torch.arange(8), torch.arange(8) + 8)] * 8

def batch(size):
    return torch.randint(0, 512, (size, 8)), torch.randint(0, 512, (size, 8))

def score(net, ids):
    return net(ids[:, :-1]).log_softmax(-1).gather(-1, ids[:, 1:, None]).sum((1, 2))
"""
PREFERENCES = """
reference = net().eval()

def loss(model, batch):
    with torch.no_grad():
        base = score(reference, batch[0]) - score(reference, batch[1])
    return -F.logsigmoid(0.1 * (score(model, batch[0]) - score(model, batch[1]) - base)).mean()
"""
DISTILLATION = """
teachers = {"large": net(4096).requires_grad_(False)}

def loss(model, batch):
    with torch.no_grad():
        wanted = teachers["large"](batch[0]).softmax(-1)
    return F.cross_entropy(model(batch[0]).flatten(0, 1), wanted.flatten(0, 1))
"""
LISTED = """
modules = {"reference": net()}

def loss(model, batch):
    with torch.no_grad():
        base = score(globals()["mod" + "ules"]["reference"], batch[0])
    return (score(model, batch[0]) - base).square().mean()
"""
PARAMETERS = 4 * (512 * 128 + 128 * 1024 + 1024 + 1024 * 512 + 512)


def test_a_part_of_the_model_is_not_auxiliary() -> None:
    model, teacher = nn.Linear(4, 2), nn.Linear(4, 2)
    objective = resolve_objective(lambda model, batch: model(batch) - teacher(batch))
    assert list(find_used_modules(objective, model).values()) == [teacher]
    assert find_used_modules(objective, teacher) == {}


def test_listed_modules_are_read() -> None:
    one, other = nn.Linear(2, 2), nn.Linear(2, 2)

    def make(modules: Any) -> Workload:
        return Workload(model=one, batch=torch.ones, loss=nn.MSELoss(), modules=modules)

    assert find_auxiliary_modules(make(other)) == {"modules[0]": other}
    assert find_auxiliary_modules(make([other, one])) == {"modules[0]": other, "modules[1]": one}
    assert find_auxiliary_modules(make({"teacher": other})) == {"teacher": other}
    for wrong in (3, "teacher", [other, 3], {"a": nn.Linear}):
        with pytest.raises(WorkloadError, match="modules contains .*: give further modules"):
            make(wrong)


@pytest.fixture
def predicted(tmp_path: Path, warm_children: None) -> Callable[[str], Plan]:
    def predict(loss: str) -> Plan:
        path = tmp_path / "model.py"
        path.write_text(HEAD + loss)
        return plan(path, target_batch=128, max_micro_batch=64, gpu="8GiB", explain=True)

    return predict


def test_a_predicted_plan_counts_a_frozen_model(predicted: Callable[[str], Plan]) -> None:
    found, held = predicted(PREFERENCES), PARAMETERS
    assert found.workload.modules == {"reference": held}
    note = next(note for note in found.notes if note.code == "modules_beside")
    assert note.facts["sizes"] == {"reference": held}
    assert found.explanation is not None
    bytes_of = found.explanation.categories
    assert PARAMETERS + held <= bytes_of["parameters"] < PARAMETERS + held + 8192
    assert 2 * PARAMETERS <= bytes_of["optimizer_state"] < 2 * PARAMETERS + 8192
    assert bytes_of["gradients"] < PARAMETERS + 8192


@pytest.mark.parametrize("loss", [DISTILLATION, LISTED], ids=["distillation", "listed"])
def test_on_the_cpu_a_teacher_is_used_and_left_unchanged(loss: str, tmp_path: Path) -> None:
    path = tmp_path / "model.py"
    path.write_text(HEAD.replace("width=1024", "width=64") + loss.replace("4096", "128"))
    workload = FileSource(str(path)).load()
    [teacher] = find_auxiliary_modules(workload).values()
    mode, before = teacher.training, copy.deepcopy(teacher.state_dict())
    found = verify(workload, target_batch=6)
    assert found.equivalent, found.to_json()
    assert found.precision == "fp64"
    result = fit(workload, target_batch=4, micro_batch=2, steps=1, device="cpu", progress=False)
    assert result.updates == 1
    assert teacher.training == mode
    torch.testing.assert_close(teacher.state_dict(), before, rtol=0, atol=0)  # Its dtype, too.

"""What is the user's own, and what that reaches; a library's objects are only seen."""

from __future__ import annotations

import collections
import functools
import importlib.util
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from autoaccum import Accumulator
from autoaccum.accumulation.reach import find_reachable, is_users


class Own(nn.Module):
    """Of this file."""


TEACHERS: dict[str, Any] = {"large": Own(), "small": [nn.Linear(1, 1)]}
LAZY = collections.ChainMap({"inside": nn.Linear(1, 1)})


@torch.no_grad()
def taught(batch: Any) -> Any:
    return TEACHERS["large"](batch)


def loss(model: nn.Module, batch: Any) -> Any:
    return LAZY[model(batch) - taught(batch)]


def test_whose_a_class_is() -> None:
    assert is_users(Own)
    assert not any(map(is_users, (nn.Linear, np.ndarray, Fraction, collections.ChainMap, Accumulator, dict)))


def test_a_class_that_lies_in_no_file_is_the_users() -> None:
    made: dict[str, Any] = {"__name__": "__main__"}
    exec("class Typed: pass", made)
    assert is_users(made["Typed"])


def test_modules_are_found_behind_decorators_and_in_plain_containers() -> None:
    modules, _ = find_reachable([functools.partial(loss)])
    assert modules == {"large": TEACHERS["large"], "small": TEACHERS["small"][0]}


@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="transformers is not installed")
def test_nothing_is_asked_of_a_librarys_mapping() -> None:
    from transformers.activations import ACT2FN

    def named(model: nn.Module, batch: Any) -> Any:
        return ACT2FN["gelu"](model(batch))

    before = list(dict.items(ACT2FN))
    assert find_reachable([named, None]) == ({}, [])
    assert list(dict.items(ACT2FN)) == before


def test_modules_and_generators_of_functions_are_found() -> None:
    inner, bound, kept = nn.Linear(1, 1), nn.Linear(1, 1), nn.Linear(1, 1)
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

    modules, generators = find_reachable([closing, Loss(), Loss().method, functools.partial(closing, model=kept), None])
    assert {id(module) for module in modules.values()} == {
        id(one) for one in (TEACHERS["large"], TEACHERS["small"][0], inner, bound, kept)
    }
    assert {"large", "inner", "teacher"} <= set(modules)
    assert {id(one) for one in generators} == {id(generator), id(numpy_generator)}

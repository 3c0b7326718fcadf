"""Weights of classes that a loss names: what its mean may divide by."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator
from typing import Any

from torch import Tensor

from autoaccum.verification.laboratory.laboratory import Laboratory
from autoaccum.workload.candidates import Candidate, count_tables


def count_class_weights(lab: Laboratory, parts: list[Any]) -> list[Candidate]:
    """Sums of class weights over the labels of each of `parts`."""
    tables = {name: tensor for name, tensor in _named_tensors(lab) if _is_table(tensor)}
    return count_tables(lab.batch, parts, tables) if tables else []


def _named_tensors(lab: Laboratory) -> Iterator[tuple[str, Any]]:
    """What the loss names of its module and its closure, and the model's buffers."""
    function = lab.objective.loss_function
    while isinstance(function, functools.partial):
        function = function.func
    function = inspect.unwrap(getattr(function, "__func__", function)) if function is not None else None
    if inspect.isfunction(function):
        named = inspect.getclosurevars(function)
        yield from {**named.globals, **named.nonlocals}.items()
    yield from ((f"model.{name}", buffer) for name, buffer in lab.specimen.fresh().model.named_buffers())


def _is_table(value: Any) -> bool:
    return isinstance(value, Tensor) and value.ndim == 1 and value.is_floating_point() and bool((value >= 0).all())

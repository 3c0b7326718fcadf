"""Two updates side by side: what counts as equal, what does not, and where the difference is said to be."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nan, tensor

from autoaccum.verification.update_comparison import compare
from autoaccum.verification.update_run import UpdateResult
from autoaccum.verification.verification_result import Difference


def _double(*entries: float) -> Tensor:
    return tensor(entries, dtype=torch.float64)


FULL = UpdateResult(
    loss=2.0,
    terms={"loss": 2.0},
    gradients={"weight": _double(4.0, -8.0), "bias": _double(1e-6)},
    buffers={"norm.running_mean": _double(0.5, 0.25), "norm.running_var": _double(1.0, 2.0), "norm.count": tensor(1)},
)


def _compared(full: UpdateResult = FULL, **changed: Any) -> dict[str, Difference]:
    other = dataclasses.replace(full, **changed)
    return {difference.quantity: difference for difference in compare(full, other, 1e-10)}


def _gradients(**changed: Tensor) -> Difference:
    return _compared(gradients={**FULL.gradients, **changed})["gradients"]


def _buffers(**changed: Tensor) -> Difference:
    named = {f"norm.{name}": buffer for name, buffer in changed.items()}
    return _compared(buffers={**FULL.buffers, **named})["buffers"]


def test_the_same_is_equal() -> None:
    differences = _compared()
    assert list(differences) == ["loss", "gradients", "buffers"]
    assert all(difference.equal and difference.error == 0 for difference in differences.values())
    assert [difference.compared for difference in differences.values()] == [1, 2, 3]


def test_gradients_are_held_to_the_largest_entry_of_the_whole_model() -> None:
    inside = _gradients(bias=_double(1e-6 + 7e-10))
    assert inside.equal
    assert inside.where == "bias"
    assert inside.error == pytest.approx(7e-10 / 8)
    outside = _gradients(bias=_double(1e-6 + 9e-10))
    assert not outside.equal
    assert outside.tolerance == 1e-10


def test_a_missing_gradient_is_one_of_zeros() -> None:
    assert _gradients(unused=torch.zeros(1, dtype=torch.float64)).equal
    missing = _compared(gradients={"bias": FULL.gradients["bias"]})["gradients"]
    assert (missing.equal, missing.error, missing.where) == (False, 1.0, "weight")
    assert not _gradients(added=_double(1.0)).equal


@pytest.mark.parametrize("entry", [nan, math.inf, -math.inf])
def test_what_is_not_finite_is_equal_only_where_both_have_it(entry: float) -> None:
    full = dataclasses.replace(FULL, gradients={"weight": _double(1.0, entry)}, terms={"loss": entry})
    same = _compared(full=full)
    assert same["gradients"].equal
    assert same["loss"].equal
    moved = _compared(full=full, gradients={"weight": _double(entry, 1.0)}, terms={"loss": 1.0})
    assert moved["gradients"].error == math.inf
    assert moved["loss"].error == math.inf
    assert not moved["loss"].equal


def test_terms_are_held_to_the_largest() -> None:
    full = dataclasses.replace(FULL, terms={"main": 1000.0, "small": 1e-7})
    off = _compared(full=full, terms={"main": 1000.0, "small": 3e-7})["loss"]
    assert not off.equal
    assert off.where == "small"
    assert off.error == pytest.approx(2e-10)
    missing = _compared(full=full, terms={"main": 1000.0})["loss"]
    assert (missing.where, missing.error) == ("small", math.inf)


def test_floating_buffers_are_held_to_their_own_entries() -> None:
    assert _buffers(running_mean=_double(0.5, 0.25 + 4e-11)).equal
    off = _buffers(running_mean=_double(0.5, 0.25 + 6e-11))
    assert not off.equal
    assert off.where == "norm.running_mean"


def test_whole_numbers_and_truth_values_are_the_same_or_not() -> None:
    off = _buffers(count=tensor(4))
    assert not off.equal
    assert (off.where, off.error, off.tolerance) == ("norm.count", 3.0, 0.0)
    full = dataclasses.replace(FULL, buffers={"ready": tensor([True, False])})
    assert _compared(full=full)["buffers"].equal
    assert not _compared(full=full, buffers={"ready": tensor([True, True])})["buffers"].equal


def test_a_buffer_that_grew_or_is_missing_is_unequal() -> None:
    assert _buffers(running_mean=_double(0.5, 0.25, 0.0)).error == math.inf
    missing = _compared(buffers={"norm.count": tensor(1)})["buffers"]
    assert (missing.where, missing.equal) == ("norm.running_mean", False)
    assert not _buffers(added=_double(1.0)).equal


def test_other_kinds_of_tensor_are_compared() -> None:
    sparse = tensor([[0.0, 1.0], [0.0, 0.0]]).to_sparse()
    gradients = {"table": sparse, "phase": tensor([1 + 2j]), "half": tensor([1.0], dtype=torch.bfloat16)}
    full = dataclasses.replace(FULL, gradients={**gradients, "none": torch.empty(0)})
    assert _compared(full=full)["gradients"].equal
    off = _compared(full=full, gradients={**full.gradients, "table": sparse * 2})["gradients"]
    assert off.where == "table"
    assert off.error == pytest.approx(1 / 5**0.5)

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
from autoaccum.verification.verification_result import Difference, Quantity


def _double(*entries: float) -> Tensor:
    return tensor(entries, dtype=torch.float64)


def _update(terms: dict[str, float], gradients: dict[str, Tensor], buffers: dict[str, Tensor]) -> UpdateResult:
    return UpdateResult(sum(terms.values()), terms, gradients, buffers)


FULL = _update(
    {"main": 1000.0, "small": 1e-7},
    {"weight": _double(4.0, -8.0), "bias": _double(1e-6), "table": tensor([[0.0, 1.0], [0.0, 0.0]]).to_sparse()},
    {
        "norm.running_mean": _double(0.5, 0.25),
        "norm.running_var": _double(1.0, 2.0),
        "norm.count": tensor(1),
        "ready": tensor([True, False]),
    },
)


def _compared(full: UpdateResult = FULL, **changed: Any) -> dict[str, Difference]:
    """Compare with an update of which some entries are others; None removes one."""
    for name, entries in changed.items():
        merged = {**getattr(full, name), **entries}
        changed[name] = {key: entry for key, entry in merged.items() if entry is not None}
    other = dataclasses.replace(full, **changed)
    return {difference.quantity: difference for difference in compare(full, other, 1e-10)}


def test_the_same_is_equal() -> None:
    differences = _compared()
    assert list(differences) == ["loss", "gradients", "buffers"]
    assert all(difference.equal and difference.error == 0 for difference in differences.values())
    assert [difference.compared for difference in differences.values()] == [2, 3, 4]


# What is compared, how the second update differs, the error, and the tensor or term if it is too large.
CASES: dict[str, tuple[Quantity, dict[str, Any], float, str | None]] = {
    "terms are held to the largest": ("loss", {"terms": {"small": 3e-7}}, 2e-10, "small"),
    "a missing term": ("loss", {"terms": {"small": None}}, math.inf, "small"),
    "gradients are held to the model's largest entry": (
        "gradients",
        {"gradients": {"bias": _double(1e-6 + 7e-10)}},
        7e-10 / 8,
        None,
    ),
    "beyond that": ("gradients", {"gradients": {"bias": _double(1e-6 + 9e-10)}}, 9e-10 / 8, "bias"),
    "a gradient of zeros where there is none": ("gradients", {"gradients": {"unused": _double(0.0)}}, 0.0, None),
    "a missing gradient is one of zeros": ("gradients", {"gradients": {"weight": None}}, 1.0, "weight"),
    "another gradient": ("gradients", {"gradients": {"added": _double(1.0)}}, 1 / 8, "added"),
    "a sparse gradient": ("gradients", {"gradients": {"table": FULL.gradients["table"] * 2}}, 1 / 8, "table"),
    "buffers are held to their own entries": (
        "buffers",
        {"buffers": {"norm.running_mean": _double(0.5, 0.25 + 4e-11)}},
        8e-11,
        None,
    ),
    "beyond those": (
        "buffers",
        {"buffers": {"norm.running_mean": _double(0.5, 0.25 + 6e-11)}},
        1.2e-10,
        "norm.running_mean",
    ),
    "whole numbers are the same or not": ("buffers", {"buffers": {"norm.count": tensor(4)}}, 3.0, "norm.count"),
    "so are truth values": ("buffers", {"buffers": {"ready": tensor([True, True])}}, 1.0, "ready"),
    "a buffer that grew": ("buffers", {"buffers": {"norm.count": tensor([1, 1])}}, math.inf, "norm.count"),
    "a missing buffer": ("buffers", {"buffers": {"norm.running_var": None}}, math.inf, "norm.running_var"),
    "another buffer": ("buffers", {"buffers": {"added": _double(1.0)}}, math.inf, "added"),
}


@pytest.mark.parametrize("case", CASES)
def test_a_difference_is_told_with_its_place(case: str) -> None:
    quantity, changed, error, where = CASES[case]
    differences = _compared(**changed)
    assert differences[quantity].error == pytest.approx(error, rel=1e-4)
    assert (differences[quantity].equal, differences[quantity].first) == (where is None, where)
    assert where in (None, differences[quantity].where)
    assert all(difference.equal for name, difference in differences.items() if name != quantity)


@pytest.mark.parametrize("entry", [nan, math.inf, -math.inf])
def test_what_is_not_finite_is_equal_only_where_both_have_it(entry: float) -> None:
    full = _update({"loss": entry}, {"weight": _double(1.0, entry)}, {})
    assert all(difference.equal for difference in _compared(full).values())
    moved = _compared(full, gradients={"weight": _double(entry, 1.0)}, terms={"loss": 1.0})
    assert moved["gradients"].error == moved["loss"].error == math.inf
    assert not moved["loss"].equal


def test_other_kinds_of_tensor_are_compared() -> None:
    others = {"phase": tensor([1 + 2j]), "half": tensor([1.0], dtype=torch.bfloat16), "none": torch.empty(0)}
    assert _compared(_update({}, others, {}))["gradients"].equal

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from autoaccum.verification.causes.weighting_causes import find_factors, find_residual, flatten

SHARES = st.lists(st.floats(0.01, 10), min_size=1, max_size=5)


def rows(count: int, entries: int = 40) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(count)
    return [torch.randn(entries, generator=generator, dtype=torch.float64) for _ in range(count)]


@given(SHARES)
def test_finds_what_each_part_counts_for(shares: list[float]) -> None:
    parts = rows(len(shares))
    target = torch.stack([share * part for share, part in zip(shares, parts, strict=True)]).sum(0)
    found = find_factors(target, parts)
    assert found is not None
    assert found.values == pytest.approx(shares, rel=1e-9)
    assert found.residual < 1e-12


def test_finds_what_the_parts_do_not_give() -> None:
    *parts, target = rows(3)
    found = find_factors(target, parts)
    assert found is not None
    assert found.residual > 0.1


@pytest.mark.parametrize("case", ["alike", "nothing", "too few entries", "not finite", "empty"])
def test_is_silent_where_parts_do_not_determine_factors(case: str) -> None:
    one, two, target = rows(3)
    if case == "alike":
        two = one * (1 + 1e-9)
    elif case == "nothing":
        two = torch.zeros_like(one)
    elif case == "too few entries":
        one, two, target = one[:2], two[:2], target[:2]
    elif case == "not finite":
        two = two * torch.inf
    else:
        one, two, target = one[:0], two[:0], target[:0]
    assert find_factors(target, [one, two]) is None


def test_leaves_out_parts_that_do_not_count() -> None:
    one, two = rows(2)
    assert find_residual(one, [one, two * torch.nan], (1.0, 0.0)) == 0.0
    assert find_residual(one, [one, two * torch.nan], (1.0, 0.1)) == float("inf")


def test_lines_gradients_up_by_name() -> None:
    like = {"a": torch.zeros(2, 2), "b": torch.zeros(1), "c": torch.zeros(3)}
    sparse = torch.tensor([0.0, 5.0, 0.0]).to_sparse()
    flat = flatten({"c": sparse, "b": torch.ones(1, dtype=torch.float32), "a": None}, like)
    assert flat.tolist() == [0, 0, 0, 0, 1, 0, 5, 0]
    assert flat.dtype == torch.float64

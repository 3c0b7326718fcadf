from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from autoaccum.accumulation.company.agreement import is_close, match

WHOLE = torch.arange(40.0, dtype=torch.float64).view(4, 10)
TIME_FIRST = torch.arange(24.0, dtype=torch.float64).view(3, 4, 2)


def rows(part: Tensor, index: int, sizes: tuple[int, int] = (2, 2), whole: Tensor = WHOLE) -> Any:
    found = match(whole, part, index, sizes, {})
    return found.state, None if found.positions is None else found.positions.tolist()


def test_rows_are_found_where_they_lie() -> None:
    assert rows(WHOLE[:2], 0) == ("agree", [0, 1])
    assert rows(WHOLE[2:], 1) == ("agree", [2, 3])
    assert rows(WHOLE.T[:, 1:], 1, (1, 3), WHOLE.T) == ("agree", [1, 2, 3])
    assert rows(TIME_FIRST[:, 2:].flatten(0, 1), 1, (2, 2), TIME_FIRST.flatten(0, 1)) == ("agree", [2, 3, 6, 7, 10, 11])


def test_rows_in_another_order_are_looked_for() -> None:
    assert rows(WHOLE[[3, 1]], 0) == ("agree", [3, 1])
    assert rows(WHOLE[[3, 0, 2]], 1, (1, 3)) == ("agree", [3, 0, 2])


def test_padding_to_the_longest_may_be_shorter_in_the_part() -> None:
    assert rows(WHOLE[2:, :7], 1) == ("agree", [2, 3])
    assert rows(WHOLE[2:, :7] + 1, 1) == ("untold", None)


def test_rows_that_depend_on_company_differ_and_the_right_ones_are_given() -> None:
    found = match(WHOLE, WHOLE[2:] - WHOLE[2:].mean(0), 1, (2, 2), {})
    assert found.state == "differ"
    assert found.right is not None
    assert torch.equal(found.right, WHOLE[2:])


def test_matrices_of_all_with_all_are_told_from_rows() -> None:
    whole = WHOLE @ WHOLE.T
    found = match(whole, whole[2:, 2:], 1, (2, 2), {})
    assert found.state == "square"
    assert found.right is not None
    assert torch.equal(found.right, whole[2:, 2:])


@pytest.mark.parametrize(
    ("whole", "part", "state"),
    [
        (torch.tensor(3.0), torch.tensor(5.0), "alike"),
        (torch.ones(3, 3), torch.ones(3, 3), "alike"),
        (torch.ones(3, 3), torch.eye(3), "differ"),
        (torch.ones(4, 3), torch.ones(0, 3), "alike"),
        (torch.ones(4, 3), torch.ones(5, 3), "untold"),
        (torch.ones(4, 3), torch.ones(4), "untold"),
    ],
    ids=["scalars", "no rows", "no rows, and others", "an empty part", "more than the whole", "other dimensions"],
)
def test_what_has_no_rows(whole: Tensor, part: Tensor, state: str) -> None:
    assert match(whole, part, 0, (2, 2), {}).state == state


def test_what_masks_is_no_measure_of_rounding() -> None:
    one = torch.tensor([1.0, -1e9, float("-inf"), float("nan"), 0.0], dtype=torch.float64)
    assert is_close(one, one.clone())
    assert not is_close(one, one + torch.tensor([1e-3, 0, 0, 0, 0], dtype=torch.float64))


def test_a_dimension_that_is_whole_in_the_other_part_is_padding() -> None:
    whole = torch.randn(4, 8, 3)
    found = match(whole, whole[2:, :4], 1, (2, 2), {}, other=(2, 8, 3))
    assert (found.state, found.dim, found.right) == ("agree", 0, None)
    unlike = match(whole, torch.randn(2, 4, 3), 1, (2, 2), {}, other=(2, 8, 3))
    assert (unlike.state, unlike.right) == ("untold", None), "never the last half of its time"


def test_blocks_with_nothing_beside_them_are_no_matrix_of_all_with_all() -> None:
    blocks = torch.block_diag(torch.ones(2, 2), torch.full((2, 2), 2.0))  # type: ignore[no-untyped-call]
    for index, part in enumerate((blocks[:2, :2], blocks[2:, 2:])):
        assert match(blocks, part, index, (2, 2), {}, other=(2, 2)).state == "alike"
        assert match(blocks + 1, part + 2, index, (2, 2), {}, other=(2, 2)).state == "square"

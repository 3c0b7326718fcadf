"""Where samples lie in a tensor."""

from __future__ import annotations

from itertools import accumulate
from math import prod

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from autoaccum.accumulation.rows import Layout, find_layouts

SIZES = (3, 1, 2)
SHAPES = st.lists(st.integers(1, 3), min_size=0, max_size=3)


@given(before=SHAPES, after=SHAPES, outer=st.integers(1, 4), blocks=st.lists(st.integers(0, 4), min_size=1, max_size=4))
def test_cutting_and_joining_undo_each_other(
    before: list[int], after: list[int], outer: int, blocks: list[int]
) -> None:
    layout = Layout(len(before), outer)
    shape = [*before, outer * sum(blocks), *after]
    whole = torch.arange(prod(shape)).reshape(shape)
    parts = layout.cut(whole, [outer * block for block in blocks])
    assert [part.shape[layout.dim] for part in parts] == [outer * block for block in blocks]
    assert torch.equal(layout.join(parts), whole)


@given(
    before=SHAPES,
    after=SHAPES,
    outer=st.integers(1, 4),
    inner=st.integers(1, 3),
    sizes=st.lists(st.integers(1, 4), min_size=2, max_size=4),
)
def test_the_layout_of_samples_is_among_those_found(
    before: list[int], after: list[int], outer: int, inner: int, sizes: list[int]
) -> None:
    shapes = [[*before, outer * size * inner, *after] for size in [*sizes, sum(sizes)]]
    layouts = find_layouts(shapes[-1], shapes[:-1], sizes)
    assert layouts[0] == Layout(len(before), 1)
    assert Layout(len(before), outer) in layouts
    samples = torch.arange(sum(sizes)).repeat_interleave(inner).repeat(outer)
    parts = Layout(0, outer).cut(samples, [shape[len(before)] for shape in shapes[:-1]])
    ends = list(accumulate(sizes, initial=0))
    assert [sorted(set(part.tolist())) for part in parts] == [
        list(range(start, start + size)) for start, size in zip(ends, sizes, strict=False)
    ]


@pytest.mark.parametrize(
    ("shape", "first"),
    [
        (lambda n: (n, 5), Layout(0, 1)),
        (lambda n: (7, n, 5), Layout(1, 1)),
        (lambda n: (n * 4, 6, 6), Layout(0, 1)),
        (lambda n: (n,), Layout(0, 1)),
    ],
    ids=["batch first", "time first", "heads with samples", "one per sample"],
)
def test_usual_shapes_have_one_dimension_of_samples(shape: object, first: Layout) -> None:
    assert callable(shape)
    layouts = find_layouts(shape(6), [shape(size) for size in SIZES], SIZES)
    assert layouts[0] == first
    assert {layout.dim for layout in layouts} == {first.dim}


def test_time_major_flattening_comes_second() -> None:
    layouts = find_layouts((6 * 4, 5), [(size * 4, 5) for size in SIZES], SIZES)
    assert layouts == [Layout(0, 1), Layout(0, 4), Layout(0, 2)]
    samples = torch.arange(6).repeat(4)
    assert [part.tolist() for part in layouts[1].cut(samples, [12, 4, 8])] == [[0, 1, 2] * 4, [3] * 4, [4, 5] * 4]


def test_ragged_tokens_need_only_add_up() -> None:
    assert find_layouts((10, 5), [(4, 5), (0, 5), (6, 5)], SIZES) == [Layout(0, 1)]


@pytest.mark.parametrize(
    ("whole", "parts"),
    [
        ((4, 4), [(4, 4), (4, 4), (4, 4)]),
        ((6, 6), [(3, 3), (1, 1), (2, 2)]),
        ((6, 7), [(3, 5), (1, 5), (2, 7)]),
        ((6, 1), [(3,), (1,), (2,)]),
        ((7, 2), [(3, 2), (1, 2), (2, 2)]),
        ((), [(), (), ()]),
    ],
    ids=["alike", "pairs of samples", "padded otherwise", "another rank", "not adding up", "scalars"],
)
def test_no_layout_where_shapes_do_not_say_so(whole: tuple[int, ...], parts: list[tuple[int, ...]]) -> None:
    assert find_layouts(whole, parts, SIZES) == []


def test_one_part_is_told_by_its_size_alone() -> None:
    assert find_layouts((3, 5), [(3, 5)], [5]) == [Layout(1, 1)]
    assert find_layouts((5, 5), [(5, 5)], [5]) == []

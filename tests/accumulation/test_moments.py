"""Moments of parts, combined, are the moments of the whole."""

from __future__ import annotations

from itertools import pairwise

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from autoaccum.accumulation.running_statistics import Moments

SPLITS = st.lists(st.integers(2, 40), min_size=1, max_size=8)


def of(values: torch.Tensor) -> Moments:
    return Moments.of(len(values), values.mean(0), values.var(0))


@settings(max_examples=60, deadline=None)
@given(SPLITS, st.integers(0, 99), st.floats(-1e4, 1e4), st.floats(1e-3, 1e3))
def test_any_split_gives_the_whole(sizes: list[int], seed: int, offset: float, scale: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    whole = torch.randn(sum(sizes), 3, generator=generator, dtype=torch.float64) * scale + offset
    bounds = [sum(sizes[:index]) for index in range(len(sizes) + 1)]
    first, *others = [of(whole[start:end]) for start, end in pairwise(bounds)]
    for other in others:
        first.add(other)
    assert first.count == len(whole)
    rounding = 1e-14 * (scale + abs(offset))  # of single values, and so of their deviations
    torch.testing.assert_close(first.mean, whole.mean(0), rtol=0.0, atol=rounding)
    torch.testing.assert_close(first.variance, whole.var(0), rtol=1e-10, atol=rounding * scale)


def test_what_it_is_made_of_may_change_afterwards() -> None:
    mean, variance = torch.ones(2), torch.ones(2)
    moments = Moments.of(3, mean, variance)
    mean.zero_()
    variance.zero_()
    assert (moments.mean.tolist(), moments.variance.tolist()) == ([1.0, 1.0], [1.0, 1.0])
    assert moments.mean.dtype == torch.float64

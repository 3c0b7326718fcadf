"""Randomness switched off."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from autoaccum.accumulation.random_calls import calm


def test_neutral_values() -> None:
    with calm():
        assert torch.equal(torch.rand(2), torch.full((2,), 0.5))
        assert torch.equal(torch.empty(2).uniform_(2, 4), torch.full((2,), 3.0))
        assert torch.equal(torch.randn(2), torch.zeros(2))
        assert torch.equal(torch.normal(torch.ones(2), 3.0), torch.ones(2))
        assert torch.equal(torch.randperm(3), torch.arange(3))
        assert torch.equal(torch.randint(2, 9, (2,)), torch.full((2,), 2))
        assert torch.equal(torch.empty(2).exponential_(4.0), torch.full((2,), 0.25))
        assert torch.equal(F.dropout(torch.ones(2), 0.75), torch.full((2,), 4.0))
        assert torch.equal(torch.native_dropout(torch.ones(2), 0.75, True)[0], torch.full((2,), 4.0))
        assert torch.equal(torch.bernoulli(torch.tensor([0.0, 0.1])), torch.tensor([0.0, 1.0]))
        assert torch.equal(torch.multinomial(torch.tensor([[1.0, 3.0, 2.0]]), 2), torch.tensor([[1, 2]]))
        assert torch.equal(torch.empty(2).random_(5), torch.zeros(2))


@pytest.mark.parametrize(
    "draw",
    [
        lambda: torch.empty(3).cauchy_(),
        lambda: torch.empty(3).geometric_(0.3),
        lambda: torch.empty(3).log_normal_(),
        lambda: torch.multinomial(torch.ones(2, 3), 4, replacement=True),
        lambda: torch.poisson(torch.ones(3) * 2.5),
        lambda: torch.binomial(torch.ones(3) * 4, torch.ones(3) * 0.4),
        lambda: torch.randint_like(torch.ones(3), 5),
        lambda: torch.randn_like(torch.ones(3)),
        lambda: torch.distributions.Dirichlet(torch.ones(2, 3)).sample(),
    ],
    ids=["cauchy", "geometric", "log-normal", "multinomial", "poisson", "binomial", "randint", "randn", "dirichlet"],
)
def test_all_rows_are_alike(draw: object) -> None:
    assert callable(draw)
    with calm():
        drawn = draw()
    assert all(torch.equal(row, drawn[0]) for row in drawn)


def test_python_and_numpy_start_alike_and_are_put_back() -> None:
    random.seed(5)
    np.random.seed(5)
    expected = random.random(), np.random.rand()
    random.seed(5)
    np.random.seed(5)
    seen = []
    for _ in range(2):
        with calm():
            seen.append((random.random(), np.random.rand()))
    assert seen[0] == seen[1] != expected
    assert (random.random(), np.random.rand()) == expected

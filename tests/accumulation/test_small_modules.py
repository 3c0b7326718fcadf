"""BatchNorm's names, windows, notices, the digest, random states."""

from __future__ import annotations

import gc
import random
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from autoaccum.accumulation.batchnorm import batchnorm_names, batchnorm_warning
from autoaccum.accumulation.randomness import RandomState, own_generators
from autoaccum.accumulation.schedule import windows
from autoaccum.devices.base import Phase
from autoaccum.errors import UsageError


def test_names_the_batchnorms_that_see_the_batch() -> None:
    model = nn.ModuleDict(
        {
            "a": nn.BatchNorm1d(2),
            "b": nn.Sequential(nn.BatchNorm2d(2), nn.BatchNorm3d(2), nn.SyncBatchNorm(2)),
            "frozen": nn.BatchNorm2d(2).eval(),
            "never frozen": nn.BatchNorm2d(2, track_running_stats=False).eval(),
            "not coupled": nn.InstanceNorm2d(2, track_running_stats=True),
            "group": nn.GroupNorm(1, 2),
        }
    )
    assert batchnorm_names(model) == ["a", "b.0", "b.1", "b.2", "never frozen"]
    assert batchnorm_names(nn.BatchNorm1d(2)) == ["BatchNorm1d"]
    assert batchnorm_names(model.eval()) == ["never frozen"]


def test_the_warning_names_few_modules_and_the_way_out() -> None:
    text = batchnorm_warning([f"layer{index}" for index in range(9)])
    assert "layer4 and 4 more:" in text
    assert len(text) < 260, "one sentence, whatever the number"
    assert "GroupNorm" in text


def test_windows_group_whatever_a_loader_yields() -> None:
    assert list(windows(iter(range(7)), 3)) == [[0, 1, 2], [3, 4, 5], [6]]
    assert list(windows([], 3)) == []
    for size in (0, -1):
        with pytest.raises(UsageError, match=f"iter_size is {size}"):
            windows([1], size)


def test_windows_hold_no_window_but_the_last() -> None:
    alive: list[weakref.ref[Any]] = []

    def loader() -> Iterator[torch.Tensor]:
        for _ in range(6):
            gc.collect()
            assert sum(reference() is not None for reference in alive) <= 2
            batch = torch.ones(2)
            alive.append(weakref.ref(batch))
            yield batch
            del batch

    for window in windows(loader(), 2):
        del window


def test_phases_are_words_of_a_trial() -> None:
    from typing import get_args

    from autoaccum.accumulation.observers import StepPhase

    assert set(get_args(StepPhase)) < set(get_args(Phase))


def test_random_states_come_back() -> None:
    module = nn.Linear(2, 2)
    generator: Any = torch.Generator().manual_seed(3)
    numpy_generator, old, python = np.random.default_rng(3), np.random.RandomState(3), random.Random(3)
    own: Any = {"noise": generator, "new": numpy_generator, "old": old, "python": python}
    module.__dict__.update(own)
    assert own_generators([module, module]) == [generator, numpy_generator, old, python]
    module.__dict__["system"] = random.SystemRandom()

    def draw() -> list[float]:
        return [
            random.random(),
            np.random.rand(),
            float(torch.rand(1)),
            float(torch.rand(1, generator=generator)),
            numpy_generator.random(),
            old.rand(),
            python.random(),
        ]

    state = RandomState(generators=own_generators([module]))
    first = draw()
    state.restore()
    assert draw() == first

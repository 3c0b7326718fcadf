"""Devices of these tests: the CPU too where that makes sense, so that their code has run before it meets a card."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def place(request: pytest.FixtureRequest) -> Iterator[torch.device]:
    """The CPU, or the first card with an empty cache."""
    if request.param == "cpu":
        yield torch.device("cpu")
        return
    torch.cuda.set_device(0)
    yield torch.device("cuda", 0)
    gc.collect()
    torch.cuda.empty_cache()

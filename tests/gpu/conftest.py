"""Devices of these tests: the CPU too where that makes sense, so that their code has run before it meets a card."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch
from warm_children import Nurseries, warmed


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def place(request: pytest.FixtureRequest, nurseries: Nurseries) -> Iterator[torch.device]:
    """The CPU, with warm children, or the first card with an empty cache."""
    if request.param == "cpu":
        with warmed(nurseries.__getitem__):
            yield torch.device("cpu")
        return
    torch.cuda.set_device(0)
    yield torch.device("cuda", 0)
    gc.collect()
    torch.cuda.empty_cache()

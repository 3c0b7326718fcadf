"""What tests of a simulated card share."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from autoaccum.devices.simulated.catalog import find_card
from autoaccum.devices.simulated.jobs import SimulatedChild

HEAD = """
import copy
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

def batch(n):
    return torch.randn(n, 8), torch.randint(0, 4, (n,))

criterion = nn.CrossEntropyLoss()
"""

Answer = Callable[..., dict[str, Any]]


@pytest.fixture
def simulated(tmp_path: Path) -> Iterator[Callable[[str], Answer]]:
    """From the lines of a workload file to a function that asks a simulated RTX 3090 for a job, in this process."""
    children = [SimulatedChild()]

    def load(lines: str, precision: str | None = None) -> Answer:
        children[-1].close()
        children.append(child := SimulatedChild())
        path = tmp_path / "model.py"
        path.write_text(HEAD + lines)
        where = {"cwd": os.getcwd(), "sys_path": sys.path, "pythonpath": os.environ.get("PYTHONPATH")}  # noqa: PTH109
        card = dataclasses.asdict(find_card("rtx3090"))
        loaded = child.answer({"job": "load", "card": card, "reference": str(path), "precision": precision, **where})

        def ask(job: str, **request: Any) -> dict[str, Any]:
            if "failure" in loaded:
                return loaded
            return child.answer({"job": job, "share": 256, "optimizer": None, **request})

        return ask

    yield load
    children[-1].close()

"""A small record of a checkpoint, for tests of what keeps it."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch

from autoaccum.training.checkpoints.contents import digest, portable


def record(update: int = 0) -> dict[str, Any]:
    shared = torch.arange(6.0)
    return {
        "update": update,
        "model": {"weight": shared, "tied": shared, "half": torch.ones(3, dtype=torch.bfloat16)},
        "counts": Counter([1, 1]),
        "nest": [(1, 2.5, None, True), {"deep": [b"bytes", "text", 1 + 2j, 1 << 127]}, {3}],
    }


def same(one: Any, other: Any) -> bool:
    return digest(portable(one)) == digest(portable(other))

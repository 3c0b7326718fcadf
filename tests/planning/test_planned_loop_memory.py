"""What is planned along with the step: what is refused at once, and what the plan records."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import autoaccum
from autoaccum.errors import DoesNotFitError
from autoaccum.units import MIB, MemorySize

pytestmark = pytest.mark.usefixtures("warm_children")

WORKLOAD = """
import torch
from torch import nn
def model(): return nn.Linear(8, 1000)
def batch(size): return torch.randn(size, 8), torch.randint(0, 1000, (size,))
criterion = nn.CrossEntropyLoss()
"""


@pytest.fixture(scope="module")
def reference(write_workload: Any) -> str:
    written: str = write_workload(WORKLOAD)
    return written


@pytest.mark.slow
def test_a_plan_records_what_was_tried_along(reference: str, tmp_path: Path) -> None:
    memory = MemorySize(bytes=256 * MIB)
    along: dict[str, Any] = {"keeps": ["ema", "outputs"], "evaluation_batch": 6}
    plan = autoaccum.plan(reference, target_batch=8, memory=memory, device="cpu", **along)
    recorded = {name: getattr(plan.spec, name) for name in ("keeps", "evaluation_batch", "worst_of")}
    assert recorded == {"keeps": ("outputs", "ema"), "evaluation_batch": 6, "worst_of": None}
    plan.save(tmp_path / "plan.json")
    assert autoaccum.Plan.load(tmp_path / "plan.json") == plan


def test_an_evaluation_that_does_not_fit_a_simulated_card_is_told_as_such(reference: str) -> None:
    asked: Mapping[str, Any] = {"target_batch": 64, "gpu": "rtx3090", "memory": "256MiB"}
    plan = autoaccum.plan(reference, evaluation_batch=256, **asked)
    assert plan.spec.evaluation_batch == 256
    message = "the evaluation after an update of micro-batch 1 does not fit: it would take .* 256 MiB are available"
    with pytest.raises(DoesNotFitError, match=message) as refused:
        autoaccum.plan(reference, evaluation_batch=100_000, **asked)
    assert refused.value.hint == "take a smaller evaluation_batch (--evaluation-batch), or more memory"

"""What a plan leaves room for stands in its table and in the step that is emitted."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from autoaccum.planning.records import Plan
from autoaccum.reporting.companions import describe_companions
from autoaccum.reporting.consoles import make_console
from autoaccum.reporting.emit import emit_wrapper
from autoaccum.reporting.plan_table import print_plan
from autoaccum.workload.spec import Workload

OUTPUTS = "the last micro-batch's outputs and loss, kept until the next has its own"
ALONG: Mapping[str, Any] = {"keeps": ["outputs", "ema"], "evaluation_batch": 64, "worst_of": 1000}


@pytest.fixture
def plan(make_plan_of: Callable[..., Plan]) -> Plan:
    def batch(size: int) -> Any:
        return torch.randn(size, 4), torch.randint(0, 3, (size,))

    return make_plan_of(Workload(model=lambda: nn.Linear(4, 3), batch=batch, criterion=nn.CrossEntropyLoss()), 18, 6)


def along(plan: Plan, **changes: Any) -> Plan:
    return replace(plan, workload={**plan.workload, **changes})


def draw(plan: Plan) -> str:
    file = io.StringIO()
    print_plan(make_console(file=file, width=200), plan, command=["autoaccum", "plan"], verbose=True)
    return file.getvalue()


@pytest.mark.parametrize(
    ("changes", "phrases"),
    [
        ({}, []),
        ({"keeps": [], "evaluation_batch": None, "worst_of": None}, []),
        ({"keeps": ["ema"]}, ["an average of the weights"]),
        ({"evaluation_batch": 8}, ["an evaluation between updates, in batches of 8"]),
        ({"keeps": ["what a later version keeps"]}, ["what a later version keeps"]),
        (ALONG, [OUTPUTS, "an average of the weights", "an evaluation between updates, in batches of 64"]),
    ],
)
def test_phrases(plan: Plan, changes: dict[str, Any], phrases: list[str]) -> None:
    assert describe_companions(along(plan, **changes)) == phrases


def test_the_table_says_what_was_planned_along(plan: Plan) -> None:
    assert "along with" not in draw(plan)
    said = draw(along(plan, **ALONG))
    assert (
        f"along with   {OUTPUTS}; an average of the weights; an evaluation between updates, in batches of 64\n" in said
    )
    assert "batches      of the longest of 1000 samples of the dataset\n" in said


def test_the_emitted_step_says_it_and_is_otherwise_the_same(plan: Plan) -> None:
    plain, told = emit_wrapper(plan), emit_wrapper(along(plan, **ALONG))
    docstring = told.split('"""')[1]
    assert f"The plan has room for what stands around the step: {OUTPUTS};" in " ".join(docstring.split())
    assert told.split('"""')[2:] == plain.split('"""')[2:]
    assert max(map(len, told.splitlines())) <= 120

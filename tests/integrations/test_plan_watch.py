"""A plan is compared with the training that runs, sentence by sentence, and with its peak."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from pictured_plans import MEASURED, plan, trial
from torch import nn

from autoaccum import Plan
from autoaccum.integrations.plan_watch import PlanWarning, PlanWatch, Running, find_differences
from autoaccum.units import GIB


def planned(**workload: Any) -> Plan:
    facts = {"model": "Linear", "parameters": 12, "precision": "bf16", "optimizer": "AdamW", "savers": (), **workload}
    fields = {**MEASURED, "device": {"name": "cpu", "kind": "cpu"}, "workload": facts}
    return plan(86, 256, 24 * GIB, 20 * GIB, (trial(86, "ok", 20 * GIB),), **fields)


def running(**changes: Any) -> Running:
    model = nn.Linear(3, 3)
    usual: dict[str, Any] = {"model": model, "optimizer": torch.optim.AdamW(model.parameters()), "precision": "bf16"}
    usual |= {"micro_batch": 86, "batch": 256, "world_size": 1, "checkpointing": False}
    return Running(**{**usual, "names": ("batch_size", "batch_size x steps"), **changes})


@pytest.mark.parametrize(
    ("workload", "changes", "sentence"),
    [
        ({"parameters": 99}, {}, "here is 12 parameters, the plan is for 99 parameters: plan again"),
        ({}, {"precision": "fp32"}, "here is fp32, the plan is for bf16"),
        ({"optimizer": "SGD"}, {}, "here is AdamW, the plan is for SGD"),
        ({}, {"micro_batch": 128}, "batch_size is 128, the plan's micro-batch 86: 128 may not fit, take 86"),
        ({}, {"micro_batch": 64}, "64 takes more micro-batches than needed"),
        ({}, {"batch": 258}, r"an update has 258 samples \(batch_size x steps\), the plan's has 256"),
        ({}, {"world_size": 2}, "2 ranks train, the plan is for 1: plan with --world-size 2"),
        ({"savers": ("recompute=1",)}, {}, "checkpointing is on in the plan and off here"),
        ({"savers": ("offload-gradients",)}, {}, "the plan needs offload-gradients"),
        ({}, {"checkpointing": True}, "gradient checkpointing is on here and off in the plan"),
        ({"recipe": {"checkpointing": True}}, {}, "gradient checkpointing is on in the plan and off here"),
    ],
)
def test_each_difference_is_a_sentence(workload: dict[str, Any], changes: dict[str, Any], sentence: str) -> None:
    with pytest.warns(PlanWarning, match=sentence) as told:
        PlanWatch(planned(**workload)).begin(running(**changes))
    assert len(told) == 1


@pytest.mark.parametrize(
    ("workload", "changes"),
    [
        ({}, {}),
        ({}, {"micro_batch": None, "batch": None, "precision": None, "optimizer": None, "checkpointing": None}),
        ({"savers": ("recompute",)}, {"checkpointing": True}),
        ({"savers": ("recompute", "offload-activations")}, {"micro_batch": None}),
    ],
)
def test_what_is_alike_or_unknown_is_not_told(workload: dict[str, Any], changes: dict[str, Any]) -> None:
    assert find_differences(planned(**workload), running(**changes)) == []


def test_a_peak_above_the_plans_is_told_once_and_both_stand_in_the_line() -> None:
    peaks = iter([19 * GIB, 20 * GIB, 21 * GIB, 22 * GIB, 22 * GIB])
    watch = PlanWatch(planned(), read_peak=lambda device: next(peaks))
    watch.begin(running())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        watch.update()
        watch.update()
    with pytest.warns(PlanWarning, match=r"the peak is 21.0 GiB after 3 updates, the plan's 20.0 GiB of 24.0 GiB"):
        watch.update()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        watch.update()
    expected = "4 updates of 256 samples planned; peak 22.0 GiB, the plan's 20.0 GiB (measured) of 24.0 GiB"
    assert expected in watch.summary()

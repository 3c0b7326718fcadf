"""Guard reports made by hand, one verdict of each kind, with names that markup must not interpret."""

from __future__ import annotations

import dataclasses

from small_locks import whole_measurement

from autoaccum.devices.explanation import Holding
from autoaccum.guarding.cases import make_case
from autoaccum.guarding.guard_result import DEFAULT_TOLERANCE, Growth, Report, Verdict
from autoaccum.messages import message
from autoaccum.units import GIB, MIB

CASE = make_case(workload="train.py", gpu="rtx3090", target_batch=256, precision="bf16")
BEFORE = whole_measurement(
    Holding(category="activations", module="blocks.0.mlp", bytes=13 * GIB),
    update={},
    limit_bytes=23 * GIB,
    peak_bytes=14 * GIB,
    min_budget_bytes=13 * GIB + 512 * MIB,
    environment={"torch": "2.13.0"},
)
NOW = dataclasses.replace(
    BEFORE,
    largest=24,
    peak_bytes=15 * GIB + 256 * MIB,
    min_budget_bytes=14 * GIB + 512 * MIB,
    holdings=(Holding(category="activations", module="blocks.0.mlp", bytes=14 * GIB),),
)
REGRESSED = Verdict(
    case=CASE,
    outcome="regressed",
    exit_code=1,
    explanation=(
        message("memory_changed", quantity="peak", bytes=1280 * MIB, before_bytes=14 * GIB),
        message("largest_changed", gpu="rtx3090", before=32, now=24),
    ),
    reasons=(
        message("memory_grew", quantity="peak", bytes=1280 * MIB, before_bytes=14 * GIB, tolerance="1%"),
        message("largest_fell", before=32, now=24),
    ),
    hint=message("lock_if_meant"),
    command="autoaccum guard train.py --gpu rtx3090 --target-batch 256 --precision bf16 --update",
    growths=(
        Growth(category="activations", module="blocks.{0..11}.mlp", bytes=1200 * MIB, change="bf16 -> fp32"),
        Growth(category="optimizer_state", module="head_|<b>`x", bytes=100 * MIB, change="new"),
        Growth(category="unused", module="", bytes=-20 * MIB),
    ),
    before=BEFORE,
    now=NOW,
)
UNCHANGED = Verdict(
    case=make_case(**{**CASE.to_record(), "gpu": "a100-80gb"}), outcome="passed", before=BEFORE, now=BEFORE
)
WITHIN = Verdict(
    case=make_case(**{**CASE.to_record(), "precision": "fp32"}),
    outcome="passed",
    explanation=(message("memory_changed", quantity="peak", bytes=2 * MIB, before_bytes=14 * GIB),),
    before=BEFORE,
    now=dataclasses.replace(BEFORE, peak_bytes=BEFORE.peak_bytes + 2 * MIB),
)
UNMEASURED = Verdict(
    case=dataclasses.replace(CASE, workload="broken.py:model"),
    outcome="unmeasured",
    exit_code=3,
    reasons=(message("error", error="workload", text="model() raised ValueError: 50 %,\n::error::told"),),
    traceback='File "broken.py", line 3, in model\n    raise ValueError("50 %")\n::error::raised\n  ##[group]old',
)
LOCKED = Verdict(case=CASE, outcome="locked", now=BEFORE)


def report(*verdicts: Verdict, updated: str | None = None) -> Report:
    return Report(verdicts=verdicts, against="autoaccum.lock", tolerance=DEFAULT_TOLERANCE, updated=updated)


ALL = report(UNCHANGED, WITHIN, UNMEASURED, REGRESSED)

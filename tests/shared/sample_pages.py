"""One page of each kind, from records made by hand, with names that a browser must not take for markup."""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Mapping

from guard_reports import ALL
from made_up_verifications import DIFFERENT
from pictured_plans import extremes, usual
from small_studies import OWN_RATE, tuning_of

from autoaccum.devices.explanation import Change, ModuleShare
from autoaccum.reporting.guard_report import guard_page
from autoaccum.reporting.page import Page
from autoaccum.reporting.plan_page import plan_page
from autoaccum.reporting.tune_report import tune_page
from autoaccum.reporting.verify_report import verify_page
from autoaccum.simulation.trace_records import Category
from autoaccum.tuning.tuning_records import Row, Setting, Tuning
from autoaccum.units import GIB, MIB

EVIL = "<script>alert(1)</script>"
_HELD: Mapping[Category, int] = {"activations": 5 * GIB, "gradients": 200 * MIB}


def pages() -> dict[str, Page]:
    """Return the pages by name."""
    plan, memory = usual()
    modules = (
        ModuleShare(name=EVIL, kind="Linear", count=12, bytes=2 * GIB, categories=_HELD),
        ModuleShare(name="", kind="", count=1, bytes=GIB, categories={"temporaries": GIB}),
    )
    changes = (
        Change(name="checkpoint", what=f"run {EVIL} again in backward", peak_bytes=6 * GIB, saved_bytes=3 * GIB),
        Change(name="bf16", what="compute in bf16", message="no kernel"),
    )
    explanation = dataclasses.replace(memory.explanation, modules=modules, changes=changes, module=EVIL)
    memory = dataclasses.replace(memory, explanation=explanation, notes=("a note of the report",))
    plan = dataclasses.replace(plan, warnings=("BatchNorm normalises by the micro-batch",), notes=("keep the rate",))
    measured = dataclasses.replace(extremes()["measured on a CPU"][0], device={"name": "cpu", "kind": "cpu"})
    verified = dataclasses.replace(DIFFERENT, workload={"model": EVIL}, notes=("random draws were held",))
    return {
        "plan": plan_page(plan, memory, seconds=12.5),
        "plan on a CPU": plan_page(
            dataclasses.replace(measured, device={"name": "cpu", "kind": "cpu"}),
            None,
        ),
        "verify": verify_page(verified, again=["autoaccum", "verify", "model.py"]),
        "guard": guard_page(ALL),
        "tune": tune_page(study(), {}),
    }


def study(trials: int = 12) -> Tuning:
    """Return a study of losses with a minimum, some pruned, and one diverged."""
    draw = random.Random(0)
    rows = []
    for number in range(trials):
        rate = OWN_RATE if number == 0 else OWN_RATE * 10 ** draw.uniform(-2, 2)
        loss = 0.1 + 0.2 * math.log10(rate / 0.1) ** 2
        losses, seconds = ((25, 3 * loss), (50, 2 * loss)), 10 + draw.uniform(0, 3)
        setting = Setting(learning_rate=rate, target_batch=16, micro_batch=16)
        row = Row(number=number, state="complete", setting=setting, loss=loss, losses=losses, seconds=seconds)
        if rate > 2:
            row = dataclasses.replace(row, state="diverged", loss=None, losses=(), reason="the loss is nan")
        elif number and loss > 0.4:
            row = dataclasses.replace(row, state="pruned", loss=None, losses=losses[:1], seconds=3.0)
        rows.append(row)
    return tuning_of(tuple(rows))

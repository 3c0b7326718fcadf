"""Train with the batch size you want on the GPU you have, by gradient accumulation.

Public names are imported on first use, so that importing the package loads neither torch nor optuna.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from autoaccum.accumulation.accumulator import Accumulator as Accumulator
    from autoaccum.accumulation.schedule import windows as windows
    from autoaccum.accumulation.step_result import AccumulationWarning as AccumulationWarning
    from autoaccum.accumulation.step_result import StepResult as StepResult
    from autoaccum.accumulation.token_sampler import TokenBudgetSampler as TokenBudgetSampler
    from autoaccum.accumulation.whole_batch.lockstep import whole_batch as whole_batch
    from autoaccum.api import compare as compare
    from autoaccum.api import fit as fit
    from autoaccum.api import guard as guard
    from autoaccum.api import plan as plan
    from autoaccum.api import tune as tune
    from autoaccum.api import verify as verify
    from autoaccum.planning.comparison_record import Comparison as Comparison
    from autoaccum.planning.plan_record import Plan as Plan
    from autoaccum.sources.workload import Workload as Workload
    from autoaccum.training.fit_events import FitResult as FitResult
    from autoaccum.tuning.tuning_records import Tuning as Tuning
    from autoaccum.verification.verification_result import Verification as Verification

__version__ = "0.1.0"

_HOMES = {
    "AccumulationWarning": "autoaccum.accumulation.step_result",
    "Accumulator": "autoaccum.accumulation.accumulator",
    "StepResult": "autoaccum.accumulation.step_result",
    "TokenBudgetSampler": "autoaccum.accumulation.token_sampler",
    "windows": "autoaccum.accumulation.schedule",
    "whole_batch": "autoaccum.accumulation.whole_batch.lockstep",
    "plan": "autoaccum.api",
    "compare": "autoaccum.api",
    "fit": "autoaccum.api",
    "verify": "autoaccum.api",
    "tune": "autoaccum.api",
    "guard": "autoaccum.api",
    "Plan": "autoaccum.planning.plan_record",
    "Comparison": "autoaccum.planning.comparison_record",
    "FitResult": "autoaccum.training.fit_events",
    "Tuning": "autoaccum.tuning.tuning_records",
    "Verification": "autoaccum.verification.verification_result",
    "Workload": "autoaccum.sources.workload",
}

__all__ = ["__version__", *_HOMES]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'autoaccum' has no attribute {name!r}")
    from importlib import import_module

    from autoaccum.serialization import HtmlRecord

    HtmlRecord.to_html = _to_html
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)


def _to_html(record: Any) -> str:
    from autoaccum.reporting.page import render_record  # It loads matplotlib.

    return render_record(record)

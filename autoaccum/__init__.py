"""Train with the batch you want on the card you have.

The public names load on first use, so that importing this package loads neither torch nor optuna.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from autoaccum.accumulation.accumulator import Accumulator as Accumulator
    from autoaccum.accumulation.observers import AccumulationWarning as AccumulationWarning
    from autoaccum.accumulation.observers import StepResult as StepResult
    from autoaccum.accumulation.schedule import windows as windows
    from autoaccum.planning.planner import plan as plan
    from autoaccum.planning.records import Plan as Plan
    from autoaccum.reporting.fitting import fit as fit
    from autoaccum.reporting.tuned import tune as tune
    from autoaccum.training.events import FitResult as FitResult
    from autoaccum.tuning.records import Tuning as Tuning
    from autoaccum.verification.records import Verification as Verification
    from autoaccum.verification.verifying import verify as verify
    from autoaccum.workload.spec import Workload as Workload

__version__ = "0.1.0"

_HOMES = {
    "AccumulationWarning": "autoaccum.accumulation.observers",
    "Accumulator": "autoaccum.accumulation.accumulator",
    "StepResult": "autoaccum.accumulation.observers",
    "windows": "autoaccum.accumulation.schedule",
    "FitResult": "autoaccum.training.events",
    "fit": "autoaccum.reporting.fitting",
    "Plan": "autoaccum.planning.records",
    "plan": "autoaccum.planning.planner",
    "Tuning": "autoaccum.tuning.records",
    "tune": "autoaccum.reporting.tuned",
    "Verification": "autoaccum.verification.records",
    "verify": "autoaccum.verification.verifying",
    "Workload": "autoaccum.workload.spec",
}

__all__ = ["__version__", *_HOMES]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'autoaccum' has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)

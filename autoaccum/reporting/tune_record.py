"""What a study has found, as a record for programs."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from typing import Any

from autoaccum.tuning.records import Tuning


def tuning_record(tuning: Tuning) -> dict[str, Any]:
    """What a study has found, as plain values: `Tuning` and its records by the names of their fields.

    What there is none of is null, and so is a number that is not finite: a trial that diverged says so by its `state`.
    `plan` is as `autoaccum fit --plan` reads it.
    """
    plan = None if tuning.plan is None else json.loads(tuning.plan.to_json())
    record = _plain(dataclasses.replace(tuning, plan=None))
    assert isinstance(record, dict)
    return {"schema": record.pop("schema"), **record, "plan": plan}


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(name): _plain(each) for name, each in value.items()}
    if isinstance(value, (tuple, list)):
        return [_plain(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value

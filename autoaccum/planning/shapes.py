"""Words of `autoaccum.records`, for who still looks for them here."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from autoaccum.records import RecordError as ShapeError
from autoaccum.records import freeze as freeze
from autoaccum.records import read_record
from autoaccum.records import to_plain as thaw

__all__ = ["ShapeError", "freeze", "shape", "thaw"]


def shape(record: Mapping[str, Any], kind: type) -> dict[str, Any]:
    """The fields of the dataclass `kind` out of `record`.

    Raises:
        ShapeError: A field without a default is missing, or a value is not of its type.
    """
    made: Any = read_record(record, kind)
    return {field.name: getattr(made, field.name) for field in dataclasses.fields(kind)}

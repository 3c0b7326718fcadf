"""What all jobs of a child have in common: where they look for modules, and how they tell a failure."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Mapping
from typing import Any


def look_where(request: Mapping[str, Any]) -> None:
    """Find modules and files where the parent does."""
    sys.path[:] = request["sys_path"]
    os.chdir(request["cwd"])
    if request["pythonpath"] is None:
        os.environ.pop("PYTHONPATH", None)
    else:
        os.environ["PYTHONPATH"] = request["pythonpath"]


def failure_reply(error: BaseException, doing: str, at: str = "") -> dict[str, Any]:
    """A reply that tells `error`, as `describe_failure` sees it."""
    from autoaccum.devices.diagnosis import describe_failure

    return {"failure": dataclasses.asdict(describe_failure(error, doing, at=at))}

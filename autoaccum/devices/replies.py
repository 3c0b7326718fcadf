"""What all jobs of a child have in common: where they look, what they load, and how they tell a failure."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from autoaccum.devices.checkout import check_loaded

if TYPE_CHECKING:
    from autoaccum.workload.spec import Workload


def look_where(request: Mapping[str, Any]) -> None:
    """Find modules and files where the parent does."""
    sys.path[:] = request["sys_path"]
    os.chdir(request["cwd"])
    if request["pythonpath"] is None:
        os.environ.pop("PYTHONPATH", None)
    else:
        os.environ["PYTHONPATH"] = request["pythonpath"]


def load_asked(request: Mapping[str, Any]) -> Workload:
    """The workload that a request names, as it asks for it (`TrialSettings.to_request`)."""
    from autoaccum.devices.parcels import unpack
    from autoaccum.options import Options
    from autoaccum.workload.loading import load_workload
    from autoaccum.workload.samples import adapt

    parcel = request.get("parcel")
    loaded = load_workload(request["reference"]) if parcel is None else unpack(parcel)
    check_loaded(request["reference"], request.get("checkout", {}))
    options = Options.from_record(request.get("options", {}))
    return adapt(loaded, most=request.get("share"), worst_of=options.worst_of, **options.overrides)


def failure_reply(error: BaseException, doing: str, at: str = "") -> dict[str, Any]:
    """A reply that tells `error`, as `describe_failure` sees it."""
    from autoaccum.devices.diagnosis import describe_failure

    return {"failure": dataclasses.asdict(describe_failure(error, doing, at=at))}

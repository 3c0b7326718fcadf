"""What all jobs of a child have in common: where they look, what they load, and how they tell a failure."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from autoaccum.devices.checkout import redirect_hooks
from autoaccum.devices.strays import Strays
from autoaccum.errors import NotMeasuredError

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
    redirect_hooks(request.get("checkout", {}))


def load_asked(request: Mapping[str, Any]) -> Workload:
    """The workload that a request names, as it asks for it (`TrialSettings.to_request`)."""
    from autoaccum.workload.adaptation import adapt
    from autoaccum.workload.loading import load_workload

    names = ("precision", "keeps", "evaluation_batch", "worst_of", "batchnorm", "multiple_of", "accumulate_in")
    asked = {name: request.get(name) for name in names}
    if request.get("parcel") is not None:
        from autoaccum.devices.parcels import unpack

        return adapt(unpack(request["parcel"]), most=request.get("share"), **asked)
    return adapt(load_workload(request["reference"]), most=request.get("share"), **asked)


def astray_reply(strays: Strays | None) -> dict[str, Any]:
    """A failure where code was loaded from elsewhere than the checkout, else nothing.

    Whatever else a job came to, it is of another revision then.
    """
    try:
        if strays is not None:
            strays.check()
    except NotMeasuredError as error:
        return failure_reply(error, "looking at what was loaded")
    return {}


def failure_reply(error: BaseException, doing: str, at: str = "") -> dict[str, Any]:
    """A reply that tells `error`, as `describe_failure` sees it."""
    from autoaccum.devices.diagnosis import describe_failure

    return {"failure": dataclasses.asdict(describe_failure(error, doing, at=at))}

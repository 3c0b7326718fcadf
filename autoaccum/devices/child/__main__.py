"""`python -m autoaccum.devices.child CONNECTION PARENT`: runs trials and answers on a private connection.

A JSON object asks (`load`, then `inspect` or `trial`), one answers; `prepare`, which may come first, has no answer,
and `ready` an empty one.
The workload is imported once; every trial builds everything anew. Standard output belongs to the workload, so nothing
is answered there.
"""

from __future__ import annotations

import dataclasses
import gc
import sys
from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from autoaccum.devices.child.connection import ParentConnection, failure_reply, load_requested, use_import_paths

if TYPE_CHECKING:
    from autoaccum.devices.meters import Meter
    from autoaccum.workload.spec import Workload


def main(arguments: list[str]) -> None:
    """Answer requests until the parent closes its end."""
    lifeline = ParentConnection(arguments)
    child: Any = Child()
    for request in lifeline:
        if request["job"] == "prepare":
            _prepare(request)
            continue
        if request["job"] == "ready":
            lifeline.answer({})
            continue
        if "card" in request:
            from autoaccum.devices.simulated.simulated_child import SimulatedChild

            child = SimulatedChild()
        lifeline.answer(child.answer(request))


class Child:
    """Answers one request after the other."""

    def __init__(self) -> None:
        self._workload: Workload | None = None
        self._meter: Meter | None = None

    def answer(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """The reply to `request`: `{"failure": ...}` when there is nothing else to tell."""
        jobs = {"load": self._load, "inspect": self._inspect, "trial": self._trial}
        return jobs[request["job"]](request)

    def _load(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Import the workload and warm PyTorch up; what the process holds then is nobody's budget.

        In this order, so that a bad file is told at once and the warm-up finds the threads, and the cards, the
        workload chooses. Replies with what the device's meter tells.
        """
        use_import_paths(request)
        from autoaccum.devices.meters import make_meter
        from autoaccum.devices.trial_run import seed_everything

        try:
            meter = make_meter(request["device"])
            seed_everything()
            workload = load_requested(request)
        except BaseException as error:
            return failure_reply(error, f"loading {request['reference']}")
        self._workload, self._meter = workload, meter
        return _start(meter)

    def _inspect(self, request: Mapping[str, Any]) -> dict[str, Any]:
        from autoaccum.devices.inspection import inspect_workload

        assert self._workload is not None
        assert self._meter is not None
        try:
            inspection = inspect_workload(self._workload, request["share"], meter=self._meter)
        except BaseException as error:
            return failure_reply(error, f"an update from a small batch of {self._workload.name}")
        return {"inspection": dataclasses.asdict(inspection), "kept_bytes": _settle(self._meter)}

    def _trial(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """One trial under the limit, which is lifted before anything is said about it."""
        from autoaccum.devices.trial_run import run_trial

        assert self._workload is not None
        assert self._meter is not None
        _collect()
        parts, limit_bytes = request["parts"], request["limit_bytes"]
        done = run_trial(self._workload, request["share"], parts, meter=self._meter, limit_bytes=limit_bytes)
        if done.failure is not None:
            doing = f"micro-batch {max(parts)}, {done.reply['phase']}"
            return {**done.reply, **failure_reply(done.failure, doing, at=f"{doing}: ")}
        return {**done.reply, "kept_bytes": _settle(self._meter)}


def _prepare(request: Mapping[str, Any]) -> None:
    """Import what every workload needs, before there is one; what goes wrong here goes wrong again in `load`.

    Neither threads nor a card are touched, since a workload may choose them: making an optimizer is enough to have
    PyTorch import what it puts off until the first one is made (torch/_compile.py), half of all it imports. Where no
    memory is measured, nothing of it is garbage either: to look for some takes a fifth of the time.
    """
    use_import_paths(request)
    if request.get("simulated"):
        gc.disable()
    with suppress(Exception):
        import torch

        if request.get("simulated"):
            from autoaccum.devices.simulated import simulated_child

            simulated_child.prepare()
        from autoaccum.devices import inspection, meters

        del inspection, meters
        torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
    if request.get("simulated"):
        gc.freeze()
        gc.enable()


def _start(meter: Meter) -> dict[str, Any]:
    """Make the device ready; `{"refused": ...}` when it is not one that can be used here."""
    from autoaccum.devices.meters import warm_up
    from autoaccum.errors import UsageError

    try:
        meter.open()
        warm_up(meter.device)
        _collect()
        # Collecting what PyTorch's modules consist of takes 0.3 s, several times a trial; none of it ever dies.
        gc.freeze()
        return dict(meter.begin())
    except UsageError as error:
        return {"refused": str(error)}
    except BaseException as error:
        reply = failure_reply(error, f"starting PyTorch on {meter.device}")
        if reply["failure"]["blames"] is not None:
            reply["failure"]["blames"] = "measurement"  # None of it is the user's code.
        return reply


def _settle(meter: Meter) -> int:
    _collect()
    return meter.settle()


def _collect() -> None:
    from autoaccum.accumulation.recovery import release_memory

    release_memory()


if __name__ == "__main__":
    main(sys.argv[1:])

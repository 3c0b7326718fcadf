"""`python -m autoaccum.tuning.tuning_child CONNECTION PARENT`: describes, times or trains one workload.

A JSON object asks, one answers, as in `devices.child`. A training is a conversation: at each milestone the child
tells its loss, and waits for whether to go on. Nothing is measured here, so malloc is left as it is.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from autoaccum.devices.child.connection import ParentConnection, failure_reply, use_import_paths
from autoaccum.options import Options
from autoaccum.tuning.tune_request import Budget
from autoaccum.tuning.tuning_result import Setting

if TYPE_CHECKING:
    from autoaccum.tuning.trial_training import UpdateTimer
    from autoaccum.workload.spec import Workload


class Child:
    """Answers one request after the other; `load` comes first.

    Args:
        lifeline: What it speaks through.
    """

    def __init__(self, lifeline: ParentConnection) -> None:
        self._lifeline = lifeline
        self._workload: Workload | None = None
        self._timer: UpdateTimer | None = None

    def run(self) -> None:
        """Answer until nobody asks any more: `{"failure": ...}` where something was raised."""
        jobs = {"load": self._load, "describe": self._describe, "update": self._update, "train": self._train}
        for request in self._lifeline:
            try:
                reply = jobs[request["job"]](request)
            except BaseException as error:
                reply = failure_reply(error, request["doing"])
            self._lifeline.answer(reply)

    def _load(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Import the workload under the same seed for every trial: its data, and a model that is an instance."""
        use_import_paths(request)
        from autoaccum.devices.trial_run import seed_everything
        from autoaccum.workload.loading import load_workload
        from autoaccum.workload.samples import replace_fields

        seed_everything()
        overrides = Options(**request["options"]).overrides
        self._workload = replace_fields(load_workload(request["reference"]), **overrides)
        return {"digest": self._workload.digest}

    def _describe(self, request: Mapping[str, Any]) -> dict[str, Any]:
        from autoaccum.tuning.trial_training import describe_workload

        assert self._workload is not None
        return {
            "facts": dataclasses.asdict(describe_workload(self._workload, request["device"], request["target_batch"]))
        }

    def _update(self, request: Mapping[str, Any]) -> dict[str, Any]:
        from autoaccum.tuning.trial_training import UpdateTimer

        assert self._workload is not None
        if self._timer is None:
            self._timer = UpdateTimer(self._workload, request["device"], request["target_batch"])
        return {"seconds": self._timer.time(request["micro_batch"])}

    def _train(self, request: Mapping[str, Any]) -> dict[str, Any]:
        from autoaccum.tuning.trial_training import train_setting

        def should_continue(percent: int, loss: float) -> bool:
            self._lifeline.answer({"percent": percent, "loss": loss})
            reply = self._lifeline.read()
            if reply is None:  # Nobody listens any more.
                raise SystemExit(0)
            return bool(reply["goes_on"])

        assert self._workload is not None
        setting, budget = Setting(**request["setting"]), Budget(**request["budget"])
        asked = {name: request[name] for name in ("seed", "evaluation_batch", "device")}
        return {
            "outcome": dataclasses.asdict(
                train_setting(self._workload, setting, budget, should_continue=should_continue, **asked)
            )
        }


if __name__ == "__main__":
    Child(ParentConnection(sys.argv[1:])).run()

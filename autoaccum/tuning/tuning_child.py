"""`python -m autoaccum.tuning.tuning_child CONNECTION PARENT`: describes or trains one workload.

A training is a conversation: at each milestone the child replies with its loss, and waits for whether to continue.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from autoaccum.devices.child.failures import describe_failure
from autoaccum.devices.child.requests import ParentConnection, Request, read_request, serve
from autoaccum.options import Options, make_options
from autoaccum.tuning.trial_processes import ContinueTraining, Describe, LoadForTuning, Train, TrainingProgress

if TYPE_CHECKING:
    from autoaccum.sources.workload import Workload


class TuningChild:
    """Handles the requests of `trial_processes`, `LoadForTuning` first."""

    _workload: Workload
    _load: LoadForTuning

    def __init__(self, connection: ParentConnection) -> None:
        self._connection = connection

    def handle(self, request: Request[Any]) -> Any:
        """Return the reply to `request`, or a `Failure`."""
        try:
            if isinstance(request, LoadForTuning):
                return self._load_workload(request)
            # These import torch, whose threads and cards the workload may choose.
            from autoaccum.tuning.trial_training import describe_workload, train_setting

            device = Options(**self._load.options).device
            if isinstance(request, Describe):
                return describe_workload(self._workload, device, self._load.target_batch)
            assert isinstance(request, Train)
            settings = vars(request) | {"device": device, "should_continue": self._ask}
            return TrainingProgress(outcome=train_setting(self._workload, **settings))
        except BaseException as error:
            return describe_failure(error, request.doing)

    def _load_workload(self, request: LoadForTuning) -> str:
        """Import the workload with the same seed for every trial: its data, and its model if that is an instance."""
        request.paths.use()
        from autoaccum.devices.trial_run import seed_everything
        from autoaccum.sources.loading import load_workload
        from autoaccum.sources.samples import replace_fields

        seed_everything()
        self._load = request
        self._workload = replace_fields(load_workload(request.reference), **make_options(**request.options).spec)
        return self._workload.digest

    def _ask(self, percent: int, loss: float) -> bool:
        """Reply with the loss at a milestone; return whether to continue."""
        self._connection.reply(TrainingProgress(percent=percent, loss=loss))
        message = self._connection.read()
        if message is None:  # The parent has gone.
            raise SystemExit(0)
        answer = read_request(message)
        assert isinstance(answer, ContinueTraining)
        return answer.should_continue


if __name__ == "__main__":
    connection = ParentConnection(sys.argv[1:])
    serve(connection, TuningChild(connection).handle)

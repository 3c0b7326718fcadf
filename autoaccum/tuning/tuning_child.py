"""`python -m autoaccum.tuning.tuning_child CONNECTION PARENT`: describes or trains one workload.

A training is a conversation: at each milestone the child replies with its loss, and waits for whether to continue.
Nothing is measured here, so malloc is left as it is.
"""

from __future__ import annotations

import sys
from functools import singledispatchmethod
from typing import TYPE_CHECKING, Any

from autoaccum.devices.child.failures import describe_failure
from autoaccum.devices.child.requests import ParentConnection, Request, read_request, serve
from autoaccum.options import Options
from autoaccum.tuning.tuning_records import (
    ContinueTraining,
    Describe,
    LoadForTuning,
    Train,
    TrainingProgress,
    WorkloadFacts,
)

if TYPE_CHECKING:
    from autoaccum.sources.spec import Workload


class TuningChild:
    """Handles the requests of `tuning_records`, `LoadForTuning` first; asks the parent by `connection` as it trains."""

    _workload: Workload

    def __init__(self, connection: ParentConnection) -> None:
        self._connection = connection
        self._device, self._target_batch = "auto", 0

    def handle(self, request: Request[Any]) -> Any:
        """Return the reply to `request`, or a `Failure`."""
        try:
            return self._reply(request)
        except BaseException as error:
            return describe_failure(error, request.doing)

    @singledispatchmethod
    def _reply(self, request: Request[Any]) -> Any:
        raise NotImplementedError(request)

    @_reply.register
    def _load(self, request: LoadForTuning) -> str:
        """Import the workload with the same seed for every trial: its data, and its model if that is an instance."""
        request.paths.use()
        from autoaccum.devices.trial_run import seed_everything
        from autoaccum.sources.loading import load_workload
        from autoaccum.sources.samples import replace_fields

        seed_everything()
        options = Options(**request.options)
        self._device, self._target_batch = options.device, request.target_batch
        self._workload = replace_fields(load_workload(request.reference), **options.overrides)
        return self._workload.digest

    @_reply.register
    def _describe(self, request: Describe) -> WorkloadFacts:
        from autoaccum.tuning.trial_training import describe_workload

        return describe_workload(self._workload, self._device, self._target_batch)

    @_reply.register
    def _train(self, request: Train) -> TrainingProgress:
        from autoaccum.tuning.trial_training import train_setting

        def should_continue(percent: int, loss: float) -> bool:
            self._connection.reply(TrainingProgress(percent=percent, loss=loss))
            message = self._connection.read()
            if message is None:  # The parent has gone.
                raise SystemExit(0)
            answer = read_request(message)
            assert isinstance(answer, ContinueTraining)
            return answer.should_continue

        outcome = train_setting(
            self._workload,
            request.setting,
            request.budget,
            seed=request.seed,
            evaluation_batch=request.evaluation_batch,
            device=self._device,
            should_continue=should_continue,
        )
        return TrainingProgress(outcome=outcome)


if __name__ == "__main__":
    connection = ParentConnection(sys.argv[1:])
    serve(connection, TuningChild(connection).handle)

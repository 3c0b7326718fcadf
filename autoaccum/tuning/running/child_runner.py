"""Trials in processes of their own: one fresh process for every training, the next one kept ready meanwhile."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import TYPE_CHECKING, Any

from autoaccum.devices.host_memory import read_host_memory
from autoaccum.devices.process import SPARE_BYTES, ChildDied, ChildProcess, SpareChild
from autoaccum.devices.recording import Failure
from autoaccum.errors import NotMeasuredError
from autoaccum.planning.device_choice import card_index
from autoaccum.tuning.records import Outcome
from autoaccum.tuning.request import TuneRequest
from autoaccum.tuning.runner import GoOn
from autoaccum.tuning.running.orders import TrainOrder, outcome_of
from autoaccum.tuning.running.trainer import LEAVE_SECONDS, check_unchanged, load_request, start_trainer
from autoaccum.tuning.settings import Budget, Setting

if TYPE_CHECKING:
    from typing_extensions import Self


class ChildRunner:
    """Runs trainings one after the other; see `runner.Runner`. Nothing is started before the first.

    Args:
        request: What the study is asked to do.
        budget: Of every training.
        evaluation_batch: The micro-batch of every evaluation.
        on_output: Gets each line the workload prints; None: it goes to stderr.
        digest: Of the source files that trials are to be of; None: of those that the first one finds.
        keeps_spare: Whether the next process imports PyTorch while a training runs, where the host has the memory.
    """

    def __init__(
        self,
        request: TuneRequest,
        budget: Budget,
        evaluation_batch: int,
        *,
        on_output: Callable[[str], None] | None = None,
        digest: str | None = None,
        keeps_spare: bool = True,
    ) -> None:
        self._request, self._budget, self._evaluation_batch = request, budget, evaluation_batch
        self._on_output, self._keeps_spare = on_output, keeps_spare
        self._spare: SpareChild | None = None
        self._peak_bytes: int | None = None
        self._digest = digest

    def __enter__(self) -> Self:
        """Nothing is started before the first training."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End every process of this runner's own. Idempotent."""
        spare, self._spare = self._spare, None
        if spare is not None:
            spare.end()

    def run(self, setting: Setting, seed: int, go_on: GoOn) -> Outcome:
        """Train in a fresh process, which is gone afterwards.

        Raises:
            NotMeasuredError: No process can be started.
            WorkloadError: The workload's source files are not those of the study any more.
        """
        order = TrainOrder(
            setting=setting,
            seed=seed,
            budget=self._budget,
            evaluation_batch=self._evaluation_batch,
            device=self._request.device,
        )
        process = self._take_process()
        try:
            return self._train(process, order, go_on)
        except ChildDied as death:
            return _outcome_of_death(death, self._request.trial_limit)
        finally:
            process.end(grace_seconds=LEAVE_SECONDS)

    def _train(self, process: ChildProcess, order: TrainOrder, go_on: GoOn) -> Outcome:
        limit = self._request.trial_limit or math.inf
        deadline = time.monotonic() + limit

        def ask(request: dict[str, Any]) -> dict[str, Any]:
            return process.ask(request, max(0.0, deadline - time.monotonic()))

        reply = ask(load_request(self._request))
        if "failure" in reply:
            return _outcome_of_failure(Failure(**reply["failure"]))
        self._digest = self._digest or reply["digest"]
        check_unchanged(self._request, self._digest, reply["digest"])
        self._keep_spare()
        reply = ask({"job": "train", "order": order.to_record()})
        while "percent" in reply:
            goes_on = go_on(reply["percent"], reply["loss"])
            reply = ask({"job": "go_on" if goes_on else "stop"})
        self._peak_bytes = max(self._peak_bytes or 0, reply["peak_bytes"])
        return outcome_of(reply["outcome"])

    def _take_process(self) -> ChildProcess:
        spare, self._spare = self._spare, None
        process = None if spare is None else spare.take()
        return start_trainer(self._on_output) if process is None else process

    def _keep_spare(self) -> None:
        """Have one started, unless the host's memory is too short for it; it is no loss when none can be."""
        if self._keeps_spare and self._spare is None and self._has_room():
            with suppress(NotMeasuredError):
                self._spare = SpareChild(self._on_output, start=start_trainer)

    def _has_room(self) -> bool:
        """Whether a spare takes nothing that the training needs: as much as those before, or half of all there is."""
        memory = read_host_memory()
        if card_index(self._request.device) is not None:
            needed = 0
        else:
            needed = memory.total_bytes // 2 if self._peak_bytes is None else self._peak_bytes
        return memory.free_bytes - needed >= SPARE_BYTES


def _outcome_of_failure(failure: Failure) -> Outcome:
    return Outcome(
        state="out_of_memory" if failure.outcome == "oom" else "failed",
        reason=failure.message,
        user_traceback=failure.traceback,
    )


def _outcome_of_death(death: ChildDied, limit_seconds: float | None) -> Outcome:
    if death.kind == "limit":
        return Outcome(state="failed", reason=f"it took longer than a trial may ({limit_seconds:g} s), and was ended")
    return Outcome(state="out_of_memory" if death.out_of_memory else "failed", reason=f"its process {death}")

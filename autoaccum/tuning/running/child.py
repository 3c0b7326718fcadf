"""`python -m autoaccum.tuning.running.child REQUESTS REPLIES PARENT`: describes, times or trains one workload.

One line of JSON asks, one answers, as in `devices.child`. A training is a conversation: at each milestone the child
says where it is, and waits for `go_on` or `stop`. Nothing is measured here, so malloc is left as it is.
"""

from __future__ import annotations

import dataclasses
import gc
import sys
from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from autoaccum.devices.lifeline import Lifeline
from autoaccum.devices.replies import failure_reply, look_where

if TYPE_CHECKING:
    from autoaccum.workload.spec import Workload


def main(arguments: list[str]) -> None:
    """Answer requests until the parent closes its end of the pipe."""
    lifeline = Lifeline(arguments)
    child = Child(lifeline)
    for request in lifeline:
        if request["job"] == "prepare":
            _prepare(request)
        else:
            lifeline.answer(child.answer(request))


class Child:
    """Answers one request after the other; `load` comes first.

    Args:
        lifeline: What a training speaks through before it is done.
    """

    def __init__(self, lifeline: Lifeline) -> None:
        self._lifeline = lifeline
        self._workload: Workload | None = None

    def answer(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """The reply to `request`: `{"failure": ...}` when there is nothing else to tell."""
        jobs = {"load": self._load, "describe": self._describe, "throughput": self._throughput, "train": self._train}
        return jobs[request["job"]](request)

    def _load(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Import the workload, under the same seed for every trial.

        What it makes at its top is so the same in all of them: its data, and the weights of a model that is an
        instance. What a function builds is of the trial's own seed.
        """
        look_where(request)
        try:
            from autoaccum.devices.rehearsal import seed_everything
            from autoaccum.workload.loading import load_workload
            from autoaccum.workload.samples import replace_given

            seed_everything()
            asked = {name: request[name] for name in ("precision", "batchnorm", "optimizer", "multiple_of")}
            self._workload = replace_given(load_workload(request["reference"]), **asked)
        except BaseException as error:
            return failure_reply(error, f"loading {request['reference']}")
        return {"digest": self._workload.digest}

    def _describe(self, request: Mapping[str, Any]) -> dict[str, Any]:
        from autoaccum.tuning.running.describing_job import find_facts
        from autoaccum.tuning.settings import Budget

        assert self._workload is not None
        budget = None if request["budget"] is None else Budget(**request["budget"])
        try:
            facts = find_facts(
                self._workload,
                request["device"],
                request["target_batch"],
                least_batch=request["least_batch"],
                budget=budget,
            )
        except BaseException as error:
            return failure_reply(error, f"building {self._workload.name}")
        return {"facts": dataclasses.asdict(facts)}

    def _throughput(self, request: Mapping[str, Any]) -> dict[str, Any]:
        from autoaccum.tuning.running.throughput_job import ThroughputJob

        assert self._workload is not None
        job: ThroughputJob | None = None
        try:
            job = ThroughputJob(self._workload, request["device"], request["target_batch"])
            return job.run(request["sizes"], lambda size: self._says({"warmed": size}))
        except BaseException as error:
            micro_batch = None if job is None else job.micro_batch
            doing = "making a batch" if micro_batch is None else f"micro-batch {micro_batch}"
            return {**failure_reply(error, doing), "micro_batch": micro_batch}

    def _train(self, request: Mapping[str, Any]) -> dict[str, Any]:
        from autoaccum.devices.host_meter import read_process_memory
        from autoaccum.tuning.running.orders import TrainOrder
        from autoaccum.tuning.running.training_job import train_setting

        assert self._workload is not None
        outcome = train_setting(
            self._workload,
            TrainOrder.of_record(request["order"]),
            lambda percent, loss: self._says({"percent": percent, "loss": loss}),
        )
        return {"outcome": dataclasses.asdict(outcome), "peak_bytes": read_process_memory().peak_bytes}

    def _says(self, reply: Mapping[str, Any]) -> bool:
        """Tell something on the way, and whether to go on; where nobody listens any more, leave."""
        self._lifeline.answer(reply)
        request = self._lifeline.read()
        if request is None:
            raise SystemExit(0)
        return bool(request["job"] == "go_on")


def _prepare(request: Mapping[str, Any]) -> None:
    """Import what every training needs, before there is a workload; what goes wrong here goes wrong again later.

    Neither threads nor a card are touched (see `devices.child`).
    """
    look_where(request)
    with suppress(Exception):
        import torch

        from autoaccum.tuning.running import describing_job, training_job

        del describing_job, training_job
        torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
    gc.freeze()


if __name__ == "__main__":
    main(sys.argv[1:])

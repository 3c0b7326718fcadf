"""What is verified, as it was given: a file, a Workload, or live objects; and what its runs might change."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from torch.optim import Optimizer

from autoaccum.devices.in_place.subjects import LiveObjects, Tried, prepare
from autoaccum.errors import WorkloadError
from autoaccum.planning.subjects import Settings, choose_way
from autoaccum.verification.request import VerifyRequest
from autoaccum.workload.adaptation import adapt, replace_given
from autoaccum.workload.loading import load_workload
from autoaccum.workload.optimizers import check_optimizer
from autoaccum.workload.spec import Workload, no_batch

_SAMPLES_LOOKED_AT = 4
"""For each of the batch."""


@dataclass(frozen=True)
class Subject:
    """What is verified.

    Attributes:
        workload: As it is asked for.
        optimizer: A live optimizer of its very model; None where there is none.
        tried: Everything of the caller's that its runs can reach.
        reference: What the record calls it.
    """

    workload: Workload
    optimizer: Optimizer | None
    tried: Tried
    reference: str


def find_subject(request: VerifyRequest) -> Subject:
    """The subject of a request.

    Raises:
        UsageError: Not exactly one of the ways to give it, or an argument that does not go with it.
        WorkloadError: It is not usable as it stands.
    """
    settings = Settings(
        share=request.target_batch,
        reduction=request.reduction,
        optimizer=request.optimizer,
        worst_of=_looked_at(request.workload, request),
        verb="verify",
    )
    way = choose_way(request.workload, request.parts, settings)
    reference = way if isinstance(way, str) else f"{way.name} (in this process)"
    given: Any = way
    if isinstance(way, str):
        loaded = load_workload(way)
        worst_of = _looked_at(loaded, request)
        given = adapt(loaded, most=request.target_batch, worst_of=worst_of, optimizer=request.optimizer)
    tried = prepare(given, "auto" if isinstance(given, LiveObjects) else "cpu")
    asked = {name: getattr(request, name) for name in ("accumulate", "batchnorm", "multiple_of")}
    workload = replace_given(tried.workload, **asked)
    check_optimizer(None if tried.optimizer is not None else workload.optimizer)
    check_accumulate(workload)
    return Subject(workload, tried.optimizer, dataclasses.replace(tried, workload=workload), reference)


def _looked_at(workload: Any, request: VerifyRequest) -> int | None:
    """Of how many samples of its dataset the longest make the batch; some where a workload has no batch of its own."""
    if request.worst_of is None and isinstance(workload, Workload) and workload.batch is no_batch:
        return _SAMPLES_LOOKED_AT * request.target_batch
    return request.worst_of


def check_accumulate(workload: Workload) -> None:
    """Refuse an `accumulate` that cannot be one.

    Raises:
        WorkloadError: It is no function.
    """
    if workload.accumulate is not None and not callable(workload.accumulate):
        raise WorkloadError(
            f"accumulate is {workload.accumulate!r}",
            hint="write def accumulate(model, micro_batches): the loop that leaves the gradient of an update in .grad",
        )

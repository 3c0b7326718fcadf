"""What a verification is asked, checked before anything starts; and what is verified, as it was given."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from autoaccum.accumulation.schedule import split_evenly
from autoaccum.checks import read_count
from autoaccum.devices.in_place.subjects import LiveObjects, Tried, prepare
from autoaccum.errors import UsageError, WorkloadError
from autoaccum.options import Options
from autoaccum.planning.device_choice import check_device
from autoaccum.planning.subjects import choose_way
from autoaccum.workload.loading import load_workload
from autoaccum.workload.optimizers import check_optimizer
from autoaccum.workload.samples import adapt, replace_given
from autoaccum.workload.spec import Workload, no_batch

_SAMPLES_LOOKED_AT = 4
"""In a dataset, for each of the batch."""


@dataclass(frozen=True, kw_only=True)
class VerifyRequest:
    """The arguments of `autoaccum.verify`, where each is explained; `parts` are those of live objects.

    Raises:
        UsageError: One of them cannot be honoured.
    """

    workload: Any = None
    parts: dict[str, Any] = field(default_factory=dict)
    options: Options = field(default_factory=lambda: Options(device="cpu"))
    accumulate: Any = None
    target_batch: int = 16
    micro_batch: Any = None
    on_event: Callable[[Any], Any] | None = None

    def __post_init__(self) -> None:
        target = read_count(self.target_batch, "target_batch")
        micro = -(-target // 4) if self.micro_batch is None else read_count(self.micro_batch, "micro_batch")
        if micro >= target:
            raise UsageError(
                f"micro_batch is {micro}, target_batch {target}: nothing accumulates",
                hint=f"give a target batch of at least {2 * micro}" if target == 1 else "give a smaller micro-batch",
            )
        object.__setattr__(self, "target_batch", target)
        object.__setattr__(self, "micro_batch", micro)
        if self.options.device == "auto":
            raise UsageError("there is no device 'auto' to verify on", hint="take cpu, cuda or cuda:N")
        check_device(self.options.device)
        if self.on_event is not None and not callable(self.on_event):
            raise UsageError(f"on_event is {self.on_event!r}", hint="give a function of one argument")


def last_window(target: int, micro: int, multiple_of: int = 1) -> tuple[int, ...] | None:
    """The parts of a shorter window, as at the end of an epoch, uneven where that is possible.

    >>> last_window(16, 4), last_window(16, 1), last_window(5, 4)
    ((4, 3), (1, 1), None)
    >>> last_window(16, 4, 2)
    (4, 2)
    """
    if multiple_of > 1:
        counted = last_window(target // multiple_of, micro // multiple_of)
        return None if counted is None else tuple(part * multiple_of for part in counted)
    cut = [tuple(split_evenly(samples, micro)) for samples in range(min(2 * micro, target) - 1, micro, -1)]
    if micro == 1 and target > 2:
        return (1, 1)
    return next((parts for parts in cut if len(set(parts)) > 1), cut[0] if cut else None)


def loaded_window(samples: int, micro: int) -> tuple[int, ...]:
    """The parts as a DataLoader of batches of `micro` gives them.

    >>> loaded_window(16, 6)
    (6, 6, 4)
    """
    whole, left = divmod(samples, micro)
    return (micro,) * whole + ((left,) if left else ())


def find_subject(request: VerifyRequest) -> tuple[Tried, str]:
    """The workload of a request with all of the caller's that its runs can reach, and the name for the record.

    Raises:
        UsageError: Not exactly one of the ways to give it, or an argument that does not go with it.
        WorkloadError: It is not usable as it stands.
    """
    looked_at = _looked_at(request.workload, request)
    options = dataclasses.replace(request.options, worst_of=looked_at, precision=None)  # Of the comparison alone.
    way = choose_way(request.workload, request.parts, options, share=request.target_batch, verb="verify")
    reference = way if isinstance(way, str) else f"{way.name} (in this process)"
    given: Any = way
    if isinstance(way, str):
        loaded = load_workload(way, "verify")
        worst_of = _looked_at(loaded, request)
        given = adapt(loaded, most=request.target_batch, worst_of=worst_of, optimizer=options.optimizer)
    tried = prepare(given, "auto" if isinstance(given, LiveObjects) else "cpu")
    asked = {"batchnorm": options.batchnorm, "multiple_of": options.multiple_of}
    workload = replace_given(tried.workload, accumulate=request.accumulate, **asked)
    check_optimizer(None if tried.optimizer is not None else workload.optimizer)
    if workload.accumulate is not None and not callable(workload.accumulate):
        hint = "write def accumulate(model, micro_batches): the loop that leaves the gradient of an update in .grad"
        raise WorkloadError(f"accumulate is {workload.accumulate!r}", hint=hint)
    return dataclasses.replace(tried, workload=workload), reference


def _looked_at(workload: Any, request: VerifyRequest) -> int | None:
    """Of how many samples of its dataset the longest make the batch; some where a workload has no batch of its own."""
    if request.options.worst_of is None and isinstance(workload, Workload) and workload.batch is no_batch:
        return _SAMPLES_LOOKED_AT * request.target_batch
    return request.options.worst_of

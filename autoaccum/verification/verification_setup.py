"""`verify`: is the accumulated update the full batch's, and if not, why."""

from __future__ import annotations

import dataclasses
import os
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

from autoaccum.accumulation.argument_checks import check_launch
from autoaccum.checks import read_count
from autoaccum.devices.child.interrupts import DelayedSignals
from autoaccum.devices.child.replies import describe_failure, failure_error
from autoaccum.devices.host_memory import read_host_memory
from autoaccum.devices.host_meter import data_limit, read_process_memory
from autoaccum.devices.in_place.live_objects import LiveObjects, Tried, prepare
from autoaccum.devices.in_place.state_keeper import StateKeeper
from autoaccum.errors import AutoaccumError, DoesNotFitError, NotMeasuredError, UsageError, WorkloadError
from autoaccum.options import OptionArguments, Options
from autoaccum.planning.device_choice import check_device
from autoaccum.planning.plan_setup import choose_way
from autoaccum.training.seeds import preserve_rng_state
from autoaccum.verification.verification_result import Event, Verification
from autoaccum.verification.verifier import Verifier
from autoaccum.workload.loading import load_workload
from autoaccum.workload.optimizers import check_optimizer
from autoaccum.workload.samples import apply_settings, replace_fields
from autoaccum.workload.spec import Workload, no_batch
from autoaccum.workload.tracebacks import blame_exit

if TYPE_CHECKING:
    from torch import nn
    from typing_extensions import Unpack

_SAMPLES_LOOKED_AT = 4
"""In a dataset, for each of the batch."""


def verify(
    workload: str | os.PathLike[str] | Workload | None = None,
    *,
    target_batch: int = 16,
    micro_batch: int | None = None,
    model: nn.Module | None = None,
    batch: Any = None,
    loss: Any = None,
    criterion: Any = None,
    weight: Callable[[Any], Any] | None = None,
    split: Callable[[Any, list[int]], Any] | None = None,
    size: Callable[[Any], int] | None = None,
    reduction: str | None = None,
    accumulate: Callable[[nn.Module, list[Any]], Any] | None = None,
    on_event: Callable[[Event], Any] | None = None,
    **options: Unpack[OptionArguments],
) -> Verification:
    """Compare an update accumulated in micro-batches with the full batch's; where they differ, find out why.

    Both begin from equal copies of model, criterion and optimizer and draw the same random numbers; loss, every
    gradient, every buffer and every parameter after one update are compared, for a whole window and for a shorter one,
    as at the end of an epoch. Copies are run; random states and modules that the loss names are put back.
    What the caller's own code counts or collects in globals and closures is the caller's.

    Args:
        workload: `model.py`, `model.py:name` or `package.module:name`; or a `Workload`.
        target_batch: Samples of the full batch.
        micro_batch: The most samples to run at once; a quarter of the target when None.
        model: A live model, in place of a workload.
        batch: For it, `batch(size)`; or a batch to be repeated and cut to size.
        loss: For it, `loss(model, batch)`, or a criterion.
        criterion: For it, `criterion(outputs, targets)`, in place of `loss`.
        weight: For it, `weight(batch)`: what the mean in `loss` divides by; the number of samples when None.
        split: For it, `split(batch, sizes)`: a list of parts with so many samples each, where samples are not rows of
            tensors; `size` goes with it.
        size: For it, `size(batch)`: the number of its samples.
        reduction: For it, `mean` (when None) or `sum`.
        accumulate: `accumulate(model, micro_batches)`: a loop of your own that leaves the gradient of an update in
            `.grad`; it is held against the full batch as well. A workload may have one of its own.
        on_event: Told of every step, with a record of `autoaccum.verification.verification_result`.
        options: As in `autoaccum.options.Options`, as far as they concern a verification: `optimizer` (a live one is
            copied with its state), `precision` (float64 when None, whatever the workload trains in; float32 where that
            does not run, which is said), `batchnorm`, `multiple_of`, `worst_of` and `device` (the CPU when None).

    Raises:
        UsageError: An argument cannot be honoured.
        WorkloadError: The workload is not usable as it stands.
        NotMeasuredError: Memory ran out, or something could not be put back.
    """
    check_launch()
    began = time.monotonic()
    target, micro = _read_sizes(target_batch, micro_batch)
    given: Any = {"device": "cpu", **options}
    asked = Options.of("verify", given)
    if asked.device == "auto":
        raise UsageError("there is no device 'auto' to verify on", hint="take cpu, cuda or cuda:N")
    check_device(asked.device)
    parts = {"model": model, "batch": batch, "loss": loss, "criterion": criterion, "weight": weight}
    parts |= {"split": split, "size": size, "reduction": reduction}

    def work(interruptions: DelayedSignals) -> Verification:
        with warnings.catch_warnings(), _within_memory() if from_file else nullcontext():
            warnings.simplefilter("ignore")
            with interruptions.window():
                return _run(Verifier(tried, reference, asked, target, micro, on_event), began)

    with preserve_rng_state(), blame_exit("the workload"):
        tried, reference = _find_subject(workload, parts, asked, accumulate, target)
        from_file = isinstance(workload, (str, os.PathLike))
        return StateKeeper(tried, at_once=True).run(work)


def _read_sizes(target_batch: Any, micro_batch: Any) -> tuple[int, int]:
    target = read_count(target_batch, "target_batch")
    micro = -(-target // 4) if micro_batch is None else read_count(micro_batch, "micro_batch")
    if micro >= target:
        raise UsageError(
            f"micro_batch is {micro}, target_batch {target}: nothing accumulates",
            hint=f"give a target batch of at least {2 * micro}" if target == 1 else "give a smaller micro-batch",
        )
    return target, micro


def _find_subject(
    given: Any, parts: dict[str, Any], options: Options, accumulate: Any, target: int
) -> tuple[Tried, str]:
    """The workload with all of the caller's that its runs can reach, and the name for the record.

    Raises:
        UsageError: Not exactly one of the ways to give it, or an argument that does not go with it.
        WorkloadError: It is not usable as it stands.
    """
    alone = dataclasses.replace(options, worst_of=_looked_at(given, options, target), precision=None)
    way = choose_way(given, parts, alone, share=target, verb="verify")
    found: Any = way
    reference = way if isinstance(way, str) else f"{way.name} (in this process)"
    if isinstance(way, str):
        loaded = load_workload(way, "verify")
        worst_of = _looked_at(loaded, options, target)
        found = apply_settings(loaded, most=target, worst_of=worst_of, optimizer=options.optimizer)
    tried = prepare(found, "auto" if isinstance(found, LiveObjects) else "cpu")
    asked = {"batchnorm": options.batchnorm, "multiple_of": options.multiple_of}
    workload = replace_fields(tried.workload, accumulate=accumulate, **asked)
    check_optimizer(None if tried.optimizer is not None else workload.optimizer)
    if workload.accumulate is not None and not callable(workload.accumulate):
        hint = "write def accumulate(model, micro_batches): the loop that leaves the gradient of an update in .grad"
        raise WorkloadError(f"accumulate is {workload.accumulate!r}", hint=hint)
    return dataclasses.replace(tried, workload=workload), reference


def _looked_at(workload: Any, options: Options, target: int) -> int | None:
    """Of how many samples of its dataset the longest make the batch; some where a workload has no batch of its own."""
    if options.worst_of is None and isinstance(workload, Workload) and workload.batch is no_batch:
        return _SAMPLES_LOOKED_AT * target
    return options.worst_of


@contextmanager
def _within_memory() -> Iterator[None]:
    """Have the allocator refuse what the machine does not have, before the kernel kills this process for it."""
    try:
        limit_bytes = read_process_memory().data_bytes + read_host_memory().free_bytes
    except NotMeasuredError:
        limit_bytes = None
    with data_limit(limit_bytes):
        yield


def _run(verifier: Verifier, began: float) -> Verification:
    """Run it; whatever is no error of ours is told as what it means."""
    less = "verify with a smaller --target-batch, as 4 with --micro-batch 2"
    try:
        return verifier.run(began)
    except DoesNotFitError as error:
        raise NotMeasuredError(error.message, hint=less) from error
    except AutoaccumError:
        raise
    except Exception as error:
        failure = describe_failure(error, "the comparison")
        if failure.outcome == "oom":
            raise NotMeasuredError(failure.message, hint=less) from error
        raise failure_error(failure, "this machine") from error

"""`verify`: is the accumulated update the full batch's, and if not, why."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

from autoaccum.accumulation.ranks import check_launch
from autoaccum.devices.host_memory import read_host_memory
from autoaccum.devices.host_meter import data_limit, read_process_memory
from autoaccum.devices.in_place.keeper import StateKeeper
from autoaccum.devices.interruptions import Interruptions
from autoaccum.devices.recording import describe_failure, failure_error
from autoaccum.errors import AutoaccumError, DoesNotFitError, NotMeasuredError
from autoaccum.options import OptionArguments, Options
from autoaccum.training.seeds import kept_randomness
from autoaccum.verification.records import Event, Verification
from autoaccum.verification.request import VerifyRequest, find_subject
from autoaccum.verification.verifier import Verifier
from autoaccum.workload.tracebacks import exit_blamed

if TYPE_CHECKING:
    from torch import nn
    from typing_extensions import Unpack

    from autoaccum.workload.spec import Workload


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
        on_event: Told of every step, with a record of `autoaccum.verification.records`.
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
    given: Any = {"device": "cpu", **options}
    parts = {"model": model, "batch": batch, "loss": loss, "criterion": criterion, "weight": weight}
    request = VerifyRequest(
        workload=workload,
        parts={**parts, "split": split, "size": size, "reduction": reduction},
        options=Options.of("verify", given),
        accumulate=accumulate,
        target_batch=target_batch,
        micro_batch=micro_batch,
        on_event=on_event,
    )
    with kept_randomness(), exit_blamed("the workload"):
        return _verify(request, began)


def _verify(request: VerifyRequest, began: float) -> Verification:
    tried, reference = find_subject(request)
    from_file = isinstance(request.workload, (str, os.PathLike))

    def work(interruptions: Interruptions) -> Verification:
        with warnings.catch_warnings(), _within_memory() if from_file else nullcontext():
            warnings.simplefilter("ignore")
            with interruptions.window():
                return _run(Verifier(request, tried, reference), began)

    return StateKeeper(tried, at_once=True).run(work)


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

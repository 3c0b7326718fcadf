"""Set up a verification: resolve the workload, and restore random states afterwards."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from autoaccum.accumulation.rng_state import preserve_rng_state
from autoaccum.checks import check_alone, read_count
from autoaccum.devices.child.failures import describe_failure, failure_error
from autoaccum.devices.device_choice import check_device
from autoaccum.errors import AutoaccumError, DoesNotFitError, NotMeasuredError, UsageError, WorkloadError
from autoaccum.options import Options
from autoaccum.planning.plan_setup import resolve_workload
from autoaccum.sources.loading import load_workload
from autoaccum.sources.optimizers import check_optimizer
from autoaccum.sources.samples import apply_spec, replace_fields
from autoaccum.sources.workload import Workload, no_batch
from autoaccum.tracebacks import blame_exit
from autoaccum.verification.verification_result import Event, Verification
from autoaccum.verification.verifier import Verifier

if TYPE_CHECKING:
    from torch import nn

_LESS = "verify with a smaller --target-batch, such as 4 with --micro-batch 2"
_CANDIDATES_PER_SAMPLE = 4
"""Dataset samples looked at for each sample of the batch, of which the longest are taken."""


def run_verification(
    workload: str | os.PathLike[str] | Workload | None,
    options: Options,
    *,
    target_batch: int,
    micro_batch: int | None = None,
    live: Mapping[str, Any] | None = None,
    accumulate: Callable[[nn.Module, list[Any]], Any] | None = None,
    on_event: Callable[[Event], Any] | None = None,
) -> Verification:
    """Compare what `autoaccum.verify` is asked to compare; its arguments are explained there.

    Args:
        workload: A reference, a Workload, or None where live objects are given.
        options: How the workload is to run; the device is not `auto`.
        target_batch: Samples of the full batch.
        micro_batch: The most samples to run at once; a quarter of the target when None.
        live: Live objects by the names of `autoaccum.verify`'s arguments; those not given are None or left out.
        accumulate: The caller's own loop.
        on_event: Called with each event of `autoaccum.verification.verification_result`.

    Raises:
        UsageError, WorkloadError, NotMeasuredError: As `autoaccum.verify`.
    """
    check_alone("verify", "start it once, without torchrun: --world-size 2 starts two ranks itself")
    began = time.monotonic()
    target = read_count(target_batch, "target_batch")
    micro = -(-target // 4) if micro_batch is None else read_count(micro_batch, "micro_batch")
    if micro >= target:
        raise UsageError(
            f"micro_batch is {micro}, target_batch {target}: nothing accumulates",
            hint=f"give a target batch of at least {2 * micro}" if target == 1 else "give a smaller micro-batch",
        )
    if options.device == "auto":
        raise UsageError("there is no device 'auto' to verify on", hint="take cpu, cuda or cuda:N")
    check_device(options.device)
    if options.world_size > 1 and options.device != "cpu":
        raise UsageError(
            f"world_size is {options.world_size} on {options.device}: ranks are compared on the CPU",
            hint="leave --device out",
        )
    if options.world_size > target:
        raise UsageError(
            f"world_size is {options.world_size}, target_batch {target}: a rank has no sample",
            hint="give a larger target batch",
        )

    with preserve_rng_state(), blame_exit("the workload"):
        tried, reference = _prepare(workload, live or {}, options, accumulate, target)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return _run(Verifier(tried, reference, options, target, micro, on_event), began)


def _prepare(
    given: Any, live: Mapping[str, Any], options: Options, accumulate: Any, target: int
) -> tuple[Workload, str]:
    """Return the workload and its name for the record.

    Raises:
        UsageError: The workload is given in no way or in several, or an argument does not go with it.
        WorkloadError: The workload cannot be used.
    """
    spec = options.spec
    alone = options.with_spec(worst_of=_worst_of(given, options, target), precision=None)
    way = resolve_workload(given, live, alone, share=target, verb="verify")
    if isinstance(way, str):
        reference, loaded = way, load_workload(way)
        own = {"worst_of": _worst_of(loaded, options, target), "optimizer": spec.get("optimizer")}
        found = apply_spec(loaded, own, largest_batch=target)
    else:
        reference, found = f"{way.name} (made in code)", way
    requested = {name: spec.get(name) for name in ("batchnorm", "coupled", "multiple_of")}
    workload = replace_fields(found, accumulate=accumulate, **requested)
    check_optimizer(workload.optimizer)
    if workload.accumulate is not None and not callable(workload.accumulate):
        hint = "write def accumulate(model, micro_batches): the loop that leaves the gradient of an update in .grad"
        raise WorkloadError(f"accumulate is {workload.accumulate!r}", hint=hint)
    return workload, reference


def _worst_of(workload: Any, options: Options, target: int) -> int | None:
    """Return how many dataset samples to take the longest from; None where the workload's own batch is used."""
    if "worst_of" not in options.spec and isinstance(workload, Workload) and workload.batch is no_batch:
        return _CANDIDATES_PER_SAMPLE * target
    return options.spec.get("worst_of")


def _run(verifier: Verifier, began: float) -> Verification:
    """Run the verification; any other exception is raised as the error that explains it."""
    try:
        return verifier.run(began)
    except AutoaccumError as error:
        if isinstance(error, DoesNotFitError):
            raise NotMeasuredError(error.message, hint=_LESS) from error
        raise
    except Exception as error:
        failure = describe_failure(error, "the comparison")
        if failure.outcome == "oom":
            raise NotMeasuredError(failure.message, hint=_LESS) from error
        raise failure_error(failure, "this machine") from error

"""`verify`: compare the update of a whole and of a shorter window, and search for the causes of a difference."""

from __future__ import annotations

import gc
import math
import os
import time
import warnings
from collections.abc import Callable, Mapping
from contextlib import closing, nullcontext
from typing import Any, cast

from torch import nn

from autoaccum.accumulation.backpropagation import has_weight
from autoaccum.accumulation.cuts import Cuts
from autoaccum.accumulation.rng_state import RngState, preserve_rng_state
from autoaccum.accumulation.schedule import check_multiple, make_schedule, slices, split_evenly
from autoaccum.checks import check_alone, read_count
from autoaccum.devices.budget import Deadline
from autoaccum.devices.child.failures import describe_failure, failure_error
from autoaccum.devices.device_choice import check_named_device
from autoaccum.devices.inspection import describe_environment, name_loss
from autoaccum.devices.trial_run import seed_everything
from autoaccum.errors import AutoaccumError, DoesNotFitError, NotMeasuredError, UsageError, WorkloadError, first_line
from autoaccum.messages import Message, message
from autoaccum.options import Options
from autoaccum.planning.plan_setup import resolve_workload
from autoaccum.sources.batches import split_batch
from autoaccum.sources.samples import apply_spec, replace_fields, take_small_batch
from autoaccum.sources.source import FileSource
from autoaccum.sources.weight_candidates import shorten
from autoaccum.sources.workload import Workload, no_batch
from autoaccum.tracebacks import blame_exit, user_code
from autoaccum.verification.cause_search import find_causes
from autoaccum.verification.fixture import Fixture, Precision
from autoaccum.verification.paired_runs import PairedRuns
from autoaccum.verification.rank_team import RankTeam
from autoaccum.verification.update_comparison import is_finite, largest_entry
from autoaccum.verification.verification_result import (
    Cause,
    Compared,
    Comparison,
    Diagnosing,
    Event,
    Method,
    Verification,
    VerificationStarted,
    Window,
)

_NOT_FINITE = "look for a division by zero, the root or log of 0, or a mean over nothing"
_SINGLE = "if BatchNorm cannot run a single sample, give --batchnorm exact, or --micro-batch 2"

SEARCH_SECONDS = 60.0
"""How long causes are searched for without a time limit."""
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
    """Compare what `autoaccum.verify` is asked to compare; its arguments and errors are explained there.

    `live` has the live objects by the names of its arguments; those not given are None or left out.
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
    check_named_device(options.device)
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
        prepared, reference = _prepare(workload, live or {}, options, accumulate, target)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return _run(_Verifier(prepared, reference, options, target, micro, on_event), began)


def _prepare(
    given: Any, live: Mapping[str, Any], options: Options, accumulate: Any, target: int
) -> tuple[Workload, str]:
    """Return the workload and its name for the record."""
    alone = options.with_spec(longest_of=_longest_of(given, options, target), precision=None)
    source = resolve_workload(given, live, alone, rank_samples=target, verb="verify")
    if isinstance(source, FileSource):
        loaded = source.load()
        workload = apply_spec(loaded, {"longest_of": _longest_of(loaded, options, target)}, largest_batch=target)
        reference = source.name
    else:
        workload, reference = source, f"{source.name} (made in code)"
    requested = {name: options.spec.get(name) for name in ("batchnorm", "coupled", "multiple_of")}
    workload = replace_fields(workload, accumulate=accumulate, **requested)
    if workload.accumulate is not None and not callable(workload.accumulate):
        hint = "write def accumulate(model, micro_batches): the loop that leaves the gradient of an update in .grad"
        raise WorkloadError(f"accumulate is {workload.accumulate!r}", hint=hint)
    return workload, reference


def _longest_of(workload: Any, options: Options, target: int) -> int | None:
    """Return how many dataset samples to take the longest from; None where the workload's own batch is used."""
    if "longest_of" not in options.spec and isinstance(workload, Workload) and workload.batch is no_batch:
        return _CANDIDATES_PER_SAMPLE * target
    return options.spec.get("longest_of")


def _run(verifier: _Verifier, began: float) -> Verification:
    """Run the verification; any other exception is raised as the error that explains it."""
    try:
        return verifier.run(began)
    except DoesNotFitError as error:  # On a rank.
        raise NotMeasuredError(error.message, hint=_LESS) from error
    except AutoaccumError:
        raise
    except Exception as error:
        failure = describe_failure(error, "the comparison")
        if failure.outcome == "oom":
            raise NotMeasuredError(failure.message, hint=_LESS) from error
        raise failure_error(failure, "this machine") from error


class _Verifier:
    """Verifies a workload, which the record calls `reference`, in parts of at most `micro` samples."""

    def __init__(
        self,
        workload: Workload,
        reference: str,
        options: Options,
        target: int,
        micro: int,
        on_event: Callable[[Event], Any] | None = None,
    ) -> None:
        self._workload, self._reference, self._options = workload, reference, options
        self._target, self._notify = target, on_event or (lambda event: None)
        self._comparisons: list[Comparison] = []
        self._unequal: list[tuple[PairedRuns, Comparison]] = []
        self._causes: list[Cause] = []
        self._notes: list[Message] = []
        self._untested: tuple[str, ...] = ()
        self._multiple_of = multiple = workload.multiple_of or 1
        check_multiple(target, multiple, "the target batch")
        self._micro_batch = max(micro // multiple, 1) * multiple
        if self._micro_batch == target:
            raise UsageError(
                f"micro-batches must be multiples of {multiple}, but there are only {multiple} samples",
                hint=f"give a target batch of {2 * multiple}",
            )

    def run(self, began: float) -> Verification:
        """Compare, and find out why something differs; `began` is the `time.monotonic` of the call."""
        ranks = self._options.world_size
        self._team: RankTeam | None
        with closing(RankTeam(ranks)) if ranks > 1 else nullcontext() as self._team:
            seed_everything()
            self._batch = take_small_batch(self._workload, self._target)
            self._random = RngState()
            runs = self._window_runs()
            started = self._describe(runs.fixture)
            self._notify(started)
            self._compare(runs, "whole")
            self._compare_uneven(runs)
            self._compare_last(runs.fixture)
            self._compare_tokens(runs.fixture)
            self._search()
            return self._record(runs.fixture, started, began)

    def _describe(self, fixture: Fixture) -> VerificationStarted:
        model, _ = fixture.fresh()
        parameters = sum(parameter.numel() for parameter in model.parameters())
        name = type(model).__name__
        return VerificationStarted(self._workload.name, name, parameters, fixture.precision, str(fixture.device))

    def _window_runs(self) -> PairedRuns:
        """Return the runs of the whole window; in float32 where float64 is only the default and does not run."""
        precision = self._options.spec.get("precision")
        try:
            return self._runs_in(cast("Precision", precision or "fp64"))
        except WorkloadError as error:
            if precision is not None:
                raise
            failure = error
        runs = self._runs_in("fp32")
        self._note("verified_in_float32", error=first_line(failure.message))
        return runs

    def _runs_in(self, precision: Precision) -> PairedRuns:
        """Return the runs of the whole window in a precision; raise NotMeasuredError if all gradients are zero."""
        self._random.restore()  # Each precision begins with the same weights.
        with user_code("model()"):
            fixture = Fixture(self._workload, precision=precision, device=self._options.device)
        runs = self._finite_runs(fixture, self._batch, self._parts_of(self._target))
        if largest_entry(runs.pair().full.gradients.values()) == 0:
            raise NotMeasuredError(
                f"every gradient of batch({self._target}) is zero, so there is nothing to compare",
                hint="return samples from batch(size) that give the model a gradient",
            )
        return runs

    def _finite_runs(self, fixture: Fixture, batch: Any, sizes: tuple[int, ...]) -> PairedRuns:
        """Return the runs of a batch.

        Raises:
            WorkloadError: The full batch does not run, counts for nothing, or its loss or gradient is not finite.
        """
        runs, samples = self._paired(fixture, batch, sizes), sum(sizes)
        with user_code("weight(batch)"):
            weight = runs.objective.weight(runs.batch)
        if not has_weight(weight):
            raise WorkloadError(
                f"weight(batch) of {samples} samples is 0, so no sample counts",
                hint="make batch(size) return samples that count",
            )
        try:
            full = runs.pair().full
        except WorkloadError as error:
            if max(sizes) > 1:
                raise
            raise WorkloadError(error.message, hint=_SINGLE) from error
        if not math.isfinite(full.loss):
            raise WorkloadError(f"the loss of batch({samples}) is {full.loss}", hint=_NOT_FINITE)
        for name, gradient in full.gradients.items():
            if not is_finite(gradient):
                raise WorkloadError(f"the gradient of {name} from batch({samples}) is not finite", hint=_NOT_FINITE)
        return runs

    def _parts_of(self, samples: int) -> tuple[int, ...]:
        """Return the parts of all ranks in order."""
        schedule = make_schedule(
            samples, self._micro_batch, world_size=self._options.world_size, multiple_of=self._multiple_of
        )
        return tuple(size for parts in schedule.ranks for size in parts if size)

    def _paired(self, fixture: Fixture, batch: Any, sizes: tuple[int, ...]) -> PairedRuns:
        return PairedRuns(fixture, batch, sizes, team=self._team)

    def _compare_uneven(self, runs: PairedRuns) -> None:
        """Compare the batch with samples shortened where all are equally long: no wrong weight shows in these."""
        if runs.objective.reduction == "sum" or runs.objective.coupled or self._unequal:
            return
        new_labels = runs.fixture.device.type == "cpu"  # A loss that does not ignore them would end a GPU's context.
        ways = shorten(self._batch, runs.sizes, new_labels=new_labels)
        for way in ways:
            if way.batch is None:
                continue
            try:
                shortened = self._finite_runs(runs.fixture, way.batch, runs.sizes)
            except AutoaccumError:  # The loss may not take it.
                continue
            self._note("samples_shortened", paths=list(way.paths))
            self._compare(shortened, "uneven")
            return
        self._untested = ways[-1].paths if ways and ways[-1].is_known else ()

    def _compare_last(self, fixture: Fixture) -> None:
        """Compare a shorter window; one that does not run is left out with a note.

        BatchNorm refuses a single sample, and state that forward keeps may have the size of the parts before.
        """
        sizes = last_window(self._target, self._micro_batch, self._multiple_of)
        if sizes is None:
            return
        samples = sum(sizes)
        part, _ = split_batch(self._batch, [samples, self._target - samples])
        runs = self._paired(fixture, part, sizes if self._team is None else self._parts_of(samples))
        try:
            runs.pair()
        except WorkloadError as error:
            if not self._unequal:
                hint = "where samples come in groups of N, give --multiple-of N"
                raise WorkloadError(error.message, hint=hint, user_traceback=error.user_traceback) from error
            self._note("window_left_out", parts=list(runs.sizes), error=first_line(error.message))
        else:
            self._compare(runs, "last")
            return
        gc.collect()  # Up to torch 2.12, a checkpoint whose forward failed leaves its hooks until its frame is gone.

    def _compare_tokens(self, fixture: Fixture) -> None:
        """Compare micro-batches within a token budget, one at least of shorter samples, with the padded batch."""
        workload, costs, batch = self._workload, self._workload.token_costs, self._batch
        is_joint = workload.coupled or workload.batchnorm in ("exact", "running") or self._multiple_of > 1
        if is_joint or self._unequal or not workload.counts_tokens:
            return
        with user_code("lengths(batch)"):
            lengths = costs.of_batch(batch)
        longest = max(lengths)
        if min(lengths) == longest:
            self._note("tokens_alike", tokens=longest)
            return
        cuts = Cuts(1, costs, workload.objective.wrap_batch)
        for count in range(self._micro_batch, 0, -1):
            cut = cuts.cut(batch, lengths, count * longest)
            in_order = [list(range(len(lengths)))[part] for part in slices(cut.sizes)]
            if any(max(lengths[at] for at in part) < longest for part in cut.indices or in_order):
                break
        runs = PairedRuns(fixture, cut.sort(batch), cut.sizes, team=self._team, micro_tokens=count * longest)
        self._compare_runs(runs, "tokens")

    def _compare(self, runs: PairedRuns, window: Window) -> None:
        """Compare the Accumulator, and the workload's own loop where it has one, with the full batch."""
        self._compare_runs(runs, window)
        if self._workload.accumulate is None:
            return
        if len(runs.sizes) % runs.world_size:
            self._note("loop_left_out", parts=list(runs.sizes))
            return
        self._compare_runs(runs.by_loop(), window)

    def _compare_runs(self, runs: PairedRuns, window: Window) -> None:
        differences = runs.pair().differences
        comparison = Comparison(method=runs.method, window=window, micro_batches=runs.sizes, differences=differences)
        self._comparisons.append(comparison)
        self._notify(Compared(comparison))
        if runs.mismatch is not None:
            self._note("random_neutral", method=runs.method, parts=list(runs.sizes), reason=runs.mismatch)
        if not comparison.equal:
            self._unequal.append((runs, comparison))

    def _search(self) -> None:
        """Search for the causes of all differences, within the time limit."""
        deadline = Deadline(self._options.time_limit or SEARCH_SECONDS)
        explained: set[Method] = set()
        for runs, comparison in self._unequal:
            runs.fixture.deadline = deadline
            if comparison.method not in explained and self._diagnose(runs, comparison, deadline):
                explained.add(comparison.method)  # A shorter window has the causes of the whole one.

    def _diagnose(self, runs: PairedRuns, comparison: Comparison, deadline: Deadline) -> bool:
        """Add the causes of a difference, and return whether all are known."""
        uses_host_rng = runs.pair().uses_host_rng
        if not uses_host_rng:
            self._notify(Diagnosing(comparison, deadline.limit_seconds or SEARCH_SECONDS))
        try:
            causes = find_causes(runs, comparison.window)
        except (WorkloadError, NotMeasuredError) as error:
            self._note("search_failed", error=first_line(error.message))
            return False
        if uses_host_rng and not any(cause.proved for cause in causes):
            raise NotMeasuredError(
                "parts draw other random numbers from Python's or NumPy's generators than the full batch does, and"
                " these cannot be replayed",
                hint="draw with torch (torch.rand, torch.randperm), whose numbers are replayed, or draw in batch(size)",
            )
        earlier = {(cause.kind, cause.where) for cause in self._causes}
        self._causes += [cause for cause in causes if (cause.kind, cause.where) not in earlier]
        return not any(cause.kind == "unknown" for cause in causes)

    def _note(self, code: str, **facts: Any) -> None:
        note = message(code, **facts)
        if note not in self._notes:
            self._notes.append(note)

    def _record(self, fixture: Fixture, started: VerificationStarted, began: float) -> Verification:
        workload, objective = self._workload, self._workload.objective
        return Verification(
            equivalent=not self._unequal and not self._untested,
            target_batch=self._target,
            micro_batch=self._micro_batch,
            precision=started.precision,
            device=started.device,
            batchnorm=workload.batchnorm,
            coupled=workload.coupled,
            tolerance=fixture.tolerance,
            comparisons=tuple(self._comparisons),
            causes=tuple(self._causes),
            notes=tuple(self._notes),
            workload={
                "reference": self._reference,
                "digest": workload.digest,
                "name": started.name,
                "model": started.model,
                "parameters": started.parameters,
                "loss": name_loss(workload),
                "reduction": objective.reduction,
                "weight": objective.divisor_label,
                "longest_of": workload.longest_of,
            },
            environment=describe_environment(fixture.device),
            world_size=self._options.world_size,
            untested=() if self._unequal else self._untested,
            neutral_random=any(note.code == "random_neutral" for note in self._notes),
            seconds=time.monotonic() - began,
        )


def last_window(target: int, micro: int, multiple_of: int = 1) -> tuple[int, ...] | None:
    """Return the parts of a shorter window, as at the end of an epoch; uneven where possible.

    >>> last_window(16, 4), last_window(16, 1), last_window(5, 4)
    ((4, 3), (1, 1), None)
    >>> last_window(16, 4, 2)
    (4, 2)
    """
    if multiple_of > 1:
        groups = last_window(target // multiple_of, micro // multiple_of) or ()
        return tuple(part * multiple_of for part in groups) or None
    if micro == 1 and target > 2:
        return (1, 1)
    windows = [split_evenly(samples, micro) for samples in range(min(2 * micro, target) - 1, micro, -1)]
    return next((parts for parts in windows if len(set(parts)) > 1), windows[0] if windows else None)

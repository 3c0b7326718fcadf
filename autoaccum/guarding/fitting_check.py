"""Whether a schedule fits, for a test that says it does: and where it does not, everything that explains it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

from autoaccum.accumulation.schedule import format_parts
from autoaccum.devices.checkout import Checkout
from autoaccum.errors import AutoaccumError, DoesNotFitError, UsageError
from autoaccum.guarding.cases import check_case
from autoaccum.guarding.comparing import compare
from autoaccum.guarding.judging import incomparable
from autoaccum.guarding.lock_file import read_lock
from autoaccum.guarding.measuring import measure, request_of
from autoaccum.guarding.project import Project, find_project
from autoaccum.guarding.records import Case, Measurement
from autoaccum.guarding.tolerance import Tolerance
from autoaccum.units import format_bytes
from autoaccum.workload.module_names import numberless

_MOST_MODULES = 5


def check_fits(workload: str, folder: Path, **asked: Any) -> str:
    """Measure what is asked for, and say why it does not fit.

    Args:
        workload: A file, absolute, with `:name` where it has one; or a module.
        folder: Where the project is looked for, upwards.
        asked: Fields of `Case`.

    Returns:
        Lines that say what is needed, the bound, where the memory goes, and what grew since the lock; empty where it
        fits.

    Raises:
        UsageError, WorkloadError, NotMeasuredError: It cannot be measured.
        DoesNotFitError: It does not even fit the machine that would measure it.
    """
    unknown = sorted(asked.keys() - {field.name for field in fields(Case)})
    if unknown:
        raise UsageError(f"there is no argument {unknown[0]!r}", hint="take those of autoaccum.plan, and micro_batch")
    project = find_project(folder)
    case = check_case(Case(workload=_reference(workload, project), **asked))
    schedule = None if case.micro_batch is None else request_of(case).schedule(case.micro_batch).micro_batches
    try:
        measured = measure(case, Checkout(project.folder), micro_batches=schedule).measurement
    except DoesNotFitError as error:
        measured = _of_single_samples(case, project, error)
    if measured.fits:
        return ""
    return "\n".join([_shortage(case, measured), *_where_it_goes(measured), *_since_the_lock(case, project)])


def _reference(workload: str, project: Project) -> str:
    """As the lock names it; a file outside of the project by its whole path."""
    try:
        return project.reference(workload, project.folder)
    except UsageError:
        return workload


def _of_single_samples(case: Case, project: Project, error: DoesNotFitError) -> Measurement:
    """What the smallest micro-batches take, of which not even one fits.

    Raises:
        DoesNotFitError: That cannot be measured; `error`, as it came.
    """
    try:
        schedule = request_of(case).schedule(1).micro_batches
        return measure(case, Checkout(project.folder), micro_batches=schedule).measurement
    except AutoaccumError:
        raise error from None


def _shortage(case: Case, measured: Measurement) -> str:
    """What is needed, and the bound."""
    needed = format_bytes(measured.peak_bytes)
    if measured.kind == "measured":
        needed = f"more than {needed}"
    if measured.least_bytes is not None and measured.least_bytes < measured.peak_bytes:
        needed += f", and cannot do with less than {format_bytes(measured.least_bytes)}"
    bound = f"the limit is {case.memory}" if case.memory else f"{format_bytes(measured.limit_bytes)} are there"
    fitting = f"the largest that fits is {measured.largest}" if measured.largest else "not even 1 fits"
    parts = format_parts(measured.micro_batches)
    return (
        f"{case.workload} on {case.gpu or case.device} does not fit: micro-batch {measured.micro_batch} "
        f"({parts}, {measured.precision}) takes {needed}; {bound}, {fitting}"
    )


def _where_it_goes(measured: Measurement) -> Iterator[str]:
    """The categories and the modules that hold most at the peak; nothing where that was not told apart."""
    if not measured.categories:
        return
    of = f" of {measured.module}" if measured.module else ""
    yield f"where the memory goes, in {measured.phase} at {measured.op}{of}:"
    ordered = sorted(measured.categories.items(), key=lambda item: -item[1])
    yield from (f"  {format_bytes(held):>9}  {category.replace('_', ' ')}" for category, held in ordered)
    modules: dict[tuple[str, str], int] = defaultdict(int)
    for holding in measured.holdings:
        if holding.module or holding.kind:
            name = numberless(holding.module) or f"the {holding.kind} itself"
            modules[holding.category.replace("_", " "), name] += holding.bytes
    most = sorted(modules.items(), key=lambda item: (-item[1], item[0]))[:_MOST_MODULES]
    yield "the modules that hold most:"
    yield from (f"  {format_bytes(held):>9}  {category} of {name}" for (category, name), held in most)


def _since_the_lock(case: Case, project: Project) -> Iterator[str]:
    """What grew since an entry of the same workload and card was locked; nothing where none tells."""
    try:
        entries = read_lock(project.lock).entries
        same = [other for other in entries if _alike(other, case)]
        if not same:
            return
        before = entries[same[0]]
        now = measure(same[0], Checkout(project.folder), micro_batches=before.micro_batches)
        told = incomparable(same[0], before, now, "") or compare(same[0], before, now, Tolerance())
    except AutoaccumError as error:
        if project.lock.exists():
            yield f"what grew since {project.lock.name} is not known: {error.message}"
        return
    reason = next(iter(told.reasons), "nothing grew")
    yield f"since {project.lock.name}: {told.explanation or reason}"


def _alike(one: Case, other: Case) -> bool:
    names = ("workload", "gpu", "device", "precision", "optimizer", "batchnorm")
    return all(getattr(one, name) == getattr(other, name) for name in names)

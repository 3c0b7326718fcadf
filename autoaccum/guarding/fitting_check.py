"""Whether a schedule fits, for a test that says it does: and where it does not, everything that explains it."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import Field, fields
from pathlib import Path
from typing import Any

from autoaccum.accumulation.schedule import format_parts
from autoaccum.devices.checkout import Checkout
from autoaccum.devices.explanation import Holding
from autoaccum.errors import AutoaccumError, DoesNotFitError, UsageError
from autoaccum.guarding.asked.cases import case_name, check_case
from autoaccum.guarding.asked.project import Project, find_project
from autoaccum.guarding.asked.tolerance import Tolerance
from autoaccum.guarding.locks.lock_file import read_lock
from autoaccum.guarding.measuring.measuring import measure, request_of
from autoaccum.guarding.records import Case, Measurement
from autoaccum.guarding.verdict.comparing import compare
from autoaccum.guarding.verdict.judging import incomparable
from autoaccum.units import format_bytes
from autoaccum.workload.module_names import compact_names, numberless

_MOST_MODULES = 5


def check_fits(workload: str, folder: Path, /, **asked: Any) -> str:
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
    known = ["limit" if field.name == "memory" else field.name for field in fields(Case)[1:]]
    unknown = sorted(asked.keys() - {*known, "memory"})
    if unknown:
        raise UsageError(f"there is no argument {unknown[0]!r}", hint=f"take {', '.join(known)}")
    project = find_project(folder)
    case = check_case(Case(workload=_reference(workload, project), **asked))
    schedule = None if case.micro_batch is None else request_of(case).schedule(case.micro_batch).micro_batches
    try:
        measured = measure(case, Checkout(project.folder), micro_batches=schedule).measurement
    except DoesNotFitError as error:
        measured = _of_single_samples(case, project, error)
    if measured.fits:
        return ""
    return "\n".join([_shortage(case, measured), *_where_it_goes(measured), *_since_the_lock(case, project, measured)])


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
    needed = f"more than {format_bytes(measured.peak_bytes)}"
    if measured.least_bytes is not None:
        roomy = f"{format_bytes(measured.peak_bytes)} where nothing limits it"
        needed = f"at least {format_bytes(measured.least_bytes)} ({roomy})"
    bound = f"the limit is {case.memory}" if case.memory else f"{format_bytes(measured.limit_bytes)} are there"
    fitting = f"the largest that fits is {measured.largest}" if measured.largest else "not even 1 fits"
    parts = format_parts(measured.micro_batches)
    return (
        f"{case.workload} on {case.gpu or case.device} does not fit: micro-batch {measured.micro_batch} "
        f"({parts}, {measured.precision}) needs {needed}; {bound}, {fitting}"
    )


def _where_it_goes(measured: Measurement) -> Iterator[str]:
    """The categories and the modules that hold most at the peak; nothing where that was not told apart."""
    if not measured.categories:
        return
    of = f" of {measured.module}" if measured.module else ""
    yield f"where the memory goes, in {measured.phase} at {measured.op}{of}:"
    ordered = sorted(measured.categories.items(), key=lambda item: -item[1])
    yield from (f"  {format_bytes(held):>9}  {category.replace('_', ' ')}" for category, held in ordered)
    yield "the modules that hold most:"
    most = sorted(_modules(measured.holdings), key=lambda each: (-each[0], each[1]))[:_MOST_MODULES]
    yield from (f"  {format_bytes(held):>9}  {what}" for held, what in most)


def _modules(holdings: Iterable[Holding]) -> Iterator[tuple[int, str]]:
    """What modules hold, and a phrase for it; those of one class that differ in numbers only are one."""
    held: dict[tuple[str, str, str], Counter[str]] = defaultdict(Counter)
    for holding in holdings:
        if holding.module or holding.kind:
            named = numberless(holding.module)
            # A star alone would tell nothing: the layers of a Sequential have their numbers for names.
            kind = holding.kind if named == "*" or not named else ""
            held[holding.category.replace("_", " "), named, kind][holding.module] += holding.bytes
    for (category, named, kind), modules in held.items():
        for spelled, names in compact_names(modules) if named == "*" else [(named, list(modules))]:
            of = spelled or f"the {kind} itself"
            yield sum(modules[name] for name in names), f"{category} of {of}"


def _since_the_lock(case: Case, project: Project, measured: Measurement) -> Iterator[str]:
    """What grew since an entry like it was locked; nothing where none tells."""
    try:
        entries = read_lock(project.lock).entries
        alike = [other for other in entries if _alike(other, case)]
        if not alike:
            return
        same = min(alike, key=lambda other: _distance(other, case, entries[other], measured))
        before = entries[same]
        now = measure(same, Checkout(project.folder), micro_batches=before.micro_batches)
        tolerance = project.tolerance or Tolerance()
        told = incomparable(same, before, now, "") or compare(same, before, now, tolerance)
    except AutoaccumError as error:
        if project.lock.exists():
            yield f"what grew since {project.lock.name} is not known: {error.message}"
        return
    reason = next(iter(told.reasons), "nothing grew")
    yield f"since {project.lock.name}: {told.explanation or reason}"


def _alike(one: Case, other: Case) -> bool:
    """Whether both are the same code on the same card, however many samples and whatever the budget."""
    return all(getattr(one, field.name) == getattr(other, field.name) for field in fields(Case) if not _is_size(field))


def _is_size(field: Field[Any]) -> bool:
    return field.name in ("target_batch", "micro_batch", "memory", "reserve", "world_size", "equal")


def _distance(one: Case, other: Case, before: Measurement, now: Measurement) -> tuple[object, ...]:
    """How far an entry is from what was measured: by the largest part, by what was asked otherwise, by its name."""
    otherwise = sum(getattr(one, field.name) != getattr(other, field.name) for field in fields(Case))
    return abs(before.micro_batch - now.micro_batch), otherwise, case_name(one)

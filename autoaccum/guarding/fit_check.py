"""Check that one case fits, for tests: the message explains why it does not."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from autoaccum.accumulation.schedule import format_parts
from autoaccum.devices.child.import_paths import Checkout
from autoaccum.devices.explanation import Holding
from autoaccum.errors import AutoaccumError, DoesNotFitError, UsageError
from autoaccum.guarding.cases import CASE_FIELDS, Case, check_case, make_case
from autoaccum.guarding.guard_result import Measurement, Tolerance
from autoaccum.guarding.lock import read_lock
from autoaccum.guarding.measuring import measure, request_of
from autoaccum.guarding.project import Project, find_project
from autoaccum.guarding.verdict import compare
from autoaccum.units import format_bytes
from autoaccum.workload.module_names import mask_numbers

_MOST_MODULES = 5


def check_fits(workload: str, folder: Path, /, **given: Any) -> str:
    """Measure a case, and return why it does not fit.

    Args:
        workload: An absolute file, with `:name` where it has one; or a module.
        folder: The folder from which the project is looked for, upwards.
        given: Fields of `Case` and of its options.

    Returns:
        Lines with what is needed, the limit, where the memory goes, and what grew since the lock; empty if it fits.

    Raises:
        UsageError, WorkloadError, NotMeasuredError: It cannot be measured.
        DoesNotFitError: It does not even fit the machine that should measure it.
    """
    unknown = sorted(given.keys() - {*CASE_FIELDS[1:]})
    if unknown:
        takes = ", ".join("limit" if name == "memory" else name for name in CASE_FIELDS[1:])
        raise UsageError(f"there is no argument {unknown[0]!r}", hint=f"take {takes}")
    project = find_project(folder)
    try:
        reference = project.reference(workload, project.folder)
    except UsageError:  # A file outside of the project has its whole path as its name.
        reference = workload
    case = check_case(make_case(workload=reference, **given))
    request, here = request_of(case), Checkout(project.folder)
    schedule = None if case.micro_batch is None else request.schedule(case.micro_batch).micro_batches
    try:
        measured = measure(case, here, micro_batches=schedule)
    except DoesNotFitError as error:
        try:  # Not even one sample fits: micro-batches of 1 show where the memory goes.
            measured = measure(case, here, micro_batches=request.schedule(1).micro_batches)
        except AutoaccumError:
            raise error from None
    if measured.fits:
        return ""
    return "\n".join([_message(case, measured), *_memory_lines(measured), *_growth_since_lock(case, project, measured)])


def _message(case: Case, measured: Measurement) -> str:
    needed = f"more than {format_bytes(measured.peak_bytes)}"
    if measured.least_bytes is not None:
        unlimited = f"{format_bytes(measured.peak_bytes)} without a limit"
        needed = f"at least {format_bytes(measured.least_bytes)} ({unlimited})"
    bound = f"{format_bytes(measured.limit_bytes)} are available"
    if case.options.memory:
        bound = f"the limit is {case.options.memory}"
    fitting = f"the largest that fits is {measured.largest}" if measured.largest else "not even 1 fits"
    parts = format_parts(measured.micro_batches)
    return (
        f"{case.workload} on {case.device_name} does not fit: micro-batch {measured.micro_batch} "
        f"({parts}, {measured.precision}) needs {needed}; {bound}, {fitting}"
    )


def _memory_lines(measured: Measurement) -> Iterator[str]:
    """List the categories and the modules that hold most at the peak; nothing where they were not recorded."""
    if not measured.categories:
        return
    of = f" of {measured.module}" if measured.module else ""
    yield f"where the memory goes, in {measured.phase} at {measured.op}{of}:"
    ordered = sorted(measured.categories.items(), key=lambda item: -item[1])
    yield from (f"  {format_bytes(held):>9}  {category.replace('_', ' ')}" for category, held in ordered)
    yield "the modules that hold most:"
    most = _modules(measured.holdings).most_common(_MOST_MODULES)
    yield from (f"  {format_bytes(held):>9}  {what}" for what, held in most)


def _modules(holdings: Iterable[Holding]) -> Counter[str]:
    """Add up what modules hold, by category and module; modules that differ only in numbers are one."""
    held = Counter[str]()
    for holding in holdings:
        if holding.module or holding.kind:
            named = mask_numbers(holding.module)
            # The layers of a Sequential are numbers only: a name that is just a star would say nothing.
            of = (holding.module if named == "*" else named) or f"the {holding.kind} itself"
            held[f"{holding.category.replace('_', ' ')} of {of}"] += holding.bytes
    return held


def _growth_since_lock(case: Case, project: Project, measured: Measurement) -> Iterator[str]:
    """Say what grew since the same workload was locked for that card, at the closest size; nothing if it was not."""
    try:
        entries = read_lock(project.lock, project.rewrite_command)
        alike = [other for other in entries if _without_size(other) == _without_size(case)]
        if not alike:
            return
        nearest = min(alike, key=lambda other: abs(entries[other].micro_batch - measured.micro_batch))
        before = entries[nearest]
        now = measure(nearest, Checkout(project.folder), micro_batches=before.micro_batches)
        verdict = compare(nearest, before, now, project.tolerance or Tolerance())
    except AutoaccumError as error:
        yield f"what grew since {project.lock.name} is not known: {error.message}"
        return
    reason = next(iter(verdict.reasons), "nothing grew")
    yield f"since {project.lock.name}: {verdict.explanation or reason}"


def _without_size(case: Case) -> Case:
    options = dataclasses.replace(case.options, memory=None, reserve=None, world_size=1, mesh=None, equal=False)
    return Case(workload=case.workload, options=options)

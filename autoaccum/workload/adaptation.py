"""A workload as it is asked for: with settings in place of its own."""

from __future__ import annotations

import dataclasses
from typing import Any

from autoaccum.errors import WorkloadError
from autoaccum.workload.spec import Workload, no_batch
from autoaccum.workload.worst_case import take_longest


def adapt(workload: Workload, *, most: int | None = None, worst_of: int | None = None, **settings: Any) -> Workload:
    """`workload` with those of `settings` in place of its own that are not None.

    Args:
        workload: As its file or its author has it.
        most: Samples of the largest training batch that will be asked for.
        worst_of: Make batches of the longest of so many samples of the dataset.
        settings: Fields of `Workload`.

    Raises:
        WorkloadError: A setting cannot be honoured, or there are neither `batch` nor samples to make one of.
    """
    workload = replace_given(workload, **settings)
    if worst_of is not None:
        largest = None if most is None else max(most, workload.evaluation_batch or 0)
        return take_longest(workload, worst_of, largest)
    if workload.batch is no_batch:
        raise WorkloadError(
            "the workload defines no 'batch'",
            hint="write def batch(size): return a batch of that many samples; or have batches made of the longest"
            " samples of its dataset by --worst-of N",
        )
    return workload


def replace_given(workload: Workload, **settings: Any) -> Workload:
    """`workload` with those fields of `settings` that are not None in place of its own.

    Raises:
        WorkloadError: One of them cannot be used.
    """
    given = {name: value for name, value in settings.items() if value is not None}
    return dataclasses.replace(workload, **given) if given else workload

"""Find savers, and activation checkpointing of the model's own, that were in use before and are lost."""

from __future__ import annotations

import math
from collections.abc import Iterable

from autoaccum.guarding.guard_result import LostSavers, Measurement
from autoaccum.options import RECOMPUTE
from autoaccum.workload.module_names import compact_names, expand_name


def find_lost(before: Measurement, now: Measurement) -> LostSavers | None:
    """Return what took less memory before and is not in use now, or for fewer blocks; None if nothing is lost."""
    savers = [word for word in before.savers if word not in now.savers]
    if _recomputed_blocks(before.savers) <= _recomputed_blocks(now.savers):
        savers = [word for word in savers if not word.startswith(RECOMPUTE)]
    were, are = ([name for one in each.recomputed for name in expand_name(one)] for each in (before, now))
    # Where as many run again as before, they have other names.
    is_own = len(are) < len(were) and not any(word.startswith(RECOMPUTE) for word in savers)
    modules = [name for name in were if name not in are] if is_own else []
    if not savers and not modules:
        return None
    return LostSavers(savers=tuple(savers), modules=tuple(pattern for pattern, _ in compact_names(modules)))


def _recomputed_blocks(savers: Iterable[str]) -> float:
    """Return how many blocks are recomputed: 0 for none, infinity for all."""
    numbers = [word.partition("=")[2] for word in savers if word.startswith(RECOMPUTE)]
    return max((int(number) if number else math.inf for number in numbers), default=0)

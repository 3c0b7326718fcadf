"""What is held at one time, complete: by module, purpose, dtype and the operator that made most of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from operator import itemgetter
from typing import Final

from autoaccum.devices.explanation import CATEGORIES, Category, Holding, Moment
from autoaccum.devices.simulated.ledger import Ledger

_APART: Final = ("_attention", "aten._softmax", "aten._safe_softmax")
"""What of an operator's name tells how attention is computed, whatever else the module makes."""


def holdings_at(ledger: Ledger, event: int) -> tuple[Holding, ...]:
    """What is held after an event, in the order of the model; what belongs to no module is first.

    Of operators that made as much of one holding it names the first. What tells how attention is computed is apart.

    Args:
        ledger: What the trace holds.
        event: The index of the event.
    """
    labelled, sizes = ledger.labelled, ledger.demand.sizes
    made: dict[tuple[int, int, str, str], Counter[str]] = {}
    for block, category in ledger.alive(event):
        origin = labelled.origins[block]
        apart = origin.op if any(part in origin.op for part in _APART) else ""
        key = ledger.purposes[block].module, CATEGORIES.index(category), origin.dtype, apart
        made.setdefault(key, Counter())[origin.op] += sizes[block]
    return tuple(
        Holding(
            category=CATEGORIES[category],
            module=labelled.modules[module].path,
            kind=labelled.modules[module].kind,
            dtype=dtype,
            op=max(by_op.items(), key=itemgetter(1))[0],
            bytes=by_op.total(),
        )
        for (module, category, dtype, _), by_op in sorted(made.items(), key=itemgetter(0))
        if by_op.total()
    )


def moments(ledger: Ledger) -> tuple[Moment, ...]:
    """When most is held in each phase of all that is traced, in the order of `Phase`; of equal moments the last."""
    found = []
    for phase, at in ledger.highest.items():
        totals = {category: held[at] for category, held in ledger.totals.items()}
        if any(totals.values()):
            found.append(
                Moment(
                    phase=phase,
                    held_bytes=ledger.held_bytes[at],
                    categories=_without_zeros(totals),
                    holdings=holdings_at(ledger, at),
                )
            )
    return tuple(found)


def _without_zeros(totals: Mapping[Category, int]) -> Mapping[Category, int]:
    return {category: held for category, held in totals.items() if held}

"""The moment at which most is held, over traces made by hand."""

from __future__ import annotations

from autoaccum.devices.simulated.breakdown import Ledger, break_down
from autoaccum.devices.simulated.replays import Demand
from autoaccum.devices.simulated.trace import NO_MODULE, LabelledTrace, Origin, Trace
from autoaccum.units import MIB


def ledger(events: tuple[int, ...], sizes: tuple[int, ...]) -> Ledger:
    trace = Trace(parts=(1,), events=events, sizes=sizes, phases=((0, "forward"),), last_update=0)
    origins = tuple(Origin(op=f"aten.op{block}", module=0) for block in range(len(sizes)))
    return Ledger(
        LabelledTrace(trace=trace, modules=(NO_MODULE,), origins=origins, claims={}), Demand(trace, sizes, 0, ())
    )


def test_the_peak_stands_where_memory_is_asked_for() -> None:
    """A block of no bytes that is freed right after leaves as much held, and asks for nothing."""
    known = ledger((0, 1, 2, ~2, ~1, ~0), (MIB, MIB, 0))
    assert known.peak_at == 1
    assert break_down(known, card="any", peak_bytes=2 * MIB, context_bytes=0).op == "aten.op1"


def test_of_equal_moments_it_is_the_last() -> None:
    assert ledger((0, ~0, 1, ~1, 2), (MIB, MIB, MIB // 2)).peak_at == 2
    assert ledger((0, ~0), (0,)).peak_at == 0, "nothing is ever held"

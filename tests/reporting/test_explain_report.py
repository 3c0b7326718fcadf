"""The explanation on a terminal: complete, at any width, without colour."""

from __future__ import annotations

from consoles import drawn

from autoaccum.devices.explanation import Change, Explanation, ModuleShare
from autoaccum.reporting.explain_report import explanation_blocks
from autoaccum.simulation.trace_records import CATEGORIES, Category
from autoaccum.units import GIB, MIB


def held(**bytes_: int) -> dict[Category, int]:
    return {category: bytes_.get(category, 0) for category in CATEGORIES}


EXPLANATION = Explanation(
    card="rtx3090 (simulated)",
    parts=(86, 85),
    peak_bytes=10 * GIB,
    categories=held(
        parameters=1 * GIB,
        gradients=1 * GIB,
        optimizer_state=2 * GIB,
        activations=5 * GIB,
        temporaries=512 * MIB,
        workspace=128 * MIB,
        unused=384 * MIB,
    ),
    context_bytes=318 * MIB,
    phase="backward",
    op="aten.mm",
    module="layers.3.attention",
    modules=(
        ModuleShare(name="layers.{0..11}.attention", kind="SelfAttention", count=12, bytes=4 * GIB, categories={}),
        ModuleShare(name="", kind="", count=1, bytes=GIB, categories={"temporaries": GIB}),
        ModuleShare(name="", kind="Net", count=1, bytes=MIB, categories={"activations": MIB}),
    ),
    changes=(
        Change(name="checkpoint", what="run again", peak_bytes=7 * GIB, saved_bytes=3 * GIB, min_budget_bytes=6 * GIB),
        Change(
            name="fused=True", what="AdamW(..., fused=True)", peak_bytes=10 * GIB, saved_bytes=0, min_budget_bytes=GIB
        ),
        Change(
            name="foreach=False", what="one by one", peak_bytes=11 * GIB, saved_bytes=-GIB, min_budget_bytes=9 * GIB
        ),
        Change(name="SGD", what="SGD in place of AdamW", message="it broke"),
    ),
)


def test_shows_what_holds_memory_and_what_would_change_it() -> None:
    text = drawn(*explanation_blocks(EXPLANATION, 9 * GIB), width=80)
    first, second, *lines = text.splitlines()
    assert first == "rtx3090 (simulated), micro-batches of 86 + 85: 10.0 GiB (predicted); measured: 9.0 GiB"
    assert second == "the peak is in backward, at aten.mm of layers.3.attention"
    rows = [line.split() for line in lines]
    assert ["activations", "5.0", "GiB", "50.0", "%"] in rows
    assert ["in", "all", "10.0", "GiB", "100.0", "%"] in rows
    assert ["layers.{0..11}.attention", "SelfAttention", "12", "4.0", "GiB"] in rows
    assert ["(no", "module)", "-", "1", "1.0", "GiB"] in rows
    assert ["checkpoint", "-3.00", "GiB", "6.0", "GiB", "run", "again"] in rows
    assert ["foreach=False", "+1.00", "GiB", "9.0", "GiB", "one", "by", "one"] in rows
    assert ["fused=True", "no", "change", "1.0", "GiB", "AdamW(...,", "fused=True)"] in rows
    assert "SGD in place of AdamW: not simulated (it broke)" in " ".join(text.split())

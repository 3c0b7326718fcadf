"""The explanation on a terminal: complete, at any width, without colour."""

from __future__ import annotations

import io
from dataclasses import replace

from autoaccum.devices.explanation import Change, Explanation, ModuleShare
from autoaccum.reporting.console import make_console, show
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
        ModuleShare(
            name="layers.*.attention",
            kind="SelfAttention",
            count=12,
            bytes=4 * GIB,
            categories={"activations": 4 * GIB},
        ),
        ModuleShare(name="", kind="", count=1, bytes=GIB, categories={"temporaries": GIB}),
        ModuleShare(name="", kind="Net", count=1, bytes=MIB, categories={"activations": MIB}),
    ),
    changes=(
        Change(
            name="checkpoint",
            what="run the 12 blocks layers.* again in backward (--savers recompute)",
            peak_bytes=7 * GIB,
            saved_bytes=3 * GIB,
            least_bytes=6 * GIB,
        ),
        Change(name="fused=True", what="AdamW(..., fused=True)", peak_bytes=10 * GIB, saved_bytes=0, least_bytes=GIB),
        Change(name="foreach=False", what="one by one", peak_bytes=11 * GIB, saved_bytes=-GIB, least_bytes=9 * GIB),
        Change(name="SGD", what="SGD in place of AdamW", message="it broke"),
    ),
)


def draw(explanation: Explanation = EXPLANATION, width: int = 80) -> str:
    file = io.StringIO()
    show(make_console(file=file, width=width), *explanation_blocks(explanation))
    return file.getvalue()


def test_shows_what_holds_memory_and_what_would_change_it() -> None:
    rows = [line.split() for line in draw().splitlines()]
    assert ["activations", "5.0", "GiB", "50.0", "%"] in rows
    assert ["in", "all", "10.0", "GiB", "100.0", "%"] in rows
    assert ["layers.*.attention", "SelfAttention", "12", "4.0", "GiB"] in rows
    assert ["(no", "module)", "-", "1", "1.0", "GiB"] in rows
    assert ["fused=True", "no", "change", "1.0", "GiB", "AdamW(...,", "fused=True)"] in rows
    assert "SGD in place of AdamW: not simulated (it broke)" in " ".join(draw().split())


def test_odd_names_neither_break_the_table_nor_command_the_terminal() -> None:
    odd = "a\tname\nof\x1b[31m \u202ekind"
    shares = [replace(EXPLANATION.modules[0], name=odd, kind=odd), *EXPLANATION.modules[1:]]
    changes = [replace(change, name=f"{number} {odd}", what=odd) for number, change in enumerate(EXPLANATION.changes)]
    explanation = replace(
        EXPLANATION, card=odd, op=odd, module=odd, modules=tuple(shares), changes=tuple(changes[:3])
    )  # fmt: skip
    text = draw(explanation, width=200)
    assert all(line.isprintable() for line in text.splitlines())
    assert r"a name of\x1b[31m \u202ekind" in text

"""Where the memory goes, as a person reads it: all of it, at any width, without colour."""

from __future__ import annotations

import io
import re
from dataclasses import replace
from typing import Any

import pytest

from autoaccum.devices.explanation import CATEGORIES, Category, Change, Explanation, ModuleShare
from autoaccum.reporting.consoles import make_console
from autoaccum.reporting.explanation_table import change_words, module_lines, print_explanation
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
            bytes_per_sample=48 * MIB,
        ),
        ModuleShare(name="", kind="", count=1, bytes=GIB, categories={"temporaries": GIB}, bytes_per_sample=None),
        ModuleShare(name="", kind="Net", count=1, bytes=MIB, categories={"activations": MIB}, bytes_per_sample=0),
    ),
    changes=(
        Change(
            name="checkpoint",
            what="run the 12 blocks layers.* again in backward (torch.utils.checkpoint); their BatchNorms then update"
            " running statistics twice",
            peak_bytes=7 * GIB,
            saved_bytes=3 * GIB,
            least_bytes=6 * GIB,
        ),
        Change(name="fused=True", what="AdamW(..., fused=True)", peak_bytes=10 * GIB, saved_bytes=0, least_bytes=GIB),
        Change(name="foreach=False", what="one by one", peak_bytes=11 * GIB, saved_bytes=-GIB, least_bytes=9 * GIB),
        Change(name="SGD", what="SGD in place of AdamW", message="it broke"),
    ),
)


def draw(explanation: Explanation = EXPLANATION, width: int = 80, measured: int | None = None, **options: Any) -> str:
    file = io.StringIO()
    print_explanation(make_console(file=file, width=width, **options), explanation, measured)
    return file.getvalue()


def test_the_whole_at_80_columns() -> None:
    assert draw() == (
        "where the memory goes\n"
        "rtx3090 (simulated), micro-batches of 86 + 85: 10.0 GiB (predicted)\n"
        "the peak stands in backward, at aten.mm of layers.3.attention\n"
        "\n"
        "at the peak           bytes    share\n"
        "parameters          1.0 GiB   10.0 %\n"
        "gradients           1.0 GiB   10.0 %\n"
        "optimizer state     2.0 GiB   20.0 %\n"
        "activations         5.0 GiB   50.0 %\n"
        "temporaries         512 MiB    5.0 %\n"
        "workspace           128 MiB    1.2 %\n"
        "unused              384 MiB    3.8 %\n"
        "in all             10.0 GiB  100.0 %\n"
        "context             318 MiB   on top\n"
        "\n"
        "module              class         count      bytes  per sample\n"
        "layers.*.attention  SelfAttention    12    4.0 GiB    48.0 MiB\n"
        "(no module)         -                 1    1.0 GiB           -\n"
        "(the model itself)  Net               1    1.0 MiB         0 B\n"
        "\n"
        "change              peak  least budget  what\n"
        "checkpoint     -3.00 GiB       6.0 GiB  run the 12 blocks layers.* again in\n"
        "                                        backward (torch.utils.checkpoint); their\n"
        "                                        BatchNorms then update running\n"
        "                                        statistics twice\n"
        "fused=True      as it is       1.0 GiB  AdamW(..., fused=True)\n"
        "foreach=False  +1.00 GiB       9.0 GiB  one by one\n"
        "SGD                    -             -  SGD in place of AdamW: not simulated (it\n"
        "                                        broke)\n"
    )


@pytest.mark.parametrize("width", [60, 80, 81, 120, 300])
def test_long_names_lose_their_beginnings_where_there_is_no_room(width: int) -> None:
    name, kind = "encoder." * 8 + "*.attention", "Multi" * 6 + "Attention"
    long = replace(EXPLANATION.modules[0], name=name, kind=kind)
    heading, line = (text.plain for text in module_lines([long], width))
    assert len(heading) == len(line) <= width
    assert line.endswith("   12    4.0 GiB    48.0 MiB")
    assert "attention  " in line
    assert line.startswith(name if width == 300 else "...")


@pytest.mark.parametrize("width", [80, 100])
def test_no_line_is_longer_than_the_console(width: int) -> None:
    assert all(len(line) <= width and line == line.rstrip() for line in draw(width=width).splitlines())


def test_a_measured_peak_stands_beside() -> None:
    assert "86 + 85: 10.0 GiB (predicted); measured: 9.0 GiB\n" in draw(measured=9 * GIB)


def test_what_is_empty_is_left_out() -> None:
    text = draw(replace(EXPLANATION, modules=(), changes=(), module="", op=""))
    assert "the peak stands in backward, at what is there from the start\n" in text
    assert "per sample" not in text
    assert "least budget" not in text
    assert text.endswith("on top\n")


def test_odd_names_neither_break_the_table_nor_command_the_terminal() -> None:
    odd = "a\tname\nof\x1b[31m \u202ekind"
    shares = [replace(EXPLANATION.modules[0], name=odd, kind=odd), *EXPLANATION.modules[1:]]
    changes = [replace(change, name=f"{number} {odd}", what=odd) for number, change in enumerate(EXPLANATION.changes)]
    explanation = replace(
        EXPLANATION, card=odd, op=odd, module=odd, modules=tuple(shares), changes=tuple(changes[:3])
    )  # fmt: skip
    text = draw(explanation, width=200)
    assert all(line.isprintable() for line in text.splitlines())
    assert len(text.splitlines()) == len(
        draw(replace(EXPLANATION, changes=EXPLANATION.changes[:3]), width=200).splitlines()
    )
    assert text.count("a name of [31m  kind") == 11


def test_colour_says_nothing_that_words_do_not() -> None:
    plain = draw()
    coloured = draw(force_terminal=True, color_system="standard", no_color=False)
    assert "\x1b[" not in plain
    assert "\x1b[" in coloured
    assert re.sub(r"\x1b\[[\d;]*m", "", coloured) == plain


def test_words_are_not_broken() -> None:
    what = "segments that grow, which leave less unused (PYTORCH_ALLOC_CONF=expandable_segments:True)"
    change = Change(name="expandable_segments", what=what, peak_bytes=9 * GIB, saved_bytes=GIB, least_bytes=GIB)
    text = draw(replace(EXPLANATION, changes=(change,)))
    assert text.endswith(
        "change                    peak  least budget  what\n"
        "expandable_segments  -1.00 GiB       1.0 GiB\n"
        "    segments that grow, which leave less unused\n"
        "    (PYTORCH_ALLOC_CONF=expandable_segments:True)\n"
    )
    assert all(len(line) <= 80 for line in text.splitlines())
    for width in (20, 60, 80, 91, 92, 200):
        assert set(what.split()) <= set(draw(replace(EXPLANATION, changes=(change,)), width=width).split())


@pytest.mark.parametrize(
    ("saved", "text"), [(None, "-"), (0, "as it is"), (GIB, "-1.00 GiB"), (-GIB, "+1.00 GiB"), (512, "-512 B")]
)
def test_savings_have_a_sign(saved: int | None, text: str) -> None:
    assert change_words(saved) == text

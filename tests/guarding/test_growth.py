"""Growth is attributed to the deepest modules that explain it, and adds up."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from small_locks import whole_measurement

from autoaccum.devices.explanation import Holding
from autoaccum.guarding.guard_result import Measurement
from autoaccum.guarding.verdict import find_growths
from autoaccum.simulation.trace_records import CATEGORIES, Category
from autoaccum.units import MIB


def row(
    category: Category, module: str, mib: float, dtype: str = "bfloat16", op: str = "aten.mm", kind: str = "L"
) -> Holding:
    return Holding(category=category, module=module, kind=kind, dtype=dtype, op=op, bytes=round(mib * MIB))


def measured(*rows: Holding, unused_mib: int = 0, **other: Any) -> Measurement:
    return whole_measurement(*rows, unused=unused_mib * MIB, **other)


def blocks(count: int, **mib: float) -> list[Holding]:
    """Activations of `count` blocks, by what is in them."""
    return [row("activations", f"blocks.{n}.{name}", size) for n in range(count) for name, size in mib.items()]


def told(before: Measurement, now: Measurement) -> list[tuple[str, str, float, str]]:
    found = find_growths(before, now)
    assert sum(growth.bytes for growth in found) == now.peak_bytes - before.peak_bytes
    assert all(growth.bytes for growth in found)
    return [(growth.category, growth.module, growth.bytes / MIB, growth.change) for growth in found]


def test_modules_that_differ_by_number_are_reported_as_one() -> None:
    found = told(measured(*blocks(12, mlp=8, attn=4)), measured(*blocks(12, mlp=12, attn=4)))
    assert found == [("activations", "blocks.{0..11}.mlp", 48, "")]


@pytest.mark.parametrize(
    ("which", "name"),
    [(range(12), "{0..11}"), (range(11), "{0..10}"), (range(0, 12, 2), "{0,2,4,6,8,10}"), (range(3), "{0..2}")],
)
def test_modules_are_named_by_the_numbers_of_those_that_grew(which: range, name: str) -> None:
    now = [row("activations", f"blocks.{n}.mlp", 12 if n in which else 8) for n in range(12)]
    assert [module for _, module, _, _ in told(measured(*blocks(12, mlp=8)), measured(*now))] == [f"blocks.{name}.mlp"]


def test_many_modules_are_named_by_those_that_contain_them() -> None:
    weights = [row("parameters", f"blocks.{n}.{name}", 4) for n in range(4) for name in ("up", "down", "qkv", "out")]
    state = [dataclasses.replace(weight, category="optimizer_state", bytes=2 * weight.bytes) for weight in weights]
    assert told(measured(*weights), measured(*weights, *state)) == [("optimizer_state", "blocks.{0..3}", 128, "new")]
    assert told(measured(*weights, *state), measured(*weights)) == [("optimizer_state", "blocks.{0..3}", -128, "gone")]
    outputs = [dataclasses.replace(weight, category="activations") for weight in weights]
    larger = [dataclasses.replace(output, bytes=2 * output.bytes) for output in outputs]
    assert told(measured(*outputs), measured(*larger)) == [("activations", "blocks.{0..3}", 64, "")]
    wide = [row("activations", name, 8) for name in ("a", "b", "c", "d")]
    assert told(measured(row("activations", "a", 1)), measured(*wide)) == [
        ("activations", "", 31, "in several modules")
    ]


def test_a_growth_has_the_line_of_the_module_that_grew_most() -> None:
    lines = {"": "net.py:1", "blocks.0.mlp": "net.py:3", "blocks.1.mlp": "net.py:4", "head": "net.py:9"}
    parts = [row("outputs", "", 1, kind="Net"), row("workspace", "", 1, kind=""), row("parameters", "head", 1)]
    larger = [dataclasses.replace(part, bytes=2 * part.bytes) for part in parts]
    wider = [row("activations", f"blocks.{n}.mlp", 9 + n) for n in range(2)]
    found = find_growths(measured(*blocks(2, mlp=8), *parts), measured(*wider, *larger), lines=lines)
    assert {(growth.category, growth.module): growth.line for growth in found} == {
        ("activations", "blocks.{0,1}.mlp"): "net.py:4",
        ("parameters", "head"): "net.py:9",
        ("outputs", ""): "net.py:1",
        ("workspace", ""): "",
    }
    several = [row("activations", name, 8 + len(name)) for name in ("a", "b", "c", "head")]
    (growth,) = find_growths(measured(), measured(*several), lines=lines)
    assert (growth.module, growth.line) == ("", "net.py:9")


@pytest.mark.parametrize(
    ("was", "is_now", "change"),
    [
        ({"dtype": "bfloat16"}, {"dtype": "float32"}, "bf16 -> fp32"),
        ({"op": "aten.flash"}, {"op": "aten._softmax"}, "aten.flash -> aten._softmax"),
        ({"op": "aten.gelu", "mib": 1}, {"op": "aten.tanh"}, "aten.tanh in bf16"),
        ({}, {}, ""),
    ],
)
def test_what_is_different_is_reported(was: dict[str, Any], is_now: dict[str, Any], change: str) -> None:
    other = row("activations", "mlp", 64)
    before, now = row("activations", "attn", **{"mib": 8, **was}), row("activations", "attn", 32, **is_now)
    ((category, module, _, told_change),) = told(measured(other, before), measured(other, now))
    assert (category, module, told_change) == ("activations", "attn", change)


@pytest.mark.parametrize(("kind", "where"), [("", "in no module"), ("GPT", "in the model itself")])
def test_what_is_no_modules_is_reported_by_its_operator(kind: str, where: str) -> None:
    before = row("activations", "", 8, "bfloat16", "aten._log_softmax", kind=kind)
    now = row("activations", "", 24, "float32", "aten._to_copy", kind=kind)
    assert told(measured(before), measured(before, now)) == [("activations", "", 24, f"aten._to_copy in fp32, {where}")]


def test_what_a_model_keeps_between_updates_is_reported() -> None:
    weight = row("parameters", "head", 8, "float32", "aten._to_copy")
    kept = row("parameters", "head", 16, "float32", "aten.add")
    assert told(measured(weight), measured(weight, kept)) == [("parameters", "head", 16, "aten.add in fp32")]


def test_a_module_with_another_name_is_another_module() -> None:
    before = [row("parameters", "h.mlp", 4, op=""), row("activations", "h.mlp", 8)]
    now = [dataclasses.replace(holding, module=f"net.{holding.module}") for holding in before]
    assert told(measured(*before), measured(*now)) == [
        ("activations", "net.h.mlp", 8, "new, aten.mm in bf16"),
        ("activations", "h.mlp", -8, "gone"),
    ]


ROWS = st.lists(
    st.builds(
        Holding,
        category=st.sampled_from(CATEGORIES[:-1]),
        module=st.sampled_from(["", "stem", "blocks.0", "blocks.0.mlp", "blocks.1.mlp", "blocks.1.mlp.act", "head.3"]),
        kind=st.sampled_from(["", "Linear", "GELU"]),
        dtype=st.sampled_from(["", "bfloat16", "float32"]),
        op=st.sampled_from(["", "aten.mm", "aten._scaled_dot_product_flash_attention"]),
        bytes=st.integers(0, 50 * MIB),
    ),
    max_size=12,
)


@given(ROWS, ROWS)
def test_whatever_is_held_what_is_reported_adds_up(was: list[Holding], is_now: list[Holding]) -> None:
    before, now = measured(*was), measured(*is_now, unused_mib=3)
    told(before, now)
    back = find_growths(now, before, -1)
    assert sum(growth.bytes for growth in back) == before.peak_bytes - now.peak_bytes

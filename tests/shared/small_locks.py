"""Made-up cases and measurements, small and of every kind."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from hypothesis import strategies as st

from autoaccum.devices.explanation import Holding
from autoaccum.guarding.cases import Case, make_case
from autoaccum.guarding.guard_result import Measurement
from autoaccum.simulation.trace_records import CATEGORIES
from autoaccum.units import GIB, MIB

WORDS = st.text(st.characters(exclude_categories=["Cs"]), max_size=6)
COUNTS = st.integers(1, 10**6)
Lock = dict[Case, Measurement]
HELD = tuple(category for category in CATEGORIES if category != "unused")

WHOLE = make_case(
    workload="train.py",
    gpu="rtx3090",
    target_batch=256,
    micro_batch=8,
    precision="bf16",
    optimizer="SGD",
    memory="20GiB",
    reserve="5%",
    world_size=2,
    parallel="fsdp2",
    mesh=(1, 2),
    equal=True,
    ema=True,
    hold_outputs=True,
    evaluation_batch=64,
    longest_of=1000,
    batchnorm="frozen",
    coupled=True,
)
"""A case that has nearly every option."""


def a_case(workload: str = "train.py", **fields: Any) -> Case:
    fields = {"gpu": "rtx3090", "target_batch": 256, **fields}
    return make_case(workload=workload, **fields)


def whole_measurement(*rows: Holding, unused: int = 10 * MIB, **fields: Any) -> Measurement:
    """Make a measurement from the holdings in `rows`, with matching sums."""
    held_bytes = sum(row.bytes for row in rows)
    known: dict[str, Any] = {
        "card": "NVIDIA GeForce RTX 3090",
        "update": {"precision": "bf16", "optimizer": "AdamW", "parameters": "124,439,808"},
        "micro_batches": (32,) * 8,
        "fits": True,
        "largest": 32,
        "capped": False,
        "limit_bytes": 22 * GIB,
        "peak_bytes": held_bytes + unused,
        "min_budget_bytes": held_bytes,
        "phase": "backward",
        "holdings": rows,
    }
    return Measurement(**{**known, **fields})


def a_measurement(*holdings: Holding, **fields: Any) -> Measurement:
    """Make a measurement of `holdings`, or of a model with four equal blocks, in the order of a lock."""
    activations = Holding(
        category="activations", module="", kind="Linear", dtype="bfloat16", op="aten.addmm", bytes=300 * MIB
    )
    rows = holdings or (
        *(dataclasses.replace(activations, module=f"blocks.{number}.mlp.0") for number in range(4)),
        Holding(category="parameters", module="head", kind="Linear", dtype="float32", bytes=100 * MIB),
        Holding(category="workspace", bytes=32 * MIB),
    )
    known: dict[str, Any] = {
        "min_budget_bytes": sum(row.bytes for row in rows) + 2 * MIB,
        "environment": {"torch": "2.13.0", "autoaccum": "0.1.0"},
    }
    return whole_measurement(*rows, **{**known, **fields})


def a_lock(*cases: Case) -> Lock:
    return {case: a_measurement() for case in cases or (a_case(), a_case(gpu="a100-80gb"))}


def holdings() -> st.SearchStrategy[Holding]:
    names = st.one_of(
        WORDS, st.builds("{}.{}.{}".format, st.sampled_from(["h", "{h}", "a\\b"]), st.integers(0, 12), WORDS)
    )
    return st.builds(
        Holding,
        category=st.sampled_from(HELD),
        module=names,
        kind=WORDS,
        dtype=st.sampled_from(["", "float32", "bfloat16"]),
        op=st.sampled_from(["", "aten.mm"]),
        bytes=st.integers(1, 10**12),
    )


_SIZES = ("20GiB", "80%", "1.5 GiB")
_OPTIONS: dict[str, Sequence[Any]] = {
    "target_batch": (1, 256, 10**6),
    "micro_batch": (1, 8, 10**6),
    "precision": ("fp32", "bf16"),
    "optimizer": ("AdamW", "SGD"),
    "memory": _SIZES,
    "reserve": _SIZES,
    "world_size": (1, 2, 3),
    "equal": (False, True),
    "ema": (False, True),
    "hold_outputs": (False, True),
    "evaluation_batch": (1, 64),
    "longest_of": (1, 1000),
    "batchnorm": ("micro", "frozen"),
    "coupled": (False, True),
}


def cases() -> st.SearchStrategy[Case]:
    return st.builds(
        lambda workload, gpu, options: make_case(workload=workload, gpu=gpu, **options),
        st.sampled_from(["train.py", "a b.py:c", 'we, "on" x.py']) | WORDS,
        st.sampled_from(["rtx3090", "a100-80gb", "24GiB"]),
        st.fixed_dictionaries({}, optional={name: st.sampled_from(values) for name, values in _OPTIONS.items()}),
    )


@st.composite
def measurements(draw: st.DrawFn) -> Measurement:
    parts = draw(st.lists(st.integers(1, 3), min_size=1, max_size=5))
    plain = WORDS | st.booleans() | COUNTS | st.floats(allow_nan=False)
    settings = st.dictionaries(WORDS, plain | st.lists(plain, max_size=3).map(tuple), max_size=2)
    return a_measurement(
        *draw(st.lists(holdings(), min_size=1, max_size=12, unique_by=lambda row: dataclasses.replace(row, bytes=0))),
        micro_batches=tuple(parts),
        environment=draw(settings),
        fits=draw(st.booleans()),
        largest=draw(st.integers(0, 64)),
    )


def locks() -> st.SearchStrategy[Lock]:
    return st.dictionaries(cases(), measurements(), max_size=3)

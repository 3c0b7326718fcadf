"""What grew, in one line: a regression is never told as a shrinkage."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import pytest

from autoaccum.devices.explanation import Category, Holding
from autoaccum.guarding.growth.attribution import growths
from autoaccum.guarding.records import Case, Measurement
from autoaccum.guarding.verdict.phrases import explain
from autoaccum.units import MIB

CASE = Case(workload="train.py", gpu="rtx3090", micro_batch=32)


def measured(unused_mib: int = 100, **held_mib: int) -> Measurement:
    """What holds activations in modules of these names, and as much unused."""
    holdings = tuple(
        Holding(category="activations", module=name, kind="Linear", dtype="bfloat16", op="aten.mm", bytes=size * MIB)
        for name, size in held_mib.items()
    )
    held_bytes = sum(holding.bytes for holding in holdings)
    categories: Mapping[Category, int] = {"activations": held_bytes, "unused": unused_mib * MIB}
    return Measurement(
        kind="predicted",
        card="NVIDIA GeForce RTX 3090",
        precision="bf16",
        optimizer="AdamW",
        batchnorm="micro",
        parameters=1000,
        micro_batches=(32, 32),
        fits=True,
        largest=32,
        capped=False,
        limit_bytes=24 * 1024 * MIB,
        peak_bytes=held_bytes + unused_mib * MIB,
        held_bytes=held_bytes,
        phase="backward",
        categories=categories,
        holdings=holdings,
    )


def told(before: Measurement, now: Measurement, more: bool | None) -> str:
    return explain(CASE, before, now, growths(before, now, more=more), more=more)


BEFORE = measured(stem=200, body=500)


@pytest.mark.parametrize(
    ("now", "sentence"),
    [
        (
            measured(60, stem=200, body=520),
            "+20.0 MiB (+2.9 %) of a peak that is 20.0 MiB lower are held: activations of body +20.0 MiB",
        ),
        (
            measured(0, stem=195, body=505),
            "-100 MiB (-12.5 %): activations of body +5.0 MiB, activations of stem -5.0 MiB",
        ),
        (
            measured(80, stem=200, body=520),
            "+20.0 MiB (+2.9 %) of the same peak are held: activations of body +20.0 MiB",
        ),
        (measured(160, stem=190, body=500), "+50.0 MiB (+6.2 %): unused +60.0 MiB"),
    ],
)
def test_a_regression_is_told_by_what_grew_whichever_way_the_peak_went(now: Measurement, sentence: str) -> None:
    assert told(BEFORE, now, True) == sentence
    assert growths(BEFORE, now, more=True)[0].bytes > 0


def test_good_news_are_told_by_what_shrank_whichever_way_the_peak_went() -> None:
    now = measured(142, stem=160, body=500)
    assert told(BEFORE, now, False) == (
        "-40.0 MiB (-5.7 %) of a peak that is 2.0 MiB higher are held: activations of stem -40.0 MiB"
    )
    assert growths(BEFORE, now, more=False)[0].bytes < 0


@pytest.mark.parametrize("now", [measured(90, stem=200, body=500), measured(100, stem=200, body=490)])
def test_what_is_neither_is_told_as_the_peak_went(now: Measurement) -> None:
    assert told(BEFORE, now, None).startswith("-10.0 MiB (-1.2 %): ")


def test_nothing_is_told_where_nothing_changed() -> None:
    assert told(BEFORE, dataclasses.replace(BEFORE), None) == ""

"""What a tolerance allows, and how it is written."""

from __future__ import annotations

from typing import Any

import pytest

from autoaccum.errors import UsageError
from autoaccum.guarding.asked.tolerance import Tolerance, parse_tolerance
from autoaccum.units import GIB, MIB


@pytest.mark.parametrize(
    ("text", "tolerance"),
    [
        ("1%", Tolerance(0.01)),
        (" 0.5 % ", Tolerance(0.005)),
        ("0%", Tolerance(0.0)),
        ("100%", Tolerance(1.0)),
        ("50MiB", Tolerance(None, 50 * MIB)),
        ("1.5 GiB", Tolerance(None, 3 * GIB // 2)),
        ("0B", Tolerance(None, 0)),
        ("0 MiB", Tolerance(None, 0)),
    ],
)
def test_tolerances_are_read(text: str, tolerance: Tolerance) -> None:
    assert parse_tolerance(text) == tolerance


@pytest.mark.parametrize("text", ["", "1", "0", "-1%", "101%", "one percent", "5 MiBs", "%", "nan%", 0.01, None])
def test_what_is_no_tolerance_is_refused_with_a_way_out(text: Any) -> None:
    with pytest.raises(UsageError, match="neither a share up to 100% nor a size: write such as 1%, 0.5% or 50MiB$"):
        parse_tolerance(text)


def test_a_long_text_is_cut() -> None:
    with pytest.raises(UsageError) as caught:
        parse_tolerance("9" * 1000 + "%")
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize(("now_bytes", "allowed"), [(900, True), (1000, True), (1010, True), (1011, False)])
def test_growth_up_to_the_share_is_allowed(now_bytes: int, allowed: bool) -> None:
    assert Tolerance(0.01).allows(1000, now_bytes) is allowed


@pytest.mark.parametrize(("now_bytes", "allowed"), [(1050, True), (1051, False)])
def test_growth_up_to_the_size_is_allowed(now_bytes: int, allowed: bool) -> None:
    assert Tolerance(None, 50).allows(1000, now_bytes) is allowed


def test_nothing_allows_no_byte() -> None:
    assert parse_tolerance("0%").allows(1000, 1000)
    assert not parse_tolerance("0%").allows(1000, 1001)


def test_the_spread_comes_on_top() -> None:
    assert Tolerance(0.01).allows(1000, 1030, 20)
    assert not Tolerance(0.01).allows(1000, 1031, 20)


@pytest.mark.parametrize(("text", "shown"), [("1%", "1 %"), ("0.25%", "0.25 %"), ("0%", "0 %"), ("50MiB", "50.0 MiB")])
def test_it_is_told_in_sentences(text: str, shown: str) -> None:
    assert str(parse_tolerance(text)) == shown

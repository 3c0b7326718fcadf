from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoaccum.errors import UsageError
from autoaccum.units import GIB, MIB, format_bytes, parse_size, percent, precise_bytes, signed_bytes


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("10GiB", 10 * GIB),
        ("24GB", 24 * 10**9),
        ("512 MiB", 512 * MIB),
        ("1.5gib", 3 * GIB // 2),
        ("100B", 100),
        (" 7 kb ", 7000),
    ],
)
def test_sizes_in_bytes(text: str, count: int) -> None:
    assert parse_size(text).resolve(total_bytes=1) == count


@pytest.mark.parametrize(("text", "count"), [("80%", 800), ("100%", 1000), ("0.5 %", 5)])
def test_percentages_of_the_total(text: str, count: int) -> None:
    assert parse_size(text).resolve(total_bytes=1000) == count


@pytest.mark.parametrize(
    "text",
    ["", "10", "GiB", "-1GiB", "0GiB", "0%", "101%", "10XB", "1e3MiB", "ten GiB", "0.1B", "١GiB", "9" * 30 + "GiB"],
)
def test_anything_else_is_refused_with_a_hint(text: str) -> None:
    with pytest.raises(UsageError, match="10GiB") as caught:
        parse_size(text)
    assert repr(text) in str(caught.value)
    assert caught.value.exit_code == 2


@given(st.integers(min_value=0, max_value=2**50))
def test_formatted_sizes_can_be_parsed_again(count: int) -> None:
    text = format_bytes(count)
    if count:
        assert abs(parse_size(text).resolve(0) - count) <= 0.06 * count


@given(st.integers(min_value=100 * MIB, max_value=2**50))
def test_one_percent_is_visible(count: int) -> None:
    assert precise_bytes(count) != precise_bytes(count + count // 50)


@given(st.integers(min_value=1, max_value=2**50))
def test_a_change_has_a_sign_either_way(count: int) -> None:
    assert signed_bytes(count) == f"+{precise_bytes(count)}"
    assert signed_bytes(-count) == f"-{precise_bytes(count)}"


@pytest.mark.parametrize(
    ("part", "shown"),
    [
        (0, "0.0 %"),
        (1, "+<0.001 %"),
        (30_000, "+0.003 %"),
        (500_000, "+0.1 %"),
        (-83 * 10**6, "-8.3 %"),
        (52 * 10**9, "+5200 %"),
    ],
    ids=["none", "next to none", "little", "a tenth", "less", "many times"],
)
def test_percent_never_shows_a_change_as_none(part: int, shown: str) -> None:
    assert percent(part, 10**9, sign=True) == shown
    assert percent(part, 10**9) == shown.lstrip("+")

"""Prices of cards from the user's file, and what is said of one that is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from autoaccum.errors import UsageError
from autoaccum.planning.comparison_request import read_prices


def test_prices_are_by_the_cards_own_names(tmp_path: Path) -> None:
    path = tmp_path / "prices.csv"
    path.write_bytes(b"\xef\xbb\xbfname, per_hour\r\nNVIDIA GeForce RTX 4090, 0.69\r\nh100, 2\r\n\r\n")
    assert read_prices(path) == {"rtx4090": 0.69, "h100": 2.0}


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("", "line 1 is '': write a line `name,per_hour`"),
        ("name,price\nt4,1\n", "line 1 is 'name,price'"),
        ("name,per_hour\nt4,$0.35\n", "line 2: per_hour is '$0.35': give a number above 0, such as 0.69"),
        ("name,per_hour\nt4,-1\n", "line 2: per_hour is '-1'"),
        ("name,per_hour\nt4\n", "line 2 has 1 fields, and there are 2 columns"),
        ("name,per_hour\nh100,1\nt4x,1\n", "line 3: there is no 't4x' among the 97 cards"),
        ("name,per_hour\na100,1\n", "line 2: 'a100' is the name of 2 cards: write one of"),
        ("name,per_hour\nt4,1\nTesla T4,2\n", "line 3 has t4 again: leave one price for each card"),
    ],
)
def test_a_wrong_file_gets_its_line_and_the_way_out(tmp_path: Path, content: str, text: str) -> None:
    path = tmp_path / "prices.csv"
    path.write_text(content)
    with pytest.raises(UsageError) as raised:
        read_prices(path)
    assert text in str(raised.value)
    assert str(raised.value).startswith(str(path))


@pytest.mark.parametrize("content", [None, b"name,per_hour\nt4,1\xe9\n"])
def test_a_file_that_cannot_be_read_is_no_traceback(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "prices.csv"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UsageError, match=r"prices.csv cannot be read \("):
        read_prices(path)

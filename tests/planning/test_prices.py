"""Prices of cards from the user's file, and what is said of one that is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from autoaccum.errors import UsageError
from autoaccum.planning.prices import read_prices


def test_prices_are_by_the_cards_own_names(tmp_path: Path) -> None:
    path = tmp_path / "prices.csv"
    path.write_bytes(b"\xef\xbb\xbfper_hour, name\r\n0.69, NVIDIA GeForce RTX 4090\r\n2, h100\r\n\r\n")
    assert read_prices(path) == ({"rtx4090": 0.69, "h100": 2.0}, [])


def test_other_cards_keep_their_prices_beside_a_name_that_is_none(tmp_path: Path) -> None:
    path = tmp_path / "prices.csv"
    path.write_text("name,per_hour\nt4,1\nt4x,1\na100,2\nh100,3\n")
    prices, (unknown, several) = read_prices(path)
    assert prices == {"t4": 1.0, "h100": 3.0}
    assert f"{path}, line 3 is not used, there is no 't4x' among the 97 cards that can be simulated" in unknown
    assert f"{path}, line 4 is not used, 'a100' is the name of 2 cards: write one of" in several


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("", "line 1 has nothing, and its columns must be name and per_hour: write a line `name,per_hour`"),
        ("name,price\nt4,1\n", "line 1 has name,price, and its columns must be name and per_hour"),
        ("name,per_hour\n", "has no prices of single cards: write a line"),
        ("name,per_hour\na100,1\nt4x,1\n", "has no prices of single cards, only of 'a100' and 't4x': write a line"),
        ("name,per_hour\nt4,\n", "line 2: per_hour is '': give a number above 0, such as 0.69"),
        ("name,per_hour\nt4,$0.35\n", "line 2: per_hour is '$0.35'"),
        ("name,per_hour\nt4x,a lot\n", "line 2: per_hour is 'a lot'"),
        ("name,per_hour\n,1\n", "line 2 has no name of a card: write a line"),
        ("name,per_hour\nt4,-1\n", "line 2: per_hour is '-1'"),
        ("name,per_hour\nt4,inf\n", "line 2: per_hour is 'inf'"),
        ("name,per_hour\nt4\n", "line 2 has 1 fields, and there are 2 columns"),
        ("name,per_hour\nt4,0,35\n", "line 2 has 3 fields, and there are 2 columns"),
        ("name,per_hour\nt4,1\nTesla T4,2\n", "line 3 has t4 again: leave one price for each card"),
        ('name,per_hour\n"t4,1\n', "is no CSV"),
    ],
)
def test_a_wrong_file_gets_its_line_and_the_way_out(tmp_path: Path, content: str, text: str) -> None:
    path = tmp_path / "prices.csv"
    path.write_text(content)
    with pytest.raises(UsageError) as raised:
        read_prices(path)
    assert text in str(raised.value)
    assert str(raised.value).startswith(str(path))


def test_a_file_that_cannot_be_read_is_no_traceback(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"none.csv cannot be read \(No such file or directory\)"):
        read_prices(tmp_path / "none.csv")
    (tmp_path / "latin.csv").write_bytes(b"name,per_hour\nt4,1\xe9\n")
    with pytest.raises(UsageError, match="it is not UTF-8"):
        read_prices(tmp_path / "latin.csv")

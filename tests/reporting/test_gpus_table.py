from __future__ import annotations

import io

from autoaccum.devices.simulated.cards import find_card
from autoaccum.reporting.console import make_console
from autoaccum.reporting.gpus_table import print_cards

RTX3090, A100, L40 = map(find_card, ("rtx3090", "a100-80gb", "l40"))


def drawn(*names: str, width: int = 80, sources: bool = False, **options: bool) -> str:
    file = io.StringIO()
    print_cards(make_console(file=file, width=width, **options), [*map(find_card, names)], sources=sources)
    return file.getvalue()


def test_a_row_shows_what_torch_sees() -> None:
    lines = drawn("rtx3090", "a100-80gb", "l40").splitlines()
    assert lines[0].split() == ["name", "card", "GiB", "CC", "SMs"]
    assert lines[1] == "Ampere"
    assert lines[2].split() == ["rtx3090", "GeForce", "RTX", "3090", "23.56", "8.6", "82"]
    assert lines[3].split()[-3:] == ["79.14", "8.0", "108"]
    assert lines[4] == "Ada"
    assert lines[5].split() == ["l40", "L40", "~44.40", "8.9", "142"]


def test_sources_are_reported_where_they_are_requested() -> None:
    text = drawn("l40", sources=True, width=40)
    assert max(map(len, text.split("plan for one")[0].splitlines())) <= 40
    assert L40.source in " ".join(text.split())
    assert "context: estimated" in text
    assert "memory:" not in drawn("l40")

"""Cards by the names people type, and what a process takes of them beside its tensors."""

from __future__ import annotations

import math
import re
import subprocess
import sys
from contextlib import suppress
from dataclasses import replace
from importlib.resources import files
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoaccum.errors import UsageError
from autoaccum.simulation.cards import (
    REPORTED,
    Card,
    all_cards,
    card_rates,
    context_memory,
    find_card,
    find_cards,
    read_cards,
)
from autoaccum.units import GIB, MIB

CARDS = all_cards()
SHARED = {
    "v100": {"v100-16gb", "v100-32gb"},
    "RTX 3080": {"rtx3080-10gb", "rtx3080-12gb"},
    "a100": {"a100-40gb", "a100-80gb"},
    "RTX 6000": {"rtx6000-ada", "rtx-pro-6000"},
    "1g.10gb": {"a100-40gb-1g.10gb", "a100-80gb-1g.10gb", "h100-1g.10gb"},
}


def refusal(text: str) -> str:
    with pytest.raises(UsageError) as caught:
        find_card(text)
    assert caught.value.exit_code == 2
    assert caught.value.hint
    return str(caught.value)


def plain(name: str) -> str:
    letters = re.sub("[^a-z0-9]|nvidia|geforce|tesla|rtx|gtx|generation|edition|gpu", "", name.lower())
    return re.sub(r"(\d)gb", r"\1g", letters)


@pytest.mark.parametrize("card", CARDS, ids=lambda card: card.name)
def test_every_spelling_finds_its_card_or_names_it_among_those_that_share_it(card: Card) -> None:
    for spelling in card.spellings:
        meant = [other for other in CARDS if plain(spelling) in map(plain, other.spellings)]
        if len(meant) == 1 or plain(spelling) == plain(card.name):
            assert find_card(spelling) is card
        else:
            assert f"{card.name} (" in refusal(spelling)


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("4090", "rtx4090"),
        ("rtx-3090-24gb", "rtx3090"),
        ("A100 80GB", "a100-80gb"),
        ("NVIDIA A100-PCIE-40GB", "a100-40gb"),
        ("colab", "t4"),
        ("4070 ti super", "rtx4070-ti-super"),
        ("4060 mobile", "rtx4060-laptop"),
        ("Quadro RTX 6000", "quadro-rtx-6000"),
        ("a100-3g.20gb", "a100-40gb-3g.20gb"),
    ],
)
def test_names_as_people_type_them(text: str, name: str) -> None:
    assert find_card(text).name == name


@pytest.mark.parametrize("text", SHARED)
def test_a_name_of_several_cards_is_refused_with_their_names_and_sizes(text: str) -> None:
    message = refusal(text)
    assert re.search(r"is the name of \d+ cards: write one of", message)
    for name in SHARED[text]:
        assert f"{name} (" in message


@pytest.mark.parametrize(
    ("text", "guess"),
    [
        ("rtx4091", "did you mean rtx4090"),
        ("a100-60gb", "did you mean a100-80gb or a100-40gb"),
        ("24", "did you mean 24GiB?"),
    ],
)
def test_a_near_miss_suggests(text: str, guess: str) -> None:
    message = refusal(text)
    assert guess in message
    assert f"no {text!r} among the {len(CARDS)} cards" in message
    assert "`autoaccum gpus`" in message


@pytest.mark.parametrize(
    ("text", "size"), [("24GiB", 24 * GIB), ("24GB", 24 * 10**9), (" 16 gib ", 16 * GIB), ("12000MiB", 12000 * MIB)]
)
def test_a_plain_size_is_a_card_with_stated_assumptions(text: str, size: int) -> None:
    card = find_card(text)
    assert (card.total_bytes, card.capability, card.multiprocessors) == (size, (8, 0), 108)
    assert (card.name, card.measured) == (text.strip(), False)
    assert "108 multiprocessors of an A100" in card.source


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("100MiB", "100MiB is 100 MiB: give a size from 1.0 GiB"),
        ("0GiB", "'0GiB' is not a possible size of memory: name a card, or a size such as 24GiB"),
        pytest.param("9" * 500 + "GiB", "is not a possible size of memory: name a card", id="a very long one"),
    ],
)
def test_a_size_that_cannot_be_a_card(text: str, says: str) -> None:
    assert says in refusal(text)


@given(st.text(max_size=30) | st.from_regex(r"(rtx|a|h|gtx|nvidia)? ?[0-9]{1,4} ?(ti|super|[0-9]{1,3} ?[kmgt]i?b)?"))
def test_any_text_is_a_card_or_a_usage_error(text: str) -> None:
    with suppress(UsageError):
        assert find_card(text).total_bytes >= GIB


def test_the_catalogue_loads_nothing_heavy() -> None:
    code = (
        "import sys; from autoaccum.simulation.cards import find_card; find_card('t4'); "
        "sys.exit(any(name in sys.modules for name in ('torch', 'numpy', 'click', 'rich')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("title", REPORTED)
def test_the_rule_gives_what_was_reported(title: str) -> None:
    start, trained, source = REPORTED[title]
    card = find_card(title)
    seen, ruled = context_memory(card), context_memory(replace(card, title="one like it"))
    assert (seen.start_bytes, seen.measured, ruled.measured) == (start, True, False)
    assert source in seen.source
    if trained is None:
        assert abs(ruled.start_bytes - start) <= ruled.uncertainty_bytes - seen.uncertainty_bytes
    else:
        assert seen.bytes == trained
        assert abs(ruled.bytes - trained) <= 2 * MIB


def test_the_rates_of_a_card_are_those_of_its_generation_at_a_clock_that_it_has() -> None:
    """Tensor cores make a power of two of FLOPs per clock; GeForce cards half as many as others of a capability."""
    plain = {(7, 0): 128, (7, 5): 128, (8, 0): 128}
    for card in all_cards():
        rates = card_rates(card)
        clock = rates.fp32_flops / plain.get(card.capability, 256) / card.multiprocessors
        assert 1.0e9 < clock < 3.5e9, f"{card.name}: {clock / 1e9:.2f} GHz by fp32_tflops and multiprocessors"
        ratio = rates.tensor_flops / rates.fp32_flops
        is_power = ratio == pytest.approx(2 ** round(math.log2(ratio)), rel=0.2)
        assert is_power, (
            f"{card.name}: tensor_tflops is {ratio:.2f} x fp32_tflops: is one with TF32, or at another clock?"
        )
        assert 1e11 < rates.memory_bytes < 5e13, f"{card.name}: bandwidth_gb_s is in GB/s"


def test_a_wrong_row_of_the_catalogue_is_named_with_its_column() -> None:
    header, first, *_ = (files("autoaccum.simulation") / "cards.csv").read_text(encoding="utf-8").splitlines()
    assert [card.name for card in read_cards([header, first])] == ["v100-16gb"]
    for old, new, wrong in (
        (",7.0,", ",7,", "has capability '7'"),
        (",16130,", ",15.75 GiB,", "has total_mib '15.75 GiB'"),
        (",yes,", ",true,", "has measured 'true'"),
        ('"', "", "has too many columns"),
        (",125,", ",", "has too few columns"),
    ):
        with pytest.raises(UsageError, match=re.escape(f"line 3 of cards.csv (v100-16gb) {wrong}: ")):
            list(read_cards([header, first, first.replace(old, new)]))


def test_the_guide_explains_every_column_of_the_catalogue() -> None:
    (path,) = (Path(__file__).parents[2] / ".github").glob("CONTRIBUTING.md")
    legend = re.findall(r"^\| `(\w+)` \|", path.read_text(encoding="utf-8"), re.MULTILINE)
    header = (files("autoaccum.simulation") / "cards.csv").read_text(encoding="utf-8").splitlines()[0]
    assert legend == header.split(",")


def test_a_card_that_is_not_in_the_catalogue_has_the_rates_of_the_nearest_in_proportion() -> None:
    known = find_card("rtx4090")
    assert card_rates(replace(known, rates=None)) == replace(
        card_rates(known), source="assumed: as the rtx4090, in proportion to its multiprocessors"
    )
    later = replace(known, title="Later than Turing", rates=None, capability=(7, 9), multiprocessors=73)
    assert card_rates(later).tensor_flops == pytest.approx(card_rates(find_card("titan-rtx")).tensor_flops * 73 / 72)
    assert card_rates(find_card("24GiB")).tensor_flops == card_rates(find_card("a100-40gb")).tensor_flops


def test_lists_of_cards_are_read_in_order_and_each_once() -> None:
    assert [card.name for card in find_cards("h100, GeForce RTX 4090,h100,24GiB")] == ["h100", "rtx4090", "24GiB"]
    assert find_cards(" ALL ") == all_cards()

"""Blocks of a simulation are paired with a card's, and rows show the prediction of each rule."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tests.gpu.alignment import TENSOR, Expected, Pair, align, peak_bytes
from tests.gpu.constants import UNEXPLAINED, Measured, compare_operation, number_blocks
from tests.gpu.simulated_operations import Simulated

WEIGHT, OUT = Expected(TENSOR, (), 4096), Expected(TENSOR, (), 1024)
WORKSPACE, FLAGS = Expected("reduction", (4, 2), 6000), Expected("reduction_flags", (4, 2), 0, 16)


def test_what_agrees_is_paired_first() -> None:
    pairs = align([WEIGHT, WORKSPACE, FLAGS, OUT], [4096, 7000, 24, 1024])
    assert pairs == [Pair(WEIGHT, 4096, 0), Pair(WORKSPACE, 7000, 1), Pair(FLAGS, 24, 2), Pair(OUT, 1024, 3)]
    assert [pair.agrees for pair in pairs] == [True, False, False, True]


sizes = st.lists(st.sampled_from([0, 512, 1024, 4096]), max_size=12)


@given(expected=sizes, measured=st.lists(st.sampled_from([512, 700, 4096]), max_size=12))
def test_nothing_is_lost_or_paired_twice(expected: list[int], measured: list[int]) -> None:
    blocks = [Expected(TENSOR, (number,), size) for number, size in enumerate(expected)]
    pairs = align(blocks, measured)
    assert sorted(pair.expected.numbers for pair in pairs if pair.expected is not None) == [
        (number,) for number in range(len(blocks))
    ]
    assert [pair.measured_bytes for pair in pairs if pair.measured_bytes is not None] == measured
    assert [pair.position for pair in pairs if pair.measured_bytes is not None] == list(range(len(measured)))


def test_rows_of_an_operation() -> None:
    simulated = Simulated("reduction: x", (WORKSPACE, FLAGS, OUT), peak_bytes=7 * 1024)
    row = compare_operation(simulated, Measured([6000, 1024, 80], peak_bytes=9000))
    assert (row["predicted_peak_bytes"], row["measured_peak_bytes"]) == (7 * 1024, 9000)
    assert [(each["rule"], each["measured_bytes"], each["predicted_bytes"]) for each in row["rows"]] == [
        ("reduction", 6000, 6000),
        ("reduction_flags", 0, 0),
        (UNEXPLAINED, 80, 0),
    ]
    unmeasured = compare_operation(simulated, None)
    assert [(each["rule"], each["measured_bytes"]) for each in unmeasured["rows"]] == [
        ("reduction", None),
        ("reduction_flags", None),
    ]


def test_what_cannot_be_simulated_is_measured_all_the_same() -> None:
    row = compare_operation(Simulated("indexing: nonzero", error="no"), Measured([512], peak_bytes=512))
    assert (row["predicted_peak_bytes"], row["not_simulated"]) == (None, "no")
    assert [each["rule"] for each in row["rows"]] == [UNEXPLAINED]


def test_peak_counts_whole_grains_and_blocks_that_are_its_own() -> None:
    assert peak_bytes([0, 1, ~0, ~1, ~7], [1, 513]) == 1536


def test_blocks_of_a_record_are_numbered_and_those_from_before_left_out() -> None:
    record = [("alloc", 64, 700), ("alloc", 99, 800), ("free_completed", 64, 700), ("free_completed", 7, 5)]
    entries = [{"action": action, "addr": address, "size": size} for action, address, size in record]
    assert number_blocks(entries) == ([0, 1, ~0], [700, 800])


def test_layers_that_are_alike_do_not_mislead() -> None:
    layer = [4096, 8192, 4096, 512, 1024]
    real = layer * 20 + [777] + layer * 20
    pairs = align([Expected(TENSOR, (), size) for size in layer * 40], real)
    assert [(pair.measured_bytes, pair.position) for pair in pairs if not pair.agrees] == [(777, 100)]

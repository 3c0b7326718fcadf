"""A known answer for each workspace rule, worked out by hand from its source."""

from __future__ import annotations

import pytest
from made_up_card import make_card

from autoaccum.simulation.cards import Card
from autoaccum.simulation.operators.reductions import Layout, reduction_layout, reduction_numbers
from autoaccum.simulation.operators.workspace_sizes import estimate
from autoaccum.simulation.trace_records import Workspace

MIB = 2**20
NEWEST = (2, 15)


H100, A100, B200 = make_card((9, 0), 132), make_card((8, 0), 108), make_card((10, 0), 148)
RTX_3090, RTX_4090 = make_card((8, 6), 82), make_card((8, 9), 128)
T4, V100 = make_card((7, 5), 40), make_card((7, 0), 80)


def bytes_of(rule: str, *numbers: int, on: Card = H100, version: tuple[int, int] = NEWEST) -> int:
    return estimate(Workspace(rule, numbers), on, version).bytes


def column_sums(rows: int, columns: int, on: Card = H100, element: int = 4, rule: str = "reduction") -> int:
    layout = reduction_layout((rows, columns), (columns, 1), (0,))
    return bytes_of(rule, *reduction_numbers(layout, accumulator_bytes=4, element_bytes=element), on=on)


@pytest.mark.parametrize(
    ("rows", "columns", "mebibytes"), [(512, 768, 0), (1024, 768, 6), (4096, 768, 24), (4096, 3072, 96)]
)
def test_bias_gradient_of_a_linear_layer_takes_a_staging_area(rows: int, columns: int, mebibytes: int) -> None:
    assert column_sums(rows, columns) == mebibytes * MIB
    assert column_sums(rows, columns, element=2) == mebibytes * MIB


@pytest.mark.parametrize(
    ("card", "blocks"), [(H100, 2112), (A100, 1728), (B200, 2368), (RTX_4090, 1536), (RTX_3090, 984), (T4, 320)]
)
def test_staging_area_fills_the_card_once(card: Card, blocks: int) -> None:
    """128 outputs x 32 threads x 4 values x 4 B for each block of threads that the card holds."""
    columns = 128 * 8
    assert column_sums(8192, columns, card) == min(-(-blocks // 8), 8192 // 4 // 16) * 8 * 65_536


@pytest.mark.parametrize(
    ("shape", "strides", "reduced", "expected"),
    [
        ((8, 128, 768), (98_304, 768, 1), (0, 1), Layout(1, (1024, 768), (768, 1))),
        ((8, 16, 10, 10), (1600, 100, 10, 1), (0, 2, 3), Layout(2, (100, 8, 16), (1, 1600, 100))),
        ((8, 16, 10, 10), (1600, 1, 160, 16), (0, 2, 3), Layout(1, (800, 16), (16, 1))),
        ((8, 16), (16, 1), (0, 1), Layout(1, (128,), (1,))),
        ((1, 16), (16, 1), (0,), Layout(0, (16,), (1,))),
        ((4, 3), (0, 0), (0,), Layout(1, (4, 3), (0, 0))),
    ],
    ids=["tokens", "planes", "channels-last", "all", "of-one", "expanded"],
)
def test_dimensions_are_sorted_and_merged(
    shape: tuple[int, ...], strides: tuple[int, ...], reduced: tuple[int, ...], expected: Layout
) -> None:
    assert reduction_layout(shape, strides, reduced) == expected


_TILE = 4 * (64 * 64 + 4)
"""A tile of memory-efficient attention's backward: 64 x 64, with 16 B of counters."""
_WIDE, _NARROW, _HALVES = (4, 12, 1024, 1024, 64, 256), (4, 12, 1024, 1024, 64, 64), (2, 0, 0)
_SUMS, _PRODUCT = 4 * 4 * 12 * 1024, 4 * 4 * 12 * 1024 * 256
KNOWN: list[tuple[str, tuple[int, ...], Card, int]] = [
    # GPT-2 at 8 x 1,024: 8 x 12 heads x 1,024 rows of 64 floats; 100 queries are 128, a size of 40 is 64.
    ("flash_gradient", (8, 12, 1024, 64, 0), H100, 24 * MIB),
    ("flash_gradient", (1, 2, 100, 40, 0), H100, 4 * 2 * 128 * 64),
    ("flash_gradient", (1, 12, 128, 64, 1), H100, 11 * 4 * 12 * 128 * 64),
    ("flash_row_sums", (8, 12, 1000), H100, 4 * 8 * 12 * 1024),
    ("flash_grouped", (2, 32, 512, 128, 2), H100, 2 * 32 * 512 * 128 * 2),
    # By tiles; keys' and values' too where they do not stay in registers.
    ("efficient_gradient", (8, 12, 1024, 1024, 64, 64, 4, 0, 0), H100, 8 * 12 * 16 * _TILE),
    ("efficient_gradient", (8, 12, 1024, 1024, 64, 64, 2, 0, 0), T4, 8 * 12 * 16 * _TILE),
    ("efficient_gradient", (1, 1, 128, 128, 128, 128, 2, 0, 0), A100, 4 * (128 * 128 + 4)),
    ("efficient_gradient", (1, 1, 128, 128, 128, 128, 2, 0, 0), RTX_3090, 4 * _TILE + 4 * 2 * 64 * 256),
    ("efficient_gradient", (*_NARROW, 4, 0, 0), H100, 12_595_200),
    ("efficient_row_sums", (8, 12, 1000), H100, 4 * 8 * 12 * 1000),
    ("efficient_output", (8, 12, 1000, 256, 2), H100, 4 * 8 * 12 * 1000 * 256),
    ("efficient_output", (8, 12, 1000, 128, 2), H100, 0),
    # Products outside of the kernel in fp32, and for halves of wide heads on Volta, which are cast first.
    ("efficient_product", (*_WIDE, 4, 0, 0), H100, _PRODUCT),
    ("efficient_product", (*_NARROW, 4, 0, 0), H100, 12_582_912),
    ("efficient_product_sums", (*_NARROW, 4, 0, 0), H100, _SUMS),
    ("efficient_cast", (*_WIDE, 4, 0, 0), H100, 0),
    *((rule, (*_WIDE, *_HALVES), V100, _PRODUCT) for rule in ("efficient_cast", "efficient_product")),
    *((rule, (*_NARROW, *_HALVES), V100, 0) for rule in ("efficient_cast", "efficient_product")),
    *((rule, (*_WIDE, *_HALVES), T4, 0) for rule in ("efficient_cast", "efficient_product")),
    # As measured (tests/gpu/data/h100.json).
    ("cudnn_gradient", (4, 12, 12, 1024, 1024, 64, 2), H100, 12_779_776),
    ("cudnn_gradient", (2, 16, 4, 1000, 1000, 96, 2), H100, 24_704_256),
    # Partial sums of many narrow rows.
    ("layer_norm_gradient", (65_536, 768, 4), H100, 0),
    ("layer_norm_gradient", (131_072, 768, 4), H100, 32 * 1024 // 24 * 768 * 4),
    ("layer_norm_gradient", (131_072, 64, 2), H100, 4096 * 64 * 2),
    ("layer_norm_gradient", (131_072, 768, 4), T4, 0),
    # Channels-last data: 32 x 16 threads take 256 values each time, at most 128 of them; below 8 it is not worth it.
    ("batch_norm", (100_352, 64, 8), H100, 64 * 128 * 8),
    ("batch_norm", (256 * 20, 64, 16), H100, 64 * 20 * 16),
    ("batch_norm", (256 * 7, 64, 16), H100, 0),
    ("group_norm", (8 * 32, 4), H100, 4 * 8 * 32),
    # Tokens are sorted above 3,072.
    ("embedding_sums", (3072, 50_257, 768, 4, 3073), H100, 0),
    ("embedding_sums", (8192, 50_257, 768, 4, 3073), H100, 4 * 768 * (819 + 8192)),
    ("embedding_indices", (16_384, 5000, 8, 3073), H100, 131_072),
    ("embedding_segments", (16_384, 5000, 8, 3073), H100, 40_000),
    ("embedding_partials", (16_384, 5000, 8, 3073), H100, 53_104),
    ("embedding_indices", (3072, 1000, 8, 3073), H100, 0),
    ("sorted_pairs", (1000, 12, 0), H100, 0),
    ("sorted_pairs", (5000, 12, 6000), H100, 0),
    ("index_put", (1000,), H100, 8000),
    ("sort", (2048, 8), H100, 16_384),
    ("scan", (10_000,), H100, 1023),
    ("scan", (1_000_000,), H100, 5119),
    ("foreach_norm", (148, 38_597_376, 4), H100, 148 * 589 * 4),
]


@pytest.mark.parametrize(("rule", "numbers", "card", "expected"), KNOWN)
def test_a_rule_gives_its_known_answer(rule: str, numbers: tuple[int, ...], card: Card, expected: int) -> None:
    assert bytes_of(rule, *numbers, on=card) == expected


@pytest.mark.parametrize(
    ("pairs", "pair", "measured"),
    [(4096, 16, 71_167), (4096, 16, 83_455), (65_536, 16, 1_068_543), (1_000_000, 12, 12_200_191)],
)
def test_sorted_pairs_are_copied_once(pairs: int, pair: int, measured: int) -> None:
    """Compared with the requests of PyTorch's own code on a fake card (tests/shared/real_allocator/fake_card.py)."""
    answer = estimate(Workspace("sorted_pairs", (pairs, pair, 0)), H100, NEWEST)
    assert abs(answer.bytes - measured) <= answer.uncertainty_bytes < answer.bytes // 5

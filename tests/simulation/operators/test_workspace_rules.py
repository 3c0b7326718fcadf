"""A known answer for each workspace rule, worked out by hand from its source."""

from __future__ import annotations

import pytest
from made_up_card import make_card

from autoaccum.simulation.cards import Card
from autoaccum.simulation.operators.reductions import Layout, reduction_layout, reduction_numbers
from autoaccum.simulation.operators.workspace_rules import estimate
from autoaccum.simulation.trace_records import Workspace

MIB = 2**20
NEWEST = (2, 15)


H100, A100, B200 = make_card((9, 0), 132), make_card((8, 0), 108), make_card((10, 0), 148)
RTX_3090, RTX_4090, T4, V100 = (
    make_card((8, 6), 82),
    make_card((8, 9), 128),
    make_card((7, 5), 40),
    make_card((7, 0), 80),
)


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
    ("of", "blocks"),
    [("H100", 2112), ("A100", 1728), ("B200", 2368), ("RTX_4090", 1536), ("RTX_3090", 984), ("T4", 320)],
)
def test_staging_area_fills_the_card_once(of: str, blocks: int) -> None:
    """128 outputs x 32 threads x 4 values x 4 B for each block of threads that the card holds."""
    on = {"H100": H100, "A100": A100, "B200": B200, "RTX_4090": RTX_4090, "RTX_3090": RTX_3090, "T4": T4}[of]
    columns = 128 * 8
    assert column_sums(8192, columns, on) == min(-(-blocks // 8), 8192 // 4 // 16) * 8 * 65_536


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


def test_flash_gradient_has_padded_rows_in_fp32() -> None:
    """GPT-2 at 8 x 1,024: 8 x 12 heads x 1,024 rows of 64 floats; 100 queries are 128, a size of 40 is 64."""
    assert bytes_of("flash_gradient", 8, 12, 1024, 64, 0) == 24 * MIB
    assert bytes_of("flash_gradient", 1, 2, 100, 40, 0) == 4 * 2 * 128 * 64
    assert bytes_of("flash_gradient", 1, 12, 128, 64, 1) == 11 * 4 * 12 * 128 * 64
    assert bytes_of("flash_row_sums", 8, 12, 1000) == 4 * 8 * 12 * 1024
    assert bytes_of("flash_grouped", 2, 32, 512, 128, 2) == 2 * 32 * 512 * 128 * 2


def test_efficient_gradient_has_a_workspace_by_tiles() -> None:
    """Tiles of 64 x 64 with 16 B of counters each; keys' and values' too where they do not stay in registers."""
    tile = 4 * (64 * 64 + 4)
    assert bytes_of("efficient_gradient", 8, 12, 1024, 1024, 64, 64, 4, 0, 0) == 8 * 12 * 16 * tile
    assert bytes_of("efficient_gradient", 8, 12, 1024, 1024, 64, 64, 2, 0, 0, on=T4) == 8 * 12 * 16 * tile
    assert bytes_of("efficient_gradient", 1, 1, 128, 128, 128, 128, 2, 0, 0, on=A100) == 4 * (128 * 128 + 4)
    on_3090 = 4 * (2 * 2 * (64 * 64 + 4) + 2 * 64 * 256)
    assert bytes_of("efficient_gradient", 1, 1, 128, 128, 128, 128, 2, 0, 0, on=RTX_3090) == on_3090
    assert bytes_of("efficient_row_sums", 8, 12, 1000) == 4 * 8 * 12 * 1000
    assert bytes_of("efficient_output", 8, 12, 1000, 256, 2) == 4 * 8 * 12 * 1000 * 256
    assert bytes_of("efficient_output", 8, 12, 1000, 128, 2) == 0


def test_efficient_gradient_multiplies_outside_its_kernel() -> None:
    """In fp32, and for halves of wide heads on Volta, which are cast first; elsewhere the kernel does it."""
    wide, narrow, halves = (4, 12, 1024, 1024, 64, 256, 4, 0, 0), (4, 12, 1024, 1024, 64, 64, 4, 0, 0), (2, 0, 0)
    assert bytes_of("efficient_product", *wide) == 4 * 4 * 12 * 1024 * 256
    assert bytes_of("efficient_product", *narrow) == 12_582_912
    assert bytes_of("efficient_product_sums", *narrow) == bytes_of("efficient_row_sums", 4, 12, 1024) == 196_608
    assert bytes_of("efficient_gradient", *narrow) == 12_595_200
    assert bytes_of("efficient_cast", *wide) == 0
    for rule in ("efficient_cast", "efficient_product"):
        assert bytes_of(rule, *wide[:6], *halves, on=V100) == 4 * 4 * 12 * 1024 * 256
        assert bytes_of(rule, *narrow[:6], *halves, on=V100) == bytes_of(rule, *wide[:6], *halves, on=T4) == 0


def test_convolution_copies_half_precision_into_the_layout_that_tensor_cores_want() -> None:
    assert bytes_of("convolution", 1000, 500, 2, 0, 1, 0) == 1500
    assert bytes_of("convolution", 1000, 500, 2, 1, 1, 0) == 0
    assert bytes_of("convolution", 1000, 500, 4, 0, 1, 0) == 0
    usual = estimate(Workspace("convolution", (1000, 500, 2, 0, 1, 0)), H100, NEWEST)
    tried = estimate(Workspace("convolution", (1000, 500, 2, 0, 1, 1)), H100, NEWEST)
    assert tried.uncertainty_bytes == 4 * usual.uncertainty_bytes
    assert not usual.measured
    assert usual.optional


def test_layer_norm_takes_partial_sums_of_many_narrow_rows() -> None:
    assert bytes_of("layer_norm_gradient", 65_536, 768, 4) == 0
    assert bytes_of("layer_norm_gradient", 131_072, 768, 4) == 32 * 1024 // 24 * 768 * 4
    assert bytes_of("layer_norm_gradient", 131_072, 64, 2) == 4096 * 64 * 2
    assert bytes_of("layer_norm_gradient", 131_072, 768, 4, on=T4) == 0


def test_batch_norm_takes_partial_sums_of_channels_last_data() -> None:
    """32 x 16 threads take 256 values each time, at most 128 of them; below 8 it is not worth it."""
    assert bytes_of("batch_norm", 100_352, 64, 8) == 64 * 128 * 8
    assert bytes_of("batch_norm", 256 * 20, 64, 16) == 64 * 20 * 16
    assert bytes_of("batch_norm", 256 * 7, 64, 16) == 0
    assert bytes_of("group_norm", 8 * 32, 4) == 4 * 8 * 32


def test_embedding_gradient_is_sorted_above_3072_tokens() -> None:
    assert bytes_of("embedding_sums", 3072, 50_257, 768, 4, 3073) == 0
    assert bytes_of("embedding_sums", 8192, 50_257, 768, 4, 3073) == 4 * 768 * (819 + 8192)
    assert bytes_of("embedding_indices", 16_384, 5000, 8, 3073) == 131_072
    assert bytes_of("embedding_segments", 16_384, 5000, 8, 3073) == 40_000
    assert bytes_of("embedding_partials", 16_384, 5000, 8, 3073) == 53_104
    assert bytes_of("embedding_indices", 3072, 1000, 8, 3073) == 0


@pytest.mark.parametrize(
    ("pairs", "pair", "measured"),
    [(4096, 16, 71_167), (4096, 16, 83_455), (65_536, 16, 1_068_543), (1_000_000, 12, 12_200_191)],
)
def test_sorted_pairs_are_copied_once(pairs: int, pair: int, measured: int) -> None:
    """Compared with the requests of PyTorch's own code on a fake card (tests/shared/real_allocator/fake_card.py)."""
    answer = estimate(Workspace("sorted_pairs", (pairs, pair, 0)), H100, NEWEST)
    assert abs(answer.bytes - measured) <= answer.uncertainty_bytes < answer.bytes // 5
    assert bytes_of("sorted_pairs", 1000, pair, 0) == bytes_of("sorted_pairs", 5000, pair, 6000) == 0


def test_sorting_scanning_and_norms_of_lists_take_their_own_workspaces() -> None:
    assert bytes_of("index_put", 1000) == 8000
    assert bytes_of("sort", 64, 2048, 4) == 16_384
    assert bytes_of("sort", 1, 1_000_000, 4) == 8_000_000
    assert bytes_of("sort", 64, 8192, 4) == 2 * 4_194_304 + 2_097_152
    assert bytes_of("scan", 10_000) == 1023
    assert bytes_of("scan", 1_000_000) == 5119
    assert bytes_of("foreach_norm", 148, 38_597_376, 4) == 148 * 589 * 4

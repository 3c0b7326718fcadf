"""Workspaces of layer, batch and group norm in PyTorch's own kernels.

Sources, in ATen/native/cuda: layer_norm_kernel.cu (`LaunchGammaBetaBackwardCUDAKernel`), Normalization.cuh
(`flexible_launch_configs`), group_norm_kernel.cu.
"""

from __future__ import annotations

from autoaccum.devices.simulated.cards import Card
from autoaccum.devices.simulated.operators.reductions import (
    reduction,
    reduction_flags,
    reduction_layout,
    reduction_numbers,
)
from autoaccum.devices.simulated.operators.workspaces import (
    Estimate,
    Numbers,
    by_name,
    ceil_div,
    power_below,
    product_rule,
)


def layer_norm_gradient(numbers: Numbers, card: Card, torch_version: tuple[int, int]) -> Estimate:
    """Partial sums for the weight (or the bias) of many narrow rows. Numbers: rows, columns, bytes of an element."""
    rows, columns, element_bytes = numbers
    return Estimate(bytes=_partial_rows(rows, columns, card) * columns * element_bytes)


def layer_norm_staging(numbers: Numbers, card: Card, torch_version: tuple[int, int]) -> Estimate:
    """The staging area in which those are added up. Numbers: as of `layer_norm_gradient`."""
    return reduction(_partial_sums(numbers, card), card, torch_version)


def layer_norm_flags(numbers: Numbers, card: Card, torch_version: tuple[int, int]) -> Estimate:
    """The counters of that sum. Numbers: as of `layer_norm_gradient`."""
    return reduction_flags(_partial_sums(numbers, card), card, torch_version)


def batch_norm(numbers: Numbers, card: Card, torch_version: tuple[int, int]) -> Estimate:
    """The partial sums of PyTorch's own channels-last kernels.

    Numbers: values per channel, channels, bytes of all sums of one channel.
    """
    values, channels, sums_bytes = numbers
    width = min(power_below(channels), 32)
    height = min(power_below(ceil_div(values, 16)), 512 // width)
    blocks = min(ceil_div(values, height * 16), 128)
    return Estimate(bytes=channels * blocks * sums_bytes if blocks >= 8 else 0)


def _partial_rows(rows: int, columns: int, card: Card) -> int:
    """Return the number of partial sums for each column; 0 if one kernel adds up everything."""
    if rows <= 64 * 1024 or columns // 32 >= card.multiprocessors // 2:
        return 0
    return min(32 * 1024 // ceil_div(columns, 32), ceil_div(rows, 32))


def _partial_sums(numbers: Numbers, card: Card) -> Numbers:
    """Return the numbers of the reduction that adds up partial sums over their rows, in fp32 at least."""
    rows, columns, element_bytes = numbers
    layout = reduction_layout((_partial_rows(rows, columns, card), columns), (columns, 1), (0,))
    return reduction_numbers(layout, accumulator_bytes=max(4, element_bytes), element_bytes=element_bytes)


RULES = {
    **by_name(layer_norm_gradient, layer_norm_staging, layer_norm_flags, batch_norm),
    "group_norm": product_rule(),  # One number for each sample and channel, or group: count, bytes of one.
}

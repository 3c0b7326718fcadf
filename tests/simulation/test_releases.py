"""The table of rules that came with releases of PyTorch, and what each changes in the prediction of one workload."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from made_up_card import make_card
from torch import Tensor
from torch.nn import functional as F

from autoaccum.devices.installed_torch import read_torch_release
from autoaccum.simulation.allocator.caching_allocator import AllocatorSettings
from autoaccum.simulation.allocator.replay import Replayer
from autoaccum.simulation.releases import CUDNN, RULES, Release, holds
from autoaccum.simulation.tracing.recorder import Recorder
from autoaccum.simulation.tracing.simulation import simulate

OLDEST, NEWEST = (2, 9), (2, 15)
MIB = 2**20
SMALL, LARGE = 8_519_680, 32 * MIB
"""The workspaces of cuBLAS."""
TURING, AMPERE, HOPPER, BLACKWELL, THOR = (7, 5), (8, 6), (9, 0), (10, 0), (11, 0)


def tensor(*shape: int, dtype: torch.dtype = torch.bfloat16, grad: bool = True) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="cuda", requires_grad=grad)


def product() -> None:
    torch.mm(tensor(64, 256, grad=False), tensor(256, 256))


def equal_free_blocks() -> None:
    """Of 40 MiB behind a block in use in the older segment, and 40 MiB of a whole one, which lies below it."""
    first = tensor(26 * MIB)
    del first
    kept = [tensor(6 * MIB)]
    behind, whole = tensor(20 * MIB), tensor(20 * MIB)
    del behind, whole
    kept.append(tensor(15 * MIB))
    torch.cuda.empty_cache()
    tensor(30 * MIB)


def product_then_a_large_tensor() -> None:
    product()
    tensor(2 * LARGE)


def linear() -> Tensor:
    return F.linear(tensor(64, 256, grad=False), tensor(256, 256), tensor(256))


def attention(
    *,
    size: int = 64,
    queries: int = 128,
    batch: int = 2,
    heads: int = 4,
    keys: int = 4,
    offset: int = 0,
    **options: Any,
) -> Callable[[], Tensor]:
    """A forward pass over 128 keys; with a mask, which flash attention does not take, except in fp32."""
    dtype = options.pop("dtype", torch.bfloat16)

    def run() -> Tensor:
        count = batch * heads * queries * size
        query = tensor(count + offset, dtype=dtype)[offset:].view(batch, heads, queries, size)
        key, value = (tensor(batch, keys, 128, size, dtype=dtype) for _ in range(2))
        mask = None if dtype is torch.float32 else tensor(queries, 128, grad=False)
        return F.scaled_dot_product_attention(query, key, value, mask, **options)

    return run


def unbatched_attention() -> None:
    query, key, value = (tensor(4, 128, 64, dtype=torch.float32) for _ in range(3))
    F.scaled_dot_product_attention(query, key, value)


def group_norm(memory_format: torch.memory_format = torch.contiguous_format) -> Callable[[], None]:
    def run() -> None:
        inputs = tensor(2, 64, 16, 16, grad=False).to(memory_format=memory_format)
        torch.native_group_norm(inputs, tensor(64), tensor(64), 2, 64, 256, 32, 1e-5)

    return run


def math_bytes(heads: int) -> int:
    """What attention in single steps takes beyond memory-efficient attention: 128 queries, 128 keys of 64 in fp32.

    The scaled queries and keys, the scores and their softmax, which of them are -inf, its rows, and a zero; instead of
    the output and a logarithm for each row.
    """
    operands, scores, rows = 4 * heads * 128 * 64, 4 * heads * 128 * 128, heads * 128
    return SMALL + 2 * operands + 2 * scores + scores // 4 + rows + 512 - (operands + 4 * rows)


SEED_AND_OFFSET = 2 * 512
"""cuDNN's attention has them on the card, memory-efficient attention on the host."""
PADDED_ROWS = 4096 - 3584 - SEED_AND_OFFSET
"""Rows that memory-efficient attention has in its logarithms for 100 queries of 2 x 4 heads, and cuDNN does not."""
CHANGES: dict[str, tuple[tuple[int, int], Callable[[], Any], int]] = {
    "shared_cublaslt_workspace": (TURING, linear, -MIB),
    "large_blackwell_workspace": (BLACKWELL, product, LARGE - SMALL),
    "large_thor_workspace": (THOR, product, LARGE - SMALL),
    "workspace_of_each_product": (TURING, product_then_a_large_tensor, -SMALL),
    "older_segments_first": (AMPERE, equal_free_blocks, -40 * MIB),
    "cudnn_dropout_in_sixteenths": (HOPPER, attention(queries=100, dropout_p=0.1), PADDED_ROWS),
    "cudnn_first_on_sm10x": ((10, 1), attention(queries=100), -PADDED_ROWS),
    "cudnn_at_most_65535": (
        HOPPER,
        attention(batch=65_536, heads=1, keys=1, queries=2),
        4 * 65_536 * 30 - SEED_AND_OFFSET,
    ),
    "cudnn_heads_of_256": (HOPPER, attention(queries=100, size=160), 4 * 8 * 100 * 160 + PADDED_ROWS),
    "cudnn_without_single_queries": (BLACKWELL, attention(queries=1), 1024 - 512 - SEED_AND_OFFSET),
    "aligned_efficient_attention": (AMPERE, attention(dtype=torch.float32, offset=1), math_bytes(8)),
    "efficient_grouped_queries": (
        AMPERE,
        attention(dtype=torch.float32, keys=2, enable_gqa=True),
        -(math_bytes(8) + 2 * 4 * 8 * 128 * 64),  # Keys and values are repeated for it.
    ),
    "fused_unbatched_attention": (AMPERE, unbatched_attention, -math_bytes(4)),
    "group_norm_moments": (AMPERE, group_norm(), 2 * 512),
    "group_norm_channels_last": (AMPERE, group_norm(torch.channels_last), -2 * 2 * 64 * 256),
}
"""By rule: a card, a workload, and the bytes by which the rule changes its peak; that of reserved memory, if not the
sizes of blocks but their places change."""


def peak_bytes(release: Release, capability: tuple[int, int], run: Callable[[], Any], *, reserved: bool = False) -> int:
    card = make_card(capability, 132)
    with simulate(card, recorder := Recorder(), release):
        recorder.begin(lambda: "forward")
        run()
        trace = recorder.trace([1])
    _, unlimited, _ = Replayer(card, AllocatorSettings(), release).replay(trace, 1 << 40)
    return unlimited.peak_reserved_bytes if reserved else unlimited.peak_allocated_bytes


@pytest.mark.parametrize("name", RULES)
def test_a_rule_changes_the_prediction_from_its_release_on(name: str) -> None:
    (major, minor), (capability, run, change) = RULES[name], CHANGES[name]
    before, after = (
        peak_bytes(release, capability, run, reserved=run is equal_free_blocks)
        for release in ((major, minor - 1), (major, minor))
    )
    assert after - before == change


def several_layers() -> None:
    kept = [attention(queries=100, size=160)(), attention(queries=100, dropout_p=0.1)(), linear()]
    group_norm()()
    del kept


def test_releases_are_compared_on_one_workload() -> None:
    """The same bytes whichever torch is installed: a release is predicted elsewhere as it predicts itself."""
    peaks = [peak_bytes((2, minor), HOPPER, several_layers) for minor in range(9, 16)]
    assert peaks[0] == 36_627_968
    assert [after - before for before, after in pairwise(peaks)] == [
        0,  # 2.10.
        -2 * PADDED_ROWS,  # 2.11: a cuDNN that comes first.
        PADDED_ROWS - MIB,  # 2.12: one workspace for both libraries; another probability of dropout.
        2 * 512,  # 2.13: the moments of groups.
        PADDED_ROWS,  # 2.14: heads of 160 that train.
        MIB - LARGE - (2 * 65_536 + 8 * 512),  # 2.15: the linear layer's own, freed before the group norm.
    ]


@pytest.mark.parametrize("name", RULES)
def test_a_rule_holds_since_its_release(name: str) -> None:
    major, minor = RULES[name]
    assert OLDEST < (major, minor) <= NEWEST
    assert not holds(name, (major, minor - 1))
    assert holds(name, (3, 0)), "a release that is newer than all rows follows all rules"


def test_each_supported_release_has_a_cudnn() -> None:
    assert min(CUDNN) == OLDEST <= read_torch_release()
    assert list(CUDNN.values()) == sorted(CUDNN.values())

"""The workspaces found for small models on fake tensors, whose numbers are affine in the batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from made_up_card import make_card
from torch import Tensor, nn
from torch.nn import functional as F

from autoaccum.simulation.operators.registry import observe_workspaces
from autoaccum.simulation.operators.workspace_sizes import estimate
from autoaccum.simulation.releases import Release
from autoaccum.simulation.trace_records import Freed, Kept, MemoryStep, OutputAllocated, Workspace
from autoaccum.simulation.tracing.recorder import Recorder
from autoaccum.simulation.tracing.simulation import simulate

OUTPUTS = OutputAllocated()
H100 = make_card((9, 0), 132)
OF_CUBLAS, OF_CUBLASLT = Workspace("product", (0, -1)), Workspace("product_with_bias", (0, -1))
_aten = torch.ops.aten


def see(func: Any, *args: Any, out: Any = None, version: Release = (2, 13), **kwargs: Any) -> Sequence[MemoryStep]:
    return observe_workspaces(func, args, kwargs, out, version)


def card_tensor(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(*shape, dtype=dtype, device="cuda:0")


def test_products_free_their_workspace_from_2_15() -> None:
    with simulate(H100):
        left, right, bias = card_tensor(2, 8), card_tensor(8, 4), card_tensor(4)
        for func, args, rule in (
            (_aten.mm.default, (left, right), "product"),
            (_aten.addmm.default, (bias, left, right), "product_with_bias"),
        ):
            assert see(func, *args, version=(2, 15)) == [OUTPUTS, Workspace(rule, (0, -1))]
            assert see(func, *args) == [OUTPUTS, Kept(Workspace("product", (0, -1)))]


@pytest.mark.parametrize(
    ("version", "environment", "kept"),
    [
        ((2, 11), {}, [OF_CUBLAS, OF_CUBLASLT]),
        ((2, 11), {"TORCH_CUBLASLT_UNIFIED_WORKSPACE": "1"}, [OF_CUBLAS]),
        ((2, 14), {"TORCH_CUBLASLT_UNIFIED_WORKSPACE": "false"}, [OF_CUBLAS]),
        ((2, 14), {"TORCH_CUBLASLT_UNIFIED_WORKSPACE": "0"}, [OF_CUBLASLT]),
        (
            (2, 14),
            {"TORCH_CUBLASLT_UNIFIED_WORKSPACE": "0", "CUBLASLT_WORKSPACE_SIZE": "4096"},
            [Workspace("product_with_bias", (0, 4 << 20))],
        ),
        ((2, 15), {"TORCH_CUBLAS_WORKSPACE_CACHE": "1"}, [OF_CUBLAS]),
    ],
)
def test_variables_decide_on_workspaces_as_in_pytorch(
    monkeypatch: pytest.MonkeyPatch, version: Release, environment: dict[str, str], kept: list[Workspace]
) -> None:
    """Up to 2.14, as PyTorch's own code allocated them on a card without kernels; in 2.15, as its source reads."""
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with simulate(H100):
        steps = see(_aten.addmm.default, card_tensor(4), card_tensor(2, 8), card_tensor(8, 4), version=version)
    assert steps == [OUTPUTS, *map(Kept, kept)]


def test_operands_in_other_layouts_are_copied() -> None:
    with simulate(H100):
        tensor, weight = card_tensor(2, 4, 8, 8), card_tensor(8, 4, 3, 3).to(memory_format=torch.channels_last)
        args = tensor, weight, None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1
        copy, _, workspace = see(_aten.convolution.default, *args, out=F.conv2d(tensor, weight))
        assert copy == Workspace("layout_copy", (4 * 2 * 4 * 64,))
        assert isinstance(workspace, Workspace)
        assert workspace.numbers[2] == 1, "channels last"
        right = card_tensor(8, 2)
        assert len(see(_aten.mm.default, card_tensor(8, 4).t(), right)) == 2, "cuBLAS reads it"
        _, _, copy = see(_aten.mm.default, card_tensor(1).expand(4, 8), right)
        assert copy == Workspace("layout_copy", (4 * 4 * 8,))


def test_flash_attention() -> None:
    with simulate(H100):
        query, key = card_tensor(2, 8, 100, 64, dtype=torch.bfloat16), card_tensor(2, 2, 50, 64, dtype=torch.bfloat16)
        rows_first = card_tensor(2, 100, 8, 64, dtype=torch.bfloat16).transpose(1, 2)
        forward = see(_aten._scaled_dot_product_flash_attention.default, query, key, key)
        dropped = see(_aten._scaled_dot_product_flash_attention.default, query, key, key, 0.1)
        args = (query, query, key, key, rows_first)
        backward = see(_aten._scaled_dot_product_flash_attention_backward.default, *args, out=(query, key, key))
    assert list(forward) == [
        *(OutputAllocated(0), OutputAllocated(1)),
        *(Workspace(f"flash_split{what}", (2, 8, 100, 50, 64)) for what in ("_sums", "s")),
        OUTPUTS,
    ]
    assert list(dropped) == []
    assert list(backward) == [
        Workspace("layout_copy", (2 * 8 * 100 * 64 * 2,)),
        OUTPUTS,
        Workspace("flash_row_sums", (2, 8, 100)),
        Workspace("flash_gradient", (2, 8, 100, 64, 0)),
        Workspace("flash_grouped", (2, 8, 50, 64, 2)),
        Workspace("flash_grouped", (2, 8, 50, 64, 2)),
    ]


def test_efficient_and_cudnn_attention() -> None:
    with simulate(H100):
        query, key = card_tensor(2, 8, 100, 64), card_tensor(2, 8, 50, 64)
        rows_first = card_tensor(2, 100, 8, 64).transpose(1, 2)
        forward = see(_aten._scaled_dot_product_efficient_attention.default, query, key, key, None, True)
        backward = see(
            _aten._scaled_dot_product_efficient_attention_backward.default,
            *(rows_first, query, key, key, None, query, query, query, query, 0.1),
        )
        shared = card_tensor(2, 2, 50, 64)
        grouped = see(
            _aten._scaled_dot_product_efficient_attention_backward.default,
            *(rows_first, query, shared, shared, None, query, query, query, query, 0.1),
        )
        misaligned = see(
            _aten._scaled_dot_product_efficient_attention_backward.default,
            *(query, query, key, key, None, query, query, query, query, 0.0),
        )
        cudnn = see(_aten._scaled_dot_product_cudnn_attention_backward.default, query, query, key, key)
    assert list(forward) == [OutputAllocated(0), OutputAllocated(1), Workspace("efficient_output", (2, 8, 100, 64, 4))]
    numbers = (2, 8, 100, 50, 64, 64, 4, 1, 0)
    assert list(backward) == [
        OUTPUTS,
        Workspace("efficient_row_sums", (2, 8, 100)),
        *[Workspace("efficient_cast", numbers)] * 2,
        Workspace("efficient_product", numbers),
        Workspace("efficient_product_sums", numbers),
        Freed(4),
        Workspace("efficient_gradient", numbers),
    ]
    assert list(grouped) == [OUTPUTS, *[Workspace("flash_grouped", (2, 8, 50, 64, 4))] * 2, *list(backward)[1:]]
    assert list(misaligned)[0] == Workspace("layout_copy", (4 * 2 * 8 * 100 * 64,))
    assert list(cudnn) == [OUTPUTS, Workspace("cudnn_gradient", (2, 8, 8, 100, 50, 64, 4))]


@pytest.mark.parametrize(
    ("shape", "measured"),
    [
        ((64, 2048), [16_384]),
        ((1_000_000,), [8_000_000, 12_200_191]),
        ((4, 1_000_000), [8_000_000, 12_200_191]),
        ((64, 8192), [4_194_304, 4_194_304, 2_097_152, 6_400_511, 96_767]),
        ((256, 10_000), [20_480_000, 30_720_255]),
    ],
    ids=str,
)
def test_sorts_take_what_was_measured(shape: tuple[int, ...], measured: list[int]) -> None:
    """On an H100 (tests/gpu/data/h100.json), or by PyTorch's own code on a fake card (tests/shared/real_allocator)."""
    with simulate(H100):
        steps = see(_aten.sort.default, card_tensor(*shape))
    assert_sizes(steps, measured)


@pytest.mark.parametrize(
    ("inverse", "measured"),
    [(False, [4_000_000, 4_157_183, 3_999_996]), (True, [4_000_000, 8_000_000, 8_000_000, 12_200_191, 3_999_996])],
)
def test_unique_values_are_sorted_in_memory_of_their_own(inverse: bool, measured: list[int]) -> None:
    """As above; the output has room for all values, though one is left."""
    with simulate(H100):
        values = card_tensor(1_000_000)
        assert_sizes(see(_aten._unique2.default, values, True, inverse, out=(card_tensor(1), values, values)), measured)


def assert_sizes(steps: Sequence[MemoryStep], measured: Sequence[int]) -> None:
    taken = [step.workspace if isinstance(step, Kept) else step for step in steps if isinstance(step, Kept | Workspace)]
    sizes = [estimate(workspace, H100, (2, 13)) for workspace in taken]
    for size, true in zip(sizes, measured, strict=True):
        assert abs(size.bytes - true) <= size.uncertainty_bytes
    assert max(size.uncertainty_bytes for size in sizes) < max(measured) // 10


def test_inputs_are_laid_out_before_outputs_are_made() -> None:
    with simulate(H100, recorder := Recorder()):
        values, layer = card_tensor(768, 1024).t(), nn.LayerNorm(768, device="cuda:0")
        recorder.begin(lambda: "forward")
        start = len(recorder.events)
        kept = layer(values)
        copy, out, mean, deviation, gone = recorder.events[start:]
    assert [recorder.sizes[block] for block in (out, mean, deviation)] == [4 * 1024 * 768, 4096, 4096]
    assert recorder.sizes[copy] == Workspace("layout_copy", (4 * 1024 * 768,))
    assert gone == ~copy
    del kept


def test_mse_loss_keeps_the_memory_of_all_elements() -> None:
    with simulate(H100, recorder := Recorder()):
        values = card_tensor(1024, 768)
        recorder.begin(lambda: "forward")
        start = len(recorder.events)
        loss = F.mse_loss(values, values)
        kept = {event for event in recorder.events[start:] if event >= 0 and ~event not in recorder.events}
        sizes = [recorder.sizes[block] for block in sorted(kept)]
        del loss
        assert {~block for block in kept} <= set(recorder.events)
    assert sizes == [4, Workspace("loss_elements", (4 * 1024 * 768,))]

"""Normalisation on a card (`Normalization.cpp`, `layer_norm.cpp`, `group_norm.cpp`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from autoaccum.devices.simulated.catalog import Card
from autoaccum.devices.simulated.kernels.layers import is_cudnn_batch_norm
from autoaccum.devices.simulated.recorder import Recorder
from autoaccum.devices.simulated.simulation import simulate

CARD = Card(name="c", title="C", total_bytes=1 << 30, capability=(8, 6), multiprocessors=82, source="made up")
BATCH, CHANNELS, SIDE = 4, 32, 8
ELEMENTS = BATCH * CHANNELS * SIDE * SIDE


class Operators(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the names of operators."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.__name__.removesuffix(".default"))
        return func(*args, **(kwargs or {}))


@contextmanager
def on_card() -> Iterator[Recorder]:
    with simulate(CARD) as mode:
        yield mode.recorder


def image(dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(BATCH, CHANNELS, SIDE, SIDE, device="cuda:0", dtype=dtype, requires_grad=True)


def sizes_of(recorder: Recorder, run: Callable[[], Any]) -> list[Any]:
    start = len(recorder.sizes)
    kept = run()
    del kept
    return [size for size in recorder.sizes[start:] if isinstance(size, int)]


BASE: dict[str, Any] = {
    "dtype": "float32",
    "weight": "float32",
    "bias": "float32",
    "tracks": (True, True),
    "shape": (4, 32, 8, 8),
    "training": True,
    "eps": 1e-5,
    "enabled": True,
}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, True),
        ({"dtype": "float16"}, True),
        ({"dtype": "float16", "weight": "float16"}, False),
        ({"dtype": "bfloat16"}, False),
        ({"weight": None, "bias": None}, False),
        ({"shape": (4, 32)}, False),
        ({"shape": (4, 32, 8)}, True),
        ({"tracks": (False, False)}, True),
        ({"tracks": (False, False), "training": False}, False),
        ({"training": False}, True),
        ({"shape": (70_000, 2, 1, 1), "training": False}, False),
        ({"shape": (70_000, 2, 1, 1)}, True),
        ({"shape": (1 << 10, 1 << 11, 1 << 10)}, False),
        ({"enabled": False}, False),
    ],
    ids=lambda value: "-".join(value) or "plain" if isinstance(value, dict) else "",
)
def test_batch_norm_runs_with_cudnn(changes: dict[str, Any], expected: bool) -> None:
    assert is_cudnn_batch_norm(**{**BASE, **changes}) is expected


@pytest.mark.parametrize(
    ("dtype", "kernel"),
    [(torch.float32, "cudnn_batch_norm"), (torch.float16, "cudnn_batch_norm"), (torch.bfloat16, "native_batch_norm")],
    ids=["fp32", "fp16", "bf16"],
)
def test_batch_norm_saves_statistics_in_fp32(dtype: torch.dtype, kernel: str) -> None:
    with on_card() as recorder:
        layer, x = nn.BatchNorm2d(CHANNELS, device="cuda:0"), image(dtype)
        held: list[Tensor] = []
        with Operators() as seen:
            sizes = sizes_of(recorder, lambda: held.append(layer(x)))
        assert kernel in seen.names
        assert sizes == [ELEMENTS * x.element_size(), CHANNELS * 4, CHANNELS * 4]
        gradient = torch.empty_like(held[0])
        sizes = sizes_of(recorder, lambda: torch.autograd.backward(held[0], gradient))
        assert sizes == [ELEMENTS * x.element_size(), CHANNELS * 4, CHANNELS * 4]


def test_cudnn_copies_a_strided_input() -> None:
    with on_card() as recorder:
        layer, x = nn.BatchNorm2d(CHANNELS, device="cuda:0"), image()
        half = ELEMENTS * 2
        assert sizes_of(recorder, lambda: layer(x[:, :, ::2])) == [half, half, CHANNELS * 4, CHANNELS * 4]
        with torch.backends.cudnn.flags(enabled=False):
            assert sizes_of(recorder, lambda: layer(x[:, :, ::2])) == [half, CHANNELS * 4, CHANNELS * 4]


def test_batch_norm_evaluates_and_differentiates() -> None:
    with on_card():
        layer, x = nn.BatchNorm2d(CHANNELS, device="cuda:0").eval(), image()
        torch.autograd.backward(layer(x).sum())
        assert x.grad is not None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_rms_norm_is_one_kernel(dtype: torch.dtype) -> None:
    with on_card() as recorder:
        layer = nn.RMSNorm(64, device="cuda:0", dtype=dtype)
        x = torch.empty(16, 64, device="cuda:0", dtype=dtype, requires_grad=True)
        width = x.element_size()
        held: list[Tensor] = []
        assert sizes_of(recorder, lambda: held.append(layer(x))) == [16 * 64 * width, 16 * 4]
        gradient = torch.empty_like(held[0])
        sizes = sizes_of(recorder, lambda: torch.autograd.backward(held[0], gradient))
        assert sizes == [16 * 64 * width, 64 * width]


def test_layer_norm_saves_statistics_in_fp32() -> None:
    with on_card() as recorder:
        layer = nn.LayerNorm(64, device="cuda:0", dtype=torch.bfloat16)
        x = torch.empty(16, 64, device="cuda:0", dtype=torch.bfloat16, requires_grad=True)
        assert sizes_of(recorder, lambda: layer(x)) == [16 * 64 * 2, 16 * 4, 16 * 4]


def test_group_norm_saves_statistics_in_its_own_dtype() -> None:
    with on_card() as recorder:
        layer, x = nn.GroupNorm(4, CHANNELS, device="cuda:0", dtype=torch.bfloat16), image(torch.bfloat16)
        assert sizes_of(recorder, lambda: layer(x)) == [ELEMENTS * 2, BATCH * 4 * 2, BATCH * 4 * 2]


@pytest.mark.parametrize("name", ["InstanceNorm2d", "SyncBatchNorm"])
def test_other_norms_train(name: str) -> None:
    with on_card():
        build: Any = getattr(nn, name)
        layer, x = build(CHANNELS, affine=True).cuda(), image()
        torch.autograd.backward(layer(x).sum())
        assert all(parameter.grad is not None for parameter in layer.parameters())

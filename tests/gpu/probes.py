"""What kernels take besides tensors (facts about a card that no source tells): one function for each kind.

Each takes the device, so that it also runs on the CPU, where every figure is 0.
"""

from __future__ import annotations

import gc
import time
import traceback
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from autoaccum.devices.cuda_memory import read_card

Probe = Callable[[torch.device], Any]


def attempt(probe: Callable[[], Any]) -> dict[str, Any]:
    """What `probe` gives, or its error: the next one must run all the same."""
    began = time.perf_counter()
    try:
        return {"value": probe(), "seconds": time.perf_counter() - began}
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}", "traceback": traceback.format_exc()}
    finally:
        gc.collect()
        torch.cuda.empty_cache()


def measure_growth(place: torch.device) -> dict[str, Any]:
    """What the first use of each kind of kernel takes outside of the allocator, and leaves in it, in this order."""
    image = torch.randn(8, 16, 32, 32, device=place, requires_grad=True)
    convolution = nn.Conv2d(16, 16, 3, padding=1).to(place)
    square = torch.randn(256, 256, device=place, requires_grad=True)
    queries = torch.randn(2, 4, 128, 64, device=place, dtype=torch.bfloat16, requires_grad=True)
    classes = torch.zeros(256, dtype=torch.long, device=place)
    steps: dict[str, Callable[[], Tensor]] = {
        "pointwise": lambda: square.relu().sum(),
        "product, fp32": lambda: (square @ square).sum(),
        "product, bf16": lambda: (square.bfloat16() @ square.bfloat16()).sum(),
        "reduction": lambda: square.sum(0).square().sum(),
        "convolution": lambda: convolution(image).sum(),
        "attention": lambda: nn.functional.scaled_dot_product_attention(queries, queries, queries).sum(),
        "softmax": lambda: nn.functional.cross_entropy(square, classes),
        "optimizer": lambda: _update(square),
    }
    grown = {}
    for name, step in steps.items():
        outside, inside = outside_bytes(place), allocated_bytes(place)
        torch.autograd.backward(step())
        square.grad = image.grad = queries.grad = None
        convolution.zero_grad()
        grown[name] = {
            "outside_bytes": outside_bytes(place) - outside,
            "left_in_allocator_bytes": allocated_bytes(place) - inside,
        }
    return grown


def measure_workspace(place: torch.device) -> dict[str, Any]:
    """What a product of 512 x 512 takes besides its result and keeps: the workspace of cuBLAS."""
    sizes = {}
    for dtype in (torch.float32, torch.bfloat16):
        one = torch.randn(512, 512, device=place, dtype=dtype)
        held = allocated_bytes(place)
        peak = peak_above(place, partial(torch.mm, one, one))
        sizes[str(dtype)] = {"peak_bytes": peak, "kept_bytes": allocated_bytes(place) - held}
    return sizes


def measure_reductions(place: torch.device) -> dict[str, int]:
    """Peak of `x.sum(0)`, every bias gradient, above its input: 0, 6, 24 and 96 MiB are expected, up to a bound."""
    found = {}
    for rows, columns in ((512, 768), (1024, 768), (4096, 768), (4096, 3072), (16384, 4096)):
        ones = torch.ones(rows, columns, device=place)
        found[f"{rows} x {columns}"] = peak_above(place, partial(torch.sum, ones, 0))
    return found


def measure_attention(place: torch.device) -> dict[str, Any]:
    """Peaks of a forward and backward by each kernel, above the inputs; gradients and output are part of them."""
    found: dict[str, Any] = {}
    for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION):
        for shape in ((4, 12, 1024, 64), (1, 16, 2048, 128)):
            found[f"{backend.name} {shape}"] = attempt(partial(_attend, place, backend, shape))
    return found


def measure_embedding(place: torch.device) -> dict[str, int]:
    """Peak of an embedding's backward, gradient included; scratch comes beyond 3,072 tokens."""
    found = {}
    for tokens in (1024, 4096, 16384):
        table = nn.Embedding(5000, 768, device=place)
        loss = table(torch.randint(0, 5000, (tokens,), device=place)).sum()
        found[str(tokens)] = peak_above(place, partial(torch.autograd.backward, loss))
    return found


def measure_clipping(place: torch.device) -> int:
    """Peak of `clip_grad_norm_` over 64 gradients of 1 MiB."""
    parameters = [nn.Parameter(torch.zeros(2**18, device=place)) for _ in range(64)]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    return peak_above(place, partial(nn.utils.clip_grad_norm_, parameters, 1.0))


def measure_convolution(place: torch.device) -> dict[str, int]:
    """Peak of a convolution's forward and backward, by heuristics and by benchmarking."""
    found = {}
    layer = nn.Conv2d(64, 64, 3, padding=1).to(place)
    images = torch.randn(32, 64, 56, 56, device=place, requires_grad=True)
    for benchmark in (False, True):
        torch.backends.cudnn.benchmark = benchmark
        found[f"benchmark={benchmark}"] = peak_above(place, lambda: torch.autograd.backward(layer(images).sum()))
    torch.backends.cudnn.benchmark = False
    return found


KERNELS: Mapping[str, Probe] = {
    "growth": measure_growth,
    "workspace": measure_workspace,
    "reductions": measure_reductions,
    "attention": measure_attention,
    "embedding": measure_embedding,
    "clipping": measure_clipping,
    "convolution": measure_convolution,
}


def peak_above(place: torch.device, work: Callable[[], Any]) -> int:
    """The most tensors and workspaces held during `work`, above what was held before it."""
    gc.collect()
    before = allocated_bytes(place)
    if place.type == "cuda":
        torch.cuda.reset_peak_memory_stats(place)
    kept = work()
    after = allocated_bytes(place)
    del kept
    return after if place.type == "cpu" else torch.cuda.max_memory_allocated(place) - before


def allocated_bytes(place: torch.device) -> int:
    """What tensors hold, once the card has done all it was asked for."""
    if place.type == "cpu":
        return 0
    torch.cuda.synchronize(place)
    return torch.cuda.memory_allocated(place)


def outside_bytes(place: torch.device) -> int:
    """What is taken of the card outside of this process's allocator, by anyone."""
    if place.type == "cpu":
        return 0
    torch.cuda.synchronize(place)
    return read_card(place.index).held_outside_bytes


def _attend(place: torch.device, backend: SDPBackend, shape: tuple[int, ...]) -> int:
    queries, keys, values = (
        torch.randn(shape, device=place, dtype=torch.bfloat16, requires_grad=True) for _ in range(3)
    )

    def attend() -> None:
        with sdpa_kernel(backend):
            result = nn.functional.scaled_dot_product_attention(queries, keys, values, is_causal=True)
            torch.autograd.backward(result.sum())

    return peak_above(place, attend)


def _update(parameter: Tensor) -> Tensor:
    weights = nn.Parameter(torch.zeros_like(parameter))
    optimizer = torch.optim.AdamW([weights])
    torch.autograd.backward(weights.sum())
    optimizer.step()
    return parameter.sum()

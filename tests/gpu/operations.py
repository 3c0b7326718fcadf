"""Operators whose kernels take memory beside their tensors, each alone, in the order in which a card is asked.

The same code runs on the card and on the simulated one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

Work = Callable[[], Any]
Prepare = Callable[[torch.device], Work]
Row = tuple[str, Prepare] | tuple[str, Prepare, bool]
FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
SHORT = {FP32: "fp32", BF16: "bf16", FP16: "fp16"}
PLAIN, LAST = torch.contiguous_format, torch.channels_last
FORMAT = {PLAIN: "", LAST: " channels_last"}
IMAGES = (32, 64, 56, 56)


@dataclass(frozen=True)
class Operation:
    """An operation that is measured and simulated.

    Attributes:
        kind: The kind of row in the table, such as `reduction`.
        name: Its name among others of its kind.
        prepare: Makes its tensors on a device, and returns what is run.
        warm: Whether it has run once before it is recorded, so that what a library takes only at first is not seen.
    """

    kind: str
    name: str
    prepare: Prepare
    warm: bool = True

    @property
    def title(self) -> str:
        """The title of its row."""
        return f"{self.kind}: {self.name}"


def all_operations() -> tuple[Operation, ...]:
    """In the order of the table of facts: what weighs most comes first."""
    kinds: dict[str, Callable[[], Iterator[Row]]] = {
        "reduction": _reductions,
        "attention": _attention,
        "embedding": _embeddings,
        "product": _products,
        "convolution": _convolutions,
        "recurrent": _recurrent_layers,
        "normalisation": _normalisations,
        "indexing": _indexing,
        "update": _updates,
    }
    return tuple(Operation(kind, *row) for kind, rows in kinds.items() for row in rows())


def _reductions() -> Iterator[Row]:
    shapes = ((512, 768), (1024, 768), (4096, 768), (4096, 3072), (16384, 4096), (65536, 512))
    for shape, dtype in product(shapes, (FP32, BF16)):
        yield f"sum(0) of {_told(shape)} {SHORT[dtype]}", _apply(lambda values: values.sum(0), shape, dtype)
    for layout in (PLAIN, LAST):
        name = f"sum((0, 2, 3)) of {_told(IMAGES)}{FORMAT[layout]}"
        yield name, _apply(lambda values: values.sum((0, 2, 3)), IMAGES, FP32, layout)
    functions: dict[str, Callable[[Tensor], Any]] = {
        "sum()": torch.sum,
        "mean(-1)": lambda values: values.mean(-1),
        "var_mean(0)": lambda values: torch.var_mean(values, 0),
        "amax(0)": lambda values: values.amax(0),
    }
    for name, function in functions.items():
        yield f"{name} of 4096 x 3072", _apply(function, (4096, 3072))


def _attention() -> Iterator[Row]:
    flash, efficient, cudnn = SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION
    usual, wide = (4, 12, 12, 1024, 1024, 64), (1, 16, 16, 2048, 2048, 128)
    for backend, shape in product((flash, cudnn), (usual, wide, (2, 16, 4, 1000, 1000, 96), (1, 8, 8, 512, 512, 256))):
        yield _attended(backend, shape, BF16, causal=True)
    yield _attended(flash, usual, FP16, dropout=0.1)
    yield _attended(flash, (1, 2, 2, 64, 16384, 64), BF16)
    yield _attended(cudnn, usual, BF16, dropout=0.125)
    for dtype, shape in product((FP32, FP16), (usual, wide, (1, 4, 4, 777, 777, 192))):
        yield _attended(efficient, shape, dtype)
    yield _attended(efficient, usual, BF16, masked=True)
    yield _attended(cudnn, usual, BF16, masked=True)
    yield _attended(efficient, wide, FP16, dropout=0.1)


def _attended(
    backend: SDPBackend, shape: tuple[int, ...], dtype: torch.dtype, *, masked: bool = False, **options: Any
) -> Row:
    """Numbers of `shape`: samples, query heads, key heads, queries, keys, head size."""
    samples, heads, key_heads, queries, keys, size = shape
    chosen = {"dropout_p": options.get("dropout", 0.0), "is_causal": options.get("causal", False)}

    def prepare(place: torch.device) -> Work:
        make = partial(torch.randn, device=place, dtype=dtype, requires_grad=True)
        query, key, value = (make(samples, *rest, size) for rest in ((heads, queries), *[(key_heads, keys)] * 2))
        mask = torch.zeros(samples, 1, queries, keys, device=place, dtype=dtype) if masked else None

        def run() -> Tensor:
            with sdpa_kernel(backend):
                out = F.scaled_dot_product_attention(query, key, value, mask, enable_gqa=heads != key_heads, **chosen)
            _go_back(out)
            return out

        return run

    told = "".join(f" {name}={value}" for name, value in options.items()) + " masked" * masked
    return f"{backend.name} {_told(shape)} {SHORT[dtype]}{told}", prepare


def _embeddings() -> Iterator[Row]:
    sizes = ((1024, 5000), (4096, 5000), (16384, 5000), (16384, 50257), (65536, 50257))
    for (tokens, rows), dtype in (*((size, FP32) for size in sizes), ((16384, 50257), BF16)):
        name = f"{tokens} tokens of {rows}" + " bf16" * (dtype == BF16)
        yield name, partial(_embed, tokens, rows, dtype)


def _embed(tokens: int, rows: int, dtype: torch.dtype, place: torch.device) -> Work:
    table = nn.Embedding(rows, 768, device=place, dtype=dtype)
    ids = torch.zeros(tokens, dtype=torch.long, device=place).random_(0, rows)
    return lambda: _go_back(table(ids))


def _products() -> Iterator[Row]:
    for dtype in (FP32, BF16, FP16):
        yield f"mm {SHORT[dtype]}", _apply(lambda values: values @ values, (512, 512), dtype)
        linear = _run_layer(partial(nn.Linear, 1024, 4096), (2048, 1024), dtype)
        yield f"linear with bias and its gradients {SHORT[dtype]}", linear
    yield "bmm fp32", _apply(lambda values: values @ values, (16, 256, 256))


def _convolutions() -> Iterator[Row]:
    conv = partial(nn.Conv2d, 64, 64, 3, padding=1)
    kinds: dict[str, tuple[Callable[..., nn.Module], tuple[int, ...]]] = {
        "3 x 3, 64 to 64": (conv, IMAGES),
        "1 x 1, 64 to 256": (partial(nn.Conv2d, 64, 256, 1), IMAGES),
        "7 x 7 by 2, 3 to 64": (partial(nn.Conv2d, 3, 64, 7, 2, 3), (16, 3, 224, 224)),
        "3 x 3, 512 to 512": (partial(nn.Conv2d, 512, 512, 3, padding=1), (32, 512, 7, 7)),
        "3 x 3 in 8 groups": (partial(conv, groups=8), IMAGES),
        "3 x 3 by depth": (partial(conv, groups=64), IMAGES),
        "2 x 2 transposed": (partial(nn.ConvTranspose2d, 128, 64, 2, 2), (8, 128, 64, 64)),
    }
    for benchmark, dtype, layout in product((False, True), (FP32, BF16, FP16), (PLAIN, LAST)):
        for name, (make, shape) in list(kinds.items())[:3:2] if benchmark else kinds.items():
            told = f"{name} {SHORT[dtype]}{FORMAT[layout]}" + " benchmark" * benchmark
            yield told, _run_layer(make, shape, dtype, layout, benchmark=benchmark), not benchmark


def _recurrent_layers() -> Iterator[Row]:
    variants: list[tuple[type[nn.RNNBase], torch.dtype, dict[str, Any]]] = [
        *((cell, dtype, {}) for cell, dtype in product((nn.LSTM, nn.GRU, nn.RNN), (FP32, FP16))),
        *((nn.LSTM, FP32, {name: value}) for name, value in (("num_layers", 1), ("bidirectional", True))),
        *((nn.LSTM, FP32, {name: value}) for name, value in (("dropout", 0.2), ("proj_size", 128))),
    ]
    for cell, dtype, options in variants:
        told = "".join(f" {name}={value}" for name, value in options.items())
        make: Any = partial(cell, 256, 512, batch_first=True, **{"num_layers": 2, **options})  # type: ignore[arg-type]
        yield f"{cell.__name__} {SHORT[dtype]}{told}", _run_layer(make, (64, 128, 256), dtype)


def _normalisations() -> Iterator[Row]:
    for (rows, columns), dtype in product(((1024, 768), (100_000, 64), (100_000, 768), (70_000, 4096)), (FP32, BF16)):
        make = partial(nn.LayerNorm, columns)
        yield f"layer norm of {rows} x {columns} {SHORT[dtype]}", _run_layer(make, (rows, columns), dtype)
    for dtype, layout in product((FP32, BF16), (PLAIN, LAST)):
        told = f"{SHORT[dtype]}{FORMAT[layout]}"
        # Under autocast a batch norm has fp32 weights and whatever input comes, a group norm is in fp32.
        yield f"batch norm {told}", _run_layer(partial(nn.BatchNorm2d, 64), IMAGES, dtype, layout, weights=FP32)
        yield f"group norm {told}", _run_layer(partial(nn.GroupNorm, 8, 64), IMAGES, dtype, layout)


def _indexing() -> Iterator[Row]:
    for count in (10_000, 1_000_000):
        yield f"index_put of {count}, accumulated", partial(_put, count)
        yield f"cumsum of {count}", _apply(lambda values: values.cumsum(0), (count,))
        yield f"nonzero of {count}", _apply(torch.nonzero, (count,))
        yield f"unique of {count}", _apply(torch.unique, (count,))
    for shape in ((1_000_000,), (64, 2048), (64, 8192)):
        yield f"sort of {_told(shape)}", _apply(torch.sort, shape)
        yield f"topk of {_told(shape)}", _apply(lambda values: values.topk(50), shape)


def _put(count: int, place: torch.device) -> Work:
    table, ids = torch.zeros(50_000, device=place), torch.zeros(count, dtype=torch.long, device=place)
    return partial(table.index_put_, (ids,), torch.ones(count, device=place), accumulate=True)


def _updates() -> Iterator[Row]:
    yield "clip_grad_norm_ of 64 x 2**18", partial(_clip, 64, 2**18)
    yield "clip_grad_norm_ of 3 x 2**24", partial(_clip, 3, 2**24)
    for name, kind, options in (
        ("AdamW foreach", torch.optim.AdamW, {"foreach": True}),
        ("AdamW fused", torch.optim.AdamW, {"fused": True}),
        ("Adam foreach", torch.optim.Adam, {"foreach": True}),
        ("SGD foreach", torch.optim.SGD, {"foreach": True, "momentum": 0.9, "weight_decay": 1e-4}),
        ("RMSprop foreach", torch.optim.RMSprop, {"foreach": True}),
    ):
        yield name, partial(_update, partial(kind, lr=0.1, **options))
    yield "cross entropy of 4096 x 50257", _classify


def _clip(count: int, elements: int, place: torch.device) -> Work:
    return partial(nn.utils.clip_grad_norm_, _with_gradients(count, elements, place), 1.0)


def _update(make: Any, place: torch.device) -> Work:
    optimizer = make(_with_gradients(16, 2**20, place))
    optimizer.step()
    work: Work = optimizer.step
    return work


def _with_gradients(count: int, elements: int, place: torch.device) -> list[nn.Parameter]:
    parameters = [nn.Parameter(torch.zeros(elements, device=place)) for _ in range(count)]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    return parameters


def _classify(place: torch.device) -> Work:
    logits = torch.ones(4096, 50257, device=place, requires_grad=True)
    classes = torch.zeros(4096, dtype=torch.long, device=place)
    return lambda: torch.autograd.backward(F.cross_entropy(logits, classes))


def _apply(
    function: Callable[[Tensor], Any],
    shape: Sequence[int],
    dtype: torch.dtype = FP32,
    layout: torch.memory_format = PLAIN,
) -> Prepare:
    """Prepare `function` of a tensor of ones."""
    return lambda place: partial(
        function, torch.ones(*shape, device=place, dtype=dtype).contiguous(memory_format=layout)
    )


def _run_layer(
    make: Callable[..., nn.Module],
    shape: Sequence[int],
    dtype: torch.dtype,
    layout: torch.memory_format = PLAIN,
    *,
    weights: torch.dtype | None = None,
    benchmark: bool = False,
) -> Prepare:
    """Prepare a layer, forward and backward; its weights have the type of its input, or `weights`."""

    def prepare(place: torch.device) -> Work:
        layer: Any = make(device=place, dtype=weights or dtype)
        layer.to(memory_format=layout)
        values = torch.ones(*shape, device=place, dtype=dtype).contiguous(memory_format=layout).requires_grad_()

        def run() -> None:
            torch.backends.cudnn.benchmark = benchmark
            try:
                _go_back(_first(layer(values)))
            finally:
                torch.backends.cudnn.benchmark = False

        return run

    return prepare


def _first(out: Any) -> Tensor:
    """Return the output alone, without a recurrent layer's states."""
    return torch.as_tensor(out[0] if isinstance(out, tuple) else out)


def _go_back(out: Tensor) -> None:
    """Run backward from a gradient with memory of its own, as that of a layer in a model."""
    torch.autograd.backward(out, torch.ones_like(out))


def _told(shape: Sequence[int]) -> str:
    """Return a name such as `4096 x 768`."""
    return " x ".join(map(str, shape))

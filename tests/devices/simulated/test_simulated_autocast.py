"""Autocast on fake CUDA tensors against CUDA's own kernels, which run on tensors without values in every build."""

from __future__ import annotations

import gc
import re
import sys
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from made_up_card import make_card
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from autoaccum.simulation.tracing import autocast
from autoaccum.simulation.tracing.autocast import POLICIES, Policy
from autoaccum.simulation.tracing.dispatch_mode import FakeCudaMode
from autoaccum.simulation.tracing.simulation import simulate

CARD = make_card()
HALF, BF16, FP32, FP64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
_COPIES = (torch.ops.aten._to_copy.default, torch.ops.aten.to.dtype)  # the latter in inference mode


class Copies(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes what is cast, in order: (shape, from, to), and the first operator that is no cast."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.noted: list[tuple[tuple[int, ...], torch.dtype, torch.dtype]] = []
        self.operators: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if func in _COPIES:
            self.noted.append((tuple(out.shape), args[0].dtype, out.dtype))
        elif func is not torch.ops.prim.device.default:
            self.operators.append(str(func))
        return out


def made(*shape: int, dtype: torch.dtype = FP32, device: str = "cuda", grad: bool = False) -> Tensor:
    return torch.ones(shape, dtype=dtype, device=device, requires_grad=grad)


def backward(out: Tensor) -> None:
    torch.autograd.backward(out.float().sum())


# The lists


def header() -> dict[Policy, set[str]]:
    """The lists of the installed PyTorch's own header."""
    text = (Path(torch.__file__).parent / "include/ATen/autocast_mode.h").read_text()
    names: dict[str, Policy] = {
        "LOWER_PRECISION_FP": "lower_precision_fp",
        "FP32": "fp32",
        "FP32_SET_OPT_DTYPE": "fp32_set_opt_dtype",
    }
    names |= {"PROMOTE": "promote", "DIFFERENT_REDISPATCH_SIGNATURE": "fp32_append_dtype"}
    lists: dict[Policy, set[str]] = {}
    for macro, body in re.findall(r"#define AT_FORALL_([A-Z0-9_]+)\(_\)((?:.*\\\n)+.*\n)", text):
        if macro in names and names[macro] == "fp32_append_dtype":
            lists["fp32_append_dtype"] = set(re.findall(r'"([^"]+)"', body))
        elif macro in names:
            found = re.findall(r"_\((\w+)(?:, *(\w+))?\)", body)
            lists[names[macro]] = {f"{name}.{overload}" if overload else name for name, overload in found}
    return lists


def test_each_operator_that_this_torch_casts_is_in_a_list() -> None:
    unknown = [name for name in autocast.cast_operators() if name not in POLICIES]
    assert not unknown, f"torch {torch.__version__} casts {unknown}: read autocast_mode.cpp, add them to POLICIES"


def test_the_lists_are_those_of_this_torch() -> None:
    theirs, here = header(), set(autocast.cast_operators())
    added = {"cudnn_convolution", "cudnn_convolution_transpose", "binary_cross_entropy", "linalg_matrix_sqrth"}
    assert {name: policy for policy, names in theirs.items() for name in names} == {
        name: policy for name, policy in POLICIES.items() if name in here - added
    }


# CUDA's own kernels, operator by operator, on PyTorch's own test data

Told = dict[str, tuple[Any, Any, Any]]
BUILT_FOR_CUDA = torch.version.cuda is not None
_LISTS = ("torch_fp16", "torch_fp32", "torch_need_autocast_promote", "torch_expect_builtin_promote")
_OTHERS = ("nn_fp16", "nn_fp32", "linalg_fp16", "methods_fp16", "methods_fp32", "banned")
_NEEDS_A_CARD = ("no NVIDIA driver", "not linked with support for cuda", "not compiled with CUDA", "CUDA error")


def cases(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, Callable[..., Any], Sequence[Any], dict[str, Any]]]:
    stub: Any = types.ModuleType("torch.testing._internal.common_utils")  # the true one needs another package
    stub.TEST_WITH_ROCM, stub.TestCase = False, object
    monkeypatch.setitem(sys.modules, stub.__name__, stub)
    from torch.testing._internal.autocast_test_lists import AutocastTestLists

    lists: Any = AutocastTestLists("cuda:0")  # type: ignore[no-untyped-call]
    for kind in (*_LISTS, *_OTHERS):
        for i, (name, args, *rest) in enumerate(getattr(lists, kind)):
            if name == "einsum" or name.startswith("cudnn_"):
                continue
            owners: tuple[Any, ...] = (torch, torch._C._nn, torch.ops.aten)
            owners = (Tensor,) if kind.startswith("methods") else owners
            function = next(getattr(owner, name) for owner in owners if hasattr(owner, name))
            yield f"{kind} {i} {name}", function, args, rest[0] if rest and isinstance(rest[0], dict) else {}
    square, row = made(8, 8, device="cuda:0"), made(8, device="cuda:0")
    yield "einsum", torch.einsum, ("ij,jk->ik", square, square), {}
    yield "vector_norm", torch.linalg.vector_norm, (square.half(),), {}
    yield "matrix_norm", torch.linalg.matrix_norm, (square.half(),), {}
    yield "sum of float64", torch.sum, (square.double(),), {}
    yield "sum with a dtype", torch.sum, (square.half(),), {"dtype": FP64}
    yield "softmax with a dtype", torch.softmax, (square.half(), -1), {"dtype": FP64}
    yield "two lower precisions", torch.atan2, (square.half(), square.bfloat16()), {}
    yield "weight, no bias", F.layer_norm, (square.half(), (8,), row), {}
    yield "no weight", F.layer_norm, (square.half(), (8,)), {}
    yield "float64 among others", F.mse_loss, (square.half(), square.double()), {}
    if hasattr(torch.ops.aten, "linalg_matrix_sqrth"):
        yield "matrix_sqrth", torch.ops.aten.linalg_matrix_sqrth, (square.half(),), {}


def tell(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> Told:
    """What is cast before each operator runs, and the dtypes it returns or its error."""
    told: Told = {}
    listed = list(cases(monkeypatch))
    with autocasting(dtype):
        for name, function, args, kwargs in listed:
            copies = Copies()
            try:
                with copies:
                    out = function(*args, **kwargs)
                dtypes = [t.dtype if isinstance(t, Tensor) else t for t in tree_leaves(out)]
                told[name] = (copies.noted, dtypes, copies.operators)
            except Exception as error:  # a card is needed, or autocast refuses
                told[name] = (copies.noted, str(error), [])
    return told


@contextmanager
def autocasting(dtype: torch.dtype) -> Iterator[None]:
    """`torch.autocast("cuda")` without its question whether there is a card."""
    torch.set_autocast_dtype("cuda", dtype)
    torch.set_autocast_enabled("cuda", True)
    try:
        yield
    finally:
        torch.set_autocast_enabled("cuda", False)
        torch.set_autocast_dtype("cuda", HALF)
        torch.clear_autocast_cache()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("dtype", [HALF, BF16], ids=["fp16", "bf16"])
def test_operators_are_cast_as_by_the_kernels_of_this_binary(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    with FakeTensorMode(allow_non_fake_inputs=True):
        real = tell(dtype, monkeypatch)
    with simulate(CARD):
        ours = tell(dtype, monkeypatch)
    assert len(real) > 100
    compared = 0
    for name, (copies, out, operators) in real.items():
        assert ours[name][0] == copies, name
        if not (isinstance(out, str) and any(reason in out for reason in _NEEDS_A_CARD)):
            assert ours[name][1] == out, name
            assert ours[name][2] == operators or not BUILT_FOR_CUDA, name  # builds without it have fewer kernels
            compared += 1
    assert compared > 100


# The cache of weights, against autocast on the CPU: the same C++ function

Scenario = Callable[[str, Tensor, Tensor], None]


def twice(device: str, x: Tensor, w: Tensor) -> None:
    with torch.autocast(device, BF16):
        F.linear(x, w)
        F.linear(x, w)


def nested_and_again(device: str, x: Tensor, w: Tensor) -> None:
    with torch.autocast(device, BF16):
        with torch.autocast(device, BF16):
            F.linear(x, w)
        F.linear(x, w)
    with torch.autocast(device, BF16):
        F.linear(x, w)


def of_no_leaf(device: str, x: Tensor, w: Tensor) -> None:
    with torch.autocast(device, BF16):
        doubled = w * 2
        F.linear(x, doubled)
        F.linear(x, doubled)


def checkpointed(device: str, x: Tensor, w: Tensor, *, reentrant: bool) -> None:
    x.requires_grad_()
    with torch.autocast(device, BF16):
        out = checkpoint(lambda y: F.linear(F.linear(y, w), w).relu(), x, use_reentrant=reentrant)
    backward(out)
    assert w.grad is not None
    assert w.grad.dtype is FP32


SCENARIOS = (
    twice,
    nested_and_again,
    of_no_leaf,
    partial(checkpointed, reentrant=True),
    partial(checkpointed, reentrant=False),
)


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_weights_are_kept_as_on_the_cpu(scenario: Scenario) -> None:
    noted = []
    for device in ("cpu", "cuda"):
        with simulate(CARD) if device == "cuda" else nullcontext():
            x, w = made(3, 4, device=device), made(4, 4, device=device, grad=True)
            with Copies() as copies:
                scenario(device, x, w)
            noted.append(copies.noted)
    assert noted[1] == noted[0]


# Memory


def leftover_bytes(mode: FakeCudaMode) -> int:
    gc.collect()
    return mode.recorder.live_bytes


def test_a_weight_is_cast_once_and_held_until_the_outermost_autocast_ends(mode: FakeCudaMode) -> None:
    x, w = made(64, 512), made(512, 512, grad=True)
    before = leftover_bytes(mode)
    with torch.autocast("cuda", BF16):
        with torch.autocast("cuda", BF16):
            F.linear(x, w)
            F.linear(x, w)
        assert leftover_bytes(mode) - before == 2 * 512 * 512
    assert leftover_bytes(mode) == before

"""Intercept calls of random operators, read the random values in their outputs, and replace them by other values.

PyTorch's tag `torch.Tag.nondeterministic_seeded` says which operators are random. Operators are named here only where
outputs also depend on inputs, as dropout's do. Those outputs are computed again from the present inputs, since a
recorded output would hide that the inputs differ. Samples of a distribution (bernoulli, normal, gamma) are replaced by
the recorded samples.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from autoaccum.accumulation.rng_state import RngState, initialized_cuda_devices
from autoaccum.tracebacks import is_autoaccum_file, is_user_file

_DISPATCH = "__torch_dispatch__"
"""The frame of another dispatch mode of this package (`verify` in float64), through which the user's call comes."""


@dataclass(frozen=True)
class CallSite:
    """A random operator and the user's line that calls it.

    Attributes:
        op: The operator's name in PyTorch without overload, such as aten.bernoulli_.
        line: The nearest line of the user's code, such as model.py:31; None if there is none.
    """

    op: str
    line: str | None

    def __str__(self) -> str:
        return self.op if self.line is None else f"{self.op} ({self.line})"


def calling_line() -> str | None:
    """Return the user's line that is running now.

    The search skips the innermost frames of autoaccum, which call this, and ends at any further one.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and is_autoaccum_file(frame.f_code.co_filename):
        frame = frame.f_back
    while frame is not None and (not is_autoaccum_file(frame.f_code.co_filename) or frame.f_code.co_name == _DISPATCH):
        if is_user_file(frame.f_code.co_filename):
            return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
        frame = frame.f_back
    return None


@contextmanager
def unfused_kernels() -> Iterator[None]:
    """On a GPU, run attention and RNNs without fused kernels, so that their dropout is an operator of its own.

    Attention then takes PyTorch's math path, and RNNs run without cuDNN. On the CPU dropout always takes these paths
    (seen with torch 2.11 to 2.15), so nothing is changed.
    """
    if not torch.get_device_module("cuda").is_initialized():
        yield
        return
    with sdpa_kernel(SDPBackend.MATH), RnnsWithoutCudnn():
        yield


class RnnsWithoutCudnn(TorchFunctionMode):
    """Runs RNNs without cuDNN; convolutions still use it."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call `func`, without cuDNN if it is an RNN."""
        if getattr(func, "__name__", "") not in ("lstm", "gru", "rnn_tanh", "rnn_relu"):
            return func(*args, **(kwargs or {}))
        with torch.backends.cudnn.flags(enabled=False):
            return func(*args, **(kwargs or {}))


_INDEX_BOUNDS = {"aten.randperm": "n", "aten.multinomial": "self", "aten.randint": "high", "aten.random_": "to"}
"""The operators that draw indices, and the argument that bounds the indices."""


@dataclass(frozen=True)
class RandomCall:
    """A finished call of a random operator.

    Attributes:
        site: The operator and the user's line.
        arguments: All arguments by name, including defaults.
        outputs: The output tensors, in order.
    """

    site: CallSite
    arguments: Mapping[str, Any]
    outputs: tuple[Tensor, ...]

    @property
    def op(self) -> str:
        """The name of the operator."""
        return self.site.op

    @property
    def is_random(self) -> bool:
        """True if the call drew random numbers: not if dropout is off or there is no output tensor."""
        if not self.outputs or self.op == "aten._cudnn_init_dropout_state":
            return False
        if self.arguments.get("train") is False or self.arguments.get("training") is False:
            return False
        return self._kernel_dropout != 0

    @property
    def is_fused(self) -> bool:
        """True for fused attention and cuDNN's RNNs, which return a seed and not the dropout mask."""
        return self._kernel_dropout is not None

    @property
    def index_range(self) -> int | None:
        """The number of items that the drawn indices choose from; None if the call draws no indices."""
        bound = self.arguments.get(_INDEX_BOUNDS.get(self.op.replace("_like", ""), ""))
        if isinstance(bound, Tensor):
            return int(bound.shape[-1] if self.op == "aten.multinomial" else bound)
        return None if bound is None else int(bound)

    @property
    def random_values(self) -> tuple[Tensor, ...]:
        """The tensors of random values; they may share memory with the outputs."""
        if self.op == "aten.native_dropout":
            return self.outputs[1:]
        if "noise" in self.arguments:
            return (self.arguments["noise"],)
        return self.outputs

    def replace(self, values: Sequence[Tensor]) -> None:
        """Change the outputs as if `values` (of the shapes of `random_values`, any dtype and device) had been drawn."""
        recompute = self._output_function()
        for drawn, value in zip(self.random_values, values, strict=True):
            drawn.copy_(value)
        if recompute is not None:
            self.outputs[0].copy_(recompute())

    @property
    def _kernel_dropout(self) -> float | None:
        dropout = self.arguments.get("dropout_p", self.arguments.get("dropout"))
        return None if dropout is None else float(dropout)

    def _output_function(self) -> Callable[[], Tensor] | None:
        """Return a function that computes the first output from inputs and random values, if it depends on both."""
        if self.op == "aten.native_dropout":
            keep = 1.0 - self.arguments["p"]
            return lambda: self.arguments["input"] * self.outputs[1] * (1.0 / keep if keep else 0.0)
        if "noise" in self.arguments:
            noise = self.arguments["noise"]
            inputs = self.outputs[0] / noise if self.op.endswith("_") else self.arguments["self"]
            return lambda: inputs * noise
        return None


class RandomCallMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Passes every call that drew random numbers to `handle`, which may replace its values."""

    supports_higher_order_operators = True

    def __init__(self, handle: Callable[[RandomCall], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._handle = handle

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run `func`, and handle the call if it drew random numbers."""
        result = func(*args, **(kwargs or {}))
        if torch.Tag.nondeterministic_seeded in getattr(func, "tags", ()):
            arguments = {argument.name: argument.default_value for argument in func._schema.arguments}
            arguments |= {**dict(zip(list(arguments), args, strict=False)), **(kwargs or {})}
            outputs = result if isinstance(result, tuple | list) else (result,)
            tensors = tuple(value for value in outputs if isinstance(value, Tensor))
            call = RandomCall(CallSite(str(func.overloadpacket), calling_line()), arguments, tensors)
            if call.is_random:
                with torch.no_grad():
                    self._handle(call)
        return result


@contextmanager
def neutral_rng() -> Iterator[set[tuple[str, int]]]:
    """Replace all random values by neutral ones, so that a whole batch and its parts see the same values.

    Dropout keeps all entries, still divided by the probability of keeping one. Uniform numbers are the middle of their
    range, normal ones the mean, integers the lowest, permutations the identity. Bernoulli numbers are 1 unless their
    probability is 0, and multinomial ones the most likely. Operators without a neutral value draw from a fixed seed, as
    do Python's and NumPy's global generators, which must be rewound between parts (`RngRecording.begin_part`). All
    generators are restored afterwards.

    Yields:
        A set that is filled with the call sites that draw indices, and the range of the indices.
    """
    cards = initialized_cuda_devices()
    state = RngState(cards)
    torch.default_generator.manual_seed(0)  # torch.manual_seed notes a seed and its stack for each library of cards.
    if cards:
        torch.cuda.manual_seed_all(0)
    random.seed(0)
    np.random.seed(0)
    ranges: set[tuple[str, int]] = set()

    def handle(call: RandomCall) -> None:
        if call.index_range is not None:
            ranges.add((str(call.site), call.index_range))
        if call.op == "aten.native_dropout":
            call.replace([torch.ones_like(call.outputs[1])])
        elif "noise" in call.arguments:
            middle = (call.arguments["lower"] + call.arguments["upper"]) / 2
            call.replace([torch.where(call.arguments["noise"] == 1, 1.0, middle)])
        elif call.op.rstrip("_") in _NEUTRAL_VALUES:
            call.outputs[0].copy_(torch.as_tensor(_NEUTRAL_VALUES[call.op.rstrip("_")](call.arguments)))

    try:
        with unfused_kernels(), RandomCallMode(handle):
            yield ranges
    finally:
        state.restore()


def _bernoulli(arguments: Mapping[str, Any]) -> Any:
    probability = arguments.get("p", arguments["self"])
    return probability > 0 if isinstance(probability, Tensor) else float(probability > 0)


def _lowest(arguments: Mapping[str, Any]) -> Any:
    return arguments.get("low", arguments.get("from", 0))


def _most_likely(arguments: Mapping[str, Any]) -> Tensor:
    """Return the most likely index of each row, repeated with replacement and followed by the next ones without."""
    weights, count = arguments["self"], arguments["num_samples"]
    if arguments["replacement"]:
        return torch.as_tensor(weights.argmax(-1, keepdim=True).expand(*weights.shape[:-1], count))
    return torch.as_tensor(weights.topk(count, dim=-1).indices)


_NEUTRAL_VALUES: Mapping[str, Callable[[Mapping[str, Any]], Any]] = {
    "aten.bernoulli": _bernoulli,
    "aten.exponential": lambda arguments: 1 / arguments["lambd"],
    "aten.multinomial": _most_likely,
    "aten.normal": lambda arguments: arguments.get("mean", 0.0),
    "aten.poisson": lambda arguments: arguments["self"].round(),
    "aten.rand": lambda arguments: 0.5,
    "aten.rand_like": lambda arguments: 0.5,
    "aten.randint": _lowest,
    "aten.randint_like": _lowest,
    "aten.randn": lambda arguments: 0.0,
    "aten.randn_like": lambda arguments: 0.0,
    "aten.random": _lowest,
    "aten.randperm": lambda arguments: torch.arange(arguments["n"]),
    "aten.uniform": lambda arguments: (arguments["from"] + arguments["to"]) / 2,
    "aten._standard_gamma": lambda arguments: arguments["self"],
}

"""Random operations as they are called: what of their outputs is chance, and how other values are put in its place.

What is random is told by torch's own tag (`torch.Tag.nondeterministic_seeded`), not by name. Names stand here only
for the few ops whose outputs hold more than chance: their inputs. Those are computed again from the inputs at hand,
since a recorded output would hide that the inputs differ. Samples of a distribution (bernoulli, normal, gamma) are
taken as they were recorded.
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
from autoaccum.workload.tracebacks import is_autoaccum_file, is_user_file

_BETWEEN = "__torch_dispatch__"
"""Another mode of ours, which the user's call comes through: that of float64."""


@dataclass(frozen=True)
class CallSite:
    """A random op and the line that calls it.

    Attributes:
        op: As torch names it, without overload: aten.bernoulli_.
        line: The nearest of the user's, as model.py:31; None where torch's own modules draw.
    """

    op: str
    line: str | None

    def __str__(self) -> str:
        return self.op if self.line is None else f"{self.op} ({self.line})"


def calling_line() -> str | None:
    """The user's line that is running now; autoaccum's frames in between end the search, those that ask do not."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and is_autoaccum_file(frame.f_code.co_filename):
        frame = frame.f_back
    while frame is not None and (not is_autoaccum_file(frame.f_code.co_filename) or frame.f_code.co_name == _BETWEEN):
        if is_user_file(frame.f_code.co_filename):
            return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
        frame = frame.f_back
    return None


_RNNS = frozenset(["lstm", "gru", "rnn_tanh", "rnn_relu"])


@contextmanager
def unfused_kernels() -> Iterator[None]:
    """On a card, let attention take its math path and RNNs torch's own: their dropout is then an op of its own.

    On the CPU dropout takes these paths anyway (*run*, torch 2.11 to 2.15), and nothing is changed.
    """
    if not torch.get_device_module("cuda").is_initialized():
        yield
        return
    with sdpa_kernel(SDPBackend.MATH), RnnsWithoutCudnn():
        yield


class RnnsWithoutCudnn(TorchFunctionMode):
    """RNNs without cuDNN; convolutions keep it."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call `func`, with cuDNN off for RNNs."""
        if getattr(func, "__name__", "") not in _RNNS:
            return func(*args, **(kwargs or {}))
        with torch.backends.cudnn.flags(enabled=False):
            return func(*args, **(kwargs or {}))


_ROWS_OF = {"aten.randperm": "n", "aten.multinomial": "self", "aten.randint": "high", "aten.random_": "to"}
"""Ops that draw indices, and the argument that bounds them."""


@dataclass(frozen=True)
class RandomCall:
    """One call of a random op, made already.

    Attributes:
        site: The op and the user's line.
        arguments: By name, with defaults.
        outputs: Its tensors, in order.
    """

    site: CallSite
    arguments: Mapping[str, Any]
    outputs: tuple[Tensor, ...]

    @property
    def op(self) -> str:
        """The op alone."""
        return self.site.op

    @property
    def is_random(self) -> bool:
        """Not so for dropout that is off, and where no tensor comes out."""
        if not self.outputs or self.op == "aten._cudnn_init_dropout_state":
            return False
        if self.arguments.get("train") is False or self.arguments.get("training") is False:
            return False
        return self._kernel_dropout != 0

    @property
    def is_fused(self) -> bool:
        """Whether chance never leaves the kernel: fused attention and cuDNN's RNNs give seeds out, not masks."""
        return self._kernel_dropout is not None

    @property
    def rows(self) -> int | None:
        """How many things the drawn indices choose among; None where what is drawn are no indices."""
        bound = self.arguments.get(_ROWS_OF.get(self.op.replace("_like", ""), ""))
        if isinstance(bound, Tensor):
            return int(bound.shape[-1] if self.op == "aten.multinomial" else bound)
        return None if bound is None else int(bound)

    @property
    def chance(self) -> tuple[Tensor, ...]:
        """What was drawn; may share memory with the outputs."""
        if self.op == "aten.native_dropout":
            return self.outputs[1:]
        if "noise" in self.arguments:
            return (self.arguments["noise"],)
        return self.outputs

    def give(self, values: Sequence[Tensor]) -> None:
        """Make it as if `values` (of `chance`'s shapes, any dtype and device) had been drawn."""
        inputs = self._inputs()
        for drawn, value in zip(self.chance, values, strict=True):
            drawn.copy_(value)
        if inputs is not None:
            self.outputs[0].copy_(inputs())

    @property
    def _kernel_dropout(self) -> float | None:
        dropout = self.arguments.get("dropout_p", self.arguments.get("dropout"))
        return None if dropout is None else float(dropout)

    def _inputs(self) -> Callable[[], Tensor] | None:
        """What computes the first output from inputs and chance, for ops where it is both."""
        if self.op == "aten.native_dropout":
            keep = 1.0 - self.arguments["p"]
            return lambda: self.arguments["input"] * self.outputs[1] * (1.0 / keep if keep else 0.0)
        if "noise" in self.arguments:
            noise = self.arguments["noise"]
            was = self.outputs[0] / noise if self.op.endswith("_") else self.arguments["self"]
            return lambda: was * noise
        return None


class RandomCallMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While it is active, every random op that draws is handed to `answer`, which may give it other values."""

    supports_higher_order_operators = True

    def __init__(self, answer: Callable[[RandomCall], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._answer = answer

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run `func`, and hand it on where it draws."""
        result = func(*args, **(kwargs or {}))
        if torch.Tag.nondeterministic_seeded in getattr(func, "tags", ()):
            call = _read_call(func, args, kwargs or {}, result)
            if call.is_random:
                with torch.no_grad():
                    self._answer(call)
        return result


def _read_call(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> RandomCall:
    schema = func._schema.arguments
    bound = {argument.name: argument.default_value for argument in schema}
    bound.update(zip((argument.name for argument in schema), args, strict=False))
    outputs = result if isinstance(result, tuple | list) else (result,)
    tensors = tuple(value for value in outputs if isinstance(value, Tensor))
    return RandomCall(CallSite(str(func.overloadpacket), calling_line()), {**bound, **kwargs}, tensors)


_SEED = 0


@contextmanager
def neutral_rng() -> Iterator[set[tuple[str, int]]]:
    """Run without chance, on whatever is run: a whole batch and its parts then see the same.

    Dropout keeps all, still divided by what it would have kept on average. Uniform draws are the middle of their
    range, normal ones the mean, permutations the identity, integers the lowest; Bernoulli draws are 1 unless their
    probability is 0; multinomial ones the likeliest. What no value is known for draws as it does, from a fixed seed.
    Python's and NumPy's global generators start from a fixed seed: parts must rewind them between each other
    (`RngRecording.begin_part`). All generators are put back afterwards.

    Yields:
        Filled with the operations that draw indices, and of how many rows.
    """
    state = RngState(initialized_cuda_devices())
    torch.manual_seed(_SEED)
    random.seed(_SEED)
    np.random.seed(_SEED)
    ranges: set[tuple[str, int]] = set()

    def answer(call: RandomCall) -> None:
        if call.rows is not None:
            ranges.add((str(call.site), call.rows))
        _make_neutral(call)

    try:
        with unfused_kernels(), RandomCallMode(answer):
            yield ranges
    finally:
        state.restore()


def _make_neutral(call: RandomCall) -> None:
    if call.op == "aten.native_dropout":
        call.give([torch.ones_like(call.outputs[1])])
    elif "noise" in call.arguments:
        middle = (call.arguments["lower"] + call.arguments["upper"]) / 2
        call.give([torch.where(call.arguments["noise"] == 1, 1.0, middle)])
    elif call.op.rstrip("_") in _NEUTRAL_VALUES:
        call.outputs[0].copy_(torch.as_tensor(_NEUTRAL_VALUES[call.op.rstrip("_")](call.arguments)))


def _bernoulli(arguments: Mapping[str, Any]) -> Any:
    probability = arguments.get("p", arguments["self"])
    return probability > 0 if isinstance(probability, Tensor) else float(probability > 0)


def _lowest(arguments: Mapping[str, Any]) -> Any:
    return arguments.get("low", arguments.get("from", 0))


def _chosen(arguments: Mapping[str, Any]) -> Tensor:
    """The likeliest of each row: as often as asked with replacement, the next likeliest else."""
    weights, count = arguments["self"], arguments["num_samples"]
    if arguments["replacement"]:
        return torch.as_tensor(weights.argmax(-1, keepdim=True).expand(*weights.shape[:-1], count))
    return torch.as_tensor(weights.topk(count, dim=-1).indices)


_NEUTRAL_VALUES: Mapping[str, Callable[[Mapping[str, Any]], Any]] = {
    "aten.bernoulli": _bernoulli,
    "aten.exponential": lambda arguments: 1 / arguments["lambd"],
    "aten.multinomial": _chosen,
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

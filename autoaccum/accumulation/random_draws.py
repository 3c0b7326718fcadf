"""Random draws of operators: read, record and replay them in other runs of the same batch, or make them neutral.

A full batch and its parts draw different dropout masks from one seed, and so can only be compared under the same random
numbers. Those of the parts are recorded, joined along the samples, and replayed in the full run.

PyTorch's tag `torch.Tag.nondeterministic_seeded` says which operators are random. Operators are named here only where
outputs also depend on inputs, as dropout's do. Those outputs are computed again from the present inputs, since a
recorded output would hide that the inputs differ. Samples of a distribution (bernoulli, normal, gamma) are replaced by
the recorded samples.
"""

from __future__ import annotations

import pickle
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import dropwhile, takewhile
from pathlib import Path
from traceback import walk_stack
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from autoaccum.accumulation.rng_state import (
    Generator,
    RngState,
    generator_state,
    has_readable_state,
    initialized_cuda_devices,
    set_generator_state,
)
from autoaccum.tracebacks import is_autoaccum_file, is_user_file

_DISPATCH = "__torch_dispatch__"
"""The frame of another dispatch mode of this package (`verify` in float64), through which the user's call comes."""


def calling_line() -> str | None:
    """Return the user's line that is running now.

    The search skips the innermost frames of autoaccum, which call this, and ends at any further one.
    """
    codes = ((frame.f_code.co_filename, frame.f_code.co_name, line) for frame, line in walk_stack(sys._getframe(1)))
    callers = dropwhile(lambda code: is_autoaccum_file(code[0]), codes)
    for file, _, line in takewhile(lambda code: not is_autoaccum_file(code[0]) or code[1] == _DISPATCH, callers):
        if is_user_file(file):
            return f"{Path(file).name}:{line}"
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
    with sdpa_kernel(SDPBackend.MATH), _RnnsWithoutCudnn():
        yield


class _RnnsWithoutCudnn(TorchFunctionMode):
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
        op: The operator's name in PyTorch without overload, such as aten.bernoulli_.
        line: The nearest line of the user's code, such as model.py:31; None if there is none.
        arguments: All arguments by name, including defaults.
        outputs: The output tensors, in order.
    """

    op: str
    line: str | None
    arguments: Mapping[str, Any]
    outputs: tuple[Tensor, ...]

    @property
    def site(self) -> str:
        """The operator and the user's line."""
        return self.op if self.line is None else f"{self.op} ({self.line})"

    @property
    def is_random(self) -> bool:
        """True if the call drew random numbers: not if dropout is off or there is no output tensor."""
        is_off = self.arguments.get("train") is False or self.arguments.get("training") is False
        return bool(self.outputs) and self.op != "aten._cudnn_init_dropout_state" and not is_off and self._dropout != 0

    @property
    def is_fused(self) -> bool:
        """True for fused attention and cuDNN's RNNs, which return a seed and not the dropout mask."""
        return self._dropout is not None

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
        return (self.arguments["noise"],) if "noise" in self.arguments else self.outputs

    def replace(self, values: Sequence[Tensor]) -> None:
        """Change the outputs as if `values` (of the shapes of `random_values`, any dtype and device) had been drawn."""
        recompute = self._output_function()
        for drawn, value in zip(self.random_values, values, strict=True):
            drawn.copy_(value)
        if recompute is not None:
            self.outputs[0].copy_(recompute())

    @property
    def _dropout(self) -> float | None:
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
            call = RandomCall(str(func.overloadpacket), calling_line(), arguments, tensors)
            if call.is_random:
                with torch.no_grad():
                    self._handle(call)
        return result


def host_generators(generators: Iterable[Generator]) -> list[Generator]:
    """Return those of `generators` that are Python's or NumPy's and whose state can be read."""
    return [one for one in generators if not isinstance(one, torch.Generator) and has_readable_state(one)]


def host_rng_states(generators: Sequence[Generator]) -> list[Any]:
    """Return the states of Python's and NumPy's global generators and of `generators`."""
    return [random.getstate(), np.random.get_state(), *map(generator_state, generators)]


def _set_host_states(generators: Sequence[Generator], states: Sequence[Any]) -> None:
    python, numpy, *others = states
    random.setstate(python)
    np.random.set_state(numpy)
    for generator, state in zip(generators, others, strict=False):  # A run without a model copy has fewer.
        set_generator_state(generator, state)


class ReplayMismatch(Exception):  # noqa: N818 -- no failure of a command: the comparison continues with a neutral RNG
    """Recorded random numbers cannot be replayed in another run; the message names operator, line and reason."""


class RecordedCall(NamedTuple):
    """The random values of one recorded call.

    Attributes:
        op: The operator.
        site: The operator and its line.
        index_range: The number of items that drawn indices choose from; None if the values are no indices.
        values: Copies of the values; None if the kernel does not return them.
    """

    op: str
    site: str
    index_range: int | None
    values: tuple[Tensor, ...] | None

    def values_for(self, call: RandomCall) -> tuple[Tensor, ...]:
        """Return the values; raise ReplayMismatch unless `call` is of the same operator, and neither is fused."""
        if self.op != call.op:
            raise ReplayMismatch(f"{call.site} draws where {self.site} drew in the recorded run")
        if self.values is None or call.is_fused:
            raise ReplayMismatch(f"{call.site} draws within a fused kernel, which does not return its random numbers")
        return self.values


def join_recorded(call: RandomCall, parts: Sequence[RecordedCall], sizes: Sequence[int]) -> list[Tensor]:
    """Return the random values for `call` in the whole batch: those of its parts, joined along the samples.

    Raises:
        ReplayMismatch: Another operator drew, no dimension is the samples', or the values are indices into a part.
    """
    drawn = [part.values_for(call) for part in parts]
    if other := [part.index_range for part in parts if part.index_range != call.index_range]:
        raise ReplayMismatch(
            f"{call.site} draws from {other[0]} indices in a part and from {call.index_range} in the whole batch"
        )
    return [_join(call, *pair, sizes) for pair in zip(call.random_values, zip(*drawn, strict=True), strict=True)]


def _join(call: RandomCall, whole: Tensor, drawn: Sequence[Tensor], sizes: Sequence[int]) -> Tensor:
    dims = [dim for dim in range(whole.ndim) if _joined_shape(drawn, dim) == [*whole.shape]]
    if len(dims) > 1:
        dims = [dim for dim in dims if [value.shape[dim] for value in drawn] == list(sizes)]
    if len(dims) == 1:
        return torch.cat([value.to(whole) for value in drawn], dim=dims[0])
    if len(drawn) == 1 and drawn[0].shape == whole.shape:
        return drawn[0]
    shapes = ", ".join(dict.fromkeys(str(list(value.shape)) for value in drawn))
    raise ReplayMismatch(
        f"{call.site} draws {list(whole.shape)} for the whole batch and {shapes} for its parts: no dimension is that"
        " of the samples"
    )


def _joined_shape(tensors: Sequence[Tensor], dim: int) -> list[int] | None:
    """Return the shape of `tensors` joined along `dim`; None if their other dimensions differ."""
    others = {(*tensor.shape[:dim], -1, *tensor.shape[dim + 1 :]) for tensor in tensors}
    if len(others) > 1 or dim >= tensors[0].ndim:
        return None
    return [sum(tensor.shape[dim] for tensor in tensors) if size == -1 else size for size in others.pop()]


class RngRecording:
    """Records the random numbers that the parts of one accumulated run draw, and replays them in other runs.

    The k-th random call of the full run gets the values of the k-th calls of all parts. Calls in backward count, since
    checkpointing draws again there. PyTorch's generators advance as they would anyway; the caller restores them.

    Python's and NumPy's generators are set where a part begins. By default every part begins where the first one began,
    and so draws the same numbers: right for numbers that are drawn once per forward and serve all samples. If
    `sequential`, each part begins where the one before ended: right for numbers that are drawn for each sample, since
    the whole batch then draws the same ones. Parts may take turns, as they do in lock step: each goes on with its own
    states, or where the one before stopped.

    Two kinds of values cannot be joined: values drawn once for all samples, and indices whose range grows with the
    batch (a permutation of the samples), since a part's indices mean other rows in the whole batch. Shapes do not tell
    (B*T, ...) from (T*B, ...), nor show what packed sequences hold. Such values may be the cause if runs differ under
    replayed numbers and agree under `neutral_rng`. A replaying run raises ReplayMismatch if it draws otherwise than the
    recorded one.

    Args:
        sizes: The parts, in samples.
        generators: Python's and NumPy's generators that are set beside the global ones; PyTorch's are left out.
        sequential: Whether parts go on with Python's and NumPy's numbers where the one before ended.

    Attributes:
        calls_by_part: The calls of each part, by its index; None is the update.
        ends: The states of Python's and NumPy's generators at the end of each part, by its index. Equal ends of parts
            that began alike mean equal numbers.
    """

    def __init__(self, sizes: Sequence[int], generators: Iterable[Generator] = (), *, sequential: bool = False) -> None:
        self._sizes = tuple(sizes)
        self._generators, self._sequential = host_generators(generators), sequential
        self.calls_by_part: dict[int | None, list[RecordedCall]] = {}
        self.ends: dict[int, bytes] = {}
        self._starts: dict[int, list[Any]] = {}
        self._stopped: dict[int, list[Any]] = {}
        self._part: int | None = None
        self._count = 0
        self._expected: int | None = None

    @property
    def sites(self) -> tuple[str, ...]:
        """The operators and lines of the recorded run that drew random numbers."""
        return tuple(dict.fromkeys(call.site for calls in self.calls_by_part.values() for call in calls))

    @property
    def is_per_sample(self) -> bool:
        """True if all recorded values have a dimension of the samples, so that joined rows surely match them."""
        calls = [(size, call) for index, size in enumerate(self._sizes) for call in self.calls_by_part.get(index, [])]
        return all(size in value.shape for size, call in calls for value in call.values or ())

    def begin_part(self, index: int, extra: Iterable[Generator] = ()) -> None:
        """Begin part `index`, which later calls belong to, and forget the calls of an earlier attempt at it.

        `extra` are the generators of this run's copy of the model.
        """
        generators = self._change_part(index, extra)
        if index not in self._starts:
            states = host_rng_states(generators)
            self._starts[index] = states if self._sequential else next(iter(self._starts.values()), states)
        _set_host_states(generators, self._starts[index])
        self.calls_by_part[index] = []

    def go_on_with_part(self, index: int, extra: Iterable[Generator] = ()) -> None:
        """Go on with part `index`, which has begun and waited for others: later calls belong to it again."""
        generators = self._change_part(index, extra)
        if not self._sequential:
            _set_host_states(generators, self._stopped[index])

    def end_part(self) -> None:
        """End the last part; later calls are the update's, whose values are replayed without joining them."""
        self._check_count()
        self._change_part(None, ())

    @contextmanager
    def record(self) -> Iterator[None]:
        """Record the accumulated run within it; on a GPU, attention and RNNs run with other kernels."""
        self.calls_by_part, self._part = {None: []}, None

        def record(call: RandomCall) -> None:
            values = None if call.is_fused else tuple(value.detach().clone() for value in call.random_values)
            self.calls_by_part[self._part].append(RecordedCall(call.op, call.site, call.index_range, values))

        with unfused_kernels(), RandomCallMode(record):
            yield
        self._change_part(None, ())

    @contextmanager
    def replay_whole(self) -> Iterator[None]:
        """Replay joined values in the full run within it; call `end_part` before the update if that draws, too."""
        parts = [self.calls_by_part.get(index, []) for index in range(len(self._sizes))]

        def replay(call: RandomCall) -> None:
            values: Sequence[Tensor]
            if self._part is not None:
                values = join_recorded(call, [self._next(calls, call) for calls in parts], self._sizes)
            else:
                values = self._next(self.calls_by_part[None], call).values_for(call)
                if [value.shape for value in values] != [value.shape for value in call.random_values]:
                    raise ReplayMismatch(f"{call.site} draws another shape than in the recorded run")
            call.replace(values)
            self._count += 1

        _set_host_states(self._generators, self._starts.get(0) or host_rng_states(self._generators))
        self._part, self._count, self._expected = 0, 0, max(map(len, parts), default=0)
        try:
            with unfused_kernels(), RandomCallMode(replay):
                yield
            if self._part is not None:
                self._check_count()
        finally:
            self._part = self._expected = None

    def _change_part(self, index: int | None, extra: Iterable[Generator]) -> list[Generator]:
        """Note where the generators of the host are as a part stops, and return them."""
        generators = [*self._generators, *host_generators(extra)]
        if self._part is not None:
            self._stopped[self._part] = host_rng_states(generators)
            self.ends[self._part] = pickle.dumps(host_rng_states(self._generators))
        self._part = index
        return generators

    def _check_count(self) -> None:
        """Raise ReplayMismatch unless the running part made all calls that were recorded."""
        if self._expected not in (None, self._count):
            raise ReplayMismatch(f"{self._expected} random calls were recorded, a later run made {self._count} of them")
        self._count = 0

    def _next(self, calls: Sequence[RecordedCall], call: RandomCall) -> RecordedCall:
        if self._count >= len(calls):
            raise ReplayMismatch(f"{call.site} draws once more than the {len(calls)} times that were recorded")
        return calls[self._count]


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
            ranges.add((call.site, call.index_range))
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
    "aten.randint": lambda arguments: arguments.get("low", 0),
    "aten.randint_like": lambda arguments: arguments.get("low", 0),
    "aten.randn": lambda arguments: 0.0,
    "aten.randn_like": lambda arguments: 0.0,
    "aten.random": lambda arguments: arguments.get("from", 0),
    "aten.randperm": lambda arguments: torch.arange(arguments["n"]),
    "aten.uniform": lambda arguments: (arguments["from"] + arguments["to"]) / 2,
    "aten._standard_gamma": lambda arguments: arguments["self"],
}

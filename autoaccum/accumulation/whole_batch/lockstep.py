"""Run the parts of an update in lock step: one at a time, and all of them meet where one needs the others.

Each part runs in a greenlet, which has a stack of its own in the same thread. Where a part calls `Lockstep.meet`, it
waits, and the next one runs. When all wait, a joint function is called with what each has, and each goes on with its
share. So one part computes at a time, autograd's graphs lie one after the other, and a single backward runs through all
of them, the last part first.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from contextvars import copy_context
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from greenlet import GreenletExit, greenlet
from torch import nn
from torch.overrides import _get_current_function_mode_stack, _pop_mode, _push_mode
from torch.utils import _python_dispatch as dispatch

from autoaccum.accumulation.whole_batch.rank_meetings import THE_END, RankMeetings, Shares, check_places
from autoaccum.errors import WorkloadError

T = TypeVar("T")
_ATTENTION = ("flash", "mem_efficient", "math", "cudnn")
Join = Callable[[list[Any]], Sequence[Any]]
"""Takes what each part has, in order, and returns the share of each."""


@dataclass(frozen=True)
class _Meeting:
    """What a part waits for: `place` says where in the model, in words."""

    place: str
    value: Any
    join: Join


class Lockstep:
    """Runs the parts of one update in lock step.

    `on_part` is called with the index of a part whenever it begins or goes on; `while_waiting()` is a context that a
    part enters where it waits.

    A part finds what it has set on one of the `modules`, and not what the others have set there since. Changes of
    values in place are seen by all. When all have ended, the modules have what the last part has set.

    Attributes:
        part: The index of the part that runs; None between parts, and in backward.
        ranks: Where the parts meet those of other ranks; None for one rank.
        follow: Called with a place and what was exchanged there, on a rank that has no parts.
        adds_up: Whether the losses of the parts are added up, and not averaged.
    """

    adds_up = False

    def __init__(
        self,
        on_part: Callable[[int], None] = lambda index: None,
        modules: Iterable[nn.Module] = (),
        while_waiting: Callable[[], AbstractContextManager[None]] = nullcontext,
        ranks: RankMeetings | None = None,
    ) -> None:
        self.ranks = ranks
        self.follow: Callable[[str, Shares], None] = lambda place, rows: None
        self.part: int | None = None
        self._while_waiting = while_waiting
        self._on_part = on_part
        self._modules = list(modules)
        self._parts: list[greenlet] = []

    def run(self, functions: Sequence[Callable[[], T]]) -> list[T]:
        """Run a function for each part, and return their results; a rank without parts follows the others.

        Raises:
            WorkloadError: A part waits for the others at a place that another one does not reach.
            BaseException: What one of the functions raised, once all other parts have ended.
        """
        if self.ranks is not None and not functions:
            while (met := self.ranks.meet(None, None, ()))[0] != THE_END:
                self.follow(*met)
            return []
        self._parts = [greenlet(function) for function in functions]
        for part in self._parts:
            part.gr_context = copy_context()
        states = [_TorchState()] * len(functions)
        self._views = [_ModuleView(self._modules)] * len(functions)
        results: list[Any] = [()] * len(functions)
        self._forks = [0] * len(functions)
        fork_rng, torch.random.fork_rng = torch.random.fork_rng, self._counted(torch.random.fork_rng)
        try:
            while True:
                for index in range(len(self._parts)):
                    results[index], states[index] = self._go_on(index, states[index], results[index])
                waiting = [not part.dead for part in self._parts]
                if not any(waiting):
                    if self.ranks is not None:
                        self.ranks.meet(THE_END, None, ())
                    self._views[-1].apply()
                    return results
                results = [(share,) for share in self._join(results, waiting)]
        finally:
            self._end(states)
            self._views = []
            torch.random.fork_rng = fork_rng

    def meet(self, place: str, value: Any, join: Join) -> Any:
        """Wait until all parts are at this `place`, and return this part's share of `join` of all values.

        Raises:
            WorkloadError: The part has set a generator aside (`fork_rng`) or seeded one: the others would draw from it.
        """
        assert self.part is not None
        if self._forks[self.part] or self._seeds != _seeds():
            raise WorkloadError(
                f"random numbers are seeded or forked around {place}, where the other parts of the batch run and draw",
                hint="end fork_rng before it, or draw from a torch.Generator made for each call",
            )
        # A weight that autocast has cast for several parts would sum their gradients in half precision.
        torch.clear_autocast_cache()
        with self._while_waiting():
            return self._parts[self.part].parent.switch(_Meeting(place, value, join))

    def check_backward(self, place: str) -> None:
        """Raise WorkloadError if a backward through `place` runs within a part: it would see that part alone."""
        if self.part is not None:
            raise WorkloadError(
                f"a gradient is computed within the loss, through {place}, where it cannot wait for the other parts",
                hint="leave that gradient out of the loss, or run the whole batch as one micro-batch",
            )

    def _go_on(self, index: int, state: _TorchState, arguments: tuple[Any, ...]) -> tuple[Any, _TorchState]:
        outside, modules = _TorchState(), _ModuleView(self._modules)
        self._on_part(index)
        self.part = index
        state.apply()
        self._views[index].apply()
        self._seeds = _seeds()
        try:
            result = self._parts[index].switch(*arguments)
            return result, _TorchState()
        finally:
            self.part = None
            self._views[index] = _ModuleView(self._modules)
            modules.apply()
            outside.apply()

    def _counted(self, fork_rng: Any) -> Any:
        """Return `fork_rng`, which counts for each part how many it has entered."""

        @contextmanager
        def fork(devices: Any = None, enabled: bool = True, *arguments: Any, **named: Any) -> Iterator[None]:
            part = self.part
            with fork_rng(devices, enabled, *arguments, **named):
                self._forks[part or 0] += bool(enabled)
                try:
                    yield
                finally:
                    self._forks[part or 0] -= bool(enabled)

        return fork

    def _join(self, results: Sequence[Any], waiting: Sequence[bool]) -> Sequence[Any]:
        check_places([one.place if waits else THE_END for one, waits in zip(results, waiting, strict=True)])
        shares: Sequence[Any] = results[0].join([result.value for result in results])
        return shares

    def _end(self, states: Sequence[_TorchState]) -> None:
        """End parts that still wait, in the contexts in which they wait."""
        outside, modules = _TorchState(), _ModuleView(self._modules)
        for part, state, view in zip(self._parts, states, self._views, strict=True):
            if part and not part.dead:
                state.apply()
                view.apply()
                with suppress(BaseException):
                    part.throw(GreenletExit)
                modules.apply()
        outside.apply()
        self._parts = []


class _ModuleView:
    """The attributes, parameters and buffers that modules have, as objects."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._kept = [(place, dict(place)) for one in modules for place in (vars(one), one._parameters, one._buffers)]

    def apply(self) -> None:
        """Give them back what they had."""
        for place, kept in self._kept:
            if len(place) != len(kept) or any(place.get(name, self) is not value for name, value in kept.items()):
                place.clear()
                place.update(kept)


class _TorchState:
    """PyTorch's settings of a thread that a part may have changed where it waits: contexts that it has entered."""

    def __init__(self) -> None:
        self._grad = torch.is_grad_enabled()
        self._autocast = [
            (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda")
        ]
        self._cached = torch.is_autocast_cache_enabled()
        self._hooks = _saved_tensor_hooks()
        self._functions = _get_current_function_mode_stack()  # type: ignore[no-untyped-call]
        self._dispatch = dispatch._get_current_dispatch_mode_stack()
        self._attention = [getattr(torch.backends.cuda, f"{kind}_sdp_enabled")() for kind in _ATTENTION]
        self._warnings = warnings.filters[:]
        self._stream = torch.cuda.current_stream() if torch.get_device_module("cuda").is_initialized() else None

    def apply(self) -> None:
        """Set them again."""
        torch.set_grad_enabled(self._grad)
        for kind, enabled in zip(_ATTENTION, self._attention, strict=True):
            getattr(torch.backends.cuda, f"enable_{kind}_sdp")(enabled)
        if warnings.filters != self._warnings:
            warnings.filters[:] = self._warnings  # type: ignore[index]
            warnings._filters_mutated()  # type: ignore[attr-defined]
        for kind, enabled, dtype in self._autocast:
            torch.set_autocast_enabled(kind, enabled)
            torch.set_autocast_dtype(kind, dtype)
        torch.set_autocast_cache_enabled(self._cached)
        _change_stack(_saved_tensor_hooks(), self._hooks, _pop_hooks, _push_hooks)
        present = _get_current_function_mode_stack()  # type: ignore[no-untyped-call]
        _change_stack(present, self._functions, _pop_mode, _push_mode)
        _change_stack(
            dispatch._get_current_dispatch_mode_stack(), self._dispatch, dispatch._pop_mode, dispatch._push_mode
        )
        if self._stream is not None:
            torch.cuda.set_stream(self._stream)


def _seeds() -> list[int]:
    return [one.initial_seed() for one in (torch.default_generator, *torch.cuda.default_generators)]


def _saved_tensor_hooks() -> list[tuple[Any, Any]]:
    """Return the entered `saved_tensors_hooks`, the outermost first."""
    autograd = torch._C._autograd
    found: list[tuple[Any, Any]] = []
    while (hooks := autograd._top_saved_tensors_default_hooks(True)) is not None:
        found.append(hooks)
        autograd._pop_saved_tensors_default_hooks()
    for pack, unpack in reversed(found):
        autograd._push_saved_tensors_default_hooks(pack, unpack)
    return found[::-1]


def _pop_hooks() -> None:
    torch._C._autograd._pop_saved_tensors_default_hooks()


def _push_hooks(hooks: tuple[Any, Any]) -> None:
    torch._C._autograd._push_saved_tensors_default_hooks(*hooks)


def _change_stack(present: list[Any], wanted: list[Any], pop: Callable[[], Any], push: Callable[[Any], Any]) -> None:
    """Pop and push entries of a stack until `present` is `wanted`."""
    common = 0
    while common < min(len(present), len(wanted)) and present[common] is wanted[common]:
        common += 1
    for _ in present[common:]:
        pop()
    for entry in wanted[common:]:
        push(entry)

"""Run the parts of an update in lock step: one at a time, and all of them meet where one needs the others.

Each part runs in a greenlet, which has a stack of its own in the same thread. Where a part calls `Lockstep.meet`, it
waits, and the next one runs. When all wait, a joint function is called with what each has, and each goes on with its
result. So one part computes at a time, autograd's graphs lie one after the other, and a single backward runs through
all of them, the last part first. An exact BatchNorm meets so, and `whole_batch(x)`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from contextvars import copy_context
from functools import partial
from threading import Lock
from typing import Any, NamedTuple, TypeAlias, TypeVar

import torch
from greenlet import GreenletExit, greenlet
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from autoaccum.accumulation.ranks.group import Ranks
from autoaccum.errors import WorkloadError

T = TypeVar("T")
Join = Callable[[list[Any]], Sequence[Any]]
"""Takes what each part has, in order, and returns what each gets."""


RankRows: TypeAlias = list[tuple[Any, list[Tensor]]]
"""The note and the tensors of each rank that has parts."""

THE_END = "the end of its loss"


class RankMeetings:
    """Where the parts of one update meet those of other ranks; each rank comes to the same meetings.

    Tensors, and in backward their gradients, are exchanged in host memory. Backward comes to the meetings in reverse
    order on all ranks, where autograd alone would choose one: each meeting takes a token from the one before it, and
    so runs its backward first. It also does so where nothing that the rank computes needs it.
    """

    def __init__(self, ranks: Ranks, device: torch.device) -> None:
        self._ranks, self._device = ranks, device
        self._token = torch.zeros((), requires_grad=True, device="cpu")
        self._lock, self._is_closed = Lock(), False

    def meet(self, place: str | None, note: Any, tensors: Sequence[Tensor]) -> tuple[str, RankRows]:
        """Return the place of the meeting, and the note and the tensors of each rank that has parts.

        The tensors are differentiable, and on the device of this rank's own. A rank without parts gives None as place.

        Raises:
            WorkloadError: Ranks are at different places.
        """
        is_differentiable = any(tensor.requires_grad for tensor in tensors)
        rows = self._ranks.gather((place, note, list(tensors), is_differentiable))
        present = [row for row in rows if row[0] is not None]
        check_places(places := [at for at, *_ in present if at is not None])
        device = tensors[0].device if tensors else self._device
        exchanged = [tensor.to(device) for row in present for tensor in row[2]]
        if any(row[3] for row in present):
            first = sum(len(row[2]) for row in rows[: self._ranks.rank])
            self._token, *exchanged = _Exchanged.apply(self, exchanged, first, self._token, *tensors)  # type: ignore[no-untyped-call]
        remaining = iter(exchanged)
        return places[0], [(row[1], [next(remaining) for _ in row[2]]) for row in present]

    @property
    def end(self) -> Tensor:
        """A number whose backward comes to all meetings."""
        return self._token

    def sum_gradients(self, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Return the gradients summed over all ranks, in host memory."""
        with self._lock:
            if self._is_closed:
                raise RuntimeError("this update has ended")
            rows = self._ranks.gather(gradients)
        columns = [[gradient for gradient in column if gradient is not None] for column in zip(*rows, strict=True)]
        return [sum(column[1:], column[0]) if column else None for column in columns]

    def close(self) -> None:
        """End the meetings: a backward that failed may still be at one, in a thread of autograd's."""
        with self._lock:
            self._is_closed = True


class _Exchanged(torch.autograd.Function):
    """This rank's tensors `own` among those of all, from the `first`; backward adds up what all ranks have."""

    @staticmethod
    def forward(
        ctx: Any, meetings: RankMeetings, everything: list[Tensor], first: int, token: Tensor, *own: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.meetings, ctx.own = meetings, slice(first, first + len(own))
        ctx.token, ctx.devices = torch.zeros_like(token), [tensor.device for tensor in own]
        ctx.set_materialize_grads(False)
        return token.clone(), *everything

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Tensor, *gradients: Tensor | None) -> Any:
        pairs = zip(ctx.meetings.sum_gradients(gradients)[ctx.own], ctx.devices, strict=True)
        moved = [None if gradient is None else gradient.to(device) for gradient, device in pairs]
        return None, None, None, ctx.token, *moved


def check_places(places: Sequence[str]) -> None:
    """Raise WorkloadError unless all parts are at the same place."""
    if len(set(places)) > 1:
        other = next(place for place in places if place != places[0])
        raise WorkloadError(
            f"a part of the batch is at {places[0]} while another is at {other}, so that they cannot be joined",
            hint="let every part run the same layers in the same order",
        )


class _Meeting(NamedTuple):
    """What a part waits for: `place` says where in the model, in words."""

    place: str
    value: Any
    join: Join


class Lockstep:
    """Runs the parts of one update in lock step.

    `on_part` is called with the index of a part whenever it begins or goes on; `while_waiting()` is a context that a
    part enters where it waits.

    A part finds what it has set on one of the `modules`, and not what the others have set there since. Changes of
    values in place are seen by all. When all have ended, the modules have what the last part has set. Grad mode and
    autocast are each part's own, too; other contexts must not be open where a part waits.

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
        self.follow: Callable[[str, RankRows], None] = lambda place, rows: None
        self.part: int | None = None
        self._while_waiting, self._on_part = while_waiting, on_part
        self._modules = list(modules)
        self._parts: list[greenlet] = []
        self._states: list[_State] = []

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
        self._states = [_State(self._modules)] * len(functions)
        results: list[Any] = [()] * len(functions)
        try:
            while True:
                results = [self._go_on(index, arguments) for index, arguments in enumerate(results)]
                waiting = [not part.dead for part in self._parts]
                if not any(waiting):
                    if self.ranks is not None:
                        self.ranks.meet(THE_END, None, ())
                    self._states[-1].apply_modules()
                    return results
                pairs = zip(results, waiting, strict=True)
                check_places([result.place if waits else THE_END for result, waits in pairs])
                results = [(joint,) for joint in results[0].join([result.value for result in results])]
        finally:
            self._end()

    def meet(self, place: str, value: Any, join: Join) -> Any:
        """Wait until all parts are at this `place`, and return what `join` of all values gives this part."""
        assert self.part is not None
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

    def _go_on(self, index: int, arguments: tuple[Any, ...]) -> Any:
        outside = _State(self._modules)
        self._on_part(index)
        self.part = index
        self._states[index].apply()
        try:
            return self._parts[index].switch(*arguments)
        finally:
            self.part = None
            self._states[index] = _State(self._modules)
            outside.apply()

    def _end(self) -> None:
        """End parts that still wait, in the contexts in which they wait."""
        outside = _State(self._modules)
        for part, state in zip(self._parts, self._states, strict=True):
            if part and not part.dead:
                state.apply()
                with suppress(BaseException):
                    part.throw(GreenletExit)
                outside.apply()
        self._parts, self._states = [], []


class _State:
    """What a part may have changed where it waits: grad mode, autocast, and what modules have as attributes."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._grad, self._cached = torch.is_grad_enabled(), torch.is_autocast_cache_enabled()
        self._autocast = [
            (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda")
        ]
        tables = (table for module in modules for table in (vars(module), module._parameters, module._buffers))
        self._attributes = [(table, dict(table)) for table in tables]

    def apply(self) -> None:
        """Set it again."""
        torch.set_grad_enabled(self._grad)
        torch.set_autocast_cache_enabled(self._cached)
        for kind, enabled, dtype in self._autocast:
            torch.set_autocast_enabled(kind, enabled)
            torch.set_autocast_dtype(kind, dtype)
        self.apply_modules()

    def apply_modules(self) -> None:
        """Give modules back the attributes, parameters and buffers that they had, as objects."""
        for table, content in self._attributes:
            if len(table) != len(content) or any(table.get(name, self) is not value for name, value in content.items()):
                table.clear()
                table.update(content)


IN_SEQUENCE = object()
_PLACE = "whole_batch(x)"
_running: Any = None
"""How the parts of the present update run: in a `Lockstep`, one after the other, or None outside of one."""


class NeedsWholeBatch(BaseException):
    """Raised by `whole_batch` where parts run one after the other: the update has to run in lock step."""


class OnePart:
    """A part that runs alone, as in an evaluation: `whole_batch(x)` is `x`, and `calls` counts how often."""

    calls = 0


@contextmanager
def parts_run(how: Any) -> Iterator[None]:
    """Let `whole_batch` join parts that run in the `Lockstep` given; raise NeedsWholeBatch for parts IN_SEQUENCE.

    In `OnePart` it joins nothing.
    """
    global _running
    before, _running = _running, how
    try:
        yield
    finally:
        _running = before


def whole_batch(x: Tensor) -> Tensor:
    """Return `x` of all samples of the effective batch, for use within a model or a loss.

    Within an update, this joins the `x` of all micro-batches, and of all ranks, along the first dimension. The result
    is differentiable: each sample gets the gradient of all uses. Elsewhere `x` itself is returned.

    A model that balances the load of experts over the whole batch:

        load = autoaccum.whole_batch(gates).mean(0)
        balance = experts * (load * load).sum()

    While a micro-batch waits here, others run. What it has set on a module is kept for it; what it has written
    elsewhere, such as into a dict, may be overwritten by another.

    Each micro-batch's loss counts by its fraction of the update, so a term that all compute alike counts once. In a
    loss with `reduction="sum"` it would count once for each micro-batch, so that is refused.

    Args:
        x: A tensor whose first dimension is the sample, or a number of rows for each sample.

    Raises:
        WorkloadError: `x` is no such tensor, the micro-batches' tensors cannot be joined, or their losses are added up.
    """
    if not isinstance(x, Tensor) or x.ndim == 0:
        raise WorkloadError("whole_batch(x) needs a tensor whose first dimension is the sample")
    running = _running
    if running is IN_SEQUENCE:
        raise NeedsWholeBatch
    if running is None or isinstance(running, OnePart):
        if running is not None:
            running.calls += 1
        return x if torch.is_grad_enabled() else x.detach()
    if running.part is None:
        raise WorkloadError(
            "whole_batch(x) runs within backward (activation checkpointing), where it cannot wait for the other parts",
            hint="leave out the checkpointing, or call whole_batch outside of the checkpointed part",
        )
    if running.adds_up:
        raise WorkloadError(
            "the loss is a sum, and whole_batch(x) is called: a term that all micro-batches compute alike would count"
            " once for each of them",
            hint='make the loss a mean (reduction="mean"), or compute it of all outputs in coupled_loss',
        )
    # The joined tensor and its gradients wait in host memory for the other parts.
    joined: Tensor = running.meet(_PLACE, x.cpu(), partial(join_rows, ranks=running.ranks))
    return joined.to(x.device, copy=True)  # Else, on the CPU, a part that changes it in place changes all parts'.


def join_rows(values: Sequence[Tensor], ranks: RankMeetings | None = None) -> list[Tensor]:
    """Return, for each part, the tensors of all parts, of all ranks, joined along the first dimension."""
    joined = _join_rows(values)
    if ranks is not None:
        joined = _join_rows([rows for _, (rows,) in ranks.meet(_PLACE, None, [joined])[1]])
    return [joined] * len(values)


def _join_rows(values: Sequence[Tensor]) -> Tensor:
    if len({(value.shape[1:], value.dtype) for value in values}) > 1:
        kinds = ", ".join(f"{list(value.shape)} of {str(value.dtype).removeprefix('torch.')}" for value in values)
        raise WorkloadError(
            f"whole_batch(x) got tensors of different shapes or dtypes: {kinds}",
            hint="make all but the first dimension equal, as by padding to one length",
        )
    joined = torch.cat([*values])
    if joined.requires_grad:
        joined.register_hook(_check_backward)  # type: ignore[no-untyped-call]
    return joined


def _check_backward(_: Tensor) -> None:
    if isinstance(_running, Lockstep):
        _running.check_backward(_PLACE)

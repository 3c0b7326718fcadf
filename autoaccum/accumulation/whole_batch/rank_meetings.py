"""Meetings of one update's parts with those of other ranks: the tensors of all ranks, forward and backward."""

from __future__ import annotations

from collections.abc import Sequence
from threading import Lock
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from autoaccum.accumulation.ranks.group import Ranks
from autoaccum.errors import WorkloadError

Shares: TypeAlias = list[tuple[Any, list[Tensor]]]
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

    def meet(self, place: str | None, note: Any, tensors: Sequence[Tensor]) -> tuple[str, Shares]:
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
        found = [[tensor.to(device) for tensor in row[2]] for row in present]
        if any(row[3] for row in present):
            first = sum(len(row[2]) for row in rows[: self._ranks.rank])
            flat = [tensor for row in found for tensor in row]
            self._token, *flat = _Exchanged.apply(self, flat, first, self._token, *tensors)  # type: ignore[no-untyped-call]
            taken = iter(flat)
            found = [[next(taken) for _ in row] for row in found]
        return places[0], [(row[1], tensors) for row, tensors in zip(present, found, strict=True)]

    def ending_at(self, loss: Tensor | None) -> Tensor:
        """Return `loss`, or zero without one, so that its backward comes to all meetings."""
        start = torch.zeros((), device=self._device) if loss is None else loss
        return start + self._token.to(start)

    def sum_gradients(self, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Return the gradients summed over all ranks, in host memory."""
        with self._lock:
            if self._is_closed:
                raise RuntimeError("this update has ended")
            rows = self._ranks.gather(gradients)
        columns = [[one for one in column if one is not None] for column in zip(*rows, strict=True)]
        return [sum(column[1:], column[0]) if column else None for column in columns]

    def close(self) -> None:
        """End the meetings: a backward that failed may still be at one, in a thread of autograd's."""
        with self._lock:
            self._is_closed = True


class _Exchanged(torch.autograd.Function):
    """This rank's tensors among those of all, `others`, from the `first`; backward adds up what all ranks have."""

    @staticmethod
    def forward(
        ctx: Any, meetings: RankMeetings, others: list[Tensor], first: int, token: Tensor, *own: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.meetings, ctx.own = meetings, slice(first, first + len(own))
        ctx.token, ctx.devices = torch.zeros_like(token), [tensor.device for tensor in own]
        ctx.set_materialize_grads(False)
        return token.clone(), *others

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Tensor, *gradients: Tensor | None) -> Any:
        sums = ctx.meetings.sum_gradients(gradients)[ctx.own]
        moved = [None if one is None else one.to(device) for one, device in zip(sums, ctx.devices, strict=True)]
        return None, None, None, ctx.token, *moved


def check_places(places: Sequence[str]) -> None:
    """Raise WorkloadError unless all parts are at the same place."""
    if len(set(places)) > 1:
        other = next(place for place in places if place != places[0])
        raise WorkloadError(
            f"a part of the batch is at {places[0]} while another is at {other}, so that they cannot be joined",
            hint="let every part run the same layers in the same order",
        )

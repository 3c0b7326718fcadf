"""Meetings of one update's parts with those of other ranks: tensors, forward and backward, and outputs for a loss."""

from __future__ import annotations

import io
import pickle
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from threading import Lock
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from autoaccum.accumulation.ranks.group import Ranks, TensorPickler
from autoaccum.accumulation.rng_state import RngState, capture_rng_state, initialized_cuda_devices, restore_rng_state
from autoaccum.errors import WorkloadError, first_line
from autoaccum.sources import pytree
from autoaccum.sources.pytree import CustomBatch

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


class RankOutputs:
    """Sends outputs of parts of the batch to all ranks, and takes theirs.

    A view of a parameter or buffer arrives as that of the receiver's own, so that it is known for one.
    """

    def __init__(self, ranks: Ranks, model: nn.Module, device: torch.device) -> None:
        self._ranks, self._device = ranks, device
        self._kept = [tensor.detach() for tensor in (*model.parameters(), *model.buffers())]

    def gather(
        self, outputs: Sequence[Any], sizes: Sequence[int], batches: Sequence[Any]
    ) -> tuple[list[Any], list[int], list[Any]]:
        """Return the outputs and sizes of all ranks' parts, and what the loss reads of their batches, in order.

        This rank's outputs are those given.

        Raises:
            WorkloadError: The outputs cannot be sent, or the workload splits its batches itself.
        """
        if any(isinstance(batch, CustomBatch) for batch in batches):
            raise WorkloadError(
                "the loss reads batches with a split(batch, sizes) of their own, which cannot be joined over ranks",
                hint="return what it reads of them from outputs(model, batch)",
            )
        self._check_constants(outputs)
        rows = self._ranks.gather((self._pack((list(outputs), list(batches))), list(sizes)))
        outputs_of, batches_of = zip(*(self._unpack(packed) for packed, _ in rows), strict=True)
        all_outputs = [
            one for rank, each in enumerate(outputs_of) for one in (outputs if rank == self._ranks.rank else each)
        ]
        return all_outputs, [size for _, each in rows for size in each], [one for each in batches_of for one in each]

    def from_first(self, run: Callable[[], Any] | None) -> Any:
        """Return what `run` returns on the first rank that can run it."""
        rows = self._ranks.gather(None if run is None else self._pack(run()))
        return self._unpack(next(row for row in rows if row is not None))

    @contextmanager
    def same_random_numbers(self) -> Iterator[None]:
        """Draw rank 0's random numbers within, and leave the generators of the others as they were."""
        devices, own = initialized_cuda_devices(), RngState(initialized_cuda_devices())
        states = self._ranks.gather(capture_rng_state(devices))
        restore_rng_state(states[0], devices)
        yield
        if self._ranks.rank:
            own.restore()

    def _check_constants(self, outputs: Sequence[Any]) -> None:
        """Raise WorkloadError if a tensor that is not the model's is an output of two parts, as no rows are."""
        known = {tensor.untyped_storage()._cdata for tensor in self._kept}
        places = ({_place(one) for one in pytree.tensors(part) if one.ndim} for part in outputs)
        seen = Counter(place for part in places for place in part if place[0] not in known)
        if any(count > 1 for count in seen.values()):
            raise WorkloadError(
                "an output is one tensor for all parts of the batch, and other ranks do not know it as that",
                hint="make it a buffer of the model (register_buffer), or use it in the loss without returning it",
            )

    def _pack(self, structure: Any) -> bytes:
        stream = io.BytesIO()
        storages = {tensor.untyped_storage()._cdata: index for index, tensor in enumerate(self._kept)}

        def persistent_id(node: Any) -> Any:
            if not isinstance(node, Tensor):
                return None
            index = storages.get(node.untyped_storage()._cdata) if node.layout is torch.strided else None
            return node if index is None else (index, node.shape, node.stride(), node.storage_offset())

        pickler = TensorPickler(stream, 5)
        pickler.persistent_id = persistent_id  # type: ignore[method-assign]
        try:
            pickler.dump(structure)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise WorkloadError(
                f"outputs or a batch cannot be sent to other ranks ({first_line(error)})",
                hint="give tensors in tuples, lists and dicts",
            ) from None
        return stream.getvalue()

    def _unpack(self, data: bytes) -> Any:
        def persistent_load(one: Any) -> Tensor:
            if isinstance(one, Tensor):
                return one.to(self._device)
            kept, *view = one
            return torch.as_strided(self._kept[kept], *view)

        unpickler = pickle.Unpickler(io.BytesIO(data))
        unpickler.persistent_load = persistent_load  # type: ignore[method-assign]
        return unpickler.load()


def _place(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.untyped_storage()._cdata, tensor.storage_offset(), tensor.shape

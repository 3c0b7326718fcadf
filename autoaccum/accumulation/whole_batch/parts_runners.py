"""Run all parts of an update so that they can need each other: in lock step, or twice with the loss in between."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, nullcontext
from functools import cache, partial
from typing import Any, NoReturn, TypeAlias

import torch
from torch import Tensor

from autoaccum.accumulation.backpropagation import Backpropagation, LossRecord
from autoaccum.accumulation.batchnorm import uncompiled
from autoaccum.accumulation.host_storage import HostStorage
from autoaccum.accumulation.module_calls import is_close
from autoaccum.accumulation.out_of_memory import find_out_of_memory
from autoaccum.accumulation.rng_state import RngState, initialized_cuda_devices, module_generators
from autoaccum.accumulation.step_result import warn_caller
from autoaccum.accumulation.transaction import buffer_restorer, is_plain_tensor
from autoaccum.accumulation.whole_batch.exact_batchnorm import ExactBatchNorm
from autoaccum.accumulation.whole_batch.lockstep import IN_SEQUENCE, Lockstep, parts_run
from autoaccum.accumulation.whole_batch.rank_meetings import RankMeetings, RankOutputs
from autoaccum.errors import UsageError, WorkloadError
from autoaccum.options import BatchNormMode
from autoaccum.sources import pytree
from autoaccum.sources.batches import batch_size, join_batches, move_batch, split_batch
from autoaccum.sources.objective import Weights

_Parts: TypeAlias = Sequence[Any]
"""The parts of the batch, each a nest of tensors."""


class LockstepParts:
    """Runs the parts of an update in lock step, and one backward through all of them.

    What autograd saves of a part lies in host memory until backward needs it, so that the device holds one part and
    what lives where parts wait for each other. A coupled loss is computed once, from the outputs of all parts.

    Args:
        exact_batchnorm: BatchNorm normalises by the moments of the whole batch.
        on_part: Called with the index of a part whenever it begins or goes on.

    Attributes:
        host_bytes: The bytes that the last update stored in host memory.
    """

    def __init__(self, *, exact_batchnorm: bool, on_part: Callable[[int], None]) -> None:
        self._exact_batchnorm, self._on_part = exact_batchnorm, on_part
        self.host_bytes = 0
        self._loss_of_all = LossOfAll()

    def __call__(
        self,
        backpropagation: Backpropagation,
        parts: _Parts,
        shares: Sequence[Weights],
        batches: _Parts,
        record: LossRecord,
    ) -> None:
        """As `PartsRunner`. Parts without weight run too: other samples depend on theirs."""
        model, device = backpropagation.model, backpropagation.device
        storage = HostStorage([*model.parameters(), *model.buffers()])
        modules, is_coupled = dict(backpropagation.named_modules()), backpropagation.objective.coupled
        ranks = RankMeetings(backpropagation.ranks, device) if backpropagation.ranks.size > 1 else None
        lockstep = Lockstep(self._on_part, modules.values(), storage.waiting, ranks)
        lockstep.adds_up = backpropagation.objective.reduction == "sum" and not is_coupled

        @contextmanager
        def joining_parts() -> Iterator[None]:
            exact = ExactBatchNorm(lockstep, storage).replacing(modules) if self._exact_batchnorm else None
            with parts_run(lockstep), uncompiled(), exact or nullcontext():
                yield

        def run_part(part: Any, share: Weights) -> Any:
            backpropagation.on_phase("forward")
            moved = move_batch(part, device)
            if is_coupled:
                return backpropagation.outputs(moved)
            return backpropagation.weighted_terms(moved, share, None, record)[1]

        with closing(ranks) if ranks is not None else nullcontext():
            with joining_parts(), nullcontext() if device.type == storage.host else storage.saving():
                results = lockstep.run([partial(run_part, *each) for each in zip(parts, shares, strict=True)])
            roots, gradients = list[Tensor](), list[Tensor | None]()
            if is_coupled:
                of_parts = self._loss_of_all.gradients(backpropagation, results, parts, batches, record)
                roots, gradients = _with_gradients(_tensors(results), [one for part in of_parts for one in part])
            elif results and (loss := torch.stack(results).sum()).requires_grad:
                roots, gradients = [backpropagation.scaled(loss)], [None]
                del loss
            del results
            if ranks is not None:
                roots, gradients = [*roots, ranks.end], [*gradients, None]
            backpropagation.on_phase("backward")
            with joining_parts():  # A part that is computed once more within backward (checkpointing) is refused.
                if roots:
                    torch.autograd.backward(roots, gradients)
        self.host_bytes = storage.peak_bytes


class RepeatedParts:
    """Runs the parts of an update twice: without graphs for the outputs, and with graphs for the gradients.

    Between the two the loss is computed once, from the outputs of all parts, and its gradients by the outputs are kept
    (Gao et al., "Scaling Deep Contrastive Learning Batch Size under Memory Limited Setup", 2021). Both passes draw the
    same random numbers and begin with the same buffers, so that random states and BatchNorm's statistics are those of
    one pass.
    """

    def __init__(self) -> None:
        self._has_compared = False
        self._loss_of_all = LossOfAll()

    def __call__(
        self,
        backpropagation: Backpropagation,
        parts: _Parts,
        shares: Sequence[Weights],
        batches: _Parts,
        record: LossRecord,
    ) -> None:
        """As `PartsRunner`."""
        model, device = backpropagation.model, backpropagation.device
        generators = module_generators(model.modules())
        restore_buffers = buffer_restorer(model)
        states, outputs = [], []
        for part in parts:
            states.append(RngState(initialized_cuda_devices(), generators))
            backpropagation.on_phase("forward")
            with torch.no_grad(), parts_run(IN_SEQUENCE):
                outputs.append(backpropagation.outputs(move_batch(part, device)))
        gradients = self._loss_of_all.gradients(backpropagation, outputs, parts, batches, record)
        after = RngState(initialized_cuda_devices(), generators)
        restore_buffers()
        for part, state, first, of_outputs in zip(parts, states, outputs, gradients, strict=True):
            state.restore()
            backpropagation.on_phase("forward")
            again = _tensors([backpropagation.outputs(move_batch(part, device))])
            if not self._has_compared:
                _warn_of_other_outputs(_tensors([first]), again)
            used, of_used = _with_gradients(again, of_outputs)
            backpropagation.on_phase("backward")
            if used:
                torch.autograd.backward(used, of_used)
        self._has_compared = True
        after.restore()


def join_parts(
    backpropagation: Backpropagation,
    mode: BatchNormMode,
    on_part: Callable[[int], None],
    *,
    in_lockstep: bool,
    sums_half: bool,
) -> None:
    """Have parts run so that they can need each other: in lock step, or twice for a coupled loss.

    Raises:
        UsageError: FSDP2 shards the model, the BatchNorm `mode` or a sum of gradients in float32 forbids it.
    """
    if backpropagation.sharded is not None:
        raise UsageError(
            "parts of the batch need each other, and fully_shard runs a model's parts one after the other",
            hint="leave the model unsharded, as in DistributedDataParallel",
        )
    if mode == "running":
        raise UsageError(
            'batchnorm is "running", and parts of the batch need each other', hint='take batchnorm="exact"'
        )
    if in_lockstep and sums_half:
        raise UsageError(
            "parts of the batch run in lock step, which sums gradients of half-precision parameters in their dtype",
            hint='give accumulate_in="parameters", or keep the parameters in float32 under autocast',
        )
    lockstep = LockstepParts(exact_batchnorm=mode == "exact", on_part=on_part)
    backpropagation.run_parts = lockstep if in_lockstep else RepeatedParts()


class LossOfAll:
    """Computes a coupled loss of the outputs of all parts, of all ranks."""

    def __init__(self) -> None:
        self._joining = OutputsJoining()

    def gradients(
        self, backpropagation: Backpropagation, outputs: _Parts, parts: _Parts, batches: _Parts, record: LossRecord
    ) -> list[list[Tensor | None]]:
        """Return the gradients of the loss by the outputs of each of this rank's `parts`, of `batches`.

        What else the loss uses, such as its own parameters, gets its gradients on the first rank only.
        """
        leaves = [_require_gradients(one) for one in outputs]
        loss = self.loss(backpropagation, leaves, parts, batches, record)
        backpropagation.on_phase("backward")
        is_first = backpropagation.ranks.rank == 0
        backpropagation.backward(loss, None if is_first else [one for one in _tensors(leaves) if one.requires_grad])
        return [[leaf.grad for leaf in pytree.tensors(one)] for one in leaves]

    def loss(
        self, backpropagation: Backpropagation, outputs: _Parts, parts: _Parts, batches: _Parts, record: LossRecord
    ) -> Tensor:
        """Return the loss of the outputs of this rank's `parts`, of `batches`, with those of other ranks."""
        ranks, sizes = backpropagation.ranks, [*map(batch_size, parts)]
        outputs_of = _outputs_of(backpropagation, batches)
        if ranks.size == 1:
            return backpropagation.coupled_loss(self._joining.join(outputs, sizes, outputs_of), batches, record)
        own = RankOutputs(ranks, backpropagation.model, backpropagation.device)
        read = [backpropagation.objective.read_by_coupled_loss(batch) for batch in batches]
        everything, sizes, read = own.gather(outputs, sizes, read)
        mine = {id(one) for one in outputs}
        # Gradients of other ranks' outputs are not used, but a loss of theirs alone has to have one, too.
        everything = [one if id(one) in mine else _require_gradients(one) for one in everything]

        def outputs_anywhere(samples: int) -> Any:
            return own.from_first(partial(outputs_of, samples) if parts else None)

        joined = self._joining.join(everything, sizes, outputs_anywhere)
        with own.same_random_numbers():
            return backpropagation.coupled_loss(joined, read, record if ranks.rank == 0 else LossRecord())


def _warn_of_other_outputs(first: Sequence[Tensor], again: Sequence[Tensor]) -> None:
    """Warn if a forward has given other outputs the second time; in a simulation there are no values to compare."""
    pairs = [(one, other.detach()) for one, other in zip(first, again, strict=True)]
    if all(map(is_plain_tensor, again)) and not all(is_close(one, other) for one, other in pairs):
        warn_caller(
            "the forward of a part gives other outputs when it is repeated, since it changes what it reads, so that the"
            " gradient is not the full batch's: keep state in buffers (register_buffer)"
        )


def _outputs_of(backpropagation: Backpropagation, batches: _Parts) -> Callable[[int], Any]:
    """Return a function that returns the outputs of the first samples of `batches`, and leaves nothing of its run."""

    @torch.no_grad()
    def run(samples: int) -> Any:
        enough = [*batches] * -(-samples // max(1, sum(map(batch_size, batches))))
        batch = join_batches(enough) if enough[1:] else enough[0]
        first = split_batch(batch, [samples, batch_size(batch) - samples])[0]
        restore_buffers = buffer_restorer(backpropagation.model)
        before = RngState(initialized_cuda_devices(), module_generators(backpropagation.model.modules()))
        with parts_run(None), uncompiled():
            outputs = backpropagation.outputs(move_batch(first, backpropagation.device))
        restore_buffers()
        before.restore()
        return outputs

    return run


def _require_gradients(outputs: Any) -> Any:
    """Return outputs as leaves that collect gradients."""
    return pytree.map_tensors(
        outputs, lambda tensor: tensor.detach().requires_grad_(tensor.is_floating_point() or tensor.is_complex())
    )


def _with_gradients(
    outputs: Sequence[Tensor], gradients: Sequence[Tensor | None]
) -> tuple[list[Tensor], list[Tensor | None]]:
    """Return the outputs that a backward begins at, and their gradients."""
    pairs = zip(outputs, gradients, strict=True)
    used = [(one, gradient) for one, gradient in pairs if gradient is not None and one.requires_grad]
    return [one for one, _ in used], [gradient for _, gradient in used]


def _tensors(parts: _Parts) -> list[Tensor]:
    return [tensor for part in parts for tensor in pytree.tensors(part)]


_Place = tuple[int, ...]
"""Where a node is in a structure: the number of the child at each level."""


class OutputsJoining:
    """Joins the outputs of all parts of a batch to one structure.

    Tensors are joined along their first dimension. A tensor that belongs to no sample is the first part's: a number
    such as a learned temperature, a parameter. A list as long as its part may be samples (captions, one mask for each
    image) or a record (feature maps, two towers): samples where parts of other sizes have lists of other lengths. If
    all parts have one size, the outputs of one sample more tell, once for each list.
    """

    def __init__(self) -> None:
        self._samples: dict[_Place, bool] = {}

    def join(self, parts: Sequence[Any], sizes: Sequence[int], outputs_of: Callable[[int], Any]) -> Any:
        """Return the joined outputs of `parts` of these `sizes`; `outputs_of` runs so many samples.

        Raises:
            WorkloadError: The parts' outputs differ in structure, shape, or in a value that is no tensor; or a tensor
                has no rows for its samples.
        """
        if len(parts) == 1:
            return parts[0]
        joined = self._join(parts, sizes, cache(outputs_of), ())
        if all(_counts(part, size) for part, size in zip(parts, sizes, strict=True)):
            raise WorkloadError(
                f"an output is {sizes[0]}, the number of samples of a part, which is not that of the whole batch",
                hint="return no such number, and count samples in the loss",
            )
        return joined

    def _join(self, nodes: Sequence[Any], sizes: Sequence[int], outputs_of: Callable[[int], Any], place: _Place) -> Any:
        first = nodes[0]
        if all(isinstance(node, Tensor) for node in nodes):
            return _join_tensors(nodes, sizes)
        inner = [None if isinstance(node, Tensor) else pytree.children(node) for node in nodes]
        if inner[0] is None:
            is_equal = {repr(node) for node in nodes} == {repr(first)} and not pytree.contains_tensors(first)
            return first if is_equal or all(node is first for node in nodes) else _refuse_structure()
        if self._are_samples(nodes, sizes, outputs_of, place):
            return pytree.rebuild_sequence(first, [entry for node in nodes for entry in node])
        rows = [children or [] for children in inner]
        if {type(node) for node in nodes} != {type(first)} or any(_steps(row) != _steps(rows[0]) for row in rows):
            _refuse_structure()
        columns = zip(*([child for _, child in row] for row in rows), strict=True)
        joined = [self._join(column, sizes, outputs_of, (*place, at)) for at, column in enumerate(columns)]
        return pytree.rebuild(first, joined)

    def _are_samples(
        self, nodes: Sequence[Any], sizes: Sequence[int], outputs_of: Callable[[int], Any], place: _Place
    ) -> bool:
        """Return whether sequences with one entry for each sample of their parts are that, and not by chance."""
        pairs = zip(nodes, sizes, strict=True)
        if not all(pytree.is_sequence(node) and len(node) == size for node, size in pairs):
            return False
        if len(set(sizes)) > 1:
            return True
        if place not in self._samples:
            larger = outputs_of(sizes[0] + 1)
            for at in place:
                larger = (pytree.children(larger) or _refuse_structure())[at][1]
            if not pytree.is_sequence(larger) or len(larger) - sizes[0] not in (0, 1):
                _refuse_structure()
            self._samples[place] = len(larger) > sizes[0]
        return self._samples[place]


def _join_tensors(column: Sequence[Tensor], sizes: Sequence[int]) -> Tensor:
    first = column[0]
    if len({(one.untyped_storage()._cdata, one.storage_offset(), one.shape) for one in column}) == 1:
        return first
    if not first.ndim:
        if any(is_plain_tensor(one) and not torch.equal(one.nan_to_num(), first.nan_to_num()) for one in column):
            raise WorkloadError(
                "an output is a number that differs between two parts of the batch",
                hint="return the rows that it is computed of, and compute it in the loss",
            )
        return first
    if any(not one.ndim or len(one) % size for one, size in zip(column, sizes, strict=True)):
        raise WorkloadError(
            f"an output of a part of {sizes[0]} samples has the shape {list(first.shape)}",
            hint="return tensors whose first dimension is the sample, or else a parameter itself",
        )
    try:
        return torch.cat([*column])
    except RuntimeError as error:
        if find_out_of_memory(error) is not None:
            raise
        raise WorkloadError(
            f"the outputs of two parts of the batch cannot be joined: {error}",
            hint="return tensors whose first dimension is the sample, and make the others equal",
        ) from None


def _refuse_structure() -> NoReturn:
    raise WorkloadError(
        "the outputs of two parts of the batch have different structures, or other values that are no tensors",
        hint="return tensors whose first dimension is the sample, and count samples in the loss",
    )


def _steps(children: list[tuple[str, Any]]) -> list[str]:
    return [step for step, _ in children]


def _counts(node: Any, size: int) -> bool:
    """Return whether a number in a structure is `size`."""
    inner = None if isinstance(node, Tensor) else pytree.children(node)
    return type(node) is int and node == size if inner is None else any(_counts(child, size) for _, child in inner)

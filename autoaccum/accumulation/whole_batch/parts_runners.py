"""Run all parts of an update so that they can need each other: in lock step, or twice with the loss in between."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, nullcontext
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor

from autoaccum.accumulation.backpropagation import Backpropagation, LossRecord
from autoaccum.accumulation.batchnorm import uncompiled
from autoaccum.accumulation.host_storage import HostStorage
from autoaccum.accumulation.rng_state import RngState, initialized_cuda_devices, module_generators
from autoaccum.accumulation.step_result import warn_caller
from autoaccum.accumulation.transaction import ModuleState, is_plain_tensor
from autoaccum.accumulation.whole_batch.coupled_loss import output_gradients
from autoaccum.accumulation.whole_batch.exact_batchnorm import ExactBatchNorm
from autoaccum.accumulation.whole_batch.lockstep import IN_SEQUENCE, Lockstep, RankMeetings, parts_run
from autoaccum.errors import UsageError
from autoaccum.sources import pytree
from autoaccum.sources.batches import move_batch
from autoaccum.sources.objective import Weights
from autoaccum.spec import BatchNormMode

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
                of_parts = output_gradients(backpropagation, results, parts, batches, record)
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

    _has_compared = False

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
        buffers = ModuleState(model.modules())
        states, outputs = [], []
        for part in parts:
            states.append(RngState(initialized_cuda_devices(), generators))
            backpropagation.on_phase("forward")
            with torch.no_grad(), parts_run(IN_SEQUENCE):
                outputs.append(backpropagation.outputs(move_batch(part, device)))
        gradients = output_gradients(backpropagation, outputs, parts, batches, record)
        after = RngState(initialized_cuda_devices(), generators)
        buffers.restore(only_changed=True)
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


def check_can_join(backpropagation: Backpropagation, mode: BatchNormMode, *, sums_half: bool) -> None:
    """Raise UsageError if the parts of updates cannot need each other.

    FSDP2 shards the model, the BatchNorm `mode` forbids it, or lock step is to sum half precision in float32
    (`sums_half`).
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
    if sums_half:
        raise UsageError(
            "parts of the batch run in lock step, which sums gradients of half-precision parameters in their dtype",
            hint='give accumulate_in="parameters", or keep the parameters in float32 under autocast',
        )


_REPEATED = 0.02
"""The difference of outputs, relative to their largest entry, that rounding can make between two runs."""


def _warn_of_other_outputs(first: Sequence[Tensor], again: Sequence[Tensor]) -> None:
    """Warn if a forward has given other outputs the second time; in a simulation there are no values to compare."""
    pairs = [(one, other.detach()) for one, other in zip(first, again, strict=True)]
    pairs = [(one, other) for one, other in pairs if one.is_floating_point() and one.numel()]
    if any(is_plain_tensor(one) and (one - other).abs().max() > _REPEATED * one.abs().max() for one, other in pairs):
        warn_caller(
            "the forward of a part gives other outputs when it is repeated, since it changes what it reads, so that the"
            " gradient is not the full batch's: keep state in buffers (register_buffer)"
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

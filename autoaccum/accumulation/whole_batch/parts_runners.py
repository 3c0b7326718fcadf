"""Run all parts of an update so that each gets what it needs of the whole batch: in lock step, or by recomputing."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor

from autoaccum.accumulation.backpropagation import Backpropagation, UpdateParts
from autoaccum.accumulation.batchnorm import uncompiled
from autoaccum.accumulation.host_storage import HostStorage
from autoaccum.accumulation.rng_state import RngState, initialized_cuda_devices, module_generators
from autoaccum.accumulation.step_result import warn_caller
from autoaccum.accumulation.transaction import ModuleState, is_plain_tensor
from autoaccum.accumulation.whole_batch.coupled_loss import output_gradients
from autoaccum.accumulation.whole_batch.exact_batchnorm import ExactBatchNorm
from autoaccum.accumulation.whole_batch.lockstep import IN_SEQUENCE, Lockstep, RankMeetings, parts_run
from autoaccum.errors import UsageError
from autoaccum.messages import message
from autoaccum.sources import pytree
from autoaccum.sources.batches import move_batch
from autoaccum.sources.objective import Weights
from autoaccum.spec import BatchNormMode


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

    def __call__(self, backpropagation: Backpropagation, update: UpdateParts) -> None:
        """As `PartsRunner`. Parts without weight run too: other samples depend on theirs."""
        model, device = backpropagation.model, backpropagation.device
        storage = HostStorage([*model.parameters(), *model.buffers()])
        modules, is_coupled = dict(backpropagation.named_modules()), backpropagation.objective.coupled
        ranks = RankMeetings(backpropagation.ranks, device) if backpropagation.ranks.size > 1 else None
        lockstep = Lockstep(self._on_part, modules.values(), storage.waiting, ranks)
        lockstep.adds_up = backpropagation.objective.reduction == "sum" and not is_coupled

        @contextmanager
        def meeting() -> Iterator[None]:
            exact = ExactBatchNorm(lockstep, storage).replacing(modules) if self._exact_batchnorm else None
            with parts_run(lockstep), uncompiled(), exact or nullcontext():
                yield

        def run_part(part: Any, factors: Weights) -> Any:
            backpropagation.on_phase("forward")
            moved = move_batch(part, device)
            if is_coupled:
                return backpropagation.outputs(moved)
            return backpropagation.weighted_terms(moved, factors, update.losses)[1]

        with closing(ranks) if ranks is not None else nullcontext():
            with meeting(), nullcontext() if device.type == storage.host else storage.saving():
                pairs = zip(update.parts, update.factors, strict=True)
                results = lockstep.run([partial(run_part, *pair) for pair in pairs])
            roots, gradients = list[Tensor](), list[Tensor | None]()
            if is_coupled:
                of_parts = output_gradients(backpropagation, update, results)
                roots, gradients = _with_gradients(_tensors(results), [one for part in of_parts for one in part])
            elif results and (loss := torch.stack(results).sum()).requires_grad:
                roots, gradients = [backpropagation.scaled(loss)], [None]
                del loss
            del results
            if ranks is not None:
                roots, gradients = [*roots, ranks.end], [*gradients, None]
            backpropagation.on_phase("backward")
            with meeting():  # A part that is computed once more within backward (checkpointing) is refused.
                if roots:
                    torch.autograd.backward(roots, gradients)
        self.host_bytes = storage.peak_bytes


class RecomputedParts:
    """Runs the parts of an update twice: without graphs for the outputs, and with graphs for the gradients.

    Between the two the loss is computed once, from the outputs of all parts, and its gradients by the outputs are kept
    (Gao et al., "Scaling Deep Contrastive Learning Batch Size under Memory Limited Setup", 2021). Both passes draw the
    same random numbers and begin with the same buffers, so that random states and BatchNorm's statistics are those of
    one pass.
    """

    _has_compared = False

    def __call__(self, backpropagation: Backpropagation, update: UpdateParts) -> None:
        """As `PartsRunner`."""
        model, device = backpropagation.model, backpropagation.device
        generators = module_generators(model.modules())
        buffers = ModuleState(model.modules())
        states, outputs = [], []
        for part in update.parts:
            states.append(RngState(initialized_cuda_devices(), generators))
            backpropagation.on_phase("forward")
            with torch.no_grad(), parts_run(IN_SEQUENCE):
                outputs.append(backpropagation.outputs(move_batch(part, device)))
        gradients = output_gradients(backpropagation, update, outputs)
        after = RngState(initialized_cuda_devices(), generators)
        buffers.restore(only_changed=True)
        for part, state, first, of_outputs in zip(update.parts, states, outputs, gradients, strict=True):
            state.restore()
            backpropagation.on_phase("forward")
            again = _tensors([backpropagation.outputs(move_batch(part, device))])
            if not self._has_compared:
                _warn_of_other_outputs(_tensors([first]), again)
            roots, of_roots = _with_gradients(again, of_outputs)
            backpropagation.on_phase("backward")
            if roots:
                torch.autograd.backward(roots, of_roots)
        self._has_compared = True
        after.restore()


def check_whole_batch(backpropagation: Backpropagation, mode: BatchNormMode, *, sums_half: bool) -> None:
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


_ROUNDING = 0.02
"""The difference of outputs, relative to their largest entry, that rounding can make between two runs."""


def _warn_of_other_outputs(first: Sequence[Tensor], again: Sequence[Tensor]) -> None:
    """Warn if a forward has given other outputs the second time; in a simulation there are no values to compare."""
    pairs = [(one, other.detach()) for one, other in zip(first, again, strict=True)]
    pairs = [(one, other) for one, other in pairs if one.is_floating_point() and one.numel() and is_plain_tensor(one)]
    if any((one - other).abs().max() > _ROUNDING * one.abs().max() for one, other in pairs):
        warn_caller(message("forward_not_repeated"))


def _with_gradients(
    outputs: Sequence[Tensor], gradients: Sequence[Tensor | None]
) -> tuple[list[Tensor], list[Tensor | None]]:
    """Return the outputs that a backward begins at, and their gradients."""
    pairs = zip(outputs, gradients, strict=True)
    roots = [(output, gradient) for output, gradient in pairs if gradient is not None and output.requires_grad]
    return [output for output, _ in roots], [gradient for _, gradient in roots]


def _tensors(parts: Sequence[Any]) -> list[Tensor]:
    return [tensor for part in parts for tensor in pytree.tensors(part)]

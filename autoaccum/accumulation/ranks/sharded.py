"""Run the parts of an update of a model that FSDP2 (`fully_shard`) shards: alike on all ranks.

Ranks gather parameters and scatter gradients within every forward and backward, so each runs the same number of parts:
one that has fewer runs others that do not count. A rank that fails within a part cannot call the others back.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from autoaccum.accumulation.backpropagation import Backpropagation, UpdateParts, has_weight
from autoaccum.accumulation.gradients import HALF_DTYPES, GradientBuffers, dense_gradients
from autoaccum.accumulation.ranks.group import RankFailure, Ranks, world_size
from autoaccum.accumulation.transaction import ModuleState
from autoaccum.errors import UpdateInterrupted, UsageError, WorkloadError
from autoaccum.options import GradSync
from autoaccum.sharded_tensors import fsdp2_modules, is_sharded, param_groups, reshard
from autoaccum.sources.batches import batch_size, move_batch
from autoaccum.sources.objective import Weights
from autoaccum.sources.pytree import tensors

_SETTINGS = ("gradient_divide_factor", "force_sum_reduction_for_comms", "reduce_grads", "all_reduce_grads")
"""What is set for a step: attributes of FSDP2's parameter groups (_fully_shard/_fsdp_param_group.py), which has methods
to set them and none to read them."""

_LOST = ("/gloo/", "Connection closed by peer", "Connection reset by peer", "NCCL", "Timed out waiting")
"""Texts of a collective's error in which another rank has ended or stays away."""


def find_sharded(model: nn.Module, grad_sync: GradSync, *, in_fp32: bool) -> ShardedParts | None:
    """Return the runner of the parts of a model that `fully_shard` shards; None if it is not sharded.

    Raises:
        UsageError: It is sharded in a way that the sums over all ranks cannot be made with.
    """
    modules = fsdp2_modules(model)
    return ShardedParts(model, modules, grad_sync, in_fp32=in_fp32) if modules else None


def check_lists(optimizer: Optimizer, device: torch.device) -> None:
    """Raise UsageError where the optimizer would update lists (foreach, fused) in which only some are sharded."""
    for group in optimizer.param_groups:
        default = device.type == "cuda" and group.get("foreach", False) is None
        kinds = {is_sharded(parameter) for parameter in group["params"] if parameter.requires_grad}
        if len(kinds) > 1 and (group.get("foreach") or group.get("fused") or default):
            raise UsageError(
                f"only some parameters are sharded, and {type(optimizer).__name__} updates lists of them, which DTensor"
                " refuses to mix",
                hint="call fully_shard on the model, too, or give the optimizer foreach=False",
            )


def is_of_collective(error: BaseException) -> TypeGuard[Exception]:
    """Return whether `error` is that of a collective in which another rank did not take part any more."""
    from torch.distributed import DistError

    is_known = isinstance(error, DistError) or any(text in str(error) for text in _LOST)
    return isinstance(error, RuntimeError) and is_known


def out_of_memory(failure: RankFailure, next_micro_batch: int, unit: str = "micro_batch") -> UpdateInterrupted:
    """Return the error, on every rank, of an update that `failure` has ended for all; `unit` is what to lower."""
    error = UpdateInterrupted(
        f"memory ran out on rank {failure.rank} ({failure.phase}) with micro-batches of {failure.largest}, and ranks"
        " that share a sharded model cannot repeat an update",
        hint=f"load a checkpoint in new processes and go on with {unit}={next_micro_batch}",
    )
    error.next_micro_batch = next_micro_batch
    return error


class ShardedParts:
    """Runs the parts of updates of a sharded model.

    Gradients are summed, not averaged: factors of the losses weight them. They are divided by the largest factor before
    the backward and multiplied by it after the sum, in the sum's dtype, so that equal ones are not rounded to bf16.

    Attributes:
        is_running: Whether parts run, so that other ranks may wait in a collective.
    """

    def __init__(self, model: nn.Module, modules: Sequence[Any], grad_sync: GradSync, *, in_fp32: bool) -> None:
        self._model, self._modules, self._grad_sync = model, modules, grad_sync
        self._groups = list({id(group): group for module in modules for group in param_groups(module)}.values())
        self._largest, self._trained = 1.0, list[Tensor]()
        self.is_running = False
        self._check_meshes()
        self._replicates = any(group.mesh_info.mesh.ndim > 1 for group in self._groups)
        if in_fp32 and (grad_sync == "last" or self._replicates):
            self._check_dtypes()

    def deal(
        self, ranks: Ranks, update: UpdateParts, factors: Sequence[Sequence[Weights]], trained: Sequence[Tensor]
    ) -> None:
        """Let every rank run as many parts as the others, whose `factors` become those of the largest one.

        Those that do not count have no factor: repetitions of this rank's smallest part that has one, or of its
        smallest part, or of another rank's where it has none. From now on, ranks may wait for each other.

        Args:
            ranks: The ranks.
            update: This rank's parts, which are changed.
            factors: The factors of all parts, for each rank.
            trained: The parameters of the optimizer.
        """
        self._trained = [parameter for parameter in trained if parameter.requires_grad]
        everything = [factor for of_rank in factors for factor in of_rank]
        self._largest = max(value for factor in everything for value in _values(factor))
        pairs = zip(update.parts, update.factors, strict=True)
        counted = [(part, _times(factor, 1 / self._largest)) for part, factor in pairs if has_weight(factor)]
        repeated = min([part for part, _ in counted] or update.parts, key=batch_size, default=None)
        if not all(factors):
            lender = next(rank for rank, of_rank in enumerate(factors) if of_rank)
            lent = ranks.gather(repeated if ranks.rank == lender else None)[lender]
            repeated = lent if repeated is None else repeated
        rounds = max(sum(map(has_weight, of_rank)) for of_rank in factors)
        counted += [(repeated, _times(everything[0], 0.0))] * (rounds - len(counted))
        update.parts, update.factors = [part for part, _ in counted], [factor for _, factor in counted]
        self.is_running = True

    def run(self, backpropagation: Backpropagation, update: UpdateParts) -> None:
        """Run what `deal` has left, and sum the gradients; losses are recorded with their factors in the update.

        Raises:
            UsageError: FSDP2 did not sum all gradients.
        """
        with self._sums():
            for index, (part, factor) in enumerate(zip(update.parts, update.factors, strict=True)):
                is_last = index == len(update.parts) - 1
                for module in self._modules:
                    module.set_requires_gradient_sync(is_last or self._grad_sync == "each", recurse=False)
                    module.set_requires_all_reduce(is_last, recurse=False)
                backpropagation.on_phase("batch")
                moved = move_batch(part, backpropagation.device)
                if has_weight(factor):
                    backpropagation.run_part(moved, factor, update.losses)
                else:
                    self._run_uncounted(backpropagation, moved)
                del moved
            self._check_sums(update.buffers)
        reshard(self._model)  # What set_reshard_after_backward(False) keeps gathered would miss the update.
        if self._largest != 1.0:
            entries = update.losses.entries
            entries[:] = [(name, factor * self._largest, value) for name, factor, value in entries]
            for gradient in dense_gradients(self._trained) if update.buffers is None else update.buffers.values():
                gradient.mul_(self._largest)

    @contextmanager
    def _sums(self) -> Iterator[None]:
        """Let FSDP2 sum gradients, and leave its settings as they were."""
        before = [(group, {name: getattr(group, name) for name in _SETTINGS}) for group in self._groups]
        try:
            for module in self._modules:
                # Neither is recursive. Without the second, gloo refuses the first for gradients in float32.
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)
            yield
        finally:
            for group, settings in before:
                for name, value in settings.items():
                    setattr(group, name, value)

    def _run_uncounted(self, backpropagation: Backpropagation, part: Any) -> None:
        """Run forward and backward with gradients of zero, whatever the loss is; buffers stay as they are."""
        buffers = ModuleState(self._model.modules())
        outputs: list[Tensor] = []

        def collect(_module: nn.Module, _inputs: Any, output: Any) -> None:
            differentiable = [tensor for tensor in tensors(output) if tensor.requires_grad]
            for tensor in differentiable:  # The gradient of a mean over no token is 0/0.
                tensor.register_hook(torch.zeros_like)  # type: ignore[no-untyped-call]
            outputs.extend(differentiable)

        with ExitStack() as hooks:
            for module in self._outermost():
                hooks.enter_context(module.register_forward_hook(collect))
            backpropagation.on_phase("forward")
            try:
                losses = [term for term in backpropagation.uncounted_terms(part).values() if term.requires_grad]
            except WorkloadError:  # A loss of no token may be a constant, without a graph.
                losses = []
            if not losses and not outputs:
                raise WorkloadError("the loss does not depend on the model's outputs")
            roots = losses or outputs
            backpropagation.on_phase("backward")
            torch.autograd.backward(roots, [torch.zeros_like(root) for root in roots])
        buffers.restore(only_changed=True)

    def _outermost(self) -> list[nn.Module]:
        """Return the model, and the sharded modules that are not within another."""
        within = {id(inner) for module in self._modules for inner in module.modules() if inner is not module}
        return list(dict.fromkeys([self._model, *(module for module in self._modules if id(module) not in within)]))

    def _check_sums(self, buffers: GradientBuffers | None) -> None:
        """Raise UsageError unless the last part has summed all gradients."""
        summed = {} if buffers is None else buffers.sums
        trained = [parameter for parameter in self._trained if is_sharded(parameter)]
        is_summed = any(parameter in summed or parameter.grad is not None for parameter in trained)
        is_partial = any(getattr(group, "_partial_reduce_output", None) is not None for group in self._groups)
        if (trained and not is_summed) or is_partial:
            raise UsageError(
                "FSDP2 did not sum all gradients with the last part of the update",
                hint="every sharded module needs a part in it; use a mesh of one dimension",
            )

    def _check_meshes(self) -> None:
        size = world_size()
        seen = next((one for group in self._groups if (one := group.mesh_info.mesh.size()) != size), None)
        if seen is not None:
            raise UsageError(
                f"the model is sharded over {seen} of {size} ranks", hint="call fully_shard with a mesh of all ranks"
            )
        sharded = {id(parameter.sharded_param) for group in self._groups for parameter in group.fsdp_params}
        for name, parameter in self._model.named_parameters():
            if is_sharded(parameter) and id(parameter) not in sharded:
                raise UsageError(
                    f"{name} is a DTensor that fully_shard does not shard, as in tensor parallelism",
                    hint="shard the model by fully_shard alone",
                )

    def _check_dtypes(self) -> None:
        for group in self._groups:
            for parameter in group.fsdp_params:
                policy = parameter.mp_policy
                dtype = policy.reduce_dtype or policy.param_dtype or parameter.sharded_param.dtype
                if parameter.sharded_param.requires_grad and dtype in HALF_DTYPES:
                    how = 'grad_sync="last"' if self._grad_sync == "last" else "a mesh of two dimensions (HSDP)"
                    raise UsageError(
                        f"with {how}, FSDP2 adds up parts' gradients in {str(dtype).removeprefix('torch.')}",
                        hint="give fully_shard mp_policy=MixedPrecisionPolicy(..., reduce_dtype=torch.float32)",
                    )


def _values(factor: Weights) -> list[float]:
    return list(factor.values()) if isinstance(factor, dict) else [factor]


def _times(factor: Weights, number: float) -> Weights:
    if isinstance(factor, dict):
        return {name: value * number for name, value in factor.items()}
    return factor * number

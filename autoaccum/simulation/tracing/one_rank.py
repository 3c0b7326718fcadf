"""One rank of several on the simulated card: the others are not there, and hold what this one does.

Collectives go to torch's fake process group, which returns at once; they allocate what their callers allocate for them.
This is rank 0: `torch.chunk`, by which FSDP2 divides parameters, gives the first rank as much as any other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import ExitStack, nullcontext
from functools import partial
from importlib import import_module
from types import SimpleNamespace
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from autoaccum.errors import UsageError
from autoaccum.sharded_tensors import fsdp2_modules, move_own, param_groups
from autoaccum.simulation.torch_patches import patch
from autoaccum.simulation.trace_records import Category
from autoaccum.simulation.tracing.dispatch_mode import FakeCudaMode
from autoaccum.simulation.tracing.fake_cuda import DEVICE
from autoaccum.simulation.unsupported import UnsupportedError


def simulate_ranks(size: int, mode: FakeCudaMode, stack: ExitStack) -> Any:
    """Make this process the first of `size` ranks on the card of `mode`, until `stack` is closed; return the group."""
    import torch.distributed as dist
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.fsdp._fully_shard import _fsdp_init, _fully_shard
    from torch.distributed.tensor import DTensor, _random, _sharding_prop
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)
    stack.callback(dist.destroy_process_group)
    mode.sharded_type = DTensor
    for wrapper, what, hint in (
        (
            nn.DataParallel,
            "nn.DataParallel splits a batch over several cards of one process, but each rank has one card",
            "return the wrapped module from model()",
        ),
        (
            nn.parallel.DistributedDataParallel,
            "DistributedDataParallel sums gradients in C++, which cannot be traced",
            "return the bare model: the Accumulator sums its gradients (--parallel ddp)",
        ),
        (FullyShardedDataParallel, "FullyShardedDataParallel (FSDP1) cannot be traced", "use fully_shard (FSDP2)"),
    ):
        patch(stack, wrapper, "__init__", partial(_refuse, what, hint))
    local: dict[str, Any] = {name: _of_local_tensor(name) for name in ("device", "is_cuda", "is_cpu", "is_meta")}
    for name, answer in local.items():
        patch(stack, DTensor, name, answer)
    # Numbers are never drawn, and need no state that is alike on all ranks. torch 2.11 asks for a region without asking
    # whether it is enabled.
    tracker = SimpleNamespace(distribute_region_enabled=False, _distribute_region=lambda *_, **__: nullcontext())
    patch(stack, _random, "_rng_tracker", tracker)
    patch(stack, _sharding_prop, "FakeTensorMode", lambda: mode.beside)
    caller: Any = _fully_shard if hasattr(_fully_shard, "_get_managed_states") else _fsdp_init  # From torch 2.11 on.
    patch(stack, caller, "_get_managed_states", _moving_first(caller._get_managed_states))
    return dist.group.WORLD


def _refuse(what: str, hint: str, *_: Any, **__: Any) -> NoReturn:
    raise UnsupportedError(what, hint=hint)


def _of_local_tensor(name: str) -> property:
    """Return a property of DTensor that C++ would answer, which sees `meta` in place of the card."""
    return property(lambda tensor: getattr(tensor._local_tensor, name))


def _moving_first(find_states: Callable[..., Any]) -> Callable[..., Any]:
    """Return `_get_managed_states` of FSDP2, which first moves a module's own parameters and buffers to the card.

    FSDP2 would then move them by setting `.data`, which cannot turn a tensor of the host into one of the card.
    """

    def move_and_find(modules: list[nn.Module], ignored_params: set[Any] | None = None) -> Any:
        ignored = set(map(id, ignored_params or ()))
        for module in modules:
            move_own(module, DEVICE, lambda tensor: id(tensor) in ignored)
        return find_states(modules, ignored_params)

    return move_and_find


def prepare_ranks() -> None:
    """Import what shards models, outside of a simulation, since it registers types and operators.

    Raises:
        UsageError: This build of PyTorch has no `torch.distributed`.
    """
    if not torch.distributed.is_available():
        raise UsageError("this PyTorch is built without torch.distributed", hint="install one with it to plan ranks")
    for name in ("distributed.fsdp", "distributed.tensor", "testing._internal.distributed.fake_pg"):
        import_module(f"torch.{name}")
    # Up to torch 2.10, collectives have kernels without values only once this is imported.
    if not torch._C._dispatch_has_kernel_for_dispatch_key("c10d::_allgather_base_", "Meta"):
        import_module("torch.distributed._tools.fake_collectives")


class RankPurposes:
    """Knows the purpose of what is being allocated for several ranks, and the module that it is for.

    Attributes:
        purpose: `gathered_parameters`, `communication`, or that of an allocator, while FSDP2 or this allocates; else
            None.
        module: The module whose parameters are gathered or whose gradients are reduced; None for those of all.

    Args:
        allocators: Functions that allocate for several ranks beside FSDP2's, by owner, name and purpose.
    """

    def __init__(self, allocators: Iterable[tuple[Any, str, Category]]) -> None:
        self.purpose: Category | None = None
        self.module: nn.Module | None = None
        self._allocators = allocators

    def watch(self, stack: ExitStack) -> None:
        """Watch these functions until `stack` is closed."""
        for owner, name, purpose in self._allocators:
            self._watch(stack, owner, name, purpose)
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            from torch.distributed.fsdp._fully_shard import _fsdp_param_group

            group = _fsdp_param_group.FSDPParamGroup
            self._watch(stack, group, "unshard", "communication", of_group=True)
            self._watch(stack, group, "wait_for_unshard", "gathered_parameters", of_group=True)
            self._watch(stack, group, "post_backward", None, of_group=True)
            self._watch(stack, _fsdp_param_group, "foreach_reduce", "communication")

    def _watch(
        self, stack: ExitStack, owner: Any, name: str, purpose: Category | None, *, of_group: bool = False
    ) -> None:
        run: Callable[..., Any] = getattr(owner, name)

        def watch(*args: Any, **kwargs: Any) -> Any:
            before = self.purpose, self.module
            self.purpose = purpose
            if of_group:
                self.module = args[0].modules[0]
            try:
                return run(*args, **kwargs)
            finally:
                self.purpose, self.module = before

        patch(stack, owner, name, watch)


def unsharded_gradients(model: nn.Module) -> Iterable[tuple[Tensor, nn.Module]]:
    """Yield the gradients that FSDP2 has not reduced yet, each with the module of its parameter."""
    groups = [group for module in fsdp2_modules(model) for group in param_groups(module)]
    for shard in [shard for group in groups for shard in group.fsdp_params]:
        whole = getattr(shard, "_unsharded_param", None)
        for gradient in (None if whole is None else whole.grad, shard.unsharded_accumulated_grad):
            if gradient is not None:
                yield gradient, shard._module_info.module

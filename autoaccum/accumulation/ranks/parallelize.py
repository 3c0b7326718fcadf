"""Divide a model among ranks: as the workload's `parallelize` does it, or by FSDP2 block by block."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from autoaccum.accumulation.gradients import HALF_DTYPES
from autoaccum.accumulation.sharded_tensors import is_sharded, is_sharded_model
from autoaccum.checks import describe_type
from autoaccum.errors import WorkloadError, first_line
from autoaccum.options import Parallel

_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
_MESH_NAMES = ("replicate", "shard")


def choose_parallel(parallel: Parallel | None, parallelize: Callable[..., Any] | None) -> Parallel:
    """Return how ranks train one model: as requested, or as a workload with or without `parallelize` means it."""
    return parallel or ("ddp" if parallelize is None else "fsdp2")


def shard_model(
    model: nn.Module,
    device: torch.device,
    shape: Sequence[int],
    parallelize: Callable[[nn.Module, Any], Any] | None = None,
) -> nn.Module:
    """Return `model`, sharded over a mesh of all ranks, and with all that is not sharded moved to `device`.

    FSDP2 itself moves a module to the device as it shards it, so that a model larger than the device is never there as
    a whole. A model that was built on `meta` is materialised by `parallelize`.

    Args:
        model: The model, on the CPU or on `meta`; alike on all ranks.
        device: The device of this rank.
        shape: The ranks of the mesh; with two dimensions, shards are replicated along the first (HSDP).
        parallelize: The workload's function; None: shard the repeated blocks and the rest.

    Raises:
        WorkloadError: `parallelize` returned something else than a model, sharded nothing, or left parameters without
            memory; or FSDP2 cannot shard this model block by block.
    """
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh(device.type, tuple(shape), mesh_dim_names=_MESH_NAMES[-len(shape) :])
    made = (parallelize or _shard_blocks)(model, mesh)
    if not isinstance(made, nn.Module | None):
        raise WorkloadError(f"parallelize(model, mesh) returned {describe_type(made)}", hint="return the model")
    model = model if made is None else made
    if parallelize is not None and not is_sharded_model(model):
        raise WorkloadError(
            "parallelize(model, mesh) shards no parameter", hint="call fully_shard in it, or replicate (--parallel ddp)"
        )
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.device.type == "meta":
            raise WorkloadError(
                f"{name} is still on meta after parallelize(model, mesh)",
                hint="call model.to_empty(device=...) and initialise the weights in it",
            )
    _move_rest(model, device)
    return model


def _shard_blocks(model: nn.Module, mesh: Any) -> None:
    """Shard the repeated blocks and the rest; gradients of half precision are summed over ranks in float32."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    is_half = any(parameter.dtype in HALF_DTYPES for parameter in model.parameters())
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float32 if is_half else None)
    try:
        for module in (*find_blocks(model), model):
            fully_shard(module, mesh=mesh, mp_policy=policy)
    except ValueError as error:
        raise WorkloadError(
            f"FSDP2 cannot shard this model: {first_line(str(error)).rstrip('.')}",
            hint="change that, or shard it in parallelize(model, mesh)",
        ) from None


def find_blocks(model: nn.Module) -> list[nn.Module]:
    """Return the repeated blocks of a model: those of one class that a list, dict or sequence holds several of.

    Blocks within blocks are left out, and so are those that share a parameter with the rest of the model, since FSDP2
    gathers a parameter with one group only.

    >>> [type(block).__name__ for block in find_blocks(nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2)))]
    ['Linear', 'Linear']
    """
    uses = Counter(id(one) for module in model.modules() for one in module._parameters.values() if one is not None)
    found = {id(block): block for block in _repeated_within(model)}.values()
    return [block for block in found if _has_own_parameters(block, uses)]


def _repeated_within(module: nn.Module) -> Iterator[nn.Module]:
    children = [child for child in module.children() if next(child.parameters(), None) is not None]
    kinds = Counter(map(type, children))
    for child in children:
        is_repeated = isinstance(module, _CONTAINERS) and kinds[type(child)] > 1
        inner = [] if is_repeated and not isinstance(child, _CONTAINERS) else list(_repeated_within(child))
        if inner or not is_repeated:
            yield from inner
        elif not isinstance(child, nn.ModuleList | nn.ModuleDict):  # They have no forward.
            yield child


def _has_own_parameters(block: nn.Module, uses: Counter[int]) -> bool:
    within = Counter(id(one) for module in block.modules() for one in module._parameters.values() if one is not None)
    return all(uses[key] == count for key, count in within.items())


def _move_rest(model: nn.Module, device: torch.device) -> None:
    """Move parameters that are not sharded, and buffers, to `device`; shards stay, which may be offloaded."""
    for module in model.modules():
        move_own(module, device, is_sharded)  # `_apply` takes new memory for a DTensor.


def move_own(module: nn.Module, device: torch.device, stays: Callable[[Tensor], bool]) -> None:
    """Move the own parameters and buffers of `module` to `device`, without the parameters that stay."""
    kept = {name: one for name, one in module._parameters.items() if one is not None and stays(one)}
    own = (*(one for name, one in module._parameters.items() if name not in kept), *module._buffers.values())
    if all(one is None or one.device == device for one in own):
        return  # `_apply` of FSDP2 would assert that shards are where they were.
    module._parameters.update(dict.fromkeys(kept))
    try:
        module._apply(lambda tensor: tensor if tensor.device == device else tensor.to(device), recurse=False)  # type: ignore[no-untyped-call]
    finally:
        module._parameters.update(kept)

"""The first of several ranks that a script starts itself: it joins the simulated group, and wraps its model in DDP."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from contextlib import ExitStack, nullcontext
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor, nn

from autoaccum.errors import UsageError
from autoaccum.simulation.torch_patches import patch
from autoaccum.simulation.trace_records import Category
from autoaccum.simulation.tracing.dispatch_mode import FakeCudaMode
from autoaccum.simulation.tracing.one_rank import prepare_ranks, simulate_ranks
from autoaccum.simulation.tracing.simulation import run_on_card


def simulate_script_ranks(size: int, mode: FakeCudaMode, stack: ExitStack) -> None:
    """Let this process become the first of `size` ranks on the card of `mode`, as a launcher would tell it.

    Several ranks are joined at once, and a single one when the script does. `init_process_group` then takes any backend
    and address, and objects that are gathered are this rank's. More than one cannot be started from here.
    """
    import torch.distributed as dist

    spawning = sys.modules["torch.multiprocessing.spawn"]
    for owner in (spawning, torch.multiprocessing):
        patch(stack, owner, "start_processes", partial(_start_one, start=spawning.start_processes))

    if size > 1:
        _join(size, mode, stack)
    elif dist.is_available():
        init = dist.init_process_group

        def join(backend: str | None = None, *_: Any, **__: Any) -> None:
            vars(dist)["init_process_group"] = init
            _join(size, mode, stack)
            dist.init_process_group(backend)

        patch(stack, dist, "init_process_group", join)


def _start_one(call: Any, args: Any = (), nprocs: int = 1, *more: Any, start: Any, **named: Any) -> Any:
    if nprocs > 1:
        raise UsageError(
            f"the script starts {nprocs} ranks itself (torch.multiprocessing.spawn), and only the first is simulated",
            hint=f"give --world-size {nprocs}, and start it with torchrun (--nproc-per-node {{world_size}})",
        )
    return start(call, args, nprocs, *more, **named)


def _join(size: int, mode: FakeCudaMode, stack: ExitStack) -> None:
    import torch.distributed as dist

    os.environ.update(RANK="0", LOCAL_RANK="0", GROUP_RANK="0", WORLD_SIZE=str(size), LOCAL_WORLD_SIZE=str(size))
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29500")
    prepare_ranks()
    simulate_ranks(size, mode, stack)
    patch(stack, torch._C, "_get_accelerator", lambda: torch.device("cuda"))  # FSDP2's mesh, if the script gives none.
    # SyncBatchNorm then leaves out no rank for having no samples, which it would read from the card.
    patch(stack, torch.cuda, "is_current_stream_capturing", lambda: _caller() == "torch.nn.modules._functions")
    backends = ["nccl"]
    new_group = dist.new_group

    def join(backend: str | None = None, *_: Any, **__: Any) -> None:
        backends.append(backend or "nccl")

    def gather(objects: list[Any], value: Any, *_: Any, **__: Any) -> None:
        objects[:] = [value] * len(objects)

    def gather_first(value: Any, objects: list[Any] | None = None, *_: Any, **__: Any) -> None:
        gather(objects or [], value)

    for name, answer in (
        ("init_process_group", join),
        ("destroy_process_group", _do_nothing),
        ("get_backend", lambda *_: backends[-1]),
        ("new_group", lambda ranks=None, *_, **__: new_group(ranks)),
        ("all_gather_object", gather),
        ("gather_object", gather_first),
        ("broadcast_object_list", _do_nothing),
        ("scatter_object_list", lambda found, given, *_, **__: gather(found, given[0])),
        ("monitored_barrier", _do_nothing),
    ):
        patch(stack, dist, name, answer)
    for name, method in (
        ("__init__", _wrap),
        ("forward", _run_replica),
        ("join", lambda *_, **__: nullcontext()),
        ("register_comm_hook", _do_nothing),
        ("_set_static_graph", _do_nothing),
        ("__getstate__", nn.Module.__getstate__),
        ("__setstate__", nn.Module.__setstate__),
    ):
        patch(stack, nn.parallel.DistributedDataParallel, name, method)


def _caller() -> Any:
    return sys._getframe(2).f_globals.get("__name__")


def _do_nothing(*_: Any, **__: Any) -> None:
    pass


def _wrap(
    wrapper: Any, module: nn.Module, device_ids: Any = None, *_: Any, gradient_as_bucket_view: bool = False, **__: Any
) -> None:
    """Wrap a module as `DistributedDataParallel` does, and take the memory of its buckets.

    Its reducer has memory for the gradients of each dtype as long as it lives (`initialize_buckets` in
    torch/csrc/distributed/c10d/reducer.cpp). Each gradient is copied there when it is summed, and stays beside its
    copy, or becomes a view of it (`gradient_as_bucket_view`; `mark_variable_ready_dense` there).
    """
    nn.Module.__init__(wrapper)
    wrapper.module, wrapper.device_ids, wrapper.output_device = module, device_ids, device_ids and device_ids[0]
    wrapper.require_backward_grad_sync, wrapper.gradient_as_bucket_view = True, gradient_as_bucket_view
    wrapper.process_group, wrapper.device = torch.distributed.group.WORLD, next(module.parameters()).device
    alike: dict[Any, list[nn.Parameter]] = {}
    for parameter in module.parameters():
        if parameter.requires_grad:
            alike.setdefault((parameter.dtype, parameter.device), []).append(parameter)
    wrapper.buckets = list(map(_allocate_bucket, alike.values()))
    if gradient_as_bucket_view:
        for bucket, parameters in zip(wrapper.buckets, alike.values(), strict=True):
            for parameter, view in zip(parameters, bucket.split([p.numel() for p in parameters]), strict=True):
                into_bucket = partial(_move_gradient, wrapper, view.view(parameter.shape))
                register: Any = parameter.register_post_accumulate_grad_hook
                register(into_bucket)


def _allocate_bucket(parameters: Sequence[Tensor]) -> Tensor:
    first = parameters[0]
    return torch.empty(sum(parameter.numel() for parameter in parameters), dtype=first.dtype, device=first.device)


def _move_gradient(wrapper: Any, view: Tensor, parameter: Tensor) -> None:
    if wrapper.require_backward_grad_sync and parameter.grad is not view:
        assert parameter.grad is not None
        parameter.grad = view.copy_(parameter.grad)


def _run_replica(wrapper: Any, *inputs: Any, **kwargs: Any) -> Any:
    return run_on_card(wrapper, *inputs, **kwargs) if wrapper.device_ids else wrapper.module(*inputs, **kwargs)


_BUCKETS: Final[tuple[Any, str, Category]] = (sys.modules[__name__], "_allocate_bucket", "communication")
ALLOCATORS: Final = (_BUCKETS,)
"""As in `RankPurposes`."""

"""Find BatchNorm modules, which under accumulation see the micro-batch and not the effective batch."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from autoaccum.accumulation.coupling import list_names
from autoaccum.accumulation.transaction import is_plain_tensor
from autoaccum.checks import join_words
from autoaccum.errors import UsageError
from autoaccum.options import BatchNormMode

BATCHNORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


def named_modules(model: nn.Module, criterion: nn.Module | None = None) -> Iterator[tuple[str, nn.Module]]:
    """Yield name and module for all modules of `model` and of a criterion that is one; a root is named by its class."""
    seen: set[nn.Module] = set()
    for prefix, root in (("", model), ("criterion.", criterion)):
        for name, module in () if root is None else root.named_modules(seen):
            yield prefix + (name or type(module).__name__), module


def find_batchnorms(model: nn.Module, criterion: nn.Module | None = None) -> Iterator[_BatchNorm]:
    """Yield every BatchNorm module of the model and the criterion, in training mode or not."""
    return (module for _, module in named_modules(model, criterion) if isinstance(module, BATCHNORMS))


def batchnorm_names(model: nn.Module, criterion: nn.Module | None = None) -> list[str]:
    """Return the names of the BatchNorm modules (also SyncBatchNorm and scripted ones) that now normalise by the batch.

    Those are the ones in training mode, and those without running statistics.
    """
    return [name for name, module in named_modules(model, criterion) if normalises_by_batch(module)]


def normalises_by_batch(module: nn.Module) -> bool:
    """Return whether `module` is a BatchNorm that now normalises by the batch (see `batchnorm_names`)."""
    is_batchnorm = isinstance(module, BATCHNORMS) or is_scripted(module)
    return is_batchnorm and (getattr(module, "running_mean", None) is None or module.training)


def frozen_warning(model: nn.Module, criterion: nn.Module | None = None) -> str | None:
    """Return a warning if `batchnorm="frozen"` would normalise by running statistics that were never estimated."""
    norms = [norm for norm in find_batchnorms(model, criterion) if is_readable(norm.running_mean)]
    trained = [one.get_buffer("running_mean").any() or (one.get_buffer("running_var") != 1).any() for one in norms]
    if not norms or any(trained):
        return None
    return (
        'batchnorm="frozen" normalises by running statistics, and these were never estimated (mean 0, variance 1):'
        " load trained weights, or begin with another mode"
    )


def check_frozen(model: nn.Module, criterion: nn.Module | None = None) -> None:
    """Raise UsageError if a BatchNorm has no running statistics, and so cannot be frozen."""
    norms = [(name, module) for name, module in named_modules(model, criterion) if isinstance(module, BATCHNORMS)]
    if names := [name for name, module in norms if module.running_mean is None]:
        raise UsageError(
            f'batchnorm is "frozen", and {list_names(names)} have no running statistics (track_running_stats=False)',
            hint='use GroupNorm there, or batchnorm="micro"',
        )


def check_synchronised(mode: BatchNormMode, modules: Iterable[nn.Module], parts: Sequence[int]) -> None:
    """Raise UsageError if SyncBatchNorm cannot wait for the other ranks in each part; they run so many `parts`."""
    if mode in ("exact", "frozen") or not any(isinstance(one, nn.SyncBatchNorm) and one.training for one in modules):
        return
    if mode == "running":
        raise UsageError(
            'batchnorm is "running", and SyncBatchNorm normalises by the micro-batches of all ranks',
            hint='take batchnorm="exact", or BatchNorm without Sync',
        )
    if len(set(parts)) > 1:
        raise UsageError(
            f"the ranks run {join_words(map(str, parts))} micro-batches, and SyncBatchNorm waits for all ranks in each",
            hint='give all ranks as many samples, or take batchnorm="exact"',
        )


def uncompiled() -> AbstractContextManager[object]:
    """Return a context in which torch.compile does nothing. Does not load torch._dynamo, which takes a second."""
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()


def is_scripted(module: nn.Module) -> bool:
    """Return whether `module` is a BatchNorm compiled by TorchScript."""
    if not isinstance(module, torch.jit.ScriptModule):
        return False
    return getattr(module, "original_name", "") in [kind.__name__ for kind in BATCHNORMS]


def is_readable(tensor: Tensor | None) -> bool:
    """Return whether the values of a running statistic can be read."""
    return tensor is not None and is_plain_tensor(tensor) and not tensor.is_meta

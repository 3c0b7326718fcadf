"""BatchNorm under accumulation: it sees the micro-batch, not the effective batch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase

from autoaccum.accumulation.coupling import listed
from autoaccum.accumulation.state import is_plain_tensor
from autoaccum.errors import UsageError

BATCHNORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
INSTANCENORMS = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)
STATISTICS = ("running_mean", "running_var", "num_batches_tracked")
_SPOKEN_OF = (_NormBase, torch.jit.ScriptModule)
_SCRIPTED = tuple(kind.__name__ for kind in BATCHNORMS)
_OTHERS = "GroupNorm, or InstanceNorm without running statistics"


def named_modules(model: nn.Module, criterion: nn.Module | None = None) -> Iterator[tuple[str, nn.Module]]:
    """Every module of `model`, and of its criterion where that is one, by name; a root by that of its class."""
    known: set[nn.Module] = set()
    for prefix, root in (("", model), ("criterion.", criterion)):
        for name, module in () if root is None else root.named_modules(known):
            yield prefix + (name or type(module).__name__), module


def has_norms(model: nn.Module, criterion: nn.Module | None = None) -> bool:
    """Whether there is any module in either that could be spoken of here; a single pass."""
    roots = (model,) if criterion is None else (model, criterion)
    return any(isinstance(module, _SPOKEN_OF) for root in roots for module in root.modules())


def find_batchnorms(model: nn.Module, criterion: nn.Module | None = None) -> Iterator[_BatchNorm]:
    """Every BatchNorm module of both, in any mode."""
    return (module for _, module in named_modules(model, criterion) if isinstance(module, BATCHNORMS))


def batchnorm_names(
    model: nn.Module, criterion: nn.Module | None = None, *, without_statistics: bool = False
) -> list[str]:
    """The BatchNorm modules (also SyncBatchNorm, and TorchScript's) that normalise by the batch as they stand.

    Those are the ones in training mode, and those without running statistics in any mode; or only the latter.
    """
    return [
        name
        for name, module in named_modules(model, criterion)
        if (isinstance(module, BATCHNORMS) or _is_scripted(module))
        and (getattr(module, "running_mean", None) is None or (module.training and not without_statistics))
    ]


def instancenorm_names(model: nn.Module, criterion: nn.Module | None = None) -> list[str]:
    """The InstanceNorm modules that update running statistics as they stand."""
    return [
        name
        for name, module in named_modules(model, criterion)
        if isinstance(module, INSTANCENORMS) and module.training and module.running_mean is not None and module.momentum
    ]


def batchnorm_warning(names: Sequence[str]) -> str:
    """One sentence on what accumulation changes for the modules `names`, and the way out."""
    return (
        f"BatchNorm normalises by the micro-batch in {listed(names)}: the gradient is not the full batch's, which"
        ' batchnorm="running" mends for running statistics only, batchnorm="frozen" or GroupNorm wholly'
    )


def instancenorm_warning(names: Sequence[str]) -> str:
    """One sentence on the running statistics of the modules `names`, and the way out."""
    return (
        f"InstanceNorm updates its running statistics per micro-batch, not per update, in {listed(names)}:"
        " use it without (track_running_stats=False), or GroupNorm"
    )


def running_warning(names: Sequence[str], without_statistics: Sequence[str]) -> str:
    """One sentence on what `batchnorm="running"` does not change for the modules `names`, and the way out."""
    kept = "running statistics are the full batch's"
    if len(without_statistics) == len(names):
        kept = "there are no running statistics that could be the full batch's"
    elif without_statistics:
        kept += f", but for {listed(without_statistics)}, which keep none"
    return (
        f"BatchNorm normalises by the micro-batch in {listed(names)}: {kept}, the gradient is not (it is with"
        ' batchnorm="frozen" or GroupNorm)'
    )


def frozen_warning(model: nn.Module, criterion: nn.Module | None = None) -> str | None:
    """One sentence where `batchnorm="frozen"` would normalise by statistics that nothing was ever estimated from."""
    norms = [norm for norm in find_batchnorms(model, criterion) if not _is_unknown(norm)]
    if not norms or not all(map(_is_untouched, norms)):
        return None
    return (
        'batchnorm="frozen" normalises by running statistics, and these were never estimated (mean 0, variance 1):'
        " load trained weights, or begin with another mode"
    )


def check_watchable(mode: str, model: nn.Module, criterion: nn.Module | None = None) -> None:
    """Refuse BatchNorms that `mode`, which is not PyTorch's own, cannot reach.

    Raises:
        UsageError: Names them.
    """
    names = [name for name, module in named_modules(model, criterion) if _is_scripted(module)]
    if names:
        raise UsageError(
            f'batchnorm is "{mode}", and {listed(names)} are TorchScript\'s, which cannot be watched',
            hint='script the model after training, or take batchnorm="micro"',
        )


def check_frozen(model: nn.Module, criterion: nn.Module | None = None) -> None:
    """Refuse to freeze BatchNorms that have no running statistics to normalise by.

    Raises:
        UsageError: Names them.
    """
    names = batchnorm_names(model, criterion, without_statistics=True)
    if names:
        raise UsageError(
            f'batchnorm is "frozen", and {listed(names)} keep no running statistics (track_running_stats=False)',
            hint=f'use {_OTHERS} there, or batchnorm="micro"',
        )


def is_compiled(model: nn.Module) -> bool:
    """Whether torch.compile has wrapped `model` or a module in it, or changed it in place."""
    return any(
        module._compiled_call_impl is not None or isinstance(getattr(module, "_orig_mod", None), nn.Module)
        for module in model.modules()
    )


def _is_scripted(module: nn.Module) -> bool:
    return isinstance(module, torch.jit.ScriptModule) and getattr(module, "original_name", "") in _SCRIPTED


def _is_unknown(norm: _BatchNorm) -> bool:
    """Whether its statistics are none, or have no values to look at."""
    return norm.running_mean is None or not is_plain_tensor(norm.running_mean) or norm.running_mean.is_meta


def _is_untouched(norm: _BatchNorm) -> bool:
    """Also with a count of 0, statistics may come from weights that were saved without one."""
    if norm.num_batches_tracked is not None and norm.num_batches_tracked > 0:
        return False
    return not norm.get_buffer("running_mean").any() and bool((norm.get_buffer("running_var") == 1).all())

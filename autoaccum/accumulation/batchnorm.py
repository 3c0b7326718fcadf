"""BatchNorm under accumulation: it sees the micro-batch, not the effective batch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from autoaccum.accumulation.copies import is_plain_tensor
from autoaccum.errors import UsageError

BATCHNORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
_SHOWN = 5


def find_batchnorms(model: nn.Module) -> Iterator[_BatchNorm]:
    """Every BatchNorm module of `model`, in any mode."""
    return (module for module in model.modules() if isinstance(module, BATCHNORMS))


def batchnorm_names(model: nn.Module, *, without_statistics: bool = False) -> list[str]:
    """The BatchNorm modules of `model` (also SyncBatchNorm) that normalise by the batch as the model stands.

    Those are the ones in training mode, and those without running statistics in any mode; or only the latter.
    """
    return [
        name or type(module).__name__
        for name, module in model.named_modules()
        if isinstance(module, BATCHNORMS)
        and (module.running_mean is None or (module.training and not without_statistics))
    ]


def batchnorm_warning(names: Sequence[str]) -> str:
    """One sentence on what accumulation changes for the modules `names`, and the way out."""
    return (
        f"BatchNorm normalises by the micro-batch, not by the effective batch, in {_listed(names)}: the gradient is not"
        " the full batch's, and running statistics are updated once per micro-batch instead of once per update;"
        ' batchnorm="running" keeps the full batch\'s running statistics, batchnorm="frozen" normalises by them, which'
        " is exact; or use GroupNorm or InstanceNorm, which look at one sample at a time"
    )


def running_warning(names: Sequence[str], without_statistics: Sequence[str]) -> str:
    """One sentence on what `batchnorm="running"` does not change for the modules `names`, and the way out."""
    kept = "running statistics are the full batch's"
    if len(without_statistics) == len(names):
        kept = "there are no running statistics that could be the full batch's"
    elif without_statistics:
        kept += f", but for {_listed(without_statistics)}, which keep none"
    return (
        f"BatchNorm normalises by the micro-batch in {_listed(names)}: {kept}, the gradient is not; it is so with"
        ' batchnorm="frozen", or with GroupNorm or InstanceNorm instead'
    )


def frozen_warning(model: nn.Module) -> str | None:
    """One sentence where `batchnorm="frozen"` would normalise by statistics that nothing was ever estimated from."""
    counts = [module.num_batches_tracked for module in find_batchnorms(model)]
    known = [count for count in counts if count is not None and is_plain_tensor(count) and not count.is_meta]
    if not known or any(known):
        return None
    return (
        'batchnorm="frozen" normalises by running statistics, and these were never estimated (mean 0, variance 1):'
        " load trained weights, or begin with another mode"
    )


def check_frozen(model: nn.Module) -> None:
    """Refuse to freeze BatchNorms that have no running statistics to normalise by.

    Raises:
        UsageError: Names them.
    """
    names = batchnorm_names(model, without_statistics=True)
    if names:
        raise UsageError(
            f'batchnorm is "frozen", and {_listed(names)} keep no running statistics (track_running_stats=False)',
            hint='use GroupNorm or InstanceNorm there, or batchnorm="micro"',
        )


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")

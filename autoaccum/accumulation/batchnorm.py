"""BatchNorm under accumulation: it sees the micro-batch, not the effective batch."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

BATCHNORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
_SHOWN = 5


def batchnorm_names(model: nn.Module) -> list[str]:
    """The BatchNorm modules of `model` (also SyncBatchNorm) that normalise by the batch as the model stands.

    Those are the ones in training mode, and those without running statistics in any mode.
    """
    return [
        name or type(module).__name__
        for name, module in model.named_modules()
        if isinstance(module, BATCHNORMS) and (module.training or module.running_mean is None)
    ]


def batchnorm_warning(names: Sequence[str]) -> str:
    """One sentence on what accumulation changes for the modules `names`, and the way out."""
    shown = ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")
    return (
        f"BatchNorm normalises by the micro-batch, not by the effective batch, in {shown}: the gradient is not the"
        " full batch's, and running statistics are updated once per micro-batch instead of once per update; use"
        " GroupNorm or LayerNorm, or freeze the statistics with eval() on these modules"
    )

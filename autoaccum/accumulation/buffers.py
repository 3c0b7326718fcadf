"""Buffers that forward updates: accumulation updates them once per micro-batch, and later parts see the change."""

from __future__ import annotations

from torch import nn

from autoaccum.accumulation.batchnorm import BATCHNORMS

_INSTANCENORMS = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)
_SHOWN = 5


class BufferVersions:
    """How often each floating buffer was written to, but for those of BatchNorm, which is warned of on its own.

    Buffers that forward replaces, such as a table it enlarges, do not count; nor do the statistics of InstanceNorm,
    which normalises by the sample in training mode.
    """

    def __init__(self, model: nn.Module) -> None:
        self._seen = {
            f"{prefix}{'.' if prefix else ''}{name}": (buffer, buffer._version)
            for prefix, module in model.named_modules()
            if not isinstance(module, (*BATCHNORMS, *_INSTANCENORMS))
            for name, buffer in module.named_buffers(recurse=False)
            if buffer.is_floating_point() and not buffer.is_inference()
        }

    def written(self) -> list[str]:
        """Names of the buffers that were written to since."""
        return [name for name, (buffer, version) in self._seen.items() if buffer._version != version]


def buffers_warning(names: list[str]) -> str:
    """One sentence on what accumulation changes for the buffers `names`, and the way out."""
    shown = ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")
    return (
        f"forward updates the buffers {shown}, once per micro-batch instead of once per update: where outputs depend"
        " on them (as in spectral_norm), the gradient is not the full batch's; freeze them with eval() on these modules"
    )

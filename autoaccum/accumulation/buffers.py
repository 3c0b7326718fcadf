"""Buffers that forward updates: accumulation updates them once per micro-batch, and later parts see the change."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from autoaccum.accumulation.batchnorm import BATCHNORMS, INSTANCENORMS, STATISTICS, listed
from autoaccum.accumulation.copies import is_plain_tensor


class BufferVersions:
    """How often each floating buffer was written to, but for those of BatchNorm, which is warned of on its own.

    Buffers that forward replaces, such as a table it enlarges, do not count; nor do the statistics of InstanceNorm,
    which normalises by the sample in training mode, and is warned of on its own, too.
    """

    def __init__(self, model: nn.Module) -> None:
        self._seen = {
            f"{prefix}{'.' if prefix else ''}{name}": (buffer, buffer._version)
            for prefix, module in model.named_modules()
            if not isinstance(module, (*BATCHNORMS, *INSTANCENORMS))
            for name, buffer in module.named_buffers(recurse=False)
            if buffer.is_floating_point() and not buffer.is_inference()
        }

    def written(self) -> list[str]:
        """Names of the buffers that were written to since."""
        return [name for name, (buffer, version) in self._seen.items() if buffer._version != version]


class KeptStatistics:
    """Running statistics that nothing but this package should write to while an update's parts are run.

    BatchNorm's kernels write to them without counting that as a version; its module counts its calls in a buffer.

    Args:
        norms: Modules with running statistics, by name.
        by_value: Whether to compare values as well, for which a device is waited for.
    """

    def __init__(self, norms: Mapping[str, nn.Module], *, by_value: bool) -> None:
        self._kept = [
            (called, module, buffer, _version(buffer), buffer.clone() if by_value and _is_readable(buffer) else None)
            for called, module in norms.items()
            for buffer in (getattr(module, name) for name in STATISTICS)
            if buffer is not None
        ]

    def changed(self) -> list[str]:
        """Names of the modules in training mode whose statistics were written to since."""
        changed = [
            name
            for name, module, buffer, version, value in self._kept
            if module.training
            and (_version(buffer) != version or (value is not None and not torch.equal(buffer, value)))
        ]
        return list(dict.fromkeys(changed))


def _version(buffer: Tensor) -> int:
    return 0 if buffer.is_inference() else buffer._version


def _is_readable(buffer: Tensor) -> bool:
    return is_plain_tensor(buffer) and not buffer.is_meta


def buffers_warning(names: list[str]) -> str:
    """One sentence on what accumulation changes for the buffers `names`, and the way out."""
    return (
        f"forward updates the buffers {listed(names)}, once per micro-batch instead of once per update: where outputs"
        " depend on them (as in spectral_norm), the gradient is not the full batch's; freeze them with eval() on these"
        " modules"
    )

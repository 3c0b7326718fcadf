"""Which PyTorch runs: rules changed between releases."""

from __future__ import annotations

from typing import Any

import torch

CUDNN = {(2, 11): 91_900, (2, 15): 92_600}
"""What the default wheel of a release is built with (its Requires-Dist); between two of them the older one's counts."""


def torch_release() -> tuple[int, int]:
    """The running PyTorch, as (2, 13).

    Where PyTorch must not be imported yet, `devices.torch_release.read_torch_release` asks for the installed one, and
    refuses those that are too old.
    """
    major, minor = torch.__version__.split(".")[:2]
    return int(major), int(minor)


def cudnn_version() -> int:
    """Of cuDNN, as 91900 for 9.19.0: this build's, or that of the default wheel of this release when it has none."""
    cudnn: Any = getattr(torch._C, "_cudnn", None)
    version = None if cudnn is None else cudnn.getVersionInt()
    if version is not None:
        return int(version)
    release = torch_release()
    return CUDNN[max((known for known in CUDNN if known <= release), default=min(CUDNN))]

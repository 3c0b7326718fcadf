"""Which PyTorch runs: rules changed between releases."""

from __future__ import annotations

import torch


def torch_release() -> tuple[int, int]:
    """The running PyTorch, as (2, 13).

    Where PyTorch must not be imported yet, `devices.torch_release.read_torch_release` asks for the installed one, and
    refuses those that are too old.
    """
    major, minor = torch.__version__.split(".")[:2]
    return int(major), int(minor)

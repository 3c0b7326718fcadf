"""The environment of a measurement: versions, processor, settings; torch is imported only when needed."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from autoaccum.errors import UsageError

if TYPE_CHECKING:
    import torch

_VARIABLES = ("OMP_NUM_THREADS", "MALLOC_ARENA_MAX", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "PYTHONMALLOC")
_CARD_VARIABLES = (
    "CUDA_VISIBLE_DEVICES",
    "CUDA_DEVICE_ORDER",
    "CUDA_LAUNCH_BLOCKING",
    "CUDA_MODULE_LOADING",
    "CUBLAS_WORKSPACE_CONFIG",
    "CUBLASLT_WORKSPACE_SIZE",
    "NVIDIA_TF32_OVERRIDE",
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
)
"""The last two are the newer and the older name of the allocator's settings, such as expandable segments."""


def describe_environment(device: torch.device) -> Mapping[str, Any]:
    """Return versions, processor, threads and allocator settings; on a card also CUDA, cuDNN and their settings."""
    import torch

    is_card, cudnn = device.type == "cuda", cast("Any", torch.backends.cudnn)
    names = (*_VARIABLES, *(_CARD_VARIABLES if is_card else ()))
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "platform": platform.platform(),
        "processor": _processor(),
        "processors": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "variables": {name: os.environ[name] for name in names if name in os.environ},
        **({"cuda": torch.version.cuda, "cudnn": cudnn.version()} if is_card else {}),
    }


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


_LEAST = (2, 11)


def read_torch_release() -> tuple[int, int]:
    """Return the major and minor version of the installed torch.

    Inside of a simulation, `torch_patches.torch_release` asks the one that runs.

    Raises:
        UsageError: torch is not installed, or too old for simulations.
    """
    try:
        installed = version("torch")
    except PackageNotFoundError:
        installed = "not installed"
    match = re.match(r"(\d+)\.(\d+)", installed)
    release = (int(match[1]), int(match[2])) if match else (0, 0)
    if release < _LEAST:
        raise UsageError(
            f"a simulated card needs torch {'.'.join(map(str, _LEAST))} or newer, torch here is {installed}",
            hint="upgrade torch; its CPU build is enough",
        )
    return release

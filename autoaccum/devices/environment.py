"""The machine and its settings that decide what a run needs, read without importing torch."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

from autoaccum.devices.measured_run import ENVIRONMENT

HOST_VARIABLES: Final = (
    "OMP_NUM_THREADS",
    "MALLOC_ARENA_MAX",
    "MALLOC_MMAP_THRESHOLD_",
    "MALLOC_TRIM_THRESHOLD_",
    "PYTHONMALLOC",
)
CARD_VARIABLES: Final = (*ENVIRONMENT, "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "CUDA_LAUNCH_BLOCKING")


def read_environment(variables: Iterable[str]) -> dict[str, Any]:
    """Return Python's version, the platform, the processor, and those of `variables` that are set."""
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "processor": _processor(),
        "processors": os.cpu_count(),
        "variables": {name: os.environ[name] for name in variables if name in os.environ},
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()

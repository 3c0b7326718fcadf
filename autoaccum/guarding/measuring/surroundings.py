"""What decides about figures beside the workload: versions, and what the environment sets."""

from __future__ import annotations

import os

from autoaccum import __version__
from autoaccum.devices.base import Inspection

_VARIABLES = (
    "CUBLASLT_WORKSPACE_SIZE",
    "CUBLAS_WORKSPACE_CONFIG",
    "CUDA_MODULE_LOADING",
    "TORCH_CUBLASLT_UNIFIED_WORKSPACE",
    "TORCH_CUBLAS_WORKSPACE_CACHE",
    "TORCH_CUDNN_SDPA_DEPRIORITIZED",
)
"""They change what libraries take beside tensors, which kernel runs, or what a context holds: really, and simulated."""


def versions_of(inspection: Inspection, *further: str) -> dict[str, str]:
    """Those of torch and autoaccum, and what else of the environment is named and known.

    Torch's is the public one: what a card takes does not depend on the build that simulates it.
    """
    known = {name: str(inspection.environment[name]) for name in further if inspection.environment.get(name)}
    return {"torch": str(inspection.environment["torch"]).partition("+")[0], "autoaccum": __version__, **known}


def variables_set() -> dict[str, str]:
    """What is set here of the variables that change figures of a card."""
    return {name: os.environ[name] for name in _VARIABLES if name in os.environ}

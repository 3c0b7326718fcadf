"""The torch that is installed, read without importing it."""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

from autoaccum.errors import UsageError

_VERSION = re.compile(r"^(__version__|cuda)\b[^=\n]*=\s*'([^']+)'", re.MULTILINE)
NOT_FOUND = "not found"
_LEAST_TORCH = (2, 9)


def torch_build() -> tuple[str, str | None]:
    """Return torch's version and the CUDA version it was built for, None for a build without CUDA.

    Both are read from `torch/version.py`, which PyTorch's build writes, without importing torch.
    """
    spec = find_spec("torch")
    if spec is None or not spec.submodule_search_locations:
        return NOT_FOUND, None
    path = Path(next(iter(spec.submodule_search_locations))) / "version.py"
    try:
        found: dict[str, str] = dict(_VERSION.findall(path.read_text(encoding="utf-8")))
    except OSError:
        found = {}
    return found.get("__version__", "of an unknown version"), found.get("cuda")


def cudnn_package() -> str | None:
    """Return the version of cuDNN in the package that wheels of torch's CUDA builds require; None without one."""
    _, cuda = torch_build()
    return None if cuda is None else package_version(f"nvidia-cudnn-cu{cuda.partition('.')[0]}")


def package_version(name: str) -> str | None:
    """Return the version of an installed distribution; None if there is none."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def read_torch_release() -> tuple[int, int]:
    """Return the major and minor version of the installed torch.

    Inside of a simulation, `torch_patches.torch_release` asks the one that runs.

    Raises:
        UsageError: torch is not installed, or too old for simulations.
    """
    installed, _ = torch_build()
    match = re.match(r"(\d+)\.(\d+)", installed)
    release = (int(match[1]), int(match[2])) if match else (0, 0)
    if release < _LEAST_TORCH:
        raise UsageError(
            f"a simulated card needs torch {'.'.join(map(str, _LEAST_TORCH))} or newer, torch here is {installed}",
            hint="upgrade torch; its CPU build is enough",
        )
    return release

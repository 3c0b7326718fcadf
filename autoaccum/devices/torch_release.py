"""Which torch is installed, without importing it."""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, version

from autoaccum.errors import UsageError

_LEAST = (2, 11)


def read_torch_release() -> tuple[int, int]:
    """Major and minor number of the torch that is installed.

    Inside of a simulation, `kernels.release.torch_release` asks the one that runs.

    Raises:
        UsageError: There is none, or an older one than can be simulated.
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

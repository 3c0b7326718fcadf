"""Which errors a simulated card takes for limits of its own."""

from __future__ import annotations

import pytest

from autoaccum.devices.simulated.unsupported import as_workload_error

RAISES = "def load(error):\n    raise error"


@pytest.mark.parametrize(
    ("module", "text", "blamed"),
    [
        ("triton.backends.nvidia.driver", "libcuda.so cannot found!", True),
        ("apex.kernels", "libcuda.so.1: cannot open shared object file", False),
        ("apex.kernels", "0 active drivers ([]). There should only be one.", True),
    ],
)
def test_triton_is_blamed_for_its_own_errors_only(module: str, text: str, blamed: bool) -> None:
    names = {"__name__": module}
    exec(RAISES, names)
    load: object = names["load"]
    assert callable(load)
    with pytest.raises(ImportError) as raised:
        load(ImportError(text))
    found = as_workload_error(raised.value, "forward")
    assert (found is not None and "a kernel of Triton" in str(found)) is blamed

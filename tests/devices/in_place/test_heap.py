"""While trials are measured, freed memory goes back to the kernel, so that one peak is like the other."""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from autoaccum.units import MIB

GLIBC = sys.platform == "linux" and hasattr(ctypes.CDLL(None), "gnu_get_libc_version")

pytestmark = pytest.mark.skipif(not GLIBC, reason="only glibc has these thresholds")

SCRIPT = """
import json
import numpy as np
from autoaccum.devices.in_place.places import tight_heap, trim_heap
from autoaccum.devices.host_meter import read_process_memory
from autoaccum.units import MIB

def left():
    # What freeing every other one of 64 blocks leaves resident.
    trim_heap()
    before = read_process_memory().anonymous_bytes
    blocks = [np.ones(MIB, dtype=np.uint8) for _ in range(64)]
    kept = blocks[::2]
    del blocks
    return read_process_memory().anonymous_bytes - before - 32 * MIB

with tight_heap():
    within = left()
print(json.dumps([within, left()]))
"""


@pytest.mark.parametrize("threshold", [None, 65536])
def test_what_is_freed_is_given_back_at_once(threshold: int | None) -> None:
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[3])}
    if threshold is not None:
        environment["MALLOC_MMAP_THRESHOLD_"] = str(threshold)
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    within, afterwards = json.loads(done.stdout)
    assert within < 4 * MIB
    if threshold is None:
        assert afterwards > 24 * MIB  # As in any process that has freed large blocks.
    else:
        assert afterwards < 4 * MIB

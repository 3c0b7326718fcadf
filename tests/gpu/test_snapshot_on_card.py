"""What PyTorch's own allocator records on a card is what the simulation of that card predicts."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from autoaccum.devices.base import TrialSettings
from autoaccum.devices.cuda import CudaDevice
from autoaccum.devices.simulated.recorded_update import compare_snapshot

SHARED = Path(__file__).parents[1] / "shared"
RECORD, WORKLOAD = SHARED / "real_allocator" / "record_snapshot.py", SHARED / "workloads" / "recorded_net.py"


@pytest.mark.gpu
def test_the_card_gives_the_predicted_peaks(tmp_path: Path) -> None:
    file = tmp_path / "step.pickle"
    words = [RECORD, WORKLOAD, file, "--micro-batch", "24", "--parts", "2"]
    subprocess.run([sys.executable, *map(str, words)], check=True, timeout=300)
    with CudaDevice(TrialSettings(reference=str(WORKLOAD), share=96)) as device, device.simulation() as simulation:
        compared = compare_snapshot(file, simulation, 48, 24)
    assert compared.agrees, compared

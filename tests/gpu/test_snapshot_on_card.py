"""The snapshot of a trial on a card is that card's own, and the simulation of the card gives the same."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path

import pytest

from autoaccum.devices.base import TrialSettings
from autoaccum.devices.cuda import CudaDevice
from autoaccum.devices.simulated.allocator.recorded_replay import replay_recording
from autoaccum.devices.simulated.allocator.recording import read_recording

WORKLOAD = """
import torch
from torch import nn

def model():
    return nn.Sequential(nn.LayerNorm(512), nn.Linear(512, 2048), nn.GELU(), nn.Linear(2048, 1000))

def batch(size):
    return torch.randn(size, 64, 512).cumsum(1), torch.randint(0, 1000, (size, 64))

def loss(model, batch):
    return nn.functional.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())
"""
PARTS = (24, 24)


@pytest.mark.gpu
def test_the_card_gives_the_predicted_addresses_and_peaks(write_workload: Callable[[str], str], tmp_path: Path) -> None:
    file = tmp_path / "step.pickle"
    with CudaDevice(TrialSettings(reference=write_workload(WORKLOAD), share=96)) as device:
        device.inspect()
        file.write_bytes(pickle.dumps(device.explain(PARTS, changes=False, snapshot=True).snapshot))
        recording = read_recording(file)
        assert replay_recording(recording) is None
        with device.simulation() as simulation:
            simulation.inspect()
            compared = simulation.compare(recording, PARTS)
    assert compared.agrees, compared

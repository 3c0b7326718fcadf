"""A snapshot of a simulated update: what PyTorch's memory viewer reads, with the user's lines and modules."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from in_process_tracer import InProcessTracer
from torch.cuda import _memory_viz

from autoaccum.devices.base import TrialSettings
from autoaccum.devices.environment import read_torch_release
from autoaccum.devices.simulated.allocator.recorded_replay import replay_recording
from autoaccum.devices.simulated.allocator.recording import read_recording
from autoaccum.devices.simulated.allocator.settings import AllocatorSettings
from autoaccum.devices.simulated.cards import find_card
from autoaccum.devices.simulated.explain.snapshot import make_snapshot
from autoaccum.devices.simulated.simulated_device import SimulatedDevice
from autoaccum.errors import UsageError

WORKLOAD = """
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(256, 1024), nn.Linear(1024, 256)

    def forward(self, x):
        wide = torch.tanh(self.up(x))  # The wide line.
        return x + self.down(wide)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = Block(), Block()

    def forward(self, x):
        x = checkpoint(self.first, x, use_reentrant=False)
        return self.second(x)


model = Net


def batch(size):
    return torch.randn(size, 32, 256), torch.randn(size, 32, 256)


criterion = nn.MSELoss()
"""
PARTS = (64, 64)


def make_device(path: Path) -> SimulatedDevice:
    path.write_text(WORKLOAD)
    card, settings = find_card("rtx3090"), TrialSettings(reference=str(path), share=256)
    make_tracer, release = partial(InProcessTracer, settings, card), read_torch_release()
    return SimulatedDevice(card, make_tracer, share=256, torch_version=release, environment={})


@pytest.fixture(scope="module")
def snapshot(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    with make_device(tmp_path_factory.mktemp("workload") / "net.py") as device:
        device.inspect()
        peak_bytes = device.trial(PARTS, fresh=True).peak_reserved_bytes
        made = device.explain(PARTS, changes=False, snapshot=True).snapshot
        assert made is not None
        file = tmp_path_factory.mktemp("snapshot") / "step.pickle"
        file.write_bytes(pickle.dumps(made))
        recording = read_recording(file)
        compared = device.compare(recording, PARTS)
        yield {**pickle.loads(file.read_bytes()), "peak_bytes": peak_bytes, "read": (recording, compared)}


def test_the_viewer_reads_it_and_it_adds_up(snapshot: dict[str, Any]) -> None:
    viewer: Any = _memory_viz
    assert "allocated" in viewer.segsum(snapshot)
    assert "alloc" in viewer.trace(snapshot)
    assert "Active Memory Timeline" in viewer.trace_plot(snapshot)
    reserved, most, alive = 0, 0, dict[int, int]()
    for entry in snapshot["device_traces"][0]:
        action, address, size = entry["action"], entry["addr"], entry["size"]
        if action == "alloc":
            assert address not in alive
            alive[address] = size
        elif action == "free_completed":
            assert alive.pop(address) == size
        elif action == "segment_alloc":
            reserved += size
            most = max(most, reserved)
    assert most == snapshot["peak_bytes"]
    blocks = [block for segment in snapshot["segments"] for block in segment["blocks"]]
    used = {block["address"]: block["requested_size"] for block in blocks if block["state"] == "active_allocated"}
    assert used == alive
    for segment in snapshot["segments"]:
        end = segment["address"]
        for block in segment["blocks"]:
            assert block["address"] == end
            end += block["size"]
        assert end == segment["address"] + segment["total_size"]


def test_blocks_have_the_users_lines_modules_and_purposes(snapshot: dict[str, Any]) -> None:
    line = next(number for number, text in enumerate(WORKLOAD.splitlines(), 1) if "The wide line" in text)
    made = [entry for entry in snapshot["device_traces"][0] if entry["action"] == "alloc"]
    of_line = [entry for entry in made if entry["frames"][0]["line"] == line]
    assert {Path(entry["frames"][0]["filename"]).name for entry in of_line} == {"net.py"}
    found = {(entry["frames"][0]["name"], entry["user_metadata"]) for entry in of_line}
    # In forward, again in the backward of a checkpointed block, and in backward, where Python runs none of it.
    assert {("second aten.tanh", "activations"), ("first aten.tanh", "activations")} <= found
    assert ("second.up aten.addmm", "temporaries") in found
    backward = {name for name, _ in found if name.endswith("aten.tanh_backward")}
    assert backward == {"first aten.tanh_backward", "second aten.tanh_backward"}
    assert {"parameters", "gradients", "optimizer_state"} <= {entry["user_metadata"] for entry in made}
    callers = next(entry["frames"] for entry in of_line if entry["frames"][0]["name"] == "second aten.tanh")
    assert [frame["name"] for frame in callers[1:3]] == ["forward", "forward"]


def test_phases_are_annotations(snapshot: dict[str, Any]) -> None:
    names = [entry["name"] for entry in snapshot["external_annotations"] if entry["stage"] == "START"]
    assert names.count("backward") == 3, "that of the first update, and two of the last"
    times = [entry["time_us"] for entry in snapshot["external_annotations"]]
    assert times == sorted(times)
    assert times[-1] == len(snapshot["device_traces"][0])


def test_it_is_read_as_a_recorded_one_and_is_what_was_predicted(snapshot: dict[str, Any]) -> None:
    recording, compared = snapshot["read"]
    assert replay_recording(recording) is None
    for figure in (compared.before, compared.held, compared.reserved):
        assert figure.recorded == figure.predicted
    assert (compared.first_difference, compared.differences, compared.agrees) == (None, (), True)


def test_expandable_segments_have_none() -> None:
    breakdown: Any = None
    with pytest.raises(UsageError, match="expandable_segments"):
        make_snapshot(breakdown, None, AllocatorSettings(expandable_segments=True))

"""A plan was proved on the card, its schedule trains under its budget, and the simulation predicts the card."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from factories import codes
from small_blocks import blocks_source
from state_digests import state_digest
from torch import Tensor, nn

from autoaccum.accumulation.accumulator import Accumulator
from autoaccum.api import plan
from autoaccum.devices.base import TrialSettings
from autoaccum.devices.cuda import CudaDevice
from autoaccum.devices.meters import card_limit
from autoaccum.devices.simulated.recorded_update import compare_snapshot
from autoaccum.errors import UsageError
from autoaccum.sources.source import FileSource
from autoaccum.units import MIB

SHARED = Path(__file__).parents[1] / "shared"
RECORD, RECORDED = SHARED / "real_allocator" / "record_snapshot.py", SHARED / "workloads" / "recorded_net.py"

WORKLOAD = """
import torch
from torch import nn

def model():
    return nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1), nn.ReLU(),
                         nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10))

def batch(size):
    return torch.randn(size, 3, SIDE, SIDE), torch.randint(0, 10, (size,))

criterion = nn.CrossEntropyLoss()
"""


def test_a_plan_was_proved_and_keeps_to_its_budget(place: torch.device, write_workload: Callable[[str], str]) -> None:
    side, memory, target = (64, "48MiB", 120) if place.type == "cpu" else (96, "1GiB", 1500)
    reference = write_workload(f"SIDE = {side}\n{WORKLOAD}")
    made = plan(reference, target_batch=target, device=str(place), memory=memory)
    assert (made.kind, sum(made.micro_batches), made.device.name) == ("measured", target, str(place))
    assert made.iter_size > 1
    assert not made.capped
    assert made.micro_batch <= made.largest_fit < target
    assert made.peak_bytes is not None
    assert made.peak_bytes <= made.limit_bytes
    assert {trial.outcome for trial in made.trials} >= {"ok", "oom"}
    if place.type == "cuda":
        assert len(made.trials) <= 5, "a simulation of the card begins the search where it ends"
        train(made, reference, place)


def train(made: Any, reference: str, place: torch.device) -> None:
    """Two updates by the plan under its own budget: where its trial needed no retries, without any."""
    workload = FileSource(reference).load()
    model = workload.build_model().to(place)
    torch.cuda.empty_cache()
    refused = torch.cuda.memory_stats(place.index)["num_ooms"]
    accumulator = Accumulator(
        model, workload.build_optimizer(model), workload.objective, micro_batch=made.micro_batch, recover=False
    )
    with card_limit(place.index, made.limit_bytes + 128 * MIB):  # What other tests left in this process.
        for _ in range(2):
            assert accumulator.step(workload.build_batch(made.target_batch)).updated
    if made.trials[-1].outcome == "ok":  # cuDNN goes on with a smaller workspace when it is refused a larger one.
        assert torch.cuda.memory_stats(place.index)["num_ooms"] == refused


@pytest.mark.gpu
def test_auto_is_the_card_and_another_is_not_there(write_workload: Callable[[str], str]) -> None:
    reference = write_workload(f"SIDE = 32\n{WORKLOAD}")
    made = plan(reference, target_batch=8, device="auto")
    assert (made.device.name, made.iter_size) == ("cuda:0", 1)
    with pytest.raises(UsageError, match="there is no cuda:99"):
        plan(reference, target_batch=8, device="cuda:99")


@pytest.mark.gpu  # On the CPU as tests/cli/test_plan_fastest.py has it.
@pytest.mark.parametrize(
    ("blocks", "length", "memory", "options"), [(4, 64, "256MiB", {}), (8, 16384, "384MiB", {"savers": "auto"})]
)
def test_the_fastest_that_fits_and_its_savers_are_timed(
    blocks: int, length: int, memory: str, options: Any, write_workload: Callable[[str], str]
) -> None:
    reference = write_workload(blocks_source(blocks, hidden=512, length=length))
    made = plan(reference, target_batch=64, device="cuda:0", memory=memory, prefer="fastest", **options)
    assert made.throughput is not None
    assert made.micro_batch == made.throughput.knee <= min(made.largest_fit, made.throughput.fastest)
    proof = made.trials[-1]
    assert (proof.parts, proof.fresh, proof.outcome) == (made.schedule.trial_parts, True, "ok")
    assert (codes(made.notes[:1]) == ["savers_chosen"]) == bool(options)


@pytest.mark.gpu
def test_the_card_gives_the_predicted_peaks(tmp_path: Path) -> None:
    file = tmp_path / "step.pickle"
    words = [RECORD, RECORDED, file, "--micro-batch", "24", "--parts", "2"]
    subprocess.run([sys.executable, *map(str, words)], check=True, timeout=300)
    with (
        CudaDevice(TrialSettings(source=FileSource(str(RECORDED)), rank_samples=96)) as device,
        device.simulation() as simulation,
    ):
        compared = compare_snapshot(file, simulation, 48, 24)
    assert compared.agrees, compared


def test_a_live_model_leaves_the_card_to_its_trials_and_comes_back(place: torch.device) -> None:
    model = nn.Sequential(nn.Linear(512, 2048), nn.ReLU(), nn.Linear(2048, 10)).to(place)
    optimizer = torch.optim.Adam(model.parameters())

    def batch(size: int) -> tuple[Tensor, Tensor]:
        return torch.randn(size, 512), torch.randint(0, 10, (size,))

    criterion = nn.CrossEntropyLoss()
    Accumulator(model, optimizer, criterion, micro_batch=8).step(batch(8))
    before, pointers = state_digest(model, optimizer), [parameter.data_ptr() for parameter in model.parameters()]
    held: list[int] = []

    def notice(event: Any) -> None:
        held.append(sum(parameter.untyped_storage().nbytes() for parameter in model.parameters()))

    made = plan(model=model, batch=batch, loss=criterion, optimizer=optimizer, target_batch=64, on_event=notice)
    assert made.device.name == str(place)
    assert state_digest(model, optimizer) == before
    if place.type == "cuda":
        assert set(held) == {0}, "the card is free while trials run"
        assert "objects_on_host" in codes(made.notes)
    else:
        assert pointers == [parameter.data_ptr() for parameter in model.parameters()]
    assert Accumulator(model, optimizer, criterion, micro_batch=8).step(batch(8)).updated

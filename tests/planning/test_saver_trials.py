"""A plan chooses the least costly savers with which the micro-batch fits, and proves them as it proves any plan."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from asking import make_request
from in_process_tracer import InProcessTracer
from scripted_device import ScriptedDevice
from synthetic_traces import INSPECTION, SyntheticTracer, linear, make_trace

import autoaccum
from autoaccum.devices.base import Inspection, Outcome, TrialSettings
from autoaccum.devices.child.requests import Request
from autoaccum.devices.simulated.cards import find_card
from autoaccum.devices.simulated.simulated_device import SimulatedDevice
from autoaccum.devices.simulated.simulation_requests import CountCost, TraceParts, Tracer
from autoaccum.devices.update_cost import Amount, UpdateCost
from autoaccum.errors import DoesNotFitError, UsageError, WorkloadError
from autoaccum.options import OFFLOADS
from autoaccum.planning.plan_events import SaversTried
from autoaccum.planning.plan_record import Plan
from autoaccum.planning.plan_request import PlanRequest
from autoaccum.planning.plan_setup import PlanSetup
from autoaccum.planning.planner import plan_on_device
from autoaccum.units import GIB, MIB, MemorySize

BLOCKS = 6
_MOVED = {"offload-activations": 8e11, "offload-gradients": 1e11, "offload-optimizer": 2e11}
"""All take longer than to recompute every block."""


def recomputed(words: tuple[str, ...]) -> int:
    return next((int(word.partition("=")[2]) for word in words if word.startswith("recompute")), 0)


class SavingTracer(SyntheticTracer):
    """A tracer of a model, a part of whose activations each recomputed block saves, and each offload some weights."""

    def __init__(self, own: tuple[str, ...] = (), **fields: Any) -> None:
        super().__init__(inspection=replace(INSPECTION, blocks=BLOCKS, **fields))
        self._own = own
        self.traced_with: list[tuple[str, ...] | None] = []

    def call(self, request: Request[Any], limit_seconds: float | None = None) -> Any:
        match request:
            case CountCost(savers=words):
                assert words is not None
                moved = sum(_MOVED[word] for word in words if word in OFFLOADS)
                return UpdateCost(
                    flops=Amount(sample=1e12 * (1 + recomputed(words) / 18)),
                    moved_bytes=Amount(update=moved),
                    host_bytes=Amount(),
                )
            case TraceParts(parts=parts, savers=words):
                self.traced_with.append(words)
                words = self._own if words is None else words
                sample = int(12 * MIB * (1 - 0.9 * recomputed(words) / BLOCKS))
                sample = sample // 2 if "offload-activations" in words else sample
                layer = 25 * MIB - 5 * MIB * len({"offload-gradients", "offload-optimizer"} & set(words))
                return make_trace(parts, linear(sample), layer_bytes=layer)
        return super().call(request, limit_seconds)


def on_card(tracer: Tracer, request: PlanRequest, memory: int, card: str = "rtx3090") -> SimulatedDevice:
    return SimulatedDevice(
        find_card(card),
        lambda: tracer,
        share=request.share,
        torch_version=(2, 13),
        memory=MemorySize(bytes=memory),
        environment={},
    )


def plan(tracer: Tracer, memory: int, target: int = 64, on_event: Any = None, **asked: Any) -> Plan:
    request = make_request(target, gpu="rtx3090", **asked)
    with on_card(tracer, request, memory) as device:
        return plan_on_device(PlanSetup(device, "model.py", isolated=False), request, on_event=on_event)


def chosen(made: Plan) -> tuple[str, ...]:
    return tuple(made.workload["savers"])


def test_no_savers_are_taken_where_one_sample_fits() -> None:
    made, without = plan(SavingTracer(), 2 * GIB, savers="auto"), plan(SavingTracer(), 2 * GIB)
    assert chosen(made) == ()
    assert (made.micro_batches, made.peak_bytes) == (without.micro_batches, without.peak_bytes)
    assert "no savers are needed: micro-batch 1 fits without" in made.notes


@pytest.mark.parametrize("size", [16, 32])
def test_the_micro_batch_that_is_asked_for_fits_by_the_fewest_blocks(size: int) -> None:
    """By brute force: a plan for each number of blocks, with a trial of that size."""
    memory = 1400 * MIB
    made = plan(SavingTracer(), memory, savers="auto", micro_batch=size)
    assert made.largest_fit >= size
    fitting: list[tuple[str, ...]] = []
    for blocks in range(BLOCKS + 1):
        words: tuple[str, ...] = (f"recompute={blocks}",) if blocks else ()
        if plan(SavingTracer(words), memory, savers=words).largest_fit >= size:
            fitting.append(words)
    assert chosen(made) == fitting[0] != ()
    asked_for = plan(SavingTracer(fitting[0]), memory, savers=fitting[0])
    assert (made.micro_batches, made.peak_bytes) == (asked_for.micro_batches, asked_for.peak_bytes)
    note = next(note for note in made.notes if "chosen" in note)
    assert f"{fitting[0][0]} chosen, since micro-batch {size} would take" in note
    assert f"it costs {recomputed(fitting[0]) / 18:.0%} more FLOPs, by an estimate" in note


def test_one_child_traces_all_candidates_and_each_but_once() -> None:
    tracer, heard = SavingTracer(), list[Any]()
    plan(tracer, 1400 * MIB, savers="auto", micro_batch=32, on_event=heard.append)
    assert tracer.closed == 1
    tried = [event.savers for event in heard if isinstance(event, SaversTried) and event.trial is not None]
    assert len(tried) == len(set(tried)) <= 2 + 3
    assert not any(set(OFFLOADS) & set(words) for words in tried), "they cost more than the blocks that were found"


def test_where_nothing_suffices_the_least_need_is_told() -> None:
    with pytest.raises(DoesNotFitError) as caught:
        plan(SavingTracer(), 100 * MIB, savers="auto")
    assert "micro-batch 1 does not fit with any savers: recompute=6 + offload-activations + " in str(caught.value)
    assert "would take the least, " in str(caught.value)
    assert "MiB of 100 MiB" in str(caught.value)


def test_a_sharded_model_is_offered_no_offloads() -> None:
    tracer = SavingTracer(parallel="fsdp2")
    with pytest.raises(DoesNotFitError):
        plan(tracer, 100 * MIB, savers="auto", world_size=2)
    assert set(tracer.traced_with) == {(), (f"recompute={BLOCKS}",)}


def test_a_saver_that_cannot_be_used_is_noted_and_left_out() -> None:
    class RefusingTracer(SavingTracer):
        def call(self, request: Request[Any], limit_seconds: float | None = None) -> Any:
            if isinstance(request, (TraceParts, CountCost)) and recomputed(request.savers or ()):
                raise WorkloadError("the blocks have BatchNorms")
            return super().call(request, limit_seconds)

    made = plan(RefusingTracer(), 1400 * MIB, savers="auto", micro_batch=16)
    assert set(chosen(made)) <= set(OFFLOADS)
    assert chosen(made)
    assert made.notes.count("recompute=6 cannot be used: the blocks have BatchNorms") == 1


@pytest.mark.parametrize("size", [0, 65])
def test_a_micro_batch_that_cannot_be_had_is_refused(size: int) -> None:
    with pytest.raises(UsageError, match="micro_batch is 0|a micro-batch of 65 is to fit, and sizes from 1 to 64"):
        plan(SavingTracer(), 2 * GIB, savers="auto", micro_batch=size)


class Card(ScriptedDevice):
    """A card of this machine, by whose trials savers fit up to some size; `simulation` is what it takes itself for."""

    def __init__(self, fits: Callable[[tuple[str, ...]], int], simulation: Callable[[], SimulatedDevice]) -> None:
        super().__init__(self._outcome_of, card="cuda:0", limit_bytes=1400 * MIB)
        self._largest, self.simulation = fits, simulation
        self.savers: tuple[str, ...] = ()
        self.inspected_with: list[tuple[str, ...]] = []

    def describe(self) -> Mapping[str, Any]:
        return {**super().describe(), "kind": "cuda"}

    def inspect(self, *, limit_seconds: float | None = None) -> Inspection:
        self.inspected_with.append(self.savers)
        return replace(super().inspect(), blocks=BLOCKS, savers=self.savers)

    def use_savers(self, savers: tuple[str, ...] | None) -> None:
        self.savers = savers or ()

    def _outcome_of(self, size: int) -> Outcome:
        return "ok" if size <= self._largest(self.savers) else "oom"


def plan_on_card(fits: Callable[[tuple[str, ...]], int], tracer: SavingTracer) -> tuple[Plan, Card]:
    request = make_request(64, savers="auto", micro_batch=32)
    device = Card(fits, lambda: on_card(tracer, request, 1400 * MIB))
    return plan_on_device(PlanSetup(device, "model.py"), request), device


def test_a_card_is_simulated_for_the_choice_and_proves_it() -> None:
    tracer = SavingTracer()
    predicted = plan(SavingTracer(), 1400 * MIB, savers="auto", micro_batch=32)
    made, card = plan_on_card(lambda words: 40 if words == chosen(predicted) else 3, tracer)
    assert (made.kind, chosen(made)) == ("measured", chosen(predicted))
    assert card.inspected_with == [chosen(predicted)], "without them it may have no room for an inspection"
    assert made.largest_fit >= 32
    assert tracer.closed >= 1


def test_savers_that_trials_refute_give_way_to_the_next() -> None:
    predicted = recomputed(chosen(plan(SavingTracer(), 1400 * MIB, savers="auto", micro_batch=32)))
    made, _ = plan_on_card(lambda words: 40 if recomputed(words) > predicted else 20, SavingTracer())
    assert chosen(made) == (f"recompute={predicted + 1}",)
    assert {trial.outcome for trial in made.trials if trial.micro_batch <= 32} == {"ok"}, "of these savers alone"


def test_where_the_card_cannot_be_simulated_blocks_are_tried_on_it() -> None:
    class FailingTracer(SavingTracer):
        def call(self, request: Request[Any], limit_seconds: float | None = None) -> Any:
            raise WorkloadError("it reads values")

    made, _ = plan_on_card(lambda words: 10 + 6 * recomputed(words), FailingTracer())
    assert chosen(made) == ("recompute=4",)
    assert "the card was not simulated (it reads values)" in made.notes


GPT = """
import torch
from torch import nn
from torch.nn import functional as F

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(64), nn.Linear(64, 192), nn.Linear(64, 64)
        self.mlp = nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))

    def forward(self, x):
        query, key, value = self.qkv(self.norm(x)).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(query, key, value, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.mlp(x)

class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.blocks, self.head = nn.Embedding(64, 64), nn.ModuleList(Block() for _ in range(3)), None

    def forward(self, ids):
        x = self.tokens(ids)
        for block in self.blocks:
            x = block(x)
        return x @ self.tokens.weight.T

model = GPT

def batch(size):
    return torch.randint(0, 64, (size, 513))

def loss(model, ids):
    return F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
"""


def test_of_a_transformer_the_fewest_blocks_are_recomputed(tmp_path: Path) -> None:
    (tmp_path / "gpt.py").write_text(GPT)
    settings = TrialSettings(reference=str(tmp_path / "gpt.py"), share=8)
    tracer = InProcessTracer(settings, find_card("rtx3090"))
    request = make_request(8, gpu="rtx3090", savers="auto", micro_batch=8)
    with on_card(tracer, request, 20 * GIB) as device:
        device.inspect()
        peaks = {}
        for blocks in range(4):
            device.use_savers((f"recompute={blocks}",) if blocks else ())
            peaks[blocks] = device.trial((8,), fresh=True).peak_reserved_bytes or 0
    assert peaks[0] > peaks[1] > peaks[3]
    memory = peaks[1]
    fitting = [blocks for blocks, peak in peaks.items() if peak <= memory]
    with on_card(InProcessTracer(settings, find_card("rtx3090")), request, memory) as device:
        made = plan_on_device(PlanSetup(device, "gpt.py", isolated=False), request)
    assert chosen(made) == (f"recompute={fitting[0]}",)
    assert (made.micro_batch, made.iter_size) == (8, 1)


DEEP = """
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 256), nn.Linear(256, 16)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))

def model():
    return nn.Sequential(*(Block() for _ in range(4)))

def batch(size):
    return torch.randn(size, 8192, 16)

def loss(model, batch):
    return model(batch).square().mean()
"""


@pytest.mark.usefixtures("warm_children")
def test_on_a_cpu_blocks_are_recomputed_as_real_trials_need_it(tmp_path: Path) -> None:
    """A sample takes 8 MiB for the tanh of a block, which backward needs twice over as it runs through one block."""
    (tmp_path / "many_layers.py").write_text(DEEP)
    made = autoaccum.plan(
        tmp_path / "many_layers.py", target_batch=8, device="cpu", memory="48MiB", savers="auto", micro_batch=1
    )
    (word,) = chosen(made)
    assert made.kind == "measured"
    assert any(f"{word} chosen, since micro-batch 1 ran out of memory without savers" in note for note in made.notes)
    one_less = recomputed((word,)) - 1
    with pytest.raises(DoesNotFitError):
        autoaccum.plan(
            tmp_path / "many_layers.py",
            target_batch=8,
            device="cpu",
            memory="48MiB",
            savers=(f"recompute={one_less}",) if one_less else (),
        )

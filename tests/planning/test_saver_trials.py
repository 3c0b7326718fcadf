"""A plan chooses the least costly savers with which the micro-batch fits, and proves them as it proves any plan."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import pytest
from factories import change_facts, codes
from planned import plan_on, plan_simulated, simulated_card
from scripted_device import ScriptedDevice
from synthetic_traces import INSPECTION, SyntheticTracer, linear, make_trace

from autoaccum.devices.base import Inspection
from autoaccum.devices.child.requests import Request
from autoaccum.devices.simulated.simulated_device import SimulatedDevice
from autoaccum.devices.simulated.simulation_requests import CountCost, TraceParts, Tracer
from autoaccum.errors import DoesNotFitError, UsageError, WorkloadError
from autoaccum.messages import Message
from autoaccum.planning.plan_events import SaversTried
from autoaccum.planning.plan_record import Plan
from autoaccum.simulation.trace_records import Amount, UpdateCost
from autoaccum.spec import OFFLOADS, DeviceFacts
from autoaccum.units import GIB, MIB

BLOCKS = 6
_MOVED = {"offload-activations": 8e11, "offload-gradients": 1e11, "offload-optimizer": 2e11}
"""All take longer than to recompute every block."""


def recomputed(words: tuple[str, ...]) -> int:
    return next((int(word.partition("=")[2]) for word in words if word.startswith("recompute")), 0)


class SavingTracer(SyntheticTracer):
    """A tracer of a model, a part of whose activations each recomputed block saves, and each offload some weights."""

    def __init__(self, own: tuple[str, ...] = (), **fields: Any) -> None:
        super().__init__(inspection=change_facts(replace(INSPECTION, **fields), blocks=BLOCKS))
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


def plan(tracer: Tracer, memory: int, target: int = 64, **asked: Any) -> Plan:
    return plan_simulated(tracer, target, memory, gpu="rtx3090", **asked)


def chosen(made: Plan) -> tuple[str, ...]:
    return tuple(made.spec.savers)


def test_no_savers_are_taken_where_one_sample_fits() -> None:
    made, without = plan(SavingTracer(), 2 * GIB, savers="auto"), plan(SavingTracer(), 2 * GIB)
    assert chosen(made) == ()
    assert (made.micro_batches, made.peak_bytes) == (without.micro_batches, without.peak_bytes)
    assert Message("savers_not_needed", {"size": 1}) in made.notes


@pytest.mark.parametrize("size", [16, 32])
def test_the_micro_batch_that_is_asked_for_fits_by_the_fewest_blocks(size: int) -> None:
    """By brute force: a plan for each number of blocks, with a trial of that size."""
    memory = 1400 * MIB
    made = plan(SavingTracer(), memory, savers="auto", fit_micro_batch=size)
    assert made.largest_fit >= size
    fitting: list[tuple[str, ...]] = []
    for blocks in range(BLOCKS + 1):
        words: tuple[str, ...] = (f"recompute={blocks}",) if blocks else ()
        if plan(SavingTracer(words), memory, savers=words).largest_fit >= size:
            fitting.append(words)
    assert chosen(made) == fitting[0] != ()
    asked_for = plan(SavingTracer(fitting[0]), memory, savers=fitting[0])
    assert (made.micro_batches, made.peak_bytes) == (asked_for.micro_batches, asked_for.peak_bytes)
    note = next(str(note) for note in made.notes if note.code == "savers_chosen")
    assert f"{fitting[0][0]} chosen, since micro-batch {size} would take" in note
    assert f"it costs {recomputed(fitting[0]) / 18:.0%} more FLOPs and an estimated " in note


def test_one_child_traces_all_candidates_and_each_but_once() -> None:
    tracer, heard = SavingTracer(), list[Any]()
    plan(tracer, 1400 * MIB, savers="auto", fit_micro_batch=32, on_event=heard.append)
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

    made = plan(RefusingTracer(), 1400 * MIB, savers="auto", fit_micro_batch=16)
    assert set(chosen(made)) <= set(OFFLOADS)
    assert chosen(made)
    assert codes(made.notes).count("saver_unusable") == 1


@pytest.mark.parametrize("size", [0, 65])
def test_a_micro_batch_that_cannot_be_had_is_refused(size: int) -> None:
    with pytest.raises(UsageError, match="micro_batch is 0|a micro-batch of 65 is to fit, and sizes from 1 to 64"):
        plan(SavingTracer(), 2 * GIB, savers="auto", fit_micro_batch=size)


class Card(ScriptedDevice):
    """A card of this machine, by whose trials savers fit up to some size; the tracer is of its simulation."""

    def __init__(self, fits: Callable[[tuple[str, ...]], int], tracer: Tracer) -> None:
        super().__init__(
            lambda size: "ok" if size <= fits(self.savers) else "oom", limit_bytes=1400 * MIB, blocks=BLOCKS
        )
        self._tracer, self.savers = tracer, tuple[str, ...]()
        self.inspected_with: list[tuple[str, ...]] = []

    def describe(self) -> DeviceFacts:
        return replace(super().describe(), kind="cuda")

    def inspect(self, *, limit_seconds: float | None = None) -> Inspection:
        self.inspected_with.append(self.savers)
        return cast("Inspection", change_facts(super().inspect(), savers=self.savers))

    def use_savers(self, savers: tuple[str, ...] | None) -> None:
        self.savers = savers or ()

    def simulation(self) -> SimulatedDevice:
        return simulated_card(self._tracer, 64, self.limit_bytes)


def plan_on_card(fits: Callable[[tuple[str, ...]], int], tracer: SavingTracer) -> tuple[Plan, Card]:
    device = Card(fits, tracer)
    return plan_on(device, 64, savers="auto", fit_micro_batch=32), device


def test_a_card_is_simulated_for_the_choice_and_proves_it() -> None:
    tracer = SavingTracer()
    predicted = plan(SavingTracer(), 1400 * MIB, savers="auto", fit_micro_batch=32)
    made, card = plan_on_card(lambda words: 40 if words == chosen(predicted) else 3, tracer)
    assert (made.kind, chosen(made)) == ("measured", chosen(predicted))
    assert card.inspected_with == [chosen(predicted)], "without them it may have no room for an inspection"
    assert made.largest_fit >= 32
    assert tracer.closed >= 1


def test_savers_that_trials_refute_give_way_to_the_next() -> None:
    predicted = recomputed(chosen(plan(SavingTracer(), 1400 * MIB, savers="auto", fit_micro_batch=32)))
    made, _ = plan_on_card(lambda words: 40 if recomputed(words) > predicted else 20, SavingTracer())
    assert chosen(made) == (f"recompute={predicted + 1}",)
    assert {trial.outcome for trial in made.trials if trial.micro_batch <= 32} == {"ok"}, "of these savers alone"

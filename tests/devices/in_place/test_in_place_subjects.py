"""Live objects, and what their functions reach: what is refused before anything is touched."""

from __future__ import annotations

import functools
import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autoaccum.devices.host_memory import HostMemory
from autoaccum.devices.in_place import InPlaceDevice, LiveObjects, device, places
from autoaccum.devices.in_place.keeper import LiveBytes, check_host_copy, count_live_bytes
from autoaccum.devices.in_place.places import check_single_thread
from autoaccum.errors import AutoaccumError, DoesNotFitError, NotMeasuredError, UsageError, WorkloadError
from autoaccum.options import Options
from autoaccum.units import GIB, KIB, MIB, MemorySize
from autoaccum.workload.spec import Workload
from autoaccum.workload.weights import resolve_objective

TEACHER = nn.Linear(2, 2)
CROSS_ENTROPY = resolve_objective(nn.CrossEntropyLoss())


def live(model: Any, **others: Any) -> LiveObjects:
    given: dict[str, Any] = {"batch": (torch.ones(4, 2), torch.zeros(4, dtype=torch.long)), "objective": CROSS_ENTROPY}
    given |= {name: others.pop(name) for name in ("batch", "objective", "evaluate", "name") if name in others}
    return LiveObjects(model=model, options=Options(**others), **given)


def two_places() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta"))


def tried(model: nn.Module, device: str = "auto") -> InPlaceDevice:
    return InPlaceDevice(live(model), share=4, device=device)


REFUSED: dict[str, tuple[Any, Any, str]] = {
    "no module": (UsageError, lambda: live(3), "model is a int"),
    "lazy": (UsageError, lambda: live(nn.LazyLinear(2)), "not initialised yet"),
    "meta": (UsageError, lambda: tried(nn.Linear(2, 2, device="meta")), "the model is on meta, where no trial"),
    "two places": (UsageError, lambda: tried(two_places()), "the model is on cpu and meta, trials measure one device"),
    "wrapped": (UsageError, lambda: live(nn.DataParallel(nn.Linear(2, 2))), "wrapped in DataParallel"),
    "other optimizer": (
        UsageError,
        lambda: live(nn.Linear(2, 2), optimizer=torch.optim.SGD(TEACHER.parameters())),
        "the SGD holds no parameter of the model",
    ),
    "unknown optimizer": (WorkloadError, lambda: live(nn.Linear(2, 2), optimizer="adamq"), "no optimizer 'adamq'"),
    "closure": (WorkloadError, lambda: live(nn.Linear(2, 2), optimizer="lbfgs"), "LBFGS needs a closure"),
    "batch": (WorkloadError, lambda: live(nn.Linear(2, 2), batch=3), "nothing with a batch dimension"),
    "call": (WorkloadError, lambda: live(nn.Linear(2, 2), batch=lambda: 3), "cannot be called with 1 argument"),
    "elsewhere": (
        UsageError,
        lambda: tried(nn.Linear(2, 2), "cuda:0"),
        "the model is on cpu, and the device is to be cuda:0",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_tried_is_refused(name: str) -> None:
    kind, make, message = REFUSED[name]
    with pytest.raises(AutoaccumError, match=message) as caught:
        make()
    assert type(caught.value) is kind


def test_live_objects_become_a_workload_of_the_same() -> None:
    model, weight = nn.Linear(2, 2), lambda batch: 3.0
    optimizer = torch.optim.SGD(model.parameters())

    def loss(model: nn.Module, batch: Any) -> Tensor:
        return nn.functional.cross_entropy(model(batch[0]), batch[1])

    for objective in (
        resolve_objective(loss, weight=weight),
        resolve_objective(loss, reduction="sum"),
        resolve_objective(criterion=nn.CrossEntropyLoss(ignore_index=1)),
        resolve_objective(nn.functional.mse_loss),
        resolve_objective(functools.partial(nn.functional.cross_entropy, reduction="sum")),
    ):
        made = live(model, objective=objective, optimizer=optimizer).as_workload()
        assert made.objective == objective
        assert made.build_model() is model
        assert made.build_optimizer(model) is optimizer


def test_live_bytes_are_counted_before_anything_is_copied() -> None:
    model: Any = nn.Sequential(nn.Linear(256, 256, bias=False), nn.Linear(256, 256, bias=False))
    model[1].weight = model[0].weight
    model.register_buffer("table", torch.ones(64, 256))
    optimizer = torch.optim.AdamW(model.parameters())
    first = count_live_bytes({"": model}, optimizer, is_live=True)
    assert (first.copy_bytes, first.guard_bytes, first.held_bytes) == (320 * KIB, 256 * KIB, 320 * KIB)
    model[0].weight.grad = torch.ones(256, 256)
    optimizer.step()
    then = count_live_bytes({"": model}, optimizer, is_live=True)
    assert then.gradient_bytes == 256 * KIB
    assert then.copy_bytes == 320 * KIB + 3 * 256 * KIB + 4
    assert then.guard_bytes == 3 * 256 * KIB + 4
    assert count_live_bytes({"": model}, None, is_live=False).held_bytes == 0


@pytest.mark.filterwarnings("ignore:Sparse ")
def test_a_sparse_buffer_is_counted_and_comes_back() -> None:
    for make in (torch.Tensor.to_sparse, torch.Tensor.to_sparse_csr):
        model: Any = nn.Linear(2, 2, bias=False)
        model.register_buffer("graph", make(torch.eye(8)))
        indices_bytes = (9 + 8) * 8 if make is torch.Tensor.to_sparse_csr else 2 * 8 * 8
        counted = count_live_bytes({"": model}, None, is_live=True)
        assert counted.copy_bytes == 16 + indices_bytes + 8 * 4
        assert counted.held_bytes >= counted.copy_bytes  # torch makes some indices larger than they are.
        InPlaceDevice(live(model), share=4).inspect()
        assert torch.equal(model.graph.to_dense(), torch.eye(8))


def test_a_copy_that_does_not_fit_is_refused_before_anything_is_touched(monkeypatch: pytest.MonkeyPatch) -> None:
    big = LiveBytes(copy_bytes=28 * GIB, guard_bytes=14 * GIB, held_bytes=28 * GIB, gradient_bytes=0)
    host = HostMemory(total_bytes=64 * GIB, free_bytes=30 * GIB, bound="the machine")
    check_host_copy("net", big, host, guarded_on_host=False)
    message = r"the copy of net and its optimizer takes 42.0 GiB of host memory, 30.0 GiB are free .*autoaccum plan"
    with pytest.raises(UsageError, match=message):
        check_host_copy("net", big, host, guarded_on_host=True)
    tiny = HostMemory(total_bytes=GIB, free_bytes=200 * MIB, bound="the machine")
    monkeypatch.setattr(device, "read_host_memory", lambda: tiny)
    touched: list[str] = []
    with pytest.raises(UsageError, match="the copy of model and its optimizer"):
        InPlaceDevice(live(nn.Linear(2, 2), batch=lambda size: touched.append("batch")), share=4).inspect()
    assert not touched


def test_the_copy_s_cost_and_what_is_held_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Linear(1024, 1024, bias=False)
    made = InPlaceDevice(live(model, batch=lambda size: torch.ones(size, 1024)), share=4)
    described = made.describe()
    assert described["held_bytes"] == described["host_copy_bytes"] == 4 * MIB
    host = HostMemory(total_bytes=8 * GIB, free_bytes=4 * GIB, bound="the machine")
    monkeypatch.setattr(places, "read_host_memory", lambda: host)
    again = InPlaceDevice(live(model), share=4, reserve=MemorySize(bytes=MIB))
    assert again.limit_bytes == 4 * GIB - MIB  # The copy is taken off what is free, what is held comes on top.


def test_a_budget_below_what_is_held_is_refused() -> None:
    made = InPlaceDevice(live(nn.Linear(1024, 1024, bias=False)), share=4, memory=MemorySize(bytes=2 * MIB))
    with pytest.raises(UsageError, match=r"a budget of 2.0 MiB is less than the 4.0 MiB that model and optimizer hold"):
        made.trial((2, 2))


def test_resident_gradients_are_told() -> None:
    model = nn.Linear(1024, 1024, bias=False)
    model.weight.grad = torch.ones(1024, 1024)
    made = InPlaceDevice(live(model, batch=(torch.ones(4, 1024), torch.zeros(4, dtype=torch.long))), share=4)
    warnings = made.inspect().cautions
    assert any(warning.startswith("gradients of 4.0 MiB lie beside the trials") for warning in warnings)


def test_a_live_model_keeps_its_mode_and_one_at_rest_is_told() -> None:
    for training in (True, False):
        model = nn.Linear(2, 2).train(training)
        made = InPlaceDevice(live(model), share=4)
        assert live(model).as_workload().build_model().training is training
        told = [warning for warning in made.inspect().cautions if warning.startswith("the model is in eval mode")]
        assert len(told) == (not training)
        assert model.training is training


def test_what_the_model_holds_counts_as_it_does_in_a_child() -> None:
    model = nn.Linear(1024, 1024, bias=False)
    subject = live(model, batch=(torch.ones(4, 1024), torch.zeros(4, dtype=torch.long)), optimizer="sgd")
    trial = InPlaceDevice(subject, share=4, memory=MemorySize(bytes=64 * MIB)).trial((2, 2))
    peak = trial.peak_reserved_bytes
    assert trial.outcome == "ok", trial.message
    assert peak is not None
    assert peak >= 2 * 4 * MIB  # The weights and their gradients.


def test_inference_mode_is_refused() -> None:
    made = InPlaceDevice(live(nn.Linear(2, 2)), share=4)
    with torch.inference_mode(), pytest.raises(UsageError, match="inference_mode"):
        made.inspect()


def test_an_inspection_that_runs_out_of_memory_is_a_clear_no() -> None:
    def greedy(size: int) -> Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB")

    with pytest.raises(DoesNotFitError, match="an update from a small batch of model ran out of memory"):
        InPlaceDevice(live(nn.Linear(2, 2), batch=greedy), share=4).inspect()


class TMonitor(threading.Thread):
    """Called as tqdm's is."""


def test_tqdm_s_thread_is_told_how_to_be_rid_of() -> None:
    stop = threading.Event()
    monitor = TMonitor(target=stop.wait, daemon=True)
    monitor.start()
    try:
        with pytest.raises(UsageError, match=r"tqdm\.tqdm\.monitor_interval = 0 before the first bar, or plan through"):
            check_single_thread()
    finally:
        stop.set()
        monitor.join()
    check_single_thread()


def test_a_workload_trains_its_own_copy_and_the_shared_criterion_comes_back() -> None:
    template = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    weights = torch.ones(2)
    made = Workload(
        model=template,
        batch=lambda size: (torch.randn(size, 2), torch.zeros(size, dtype=torch.long)),
        criterion=nn.CrossEntropyLoss(weight=weights),
    )
    before = {name: value.clone() for name, value in template.state_dict().items()}
    with InPlaceDevice(made, share=8, memory=MemorySize(bytes=64 * MIB)) as tried:
        tried.inspect()
        assert tried.trial((4, 4)).outcome == "ok"
    assert all(torch.equal(value, before[name]) for name, value in template.state_dict().items())


@pytest.mark.without_gpu
@pytest.mark.parametrize("place", ["cuda", "cuda:1"])
def test_a_card_that_cannot_be_started_is_told(place: str) -> None:
    """As behind a driver that is too old, which only CUDA itself can tell."""
    workload = Workload(model=lambda: nn.Linear(1, 1), batch=torch.zeros, criterion=nn.MSELoss())
    with (
        InPlaceDevice(workload, share=1, device=place) as device,
        pytest.raises(NotMeasuredError, match=r"CUDA does not start on cuda:\d \(.+\): nvidia-smi"),
    ):
        device.inspect()

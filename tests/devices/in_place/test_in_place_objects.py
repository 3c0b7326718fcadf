"""Live objects: what is refused, what they hold, their batches of any size, and plans that measure more."""

from __future__ import annotations

import functools
import resource
import threading
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import autoaccum
from autoaccum.devices.budget import AvailableMemory
from autoaccum.devices.in_place import InPlaceDevice, LiveObjects, in_place_device, memory_limits
from autoaccum.devices.in_place.sample_batches import make_batches
from autoaccum.devices.in_place.saved_state import LiveStateSize, check_host_copy, measure_live_state
from autoaccum.errors import AutoaccumError, DoesNotFitError, NotMeasuredError, UsageError, WorkloadError
from autoaccum.options import Options
from autoaccum.units import GIB, KIB, MIB, MemorySize
from autoaccum.workload.batches import batch_size
from autoaccum.workload.objective import resolve_objective
from autoaccum.workload.spec import Workload

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
    "meta": (UsageError, lambda: tried(nn.Linear(2, 2, device="meta")), "the model is on meta, where no trial"),
    "two places": (UsageError, lambda: tried(two_places()), "the model is on cpu and meta, trials measure one device"),
    "wrapped": (UsageError, lambda: live(nn.DataParallel(nn.Linear(2, 2))), "wrapped in DataParallel"),
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


def test_live_state_is_measured_before_anything_is_copied() -> None:
    model: Any = nn.Sequential(nn.Linear(256, 256, bias=False), nn.Linear(256, 256, bias=False))
    model[1].weight = model[0].weight
    model.register_buffer("table", torch.ones(64, 256))
    optimizer = torch.optim.AdamW(model.parameters())
    first = measure_live_state({"": model}, optimizer, is_live=True)
    assert (first.copy_bytes, first.held_bytes) == (320 * KIB, 320 * KIB)
    model[0].weight.grad = torch.ones(256, 256)
    optimizer.step()
    then = measure_live_state({"": model}, optimizer, is_live=True)
    assert then.copy_bytes == 320 * KIB + 3 * 256 * KIB + 4
    assert measure_live_state({"": model}, None, is_live=False).held_bytes == 0


def test_a_copy_that_does_not_fit_is_refused_before_anything_is_touched(monkeypatch: pytest.MonkeyPatch) -> None:
    big = LiveStateSize(copy_bytes=28 * GIB, held_bytes=28 * GIB)
    host = AvailableMemory(total_bytes=64 * GIB, free_bytes=30 * GIB, bound="the machine")
    check_host_copy("net", big, host, guarded_on_host=False)
    message = r"the copy of net and its optimizer takes 56.0 GiB of host memory, 30.0 GiB are free .*autoaccum plan"
    with pytest.raises(UsageError, match=message):
        check_host_copy("net", big, host, guarded_on_host=True)
    tiny = AvailableMemory(total_bytes=GIB, free_bytes=200 * MIB, bound="the machine")
    monkeypatch.setattr(in_place_device, "read_host_memory", lambda: tiny)
    touched: list[str] = []
    with pytest.raises(UsageError, match="the copy of model and its optimizer"):
        InPlaceDevice(live(nn.Linear(2, 2), batch=lambda size: touched.append("batch")), share=4).inspect()
    assert not touched


def test_the_size_of_the_copy_and_of_the_live_objects_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Linear(1024, 1024, bias=False)
    made = InPlaceDevice(live(model, batch=lambda size: torch.ones(size, 1024)), share=4)
    described = made.describe()
    assert described["held_bytes"] == described["host_copy_bytes"] == 4 * MIB
    host = AvailableMemory(total_bytes=8 * GIB, free_bytes=4 * GIB, bound="the machine")
    monkeypatch.setattr(memory_limits, "read_host_memory", lambda: host)
    again = InPlaceDevice(live(model), share=4, reserve=MemorySize(bytes=MIB))
    assert again.limit_bytes == 4 * GIB - MIB  # The copy is taken off what is free, what is held comes on top.


def test_a_budget_below_what_is_held_is_refused() -> None:
    made = InPlaceDevice(live(nn.Linear(1024, 1024, bias=False)), share=4, memory=MemorySize(bytes=2 * MIB))
    with pytest.raises(UsageError, match=r"a budget of 2.0 MiB is less than the 4.0 MiB that model and optimizer hold"):
        made.trial((2, 2))


def test_other_threads_are_not_limited() -> None:
    stop = threading.Event()
    other = threading.Thread(target=stop.wait, name="progress bar", daemon=True)
    other.start()
    made = InPlaceDevice(live(nn.Linear(2, 2)), share=4, memory=MemorySize(bytes=64 * MIB))
    try:
        with pytest.raises(UsageError, match=r"other Python threads .*: progress bar \(Thread\): end them first, or"):
            made.trial((1, 1))
    finally:
        stop.set()
        other.join()
    before = resource.getrlimit(resource.RLIMIT_DATA)
    assert made.trial((1, 1)).outcome == "ok"
    assert resource.getrlimit(resource.RLIMIT_DATA) == before


def test_a_live_model_keeps_its_mode_and_eval_mode_is_warned_of() -> None:
    for training in (True, False):
        model = nn.Linear(2, 2).train(training)
        made = InPlaceDevice(live(model), share=4)
        assert live(model).as_workload().build_model().training is training
        told = [warning for warning in made.inspect().cautions if warning.startswith("the model is in eval mode")]
        assert len(told) == (not training)
        assert model.training is training


def test_an_inspection_that_runs_out_of_memory_is_a_clear_no() -> None:
    def greedy(size: int) -> Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB")

    with pytest.raises(DoesNotFitError, match="an update from a small batch of model ran out of memory"):
        InPlaceDevice(live(nn.Linear(2, 2), batch=greedy), share=4).inspect()


def test_a_workload_trains_its_own_copy_and_the_shared_criterion_is_restored() -> None:
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
def test_a_card_that_cannot_be_started_is_reported(place: str) -> None:
    """As behind a driver that is too old, which only CUDA itself can tell."""
    workload = Workload(model=lambda: nn.Linear(1, 1), batch=torch.zeros, criterion=nn.MSELoss())
    with (
        InPlaceDevice(workload, share=1, device=place) as in_place_device,
        pytest.raises(NotMeasuredError, match=r"CUDA does not start on cuda:\d \(.+\): nvidia-smi"),
    ):
        in_place_device.inspect()


def wide() -> tuple[nn.Module, Any]:
    model = nn.Linear(16, 4096)
    return model, lambda size: (torch.randn(size, 16), torch.randint(0, 4096, (size,)))


def plan_wide(**asked: Any) -> autoaccum.Plan:
    model, batch = wide()
    return autoaccum.plan(
        model=model,
        batch=batch,
        loss=nn.CrossEntropyLoss(),
        target_batch=4,
        memory=MemorySize(bytes=48 * MIB),
        **asked,
    )


def test_live_objects_count_towards_the_budget() -> None:
    plan = plan_wide(keeps="ema", evaluation_batch=8, evaluate=lambda model, batch: model(batch[0]))
    assert (plan.workload["keeps"], plan.workload["evaluation_batch"]) == (("ema",), 8)
    assert plan.workload["worst_of"] is None


@pytest.mark.slow
def test_an_evaluation_too_large_is_reported_as_such() -> None:
    with pytest.raises(DoesNotFitError, match="the evaluation does not fit: .* take a smaller evaluation_batch"):
        plan_wide(evaluation_batch=4096)


def test_an_evaluation_needs_its_size() -> None:
    with pytest.raises(UsageError, match="evaluate is given without evaluation_batch: say how many"):
        plan_wide(evaluate=lambda model, batch: None)


def test_live_objects_have_no_longest_samples() -> None:
    with pytest.raises(UsageError, match="worst_of is 10, and live objects have no dataset"):
        plan_wide(worst_of=10)


def test_a_workload_in_code_has() -> None:
    workload = autoaccum.Workload(
        model=lambda: nn.Linear(5, 3),
        loss=lambda model, batch: model(batch).mean(),
        dataset=[torch.zeros(length, 5) for length in (2, 4, 3)],
        collate=lambda samples: nn.utils.rnn.pad_sequence(samples, batch_first=True),
    )
    with pytest.raises(WorkloadError, match="defines no 'batch'"):
        autoaccum.plan(workload, target_batch=4)
    plan = autoaccum.plan(workload, target_batch=4, worst_of=3, memory="256MiB")
    assert plan.workload["worst_of"] == 3


@dataclass
class Record:
    ids: Tensor
    name: str


def test_a_sample_is_repeated_and_cut() -> None:
    x, y = torch.arange(6.0).reshape(3, 2), torch.arange(3)
    batches = make_batches((x, y))
    inputs, targets = batches(7)
    assert torch.equal(inputs, x[torch.arange(7) % 3])
    assert torch.equal(targets, torch.arange(7) % 3)
    assert batch_size(batches(2)) == 2
    assert batch_size(batches(3)) == 3


@pytest.mark.parametrize("size", [1, 3, 8])
@pytest.mark.parametrize(
    "sample",
    [
        torch.ones(3, 2),
        [torch.ones(3, 2), torch.zeros(3)],
        {"ids": torch.ones(3, 4, dtype=torch.long), "scale": 2.0, "shape": (224, 224)},
        Record(torch.ones(3, 2), "x"),
        (np.ones((3, 2)), torch.zeros(3)),
        {"image": [torch.ones(2), torch.ones(3), torch.ones(4)], "label": torch.zeros(3)},
        (torch.ones(3, 2), ["a", "b", "c"]),
    ],
    ids=["tensor", "list", "dict", "dataclass", "array", "ragged", "strings"],
)
def test_every_form_has_the_size_asked_for(sample: Any, size: int) -> None:
    made = make_batches(sample)(size)
    assert type(made) is type(sample)
    assert batch_size(made) == size


@pytest.mark.parametrize("size", [2, 3, 6])
@pytest.mark.parametrize("form", ["tensor", "samples"])
def test_batches_have_memory_of_their_own(form: str, size: int) -> None:
    parts = [torch.ones(4) for _ in range(3)]
    sample: Any = torch.ones(3, 4) if form == "tensor" else {"image": parts, "label": torch.zeros(3)}
    made = make_batches(sample)(size)
    tensors = [made] if form == "tensor" else made["image"]
    addresses = {tensor.untyped_storage().data_ptr() for tensor in tensors}
    assert len(addresses) == len(tensors)
    theirs = [sample] if form == "tensor" else parts
    assert not addresses & {tensor.untyped_storage().data_ptr() for tensor in theirs}
    for tensor in tensors:
        tensor.zero_()
    assert all(float(part.sum()) == 4 for part in parts)


def test_another_size_is_refused_with_the_way_out() -> None:
    data = torch.arange(10)
    with pytest.raises(WorkloadError, match=r"batch\(64\) returned 10 samples: return as many as asked, or give one"):
        make_batches(lambda n: data[:n])(64)


def test_an_exhausted_iterator_is_reported() -> None:
    loader = iter(DataLoader(TensorDataset(torch.ones(4, 2)), batch_size=2))
    batches = make_batches(lambda size: next(loader))
    batches(2)
    batches(2)
    with pytest.raises(WorkloadError, match=r"batch\(2\) raised StopIteration: its iterator has no more") as caught:
        batches(2)
    assert "next(loader)" in str(caught.value.user_traceback)


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (DataLoader(TensorDataset(torch.ones(4))), r"batch is a DataLoader: give one batch of it: next\(iter\(loader"),
        (iter([1, 2]), "batch is a list_iterator"),
        (torch.ones(0, 3), "the sample batch is empty"),
        (3, "nothing with a batch dimension"),
        ((torch.ones(2), torch.ones(3)), "has the length 3"),
    ],
    ids=["loader", "iterator", "empty", "number", "uneven"],
)
def test_what_is_no_batch_is_refused(batch: Any, message: str) -> None:
    with pytest.raises(WorkloadError, match=message):
        make_batches(batch)


@pytest.mark.parametrize("size", [2, 3, 8])
def test_no_gradient_reaches_a_sample_that_requires_one(size: int) -> None:
    """As of a gradient penalty: what depends on the inputs' gradient still finds inputs that require it."""
    inputs, scale = torch.ones(3, 2, requires_grad=True), torch.ones(2, requires_grad=True)
    make = make_batches((inputs, torch.ones(3, 2) * scale))
    for _ in range(2):
        batch = make(size)
        assert all(tensor.requires_grad and tensor.is_leaf for tensor in batch)
        torch.autograd.backward([tensor.sum() for tensor in batch])
    assert inputs.grad is None
    assert scale.grad is None


def test_inference_mode_is_refused() -> None:
    made = InPlaceDevice(live(nn.Linear(2, 2)), share=4)
    with torch.inference_mode(), pytest.raises(UsageError, match="inference_mode"):
        made.inspect()

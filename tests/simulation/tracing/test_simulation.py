"""Fake on the card, real on the host; what is exchanged for that, and put back."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from autoaccum.devices.child.requests import reply_to_json
from autoaccum.devices.simulated.simulation_requests import TraceParts
from autoaccum.devices.trial_requests import Inspect
from autoaccum.simulation.cards import find_card
from autoaccum.simulation.tracing.dispatch_mode import FakeCudaMode
from autoaccum.simulation.tracing.recorder import manual_garbage_collection
from autoaccum.simulation.tracing.simulation import simulate
from autoaccum.simulation.unsupported import UnknownValueError, UnsupportedError


@pytest.mark.usefixtures("mode")
class TestDevices:
    def test_the_host_computes(self) -> None:
        assert torch.arange(4).sum().item() == 6
        assert type(torch.randn(3)) is torch.Tensor
        assert nn.Linear(3, 2)(torch.ones(1, 3)).shape == (1, 2)

    def test_the_card_does_not(self) -> None:
        tensor = torch.randn(4, device="cuda")
        assert isinstance(tensor, FakeTensor)
        with pytest.raises(UnknownValueError, match=r"shape \(\)"):
            tensor.sum().item()
        with pytest.raises(UnknownValueError, match=r"shape \(4,\)"):
            tensor.cpu().numpy()

    @pytest.mark.parametrize("device", ["cuda", "cuda:0", torch.device("cuda"), 0])
    def test_every_way_to_the_card(self, device: str | torch.device | int) -> None:
        host = torch.ones(2, dtype=torch.float64)
        for there in (host.to(device), host.cuda(), host.to(device, torch.float16), host.to(device=device)):
            assert str(there.device) == "cuda:0"
            assert there.is_cuda
        assert str(torch.as_tensor(host, device="cuda").device) == "cuda:0"
        assert str(torch.tensor([1.0], device="cuda").device) == "cuda:0"

    def test_a_tensor_that_is_there_is_not_copied(self, mode: FakeCudaMode) -> None:
        there = torch.ones(2, device="cuda")
        events = len(mode.recorder.events)
        assert there.to("cuda") is there
        assert there.cuda() is there
        assert there.to(torch.device("cuda", 0), torch.float32) is there
        assert torch.as_tensor(there, device="cuda") is there
        assert len(mode.recorder.events) == events
        copy = there.to("cuda", copy=True)
        assert copy is not there
        assert str(copy.device) == "cuda:0"
        assert len(mode.recorder.events) == events + 1

    def test_a_missing_card_is_refused(self) -> None:
        with pytest.raises(UnsupportedError, match=r"cuda:1, but only one card is simulated"):
            torch.ones(2, device="cuda:1")


def test_a_storage_that_is_resized_is_heard(mode: FakeCudaMode) -> None:
    tensor = torch.empty(256, device="cuda")
    storage = tensor.untyped_storage()
    assert mode.recorder.block_of(tensor) == 0
    storage.resize_(0)
    assert mode.recorder.block_of(tensor) is None
    assert mode.recorder.live_bytes == 0
    storage.resize_(2048)
    storage.resize_(1024)
    tensor.add_(1)
    assert (mode.recorder.events, mode.recorder.sizes) == ([0, ~0, 1, 2, ~1], [1024, 2048, 1024])
    mode.recorder.begin(lambda: "load")
    assert mode.recorder.sizes == [1024]
    storage.resize_(0)
    mode.recorder.begin(lambda: "load")
    del tensor, storage
    assert (mode.recorder.events, mode.recorder.sizes) == ([], [])


def test_a_trace_begins_with_what_is_alive(mode: FakeCudaMode) -> None:
    older, newer = torch.empty(3, device="cuda"), torch.empty(5, device="cuda")
    mode.recorder.begin(lambda: "model")
    assert mode.recorder.sizes == [12, 20]
    del older
    mode.recorder.mark_update()
    trace = mode.recorder.trace((1,))
    assert (trace.events, trace.last_update, trace.phases) == ((0, 1, ~0), 3, ((0, "model"),))
    del newer
    assert TraceParts(parts=(2, 2)).read_reply(reply_to_json(trace)) == trace


@pytest.mark.usefixtures("mode")
def test_parameters_are_exchanged_and_stay_tied() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.BatchNorm1d(4))
    model[1].weight = model[0].weight
    setattr(model[0].weight, "no_decay", True)  # noqa: B010
    model[0].bias.requires_grad_(False)
    model.to("cuda")
    assert model[1].weight is model[0].weight
    assert isinstance(model[0].weight, nn.Parameter)
    assert vars(model[0].weight)["no_decay"] is True
    assert [p.requires_grad for p in model.parameters()] == [True, False, True, True, True]
    assert {str(t.device) for t in model.state_dict().values()} == {"cuda:0"}
    model.half()
    assert model[1].weight is model[0].weight
    assert model[0].weight.dtype == torch.float16
    assert model.get_buffer("2.num_batches_tracked").dtype == torch.int64


@pytest.mark.parametrize("name", ["_group_tensors_by_device_and_dtype", "_conv_determine_backend_memory_format"])
def test_a_torch_that_changed_is_refused_and_not_mispredicted(
    name: str, simulated: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(torch._C, name)
    failure = simulated("def model(): return nn.Linear(8, 4)")(Inspect())
    assert failure.fault == "user"
    assert f"torch {torch.__version__} has no torch._C.{name}" in failure.message


def test_sets_have_the_order_in_which_they_were_filled() -> None:
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(50)))
    with simulate(find_card("rtx3090")):
        modules, parameters = set(model), set(model.parameters())
        assert list(modules) == list(model)
        assert [id(each) for each in parameters] == [id(each) for each in model.parameters()]
        model.to("cuda")
        assert {*model.parameters()} == {*reversed(list(model.parameters()))}
        linear = model[7]
        del model[7], modules, parameters
        gc.collect()
        assert linear in {linear: None}
    assert hash(linear) == object.__hash__(linear)
    assert hash(linear.weight) == id(linear.weight)


class Cycle:
    def __init__(self) -> None:
        self.itself = self


@pytest.mark.parametrize("enabled", [True, False])
def test_who_enables_it_collects_nothing(enabled: bool) -> None:
    thresholds = gc.get_threshold()
    if not enabled:
        gc.disable()
    try:
        with manual_garbage_collection():
            gc.enable()
            first = weakref.ref(Cycle())
            cycles = [Cycle() for _ in range(3 * max(thresholds[0], 1000))]
            assert first() is not None
            gc.collect()
            assert first() is None
        assert (gc.isenabled(), gc.get_threshold(), len(cycles) > 0) == (enabled, thresholds, True)
    finally:
        gc.enable()


def test_what_is_written_to_a_given_tensor_takes_no_memory_each_time(mode: FakeCudaMode) -> None:
    rows, columns, held = (torch.empty(shape, device="cuda") for shape in ((600, 10), (10, 700), (600, 700)))
    count = len(mode.recorder.sizes)
    for _ in range(2):  # Later calls are answered by a cache.
        torch.mm(rows, columns, out=held)
    assert held.nbytes not in mode.recorder.sizes[count:], "nothing but cuBLAS's workspaces is allocated"


def test_another_layout_stays_on_the_card_while_a_model_is_built_lazily(mode: FakeCudaMode) -> None:
    with mode.building_lazily():
        layer = nn.Conv2d(64, 512, 3).to("cuda")
        layer = layer.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    assert layer.weight.device.type == "cuda"
    assert layer.weight.is_contiguous(memory_format=torch.channels_last)

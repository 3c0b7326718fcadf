"""`autoaccum.verify`: the verdict, the ways to give a workload, what it leaves untouched, and how it fails."""

from __future__ import annotations

import copy
import dataclasses
import random
import signal
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import small_verified as small
import torch
from factories import codes
from state_digests import state_digest
from torch import Tensor, nn
from torch.nn import functional

from autoaccum.api import verify
from autoaccum.errors import UsageError, WorkloadError
from autoaccum.sources.workload import Workload
from autoaccum.verification.fixture import Fixture
from autoaccum.verification.paired_runs import PairedRuns
from autoaccum.verification.verification_result import Compared, VerificationStarted

WORKLOAD = Workload(model=small.dropped, batch=small.pairs, criterion=nn.CrossEntropyLoss(), name="small")


def test_a_sound_workload_is_equivalent() -> None:
    events: list[Any] = []
    found = verify(WORKLOAD, on_event=events.append)
    assert found.equivalent
    assert not found.causes
    assert (found.target_batch, found.micro_batch, found.precision, found.device) == (16, 4, "fp64", "cpu")
    assert [(one.window, one.micro_batches) for one in found.comparisons] == [("whole", (4, 4, 4, 4)), ("last", (4, 3))]
    assert [one.quantity for one in found.comparisons[0].differences] == ["loss", "gradients", "buffers"]
    assert all(one.error < 1e-14 for comparison in found.comparisons for one in comparison.differences)
    assert found.tolerance == 1e-10
    assert found.workload["name"] == "small"
    assert found.workload["parameters"] == 75
    assert [type(event) for event in events] == [VerificationStarted, Compared, Compared]


def test_the_reference_is_plain_pytorch_in_float64() -> None:
    model, batch = small.Mlp(), small.pairs(8)
    made = Workload(model=model, batch=small.pairs, loss=small.class_loss)
    full = PairedRuns(Fixture(made), batch, (3, 3, 2)).pair().full
    reference = copy.deepcopy(model).double()
    loss = small.class_loss(reference, (batch[0].double(), batch[1]))
    torch.autograd.backward(loss)
    assert full.loss == pytest.approx(float(loss.detach()), rel=1e-14)
    for name, parameter in reference.named_parameters():
        torch.testing.assert_close(full.gradients[name], parameter.grad, rtol=1e-12, atol=1e-16)


def test_a_file_is_verified(tmp_path: Path) -> None:
    path = tmp_path / "net.py"
    path.write_text(
        "import torch\nfrom torch import nn\nfrom itertools import accumulate\ntorch.manual_seed(3)\n"
        "def model(): return nn.Linear(2, 1)\ncriterion = nn.MSELoss()\n"
        "def batch(size): return torch.randn(size, 2), torch.randn(size, 1)\n"
    )
    before = torch.get_rng_state()
    found = verify(path, target_batch=4, micro_batch=2)
    assert found.equivalent
    assert found.workload["reference"] == str(path)
    assert [comparison.method for comparison in found.comparisons] == ["accumulator", "accumulator"]
    assert torch.equal(before, torch.get_rng_state())


def test_a_dataset_gives_the_batch_where_there_is_none() -> None:
    dataset = [(torch.randn(small.FEATURES), index % 3) for index in range(40)]
    found = verify(Workload(model=small.Mlp, dataset=dataset, criterion=nn.CrossEntropyLoss()), target_batch=8)
    assert found.equivalent
    assert found.workload["longest_of"] == 32


def test_what_does_not_run_in_float64_is_verified_in_float32() -> None:
    class Narrow(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            if x.dtype != torch.float32:
                raise TypeError("this kernel takes float32")
            return x * 2

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor) -> Any:
            return gradients[0] * 2

    def loss(model: nn.Module, batch: Any) -> Tensor:
        narrow: Any = Narrow
        return functional.cross_entropy(narrow.apply(model(batch[0])), batch[1])

    workload = Workload(model=small.Mlp, batch=small.pairs, loss=loss)
    found = verify(workload)
    assert (found.equivalent, found.precision) == (True, "fp32")
    assert codes(found.notes) == ["verified_in_float32"]
    assert "this kernel takes float32" in found.notes[0].facts["error"]
    with pytest.raises(WorkloadError, match="this kernel takes float32"):
        verify(workload, precision="fp64")


def test_packed_weights_are_verified_in_float32() -> None:
    """Kernels that unpack weights to a narrow dtype leave memory unset where one asks for float64."""

    class Packed(nn.Linear):
        def __init__(self) -> None:
            super().__init__(4, 4)
            self.codes = nn.Parameter(torch.randint(-8, 8, (4, 4), dtype=torch.int8), requires_grad=False)

        def forward(self, x: Tensor) -> Tensor:
            assert self.weight.dtype == torch.float32
            return super().forward(x) @ self.codes.to(x.dtype)

    workload = Workload(
        model=Packed, batch=lambda size: (torch.randn(size, 4), torch.randn(size, 4)), loss=functional.mse_loss
    )
    found = verify(workload)
    assert (found.equivalent, found.precision) == (True, "fp32")
    assert "codes holds packed weights (of torch.int8)" in found.notes[0].facts["error"]


def _live() -> tuple[nn.Module, torch.optim.Optimizer, nn.Module, Any]:
    """A model in training, its optimizer with state, and a loss that holds a teacher with a buffer of its own."""
    torch.manual_seed(0)
    model, teacher = small.dropped(), nn.Sequential(nn.Linear(small.FEATURES, 3), nn.BatchNorm1d(3))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)

    def loss(network: nn.Module, batch: Any) -> Tensor:
        wanted = teacher(batch[0].to(next(teacher.parameters()).dtype)).detach().to(batch[0])
        return functional.mse_loss(network(batch[0]), wanted)

    torch.autograd.backward(loss(model, small.pairs(8)))
    optimizer.step()
    return model, optimizer, teacher, loss


def _digest(model: nn.Module, optimizer: torch.optim.Optimizer, teacher: nn.Module) -> str:
    return state_digest(model, optimizer, criterion=teacher)


@pytest.mark.slow
def test_live_objects_are_verified_and_nothing_of_them_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer, teacher, loss = _live()
    monkeypatch.chdir(Path(__file__).parent)
    before = _digest(model, optimizer, teacher)
    modes = torch.is_grad_enabled(), torch.get_default_dtype()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = verify(model=model, batch=small.pairs, loss=loss, target_batch=8)
    assert not caught
    assert not found.equivalent, "the teacher's BatchNorm sees the micro-batch"
    assert found.workload["reference"] == "Sequential (made in code)"
    assert _digest(model, optimizer, teacher) == before
    assert (torch.is_grad_enabled(), torch.get_default_dtype()) == modes


def test_a_failure_leaves_nothing_behind_either() -> None:
    model, optimizer, teacher, loss = _live()
    before = _digest(model, optimizer, teacher)
    calls = []

    def failing(network: nn.Module, batch: Any) -> Tensor:
        calls.append(len(batch[0]))
        random.random()
        np.random.rand()
        teacher(torch.randn(4, small.FEATURES))
        if len(calls) > 2:
            raise ValueError("on purpose")
        result: Tensor = loss(network, batch)
        return result

    with pytest.raises(WorkloadError, match="on purpose") as raised:
        verify(model=model, batch=small.pairs, loss=failing, target_batch=8, precision="fp32")
    assert "test_verification_setup.py" in (raised.value.user_traceback or "")
    assert _digest(model, optimizer, teacher) == before


def _updating(model: nn.Module, micro_batches: list[Any]) -> None:
    for parameter in model.parameters():
        parameter.data.add_(1)


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"batch": lambda size: small.pairs(size + 1)}, r"batch\(16\) returned 17 samples"),
        ({"criterion": lambda outputs, targets: outputs.sum() * float("nan")}, r"the loss of batch\(16\) is nan: look"),
        (
            {"criterion": lambda outputs, targets: (outputs * 0).abs().sqrt().sum()},
            "gradient of .* is not finite: look",
        ),
        ({"model": lambda: nn.Identity()}, "none of the 0 parameters"),
        ({"accumulate": 3}, "accumulate is 3: write def accumulate"),
        ({"accumulate": _updating}, "has changed the parameters: leave the gradient in .grad"),
        (
            {"criterion": None, "loss": lambda m, b: m(b[0]).mean(), "weight": lambda b: 0},
            "weight.* of 16 samples is 0",
        ),
    ],
    ids=["size", "nan", "infinite", "parameters", "accumulate", "an update", "no weight"],
)
def test_what_cannot_be_verified_is_said(changed: dict[str, Any], told: str) -> None:
    with pytest.raises(WorkloadError, match=told):
        verify(dataclasses.replace(WORKLOAD, **changed))


def test_a_single_sample_and_batchnorm_is_reported_with_the_way_out() -> None:
    workload = dataclasses.replace(WORKLOAD, model=lambda: nn.Sequential(small.Mlp(), nn.BatchNorm1d(3)))
    with pytest.raises(WorkloadError, match="if BatchNorm cannot run a single sample, give --batchnorm exact"):
        verify(workload, target_batch=4, micro_batch=1)
    found = verify(workload, target_batch=4, micro_batch=2)
    assert [one.window for one in found.comparisons] == ["whole"]
    assert [(note.code, note.facts["parts"]) for note in found.notes] == [("window_left_out", [2, 1])]


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({}, 'there is nothing to verify: give one: verify("model.py", ...)'),
        ({"workload": WORKLOAD, "model": small.Mlp()}, "a workload is given, and model too"),
        ({"model": small.Mlp()}, "model given, batch missing"),
        ({"target_batch": "16"}, "target_batch is '16': give a whole number"),
        ({"target_batch": 1}, "micro_batch is 1, target_batch 1: nothing accumulates: give a target batch of at least"),
        ({"precision": "tf32"}, "there is no precision 'tf32': choose fp64 or fp32"),
        ({"device": "auto"}, "there is no device 'auto' to verify on: take cpu, cuda or cuda:N"),
        ({"device": "tpu"}, "there is no device 'tpu'"),
        ({"workload": WORKLOAD, "world_size": 17}, "a rank has no sample: give a larger target batch"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, dict) else "",
)
def test_wrong_usage_is_refused(given: dict[str, Any], told: str) -> None:
    with pytest.raises(UsageError) as raised:
        verify(**given)
    assert told in str(raised.value)


def _exiting(*_: Any) -> Any:
    sys.exit(0)


@pytest.mark.parametrize(
    ("changed", "doing"),
    [
        ({"model": _exiting}, r"model\(\)"),
        ({"batch": _exiting}, r"batch\(16\)"),
        ({"criterion": None, "loss": _exiting}, "an update in parts of 4"),
        ({"accumulate": _exiting}, r"accumulate\(\)"),
    ],
    ids=["model", "batch", "loss", "accumulate"],
)
def test_a_sys_exit_of_the_users_verifies_nothing(changed: dict[str, Any], doing: str) -> None:
    with pytest.raises(WorkloadError, match=rf"^{doing} called sys.exit\(0\)$"):
        verify(dataclasses.replace(WORKLOAD, **changed))


def test_an_interruption_ends_it() -> None:
    def loss(model: nn.Module, pair: Any) -> Tensor:
        if len(pair[0]) == 4:  # A part: within the Accumulator's step.
            signal.raise_signal(signal.SIGINT)
        return nn.functional.cross_entropy(model(pair[0]), pair[1])

    with pytest.raises(KeyboardInterrupt):
        verify(model=small.Mlp(), batch=small.pairs, loss=loss)

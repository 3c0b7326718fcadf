"""The loop around the step: held outputs, the EMA of odd models, an evaluation that changes nothing."""

from __future__ import annotations

import threading
import weakref
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from state_digests import state_digest
from torch import Tensor, nn

from autoaccum.devices.loop_memory import EmaModel, HoldingObjective, evaluate
from autoaccum.devices.trial_run import TrialRun
from autoaccum.errors import WorkloadError
from autoaccum.sources.objective import resolve_objective
from autoaccum.sources.workload import Workload

SIZE = 4


@dataclass
class Record:
    logits: Tensor
    name: str = "record"


FORMS: dict[str, Any] = {
    "tensor": (lambda x: x, lambda outputs: outputs),
    "tuple": (lambda x: (x, [x.sum()]), lambda outputs: outputs[0]),
    "dict": (lambda x: {"logits": x, "none": None}, lambda outputs: outputs["logits"]),
    "dataclass": (Record, lambda outputs: outputs.logits),
}


class Net(nn.Module):
    def __init__(self, form: str = "tensor") -> None:
        super().__init__()
        self.linear, self.form = nn.Linear(3, 5), form

    def forward(self, x: Tensor) -> Any:
        return FORMS[self.form][0](self.linear(x))


def batch(size: int) -> Any:
    return torch.randn(size, 3), torch.randint(0, 5, (size,))


def make(form: str = "tensor", **changes: Any) -> Workload:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        return nn.functional.cross_entropy(FORMS[form][1](model(batch[0])), batch[1])

    return Workload(**{"model": lambda: Net(form), "batch": batch, "loss": loss, **changes})


@pytest.mark.parametrize("form", FORMS)
def test_the_outputs_of_the_last_micro_batch_are_kept_whatever_their_form(form: str) -> None:
    trial_run = TrialRun(make(form, hold_outputs=True), 6)
    trial_run.run((3, 2))
    assert [2, 5] in [list(tensor.shape) for tensor in trial_run.outputs]
    assert trial_run.outputs[-1].shape == (), "the loss"
    assert trial_run.averages == []


def test_an_output_is_freed_once_its_successor_is_there() -> None:
    seen: list[weakref.ref[Tensor]] = []
    alive: list[list[bool]] = []

    def loss(model: nn.Module, batch: Any) -> Tensor:
        alive.append([one() is not None for one in seen[-2:]])
        first, second = model(batch[0]), model(batch[0])
        alive.append([one() is not None for one in seen[-2:]])
        seen.extend([weakref.ref(first), weakref.ref(second)])
        return torch.as_tensor((first + second).mean())

    objective = HoldingObjective.of(resolve_objective(loss))
    model = Net()
    for _ in range(3):
        objective.terms(model, batch(2))
    assert alive == [[], [], [True, True], [False, False], [True, True], [False, False]]
    assert len(objective.calls) == 2
    assert not model._forward_hooks


def test_a_model_that_is_not_called_has_no_outputs_to_keep() -> None:
    def loss(model: Any, batch: Any) -> Tensor:
        return torch.as_tensor(model.forward(batch[0])).mean()

    TrialRun(make(loss=loss), 4).run((2, 2))
    with pytest.raises(WorkloadError, match="no outputs to keep: the loss does not call the model itself"):
        TrialRun(make(loss=loss, hold_outputs=True), 4).run((2, 2))


def test_an_average_has_the_weights_and_buffers_of_the_model() -> None:
    model: Any = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 5))
    model[1].weight = model[0].weight
    model[3].requires_grad_(False)
    averages = EmaModel(model)
    parameters = list(model.parameters())
    own = [*parameters, *model.buffers()]
    assert [(tensor.shape, tensor.dtype) for tensor in averages.tensors] == [(own.shape, own.dtype) for own in own]
    assert not {tensor.data_ptr() for tensor in averages.tensors} & {tensor.data_ptr() for tensor in own}
    averages.update()
    before = [tensor.detach().clone() for tensor in parameters]
    with torch.no_grad():
        torch._foreach_add_(parameters, 1.0)
    averages.update()
    for average, old in zip(averages.tensors, before, strict=False):
        torch.testing.assert_close(average.detach(), old + 0.001, rtol=0, atol=1e-5)


def test_a_model_that_cannot_be_copied_has_no_average() -> None:
    def model() -> Any:
        made: Any = Net()
        made.lock = threading.Lock()
        return made

    with pytest.raises(WorkloadError, match="Net, cannot be copied for its average .*train without ema"):
        TrialRun(make(model=model, ema=True), 4).run((2, 2))


def test_an_evaluation_is_two_passes_without_gradients_whose_outputs_outlive_them() -> None:
    seen: list[weakref.ref[Tensor]] = []
    seen_calls: list[Any] = []

    def run(model: nn.Module, batch: Any) -> Tensor:
        seen_calls.append((model.training, torch.is_grad_enabled(), len(batch[0]), [one() is not None for one in seen]))
        outputs = torch.as_tensor(model(batch[0]))
        seen.append(weakref.ref(outputs))
        return outputs

    model = Net()
    evaluate(make(evaluation_batch=SIZE, evaluate=run), model)
    assert seen_calls == [(False, False, SIZE, []), (False, False, SIZE, [True])]
    assert [one() for one in seen] == [None, None]
    assert model.training
    assert torch.is_grad_enabled()


@pytest.mark.parametrize("fails", [False, True])
def test_an_evaluation_changes_nothing(fails: bool) -> None:
    model: Any = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Dropout(0.5))
    model[1].eval()
    model.register_forward_hook(lambda *_: None)
    optimizer = torch.optim.SGD(model.parameters())

    def run(model: nn.Module, batch: Any) -> Any:
        model(batch[0])
        if fails:
            model.train()
            raise ValueError("no")

    whole = batch(SIZE)
    before = state_digest(model, optimizer), [module.training for module in model.modules()], len(model._forward_hooks)
    try:
        evaluate(make(evaluation_batch=SIZE, evaluate=run, batch=lambda size: whole), model)
    except ValueError:
        assert fails
    after = state_digest(model, optimizer), [module.training for module in model.modules()], len(model._forward_hooks)
    assert after == before


def test_a_loss_for_training_only_is_distinguished_from_an_evaluation_that_fails() -> None:
    def loss(model: nn.Module, batch: Any) -> Any:
        if not model.training:
            raise KeyError("losses")
        return model(batch[0]).mean()

    message = r"the loss in eval mode \(there is no def evaluate\(model, batch\)\) raised KeyError"
    with pytest.raises(WorkloadError, match=message):
        evaluate(make(loss=loss, evaluation_batch=SIZE), Net())
    evaluate(make(loss=loss, evaluation_batch=SIZE, evaluate=lambda model, batch: model(batch[0])), Net())


def test_the_evaluation_stands_between_updates() -> None:
    seen_calls: list[Any] = []
    trial_run: TrialRun
    trial_run = TrialRun(
        make(
            ema=True,
            evaluation_batch=SIZE,
            evaluate=lambda model, batch: seen_calls.append(
                (trial_run.phase, len(trial_run.averages), [one.grad for one in model.parameters()])
            ),
            optimizer="adam",
        ),
        6,
        before_update=lambda: seen_calls.append("start"),
    )
    trial_run.run((3, 3))
    passes = [("evaluation", 2, [None, None])] * 2
    assert seen_calls == ["start", *passes, "start", "start"]
    assert trial_run.phase == "update"

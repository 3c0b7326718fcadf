"""Live objects and a Workload made in code are planned in processes of their own: nothing here changes or is asked."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from factories import Classifier, class_loss, labelled_rows
from on_ranks import on_ranks
from state_digests import state_digest
from torch import Tensor, nn

import autoaccum
from autoaccum.errors import NotMeasuredError, UsageError, WorkloadError

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("warm_children")]


class Counting(Classifier):
    """Counts its calls in an attribute, which no rollback covers."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x)


def rows(samples: int) -> tuple[Tensor, Tensor]:
    return labelled_rows(samples, torch.float32)


def plan(model: nn.Module, loss: Any = class_loss, **asked: Any) -> autoaccum.Plan:
    given: dict[str, Any] = {"batch": rows, "device": "cpu", "memory": "64MiB", "target_batch": 16}
    return autoaccum.plan(model=model, loss=loss, **given | asked)


def refuse(model: nn.Module, batch: Any) -> Tensor:
    raise ValueError("on purpose")


def interrupt(event: Any) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("changed", "ending"),
    [({}, None), ({"loss": refuse}, WorkloadError), ({"on_event": interrupt}, KeyboardInterrupt)],
    ids=["plan", "failure", "interrupt"],
)
def test_nothing_of_the_caller_s_changes(changed: dict[str, Any], ending: type[BaseException] | None) -> None:
    model = Counting(norm=True, dropout=0.5).eval()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    torch.autograd.backward(class_loss(model, rows(4)))
    optimizer.step()
    before, handlers = state_digest(model, optimizer), threading.active_count()
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait, daemon=True)
    thread.start()
    try:
        if ending is None:
            made = plan(model, optimizer=optimizer, **changed)
            assert (made.kind, made.workload.optimizer) == ("measured", "SGD")
            assert made.workload.reference == "Counting (made in code)"
            assert made.trials[-1].fresh
        else:
            with pytest.raises(ending):
                plan(model, optimizer=optimizer, **changed)
    finally:
        stop.set()
        thread.join()
    assert (state_digest(model, optimizer), model.calls, threading.active_count()) == (before, 1, handlers)


def test_the_trials_have_the_values_of_the_model() -> None:
    """A loss that is finite with these weights only."""

    def loss(model: nn.Module, batch: Any) -> Tensor:
        return class_loss(model, batch) / (model.first.weight == 0.5).all()  # type: ignore[union-attr]

    model = Classifier()
    nn.init.constant_(model.first.weight, 0.5)
    model.first.weight.requires_grad_(False)
    assert plan(model, loss).micro_batch == 16
    nn.init.constant_(model.first.weight, 0.25)
    with pytest.raises(WorkloadError):
        plan(model, loss)


def test_a_trial_that_hangs_is_ended() -> None:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        if len(batch[0]) == 16:
            threading.Event().wait(600)
        return class_loss(model, batch)

    with pytest.raises(NotMeasuredError, match="the time limit of 6 s"):
        plan(Classifier(), loss, time_limit=6)


def plan_on_a_rank() -> tuple[int, int, int, str]:
    torch.manual_seed(0)
    made = plan(Classifier(), max_micro_batch=4)
    return made.micro_batch, made.world_size, len(made.devices or ()), made.digest()


def test_two_ranks_plan_together() -> None:
    first, second = on_ranks(2, plan_on_a_rank, timeout=120, patience=100)
    assert first == second
    assert first[:3] == (4, 2, 2)


def test_what_cannot_be_sent_is_named_with_the_way_out() -> None:
    model: Any = Classifier()
    model.last.lock = threading.Lock()
    with pytest.raises(UsageError, match=r"^model.last.lock cannot .*: write model, batch and loss into a file"):
        plan(model)
    model = Classifier()
    with pytest.raises(UsageError, match=r"loss uses the model itself, .* it is called with"):
        plan(model, lambda _, batch: class_loss(model, batch))

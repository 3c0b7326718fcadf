"""Losses that compare samples: computed once, of the outputs of the whole effective batch."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from memory_errors import OutOfMemoryAt
from torch import Tensor, nn
from torch.nn import functional
from whole_batches import Recorded, check_buffers, check_equal

from autoaccum.accumulation.accumulator import Accumulator
from autoaccum.accumulation.step_result import AccumulationWarning
from autoaccum.accumulation.whole_batch.coupled_loss import join_outputs
from autoaccum.errors import UsageError, WorkloadError

WIDTH = 6
CUTS = (slice(0, 6), slice(6, 10))


class Towers(nn.Module):
    """Two towers with a tied weight; the temperature is a number, the bias a row."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, 8), nn.Linear(WIDTH, 8)
        self.second.weight = self.first.weight
        self.norm: nn.Module = nn.Identity()
        self.temperature, self.bias = nn.Parameter(torch.tensor(0.5)), nn.Parameter(torch.tensor([0.1]))

    def forward(self, left: Tensor, right: Tensor) -> dict[str, Tensor]:
        left, right = self.norm(self.first(left)), self.second(right)
        return {"left": left, "right": right, "temperature": self.temperature, "bias": self.bias}


class Stateful(Towers):
    """Draws random numbers, changes one buffer and replaces another; its outputs depend on both."""

    mean: Tensor
    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.drop = nn.BatchNorm1d(8), nn.Dropout(0.3)
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("seen", torch.tensor(1))

    def forward(self, left: Tensor, right: Tensor) -> dict[str, Tensor]:
        self.mean = 0.9 * self.mean + 0.1 * left.mean(0)
        self.seen += len(left)
        found = super().forward(self.drop(left) - self.mean, right / self.seen)
        return found | {"right": found["right"] * random.random()}


def outputs(model: nn.Module, batch: Any) -> Any:
    return model(batch["left"], batch["right"])


def info_nce(outputs: Any, batch: Any) -> Tensor:
    left, right = functional.normalize(outputs["left"]), functional.normalize(outputs["right"])
    logits = left @ right.T * outputs["temperature"].exp() + outputs["bias"]
    return functional.cross_entropy(logits, torch.arange(len(logits)))


def supervised(outputs: Any, batch: Any) -> dict[str, Tensor]:
    z = functional.normalize(outputs["left"])
    logits = (z @ z.T / 0.5).masked_fill(torch.eye(len(z), dtype=torch.bool), -1e9)
    same = (batch["labels"][:, None] == batch["labels"]) & ~torch.eye(len(z), dtype=torch.bool)
    contrast = -(logits.log_softmax(1) * same).sum() / same.sum()
    return {"contrast": contrast, "pull": outputs["right"].square().mean()}


def hard_triplets(outputs: Any, batch: Any) -> Tensor:
    distances = torch.cdist(outputs["left"], outputs["left"])
    same = batch["labels"][:, None] == batch["labels"]
    furthest = distances.masked_fill(~same, -1).amax(1)
    nearest = distances.masked_fill(same, 1e9).amin(1)
    return functional.relu(furthest - nearest + 1).mean()


def barlow_twins(outputs: Any, batch: Any) -> Tensor:
    left, right = ((z - z.mean(0)) / z.std(0) for z in (outputs["left"], outputs["right"]))
    correlation = left.T @ right / len(left)
    return torch.as_tensor((correlation - torch.eye(8)).square().sum())


def normalised(outputs: Any, batch: Any) -> Tensor:
    errors = (outputs["left"].mean(1) - batch["targets"]).square()
    return torch.as_tensor(errors.sum() / (batch["targets"].abs().sum() + 1))


LOSSES: list[Callable[[Any, Any], Any]] = [info_nce, supervised, hard_triplets, barlow_twins, normalised]


def batch_of(size: int = 10) -> dict[str, Any]:
    views = {name: torch.randn(size, WIDTH, dtype=torch.float64) for name in ("left", "right")}
    labels = torch.arange(size) % 3
    return views | {"labels": labels, "targets": torch.randn(size, dtype=torch.float64), "source": "a test"}


def total(loss: Callable[[Any, Any], Any]) -> Callable[[nn.Module, Any], Tensor]:
    def whole(model: nn.Module, batch: Any) -> Tensor:
        value = loss(outputs(model, batch), batch)
        return torch.as_tensor(sum(value.values()) if isinstance(value, dict) else value)

    return whole


def recorded_of(model: nn.Module, loss: Any = info_nce, micro_batch: int = 3, **options: Any) -> Recorded:
    chosen: dict[str, Any] = {"outputs": outputs, "coupled": True, **options}
    return Recorded(model, coupled_loss=loss, micro_batch=micro_batch, **chosen)


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("micro_batch", [1, 4])
@pytest.mark.parametrize("batchnorm", ["micro", "exact"])
def test_the_gradient_is_the_full_batch_s(loss: Any, micro_batch: int, batchnorm: Any) -> None:
    model, batch = Towers(), batch_of()
    if batchnorm == "exact":
        model.norm = nn.BatchNorm1d(8)
    recorded = recorded_of(model.double(), loss, micro_batch, batchnorm=batchnorm, clip_norm=1e9)
    result = recorded.step(batch)
    check_equal(recorded, model, total(loss), batch)
    assert result.loss == pytest.approx(float(total(loss)(model, batch).detach()), abs=1e-12)
    assert set(result.terms) == ({"contrast", "pull"} if loss is supervised else {"loss"})


def test_a_window_is_one_batch() -> None:
    model, batch = Towers().double(), batch_of()
    window = [{name: value if name == "source" else value[cut] for name, value in batch.items()} for cut in CUTS]
    recorded = recorded_of(model)
    assert recorded.accumulator.step_parts(window).micro_batches == (3, 3, 2, 2)
    check_equal(recorded, model, total(info_nce), batch)
    window[1]["labels"] = window[1]["labels"][:, None]
    with pytest.raises(WorkloadError, match=r"batch\['labels'\] of several batches cannot be joined"):
        recorded.accumulator.step_parts(window)


@pytest.mark.parametrize("micro_batch", [2, 4])
def test_both_passes_draw_the_same_and_change_the_state_once(micro_batch: int) -> None:
    """The two passes are what one pass by hand is, in gradients, buffers and random states."""
    model, batch = Stateful().double(), batch_of()
    recorded = recorded_of(model, micro_batch=micro_batch)
    torch.manual_seed(3)
    random.seed(3)
    with pytest.warns(UserWarning, match="BatchNorm normalises by the micro-batch in norm"):
        sizes = list(recorded.step(batch).micro_batches)
    state, number = torch.get_rng_state(), random.random()
    torch.manual_seed(3)
    random.seed(3)
    by_hand = copy.deepcopy(model)
    lefts, rights = torch.split(batch["left"], sizes), torch.split(batch["right"], sizes)
    parts = [by_hand(left, right) for left, right in zip(lefts, rights, strict=True)]
    joined = parts[0] | {name: torch.cat([part[name] for part in parts]) for name in ("left", "right")}
    info_nce(joined, batch).backward()  # type: ignore[no-untyped-call]
    assert torch.equal(state, torch.get_rng_state())
    assert number == random.random()
    check_buffers(recorded.model, by_hand)
    for name, parameter in by_hand.named_parameters():
        torch.testing.assert_close(recorded.gradients[name], parameter.grad, rtol=0, atol=1e-12)


class Contrastive(nn.Module):
    """A criterion with a weight and a BatchNorm of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.norm = nn.Parameter(torch.tensor(2.0)), nn.BatchNorm1d(8)
        self.double()

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        z = functional.normalize(self.norm(outputs)) * self.scale
        return functional.mse_loss(z @ z.T, (targets[:, None] == targets).to(z.dtype))


@pytest.mark.parametrize("batchnorm", ["micro", "exact"])
def test_a_criterion_needs_no_more(batchnorm: Any) -> None:
    model, criterion = nn.Sequential(nn.Linear(WIDTH, 8)).double(), Contrastive()
    whole, batch = copy.deepcopy(criterion), (torch.randn(9, WIDTH, dtype=torch.float64), torch.arange(9) % 3)
    recorded = Recorded(model, criterion=criterion, coupled=True, micro_batch=2, batchnorm=batchnorm)
    recorded.accumulator._updater.optimizer.add_param_group({"params": list(criterion.parameters())})
    if batchnorm == "micro":
        with pytest.warns(UserWarning, match=r"BatchNorm normalises by the micro-batch in criterion\.norm"):
            recorded.step(batch)
    else:
        recorded.step(batch)
    check_equal(recorded, model, lambda model, batch: whole(model(batch[0]), batch[1]), batch)
    check_buffers(criterion, whole)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float16, 5e-3), (torch.bfloat16, 0.02)])
def test_fp16_with_a_scaler_and_half_precision_parameters(dtype: torch.dtype, tolerance: float) -> None:
    is_scaled = dtype == torch.float16
    model, batch = Towers(), {name: batch_of()[name].float() for name in ("left", "right")}
    if not is_scaled:
        model, batch = model.to(dtype), {name: value.to(dtype) for name, value in batch.items()}
    scaled: Any = {"precision": "fp16", "scaler": torch.amp.GradScaler("cpu", init_scale=1024.0), "clip_norm": 1e9}
    recorded = recorded_of(model, **(scaled if is_scaled else {}))

    def loss(model: nn.Module, batch: Any) -> Tensor:
        with torch.autocast("cpu", dtype, enabled=is_scaled):
            return total(info_nce)(model, batch)

    assert recorded.step(batch).updated
    check_equal(recorded, model, loss, batch, tolerance=tolerance)


def split(batch: Any, sizes: list[int]) -> list[Any]:
    lefts, rights = torch.split(batch["left"], sizes), torch.split(batch["right"], sizes)
    return [{"left": left, "right": right} for left, right in zip(lefts, rights, strict=True)]


def test_a_batch_that_the_workload_splits_itself() -> None:
    model, batch = Towers().double(), batch_of()
    recorded = recorded_of(model, micro_batch=4, split=split, size=lambda batch: len(batch["left"]))
    recorded.step(batch)
    check_equal(recorded, model, total(info_nce), batch)
    with pytest.raises(WorkloadError, match="parts made by split.batch, sizes. cannot be joined: make one larger bat"):
        recorded.accumulator.step_parts(split(batch, [5, 5]))


def pair(model: nn.Module, batch: Any) -> Any:
    found = outputs(model, batch)
    return found["left"], found["right"]


def rows_of_two(model: nn.Module, batch: Any) -> Any:
    return [one.repeat_interleave(2, 0) for one in (*pair(model, batch), outputs(model, batch)["left"])]


def contrast_of_pair(outputs: Any, batch: Any) -> Tensor:
    assert [one.ndim for one in outputs[:2]] == [2, 2]
    return torch.as_tensor((outputs[0] @ outputs[1].T).square().mean())


@pytest.mark.parametrize("function", [pair, rows_of_two])
@pytest.mark.parametrize("micro_batch", [1, 2, 5])
def test_tuples_and_lists_are_records(function: Any, micro_batch: int) -> None:
    """A tuple may be as long as a part, and a sample have several rows."""
    model, batch = Towers().double(), batch_of()
    recorded = recorded_of(model, contrast_of_pair, micro_batch, outputs=function)
    recorded.step(batch)
    check_equal(recorded, model, lambda model, batch: contrast_of_pair(function(model, batch), batch), batch)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"loss": lambda model, batch: model(batch).sum()},
            "coupled is set, but the loss is a function of model and",
        ),
        ({"criterion": nn.MSELoss(), "batchnorm": "running"}, 'batchnorm is "running", and parts of the batch need ea'),
        ({"criterion": nn.MSELoss(), "coupled": "twice"}, "coupled is 'twice': give True or False"),
        ({"coupled_loss": info_nce}, "there is coupled_loss, but no outputs: write both"),
        ({"coupled_loss": info_nce, "outputs": outputs, "loss": nn.MSELoss()}, "there are loss and coupled_loss: give"),
    ],
)
def test_what_does_not_go_together_is_refused(options: dict[str, Any], message: str) -> None:
    model = nn.Linear(2, 2)
    chosen: Any = {"coupled": True, "micro_batch": 1} | options
    with pytest.raises((UsageError, WorkloadError), match=message):
        Accumulator(model, torch.optim.SGD(model.parameters()), **chosen)


def test_outputs_that_cannot_be_joined_are_refused() -> None:
    cases: list[tuple[Callable[[Tensor, Tensor], Any], str]] = [
        (lambda left, right: [left] if len(left) == 3 else [left, right], "have different structures, or other"),
        (lambda left, right: left @ left.T, "cannot be joined: Sizes of t"),
        (lambda left, right: [left, len(left)], "an output is 4, the number of samples of a part"),
        (lambda left, right: list(left), "a list of 4 entries for a part of 4 samples, which may be one for each: "),
        (lambda left, right: left.new_ones(7, 2, requires_grad=True), r"4 samples has the shape \[7, 2"),
        (lambda left, right: {0: left.mean()}, "an output is a number that differs between two parts of the batch"),
    ]
    for change, message in cases:

        def function(model: nn.Module, batch: Any, change: Any = change) -> Any:
            return change(*pair(model, batch))

        with pytest.raises(WorkloadError, match=message):
            recorded_of(Towers().double(), lambda z, _: z[0].sum(), 4, outputs=function).step(batch_of())


def test_a_forward_that_changes_what_it_reads_is_warned_of_in_two_passes() -> None:
    class Drifting(Towers):
        def forward(self, *arguments: Any, **named: Any) -> Any:
            with torch.no_grad():
                next(p for p in self.parameters() if p.ndim == 2).data.mul_(0.5)
            return super().forward(*arguments, **named)

    batch = batch_of()
    recorded = recorded_of(Drifting().double(), micro_batch=4)
    with pytest.warns(AccumulationWarning, match="a repeated forward of a micro-batch gives other outputs"):
        recorded.step(batch)


def test_a_summed_coupled_loss_is_computed_of_the_whole_batch() -> None:
    def summed(outputs: Any, batch: Any) -> Tensor:
        return info_nce(outputs, batch) * len(outputs["left"])

    model, batch = Towers().double(), batch_of()
    recorded = recorded_of(model, summed, reduction="sum")
    recorded.step(batch)
    check_equal(recorded, model, total(summed), batch)


def test_memory_that_runs_out_where_outputs_are_joined_is_no_error_of_theirs() -> None:
    parts = [torch.randn(2, 3, requires_grad=True) for _ in range(2)]
    with OutOfMemoryAt(0), pytest.raises(torch.OutOfMemoryError):
        join_outputs(parts, [2, 2])

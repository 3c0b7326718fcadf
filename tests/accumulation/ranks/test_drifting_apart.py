"""Ranks keep equal parameters, or refuse to step: half precision, uneven shares, and what a script does on one rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from on_ranks import on_ranks
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from autoaccum import Accumulator

MIB_OF_FLOATS = 2**18


def pairs(samples: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    torch.manual_seed(seed)
    return torch.randn(samples, 6), torch.randint(0, 5, (samples,))


def make(model: Any = None, loss: Any = None, **options: Any) -> tuple[Any, Accumulator]:
    torch.manual_seed(1)
    model = nn.Linear(6, 5) if model is None else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return model, Accumulator(model, optimizer, loss or nn.CrossEntropyLoss(), micro_batch=4, **options)


class TwoWays(nn.Module):
    """Uses one of two layers, another on each rank."""

    def __init__(self) -> None:
        super().__init__()
        self.ways, self.head = nn.ModuleList([nn.Linear(6, 64), nn.Linear(6, 64)]), nn.Linear(64, 5)

    def forward(self, inputs: Tensor) -> Tensor:
        way = self.ways[dist.get_rank()]
        out: Tensor = self.head(way(inputs).tanh())
        return out


def half_precision(accumulate_in: Any) -> Any:
    torch.manual_seed(0)
    options: dict[str, Any] = {"accumulate_in": accumulate_in, "clip_norm": 0.1}
    model, accumulator = make(TwoWays().bfloat16(), **options)
    norms = []
    for number in range(4):
        inputs, targets = pairs(4 if dist.get_rank() == 0 else 12, 2 * number + dist.get_rank())
        norms.append(accumulator.step((inputs.bfloat16(), targets)).grad_norm)
    return norms, model.state_dict()


@pytest.mark.parametrize("accumulate_in", ["fp32", "parameters"])
def test_half_precision_is_the_same_on_all_ranks_whatever_the_shares(accumulate_in: str) -> None:
    (norms, first), (others, second) = on_ranks(2, half_precision, accumulate_in)
    assert norms == others
    for name, value in first.items():
        assert torch.equal(value, second[name])


def thirds() -> Tensor:
    model, accumulator = make(nn.Linear(6, 5).bfloat16())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()  # So that the update is what is compared, not what it is added to.
    inputs, targets = pairs(12)
    start = 4 * dist.get_rank() if dist.is_initialized() else 0
    mine = slice(start, start + 4) if dist.is_initialized() else slice(None)
    accumulator.step((inputs[mine].bfloat16(), targets[mine]))
    weight: Tensor = model.weight.detach()
    return weight


def test_a_factor_of_a_third_is_not_rounded_to_half_precision() -> None:
    assert torch.equal(thirds(), on_ranks(3, thirds)[0])


class Wide(nn.Module):
    """Has parameters of 8, 8, 10 (unused) and 8 MiB, which make other buckets without the unused one."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.ParameterList([nn.Parameter(torch.zeros(size * MIB_OF_FLOATS)) for size in (8, 8, 10, 8)])

    def forward(self, inputs: Tensor) -> Tensor:
        first, second, _, last = self.wide
        out: Tensor = inputs[:, :5] * (1 + first.sum() + second.sum() + last.sum())
        return out


class Buffers(nn.Module):
    """Has buffers that collectives do not take as they are, other ones on each rank."""

    def __init__(self) -> None:
        super().__init__()
        rank = 1.0 + dist.get_rank()
        for name, value in {
            "one": torch.tensor([rank]).expand(4),
            "expanded": torch.full((3, 1), rank).expand(3, 4),
            "sparse": (torch.eye(3) * rank).to_sparse(),
            "short": torch.full((2,), int(rank), dtype=torch.int16),
            "eight": torch.full((2,), rank).to(torch.float8_e4m3fn),
            "flags": torch.full((2,), rank == 1),
            "none": torch.zeros(0, 3),
            "turned": (torch.arange(6.0) * rank).view(2, 3).t(),
        }.items():
            self.register_buffer(name, value)
        self.layer = nn.Linear(6, 5)


def wide_values() -> list[float]:
    model, accumulator = make(Wide())
    accumulator.step(pairs(8))
    return [one[-1].item() for one in model.parameters()]


def beginnings() -> Any:
    buffers = make(Buffers())[0].state_dict()
    model, head = nn.Linear(6, 6), nn.Linear(6, 5)  # Each rank has its own seed.
    optimizer = torch.optim.SGD([*model.parameters(), *head.parameters()], lr=0.1)

    def loss(model: nn.Module, batch: Any) -> Tensor:
        return nn.functional.cross_entropy(head(model(batch[0])), batch[1])

    Accumulator(model, optimizer, loss, micro_batch=4).step(pairs(8))
    return wide_values(), {name: one.to_dense().float() for name, one in buffers.items()}, head.weight.detach()


def test_ranks_begin_alike_with_all_that_is_trained() -> None:
    (wide, buffers, head), (other_wide, others, other_head) = on_ranks(2, beginnings)
    assert wide == other_wide == pytest.approx(wide_values(), rel=1e-5)
    assert [value != 0 for value in wide] == [True, True, False, True]
    assert torch.equal(head, other_head)
    assert float(buffers["one"][0]) == 1.0
    for name, value in buffers.items():
        assert torch.equal(value, others[name]), name


def step_with(change: Callable[[nn.Sequential, torch.optim.Optimizer], object]) -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    accumulator = Accumulator(model, optimizer, nn.CrossEntropyLoss(), micro_batch=4)
    if dist.get_rank() == 1:
        change(model, optimizer)
    accumulator.step(pairs(8))


def other_parameters() -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
    optimizer = torch.optim.SGD(model[dist.get_rank()].parameters(), lr=0.1)
    Accumulator(model, optimizer, nn.CrossEntropyLoss(), micro_batch=4)


def loss_through_the_wrapper() -> None:
    wrapper = DistributedDataParallel(nn.Linear(6, 5))

    def loss(_: nn.Module, batch: Any) -> Tensor:
        return nn.functional.cross_entropy(wrapper(batch[0]), batch[1])

    make(wrapper, loss)[1].step(pairs(8 - 4 * dist.get_rank()))


def wrapped_for_one() -> None:
    groups = [dist.new_group([rank]) for rank in range(2)]
    make(DistributedDataParallel(nn.Linear(6, 5), process_group=groups[dist.get_rank()]))


REFUSED: dict[str, tuple[Callable[[], object], str]] = {
    "no batch": (lambda: make()[1].step_parts([]), "there is no micro-batch to step with on any rank"),
    "frozen": (lambda: step_with(lambda model, _: model[1].requires_grad_(False)), "parameters are frozen"),
    "frozen another": (
        lambda: step_with(lambda model, _: model[1].bias.requires_grad_(False)),
        "parameters are frozen",
    ),
    "lr": (
        lambda: step_with(lambda _, optimizer: optimizer.param_groups[0].update(lr=0.2)),
        "the optimizer's lr differs between ranks: (['0.1'], ['0.2'])",
    ),
    "state": (
        lambda: step_with(lambda model, optimizer: optimizer.state[next(model.parameters())].update(step=1)),
        "whether the optimizer has state differs between ranks: (False, True)",
    ),
    "another group": (
        lambda: step_with(lambda _, optimizer: optimizer.add_param_group({"params": [torch.ones(2)]})),
        "the number of parameters in the optimizer's groups differs between ranks: ([4], [4, 1])",
    ),
    "other parameters": (other_parameters, "the models of rank "),
    "loss through the wrapper": (loss_through_the_wrapper, "the loss calls DistributedDataParallel, which waits"),
    "wrapped for one": (wrapped_for_one, "DistributedDataParallel has a group of 1 ranks, and there are 2"),
}


def refusals() -> dict[str, str]:
    found = {}
    for name, (call, _) in REFUSED.items():
        try:
            call()
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
    return found


def test_what_would_let_ranks_drift_apart_is_refused_on_all() -> None:
    for found in on_ranks(2, refusals):
        assert list(found) == list(REFUSED)
        for name, (_, message) in REFUSED.items():
            assert found[name].startswith(f"UsageError: {message}")


class Trainer:
    """Keeps the wrapper beside a loss that does not call it."""

    def __init__(self) -> None:
        self.wrapper = DistributedDataParallel(nn.Linear(6, 5))

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return nn.functional.cross_entropy(model(batch[0]), batch[1])


def keeps_the_wrapper() -> tuple[bool, int]:
    trainer = Trainer()
    accumulator = make(trainer.wrapper, trainer.loss)[1]
    updated = accumulator.step(pairs(8 - 4 * dist.get_rank())).updated
    with torch.no_grad():
        trainer.wrapper(pairs(4)[0])  # As an evaluation does, between steps.
    return updated, len(trainer.wrapper._forward_pre_hooks)


def test_a_wrapper_that_the_loss_does_not_call_may_stay_in_reach() -> None:
    assert on_ranks(2, keeps_the_wrapper) == [(True, 0)] * 2

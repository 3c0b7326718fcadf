"""Updates whose samples are of several ranks, by cases of a model, a batch and a loss, and what they come to."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from on_ranks import on_ranks
from torch import Tensor, nn

from autoaccum import Accumulator

SAMPLES = 7
Wrapped = Sequence[tuple[str, Callable[[nn.Module], nn.Module]]]


class Net(nn.Module):
    """Two modules to shard within a third, of sizes that ranks share unevenly; a frozen and an unused one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first, self.second = nn.Linear(6, 7), nn.Sequential(nn.Linear(7, 7), nn.Tanh(), nn.Linear(7, 5))
        self.frozen, self.unused = nn.Linear(7, 7).requires_grad_(False), nn.Linear(2, 2)
        self.norm = nn.BatchNorm1d(6, affine=False).eval()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.second(self.frozen(self.first(self.norm(x)).tanh()))
        return out


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.embed, self.out = nn.Embedding(11, 6), nn.Linear(6, 11, bias=False)
        self.out.weight = self.embed.weight
        self.first = nn.Linear(6, 6)

    def forward(self, tokens: Tensor) -> Tensor:
        out: Tensor = self.out(self.first(self.embed(tokens)))
        return out


def pairs(samples: int) -> tuple[Tensor, Tensor]:
    torch.manual_seed(5)
    return torch.randn(samples, 6, dtype=torch.float64), torch.randint(0, 5, (samples,))


def tokens(samples: int) -> tuple[Tensor, Tensor]:
    torch.manual_seed(6)
    rows = torch.randint(0, 11, (samples, 7))
    targets = rows.clone()
    for row in range(samples):
        targets[row, row % 7 :] = -100  # Row 0 has no token at all.
    return rows, targets


def token_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    counted = batch[1] != -100
    chosen = model(batch[0]).log_softmax(-1).gather(-1, batch[1].clamp(min=0).unsqueeze(-1)).squeeze(-1)
    loss: Tensor = -(chosen * counted).sum() / counted.sum()  # Of no token, loss and gradient are NaN.
    return loss


def token_count(batch: tuple[Tensor, Tensor]) -> Tensor:
    return (batch[1] != -100).sum()


def terms(model: nn.Module, batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
    outputs = model(batch[0])
    return {"class": nn.functional.cross_entropy(outputs, batch[1]), "size": outputs.square().mean()}


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Any], dict[str, Any]]] = {
    "mean": (Net, pairs, {"loss": nn.CrossEntropyLoss()}),
    "clipped": (Net, pairs, {"loss": nn.CrossEntropyLoss(), "clip_norm": 0.1}),
    "sum": (Net, pairs, {"loss": nn.CrossEntropyLoss(reduction="sum"), "clip_norm": 0.1}),
    "class weights": (Net, pairs, {"loss": nn.CrossEntropyLoss(torch.tensor([1.0, 2, 0, 4, 5]).double())}),
    "terms": (Net, pairs, {"loss": terms, "clip_norm": 0.1}),
    "tokens, tied": (Tied, tokens, {"loss": token_loss, "weight": token_count, "clip_norm": 0.1}),
}


def dealt(batch: Any, rank_samples: list[int] | None) -> list[Any]:
    """Return this rank's samples of a batch as a list of one batch, or of none; without them, the whole batch."""
    if rank_samples is None:
        return [batch]
    start, samples = sum(rank_samples[: dist.get_rank()]), rank_samples[dist.get_rank()]
    return [tuple(one[start : start + samples] for one in batch)] if samples else []


def changed(model: nn.Module) -> nn.Module:
    """Change the weights of all ranks but rank 0, whose count."""
    if dist.get_rank():
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(1)
    return model


def ddp(model: nn.Module) -> nn.Module:
    return nn.parallel.DistributedDataParallel(changed(model), find_unused_parameters=True)


def shard(model: Any, mesh: tuple[int, ...] | None = None, *, reshard: bool | None = None, **options: Any) -> Any:
    """Shard a model and what it has of `first` and `second`; `reshard` as set_reshard_after_backward takes it."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    shape = mesh or (dist.get_world_size(),)
    made = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
    for name in ("first", "second"):
        if hasattr(model, name):
            fully_shard(getattr(model, name), mesh=made, **options)
    fully_shard(model, mesh=made, **options)
    if reshard is not None:
        model.set_reshard_after_backward(reshard)
    return model


def shard_first(model: Any) -> Any:
    shard(model.first)
    return model


def shard_on_host(model: Any) -> Any:
    from torch.distributed.fsdp import CPUOffloadPolicy

    return shard(model, offload_policy=CPUOffloadPolicy(pin_memory=False))


def whole(tensor: Any) -> Tensor:
    tensor = tensor.detach()
    found: Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return found.clone()


def updates(case: str, rank_samples: list[int] | None = None, wrap: Any = None, **more: Any) -> Any:
    """Return the state after two updates, and their results."""
    make, draw, options = CASES[case]
    model = make().double()
    model = model if wrap is None else wrap(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=False)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    accumulator = Accumulator(model, optimizer, micro_batch=2, scheduler=scheduler, **(copy.deepcopy(options) | more))
    results = [accumulator.step_parts(dealt(draw(SAMPLES), rank_samples)) for _ in range(2)]
    assert all(parameter.grad is None for parameter in model.parameters())
    state = {name: whole(value) for name, value in getattr(model, "module", model).state_dict().items()}
    return state, [(one.loss, one.grad_norm, one.samples, dict(one.terms)) for one in results]


def _all_updates(rank_samples: list[int], wrapped: Wrapped, more: dict[str, Any]) -> Any:
    return [updates(case, rank_samples, wrap, **more) for case, wrap in wrapped]


def check_updates(rank_samples: list[int], wrapped: Wrapped, **more: Any) -> None:
    """Assert that updates over ranks, for pairs of a case and what wraps its model, are those of one process."""
    for case_and_wrap, *together in zip(
        wrapped, *on_ranks(len(rank_samples), _all_updates, rank_samples, wrapped, more), strict=True
    ):
        case = case_and_wrap[0]
        state, results = updates(case, **more)
        for state_here, results_here in together:
            for name, value in state.items():
                torch.testing.assert_close(state_here[name], value, rtol=1e-9, atol=1e-11, msg=f"{case}: {name}")
            for (loss, norm, samples, named), here in zip(results, results_here, strict=True):
                assert here[0] == pytest.approx(loss, rel=1e-12), case
                assert here[1] == (None if norm is None else pytest.approx(norm, rel=1e-12)), case
                assert here[2] == samples, case
                assert here[3] == pytest.approx(named, rel=1e-12), case
            assert results_here[0][1] == together[0][1][0][1], f"{case}: norms differ between ranks"

from __future__ import annotations

import copy
from typing import Any

import coupled_models as small
import pytest
import torch
from torch import Tensor, nn

from autoaccum.accumulation.company.divergence import Comparer, Divergence
from autoaccum.accumulation.company.module_calls import Call, Recorder, exchange, floating, following


def diverge(model: nn.Module, batch: Tensor, sizes: tuple[int, int] = (2, 2)) -> Divergence:
    """Run a batch whole, and in two parts."""
    divergence = Divergence(Recorder(), sizes)
    with torch.no_grad():
        own = copy.deepcopy(model)
        with following(own, divergence.whole):
            own(batch.clone())
        for index, part in enumerate(torch.split(batch, list(sizes))):
            own, comparer = copy.deepcopy(model), Comparer(divergence, index)
            with following(own, comparer):
                own(part.clone())
            comparer.finish()
    return divergence


def names(divergence: Divergence) -> list[str | None]:
    return [None if call is None else call.name for call in divergence.coupled()]


class Sharing(nn.Module):
    """Calls one norm twice, and gives a dict of what it has."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.last = nn.BatchNorm1d(small.WIDTH), nn.Linear(small.WIDTH, 3)

    def forward(self, x: Tensor) -> dict[str, Any]:
        once = self.norm(x)
        return {"out": self.last(self.norm(once.tanh())), "hidden": [once, (x, 3)], "sum": None}


def test_calls_are_counted_and_know_who_made_them() -> None:
    recorder, model = Recorder(), small.shared_mlp()
    with following(model, recorder):
        model(torch.randn(2, small.WIDTH))
    calls = list(recorder.outputs)
    assert Call("0", 1) in calls
    assert {call.name: call.depth for call in calls} == {"0": 1, "1": 1, "3": 1, "4": 1, "": 0}
    assert [call.name for call in calls[0].callers] == [""]
    assert recorder.counts() == {"": 1, "0": 2, "1": 1, "3": 1, "4": 1}


def test_no_hook_stays_when_a_forward_raises() -> None:
    model = small.mlp()
    with pytest.raises(RuntimeError), following(model, Recorder()):
        model(torch.randn(2, small.WIDTH + 1))
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_only_the_module_that_couples_is_blamed_and_no_one_after_it() -> None:
    model = nn.Sequential(small.mlp(), small.Normaliser(), nn.Linear(3, 4), nn.LayerNorm(4))
    assert names(diverge(model, torch.randn(4, small.WIDTH))) == ["1"]


def test_a_module_that_is_called_twice_is_named_once() -> None:
    assert names(diverge(Sharing(), torch.randn(4, small.WIDTH))) == ["norm"]


def test_what_a_parent_does_between_its_modules_is_its_own() -> None:
    model = nn.Sequential(nn.Identity(), nn.Sequential(nn.Identity(), small.Centring()))
    assert names(diverge(model, torch.randn(4, small.WIDTH))) == ["1.1"]


def test_rows_are_told_of_every_output() -> None:
    batch = torch.randn(5, small.WIDTH)
    model = small.mlp()
    divergence = diverge(model, batch, (3, 2))
    call = next(call for call in divergence.whole.outputs if call.depth == 0)
    found = divergence.rows(call, 0)
    assert found is not None
    whole, first, second = found
    assert first.positions is not None
    assert second.positions is not None
    assert (first.positions.tolist(), second.positions.tolist()) == ([0, 1, 2], [3, 4])
    assert torch.allclose(whole, model(batch))


def test_calls_that_do_not_pair_up_blame_nobody() -> None:
    class Often(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(small.WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            for _ in range(len(x)):
                last = self.norm(x)
            return torch.zeros_like(last)

    divergence = diverge(Often(), torch.randn(4, small.WIDTH))
    assert divergence.unmatched == {"norm"}
    assert names(divergence) == []


def test_only_dense_floating_tensors_are_exchanged() -> None:
    nest = {"a": torch.ones(2), "b": [torch.arange(2), (torch.zeros(1), "text")], "c": torch.eye(2).to_sparse()}
    assert [tensor.shape for tensor in floating(nest)] == [(2,), (1,)]
    assert exchange(nest, lambda tensor: tensor) is nest
    doubled = exchange(nest, lambda tensor: tensor + 1)
    assert doubled["a"].tolist() == [2, 2]
    assert doubled["b"][1][0].tolist() == [1]
    assert doubled["c"] is nest["c"]

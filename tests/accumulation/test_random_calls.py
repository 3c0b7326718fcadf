"""Random ops as they are called."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from autoaccum.accumulation.draws import Draw, DrawMismatch, join_draws
from autoaccum.accumulation.random_calls import DrawSite, OpenRNNs, RandomCall, RandomCalls


def heard(draw: Any) -> list[RandomCall]:
    calls: list[RandomCall] = []
    with RandomCalls(calls.append):
        draw()
    return calls


def test_random_ops_are_told_by_their_tag() -> None:
    calls = heard(lambda: (torch.rand(2), torch.ones(2) * 2, torch.zeros(2).normal_(), torch.manual_seed(0)))
    assert [call.op for call in calls] == ["aten.rand", "aten.normal_"]


def test_dropout_that_is_off_draws_nothing() -> None:
    q = torch.ones(1, 1, 3, 4)
    attend = nn.functional.scaled_dot_product_attention
    assert heard(lambda: (attend(q, q, q), torch.native_dropout(q, 0.5, False), nn.functional.rrelu(q))) == []


def test_the_line_is_the_users_own() -> None:
    (call,) = heard(lambda: nn.Dropout(0.5)(torch.ones(2)))
    assert str(call.site).startswith("aten.bernoulli_ (test_random_calls.py:")


def test_an_output_is_computed_again_from_the_inputs_at_hand() -> None:
    """A recorded output would hide that something upstream differs."""

    def answer(call: RandomCall) -> None:
        call.give([torch.tensor([True, False])])

    x = torch.tensor([3.0, 5.0], requires_grad=True)
    with RandomCalls(answer):
        out, _ = torch.native_dropout(x, 0.5, True)
    torch.autograd.backward(out.sum())
    assert out.tolist() == [6.0, 0.0]
    assert x.grad is not None
    assert x.grad.tolist() == [2.0, 0.0]


def sealed(dropout: float) -> RandomCall:
    site = DrawSite("aten._cudnn_rnn", "model.py:31")
    return RandomCall(site, {"dropout": dropout, "train": True}, (torch.ones(2),))


def test_kernels_that_keep_their_draws_are_named() -> None:
    assert not sealed(0.0).is_drawing
    call = sealed(0.5)
    assert call.is_drawing
    draw = Draw(call.site, None, call.is_sealed, ())
    with pytest.raises(DrawMismatch, match=r"aten\._cudnn_rnn \(model\.py:31\) draws within its kernel"):
        join_draws(call, [draw, draw], (1, 1), innermost=False)


class Watching(TorchFunctionMode):
    """Whether cuDNN is on, for each function called."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[str, bool] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen[func.__name__] = torch.backends.cudnn.enabled
        return func(*args, **(kwargs or {}))


def test_rnns_run_without_cudnn_and_nothing_else_does() -> None:
    x: Tensor = torch.ones(2, 1, 3)
    model = nn.LSTM(3, 4)
    with Watching() as watching, OpenRNNs():
        nn.functional.conv1d(model(x)[0], torch.ones(1, 1, 1))
    assert watching.seen["lstm"] is False
    assert watching.seen["conv1d"] is True

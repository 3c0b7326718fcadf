"""All of a run in float64, whatever the user's code asks for by name."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from autoaccum.verification.fixture import in_float64, widened


class Narrowing(nn.Module):
    """Computes as transformers do: norms and logits in float32, masks made on the way."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        normed = inputs.to(torch.float32) * torch.rsqrt(inputs.float().pow(2).mean(-1, keepdim=True) + 1e-6)
        mask = torch.zeros(3, dtype=torch.float32, device=inputs.device)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = self.linear(normed.type_as(inputs)) + mask + torch.ones(3)
        probabilities: Tensor = logits.float().softmax(-1, dtype=torch.float32)
        return probabilities


def test_nothing_is_rounded_on_the_way() -> None:
    torch.manual_seed(0)
    model, inputs = Narrowing().double(), torch.randn(4, 3, dtype=torch.float64)
    with in_float64():
        found = model(inputs)
    normed = inputs * torch.rsqrt(inputs.pow(2).mean(-1, keepdim=True) + 1e-6)
    wanted = (nn.functional.linear(normed, model.linear.weight, model.linear.bias) + 1).softmax(-1)
    assert found.dtype == torch.float64
    torch.testing.assert_close(found, wanted, rtol=1e-14, atol=1e-15)


def test_gradients_pass_through_what_was_to_be_narrow() -> None:
    leaf = torch.randn(3, dtype=torch.float64, requires_grad=True)
    with in_float64():
        torch.autograd.backward(leaf.float().pow(3).sum())
    assert leaf.grad is not None
    torch.testing.assert_close(leaf.grad, 3 * leaf.detach() ** 2, rtol=1e-15, atol=0)


def test_a_nest_is_widened_without_touching_it() -> None:
    more = [torch.ones(2, dtype=torch.bfloat16), "text"]
    batch: dict[str, Any] = {"x": torch.ones(2), "ids": torch.arange(2), "more": more}
    wide = widened(batch)
    assert [wide["x"].dtype, wide["ids"].dtype, wide["more"][0].dtype] == [torch.float64, torch.int64, torch.float64]
    assert wide["more"][1] == "text"
    assert batch["x"].dtype == torch.float32
    assert widened(np.ones(2)).dtype == np.float64

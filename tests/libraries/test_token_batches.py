"""Micro-batches by tokens of models of transformers, which compute their loss themselves."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tiny_transformers import NO_DROPOUT, WORDS, bert, hf, t5
from torch import Tensor

from autoaccum import Accumulator

LENGTHS = (3, 9, 4, 1, 9, 2, 12, 5, 1)
ANSWERS = (2, 5, 7, 1, 1, 9, 3, 3, 4)


def encoded(**more: Tensor) -> dict[str, Tensor]:
    mask = (torch.arange(16) < torch.tensor(LENGTHS)[:, None]).long()
    return {"input_ids": torch.randint(1, WORDS, mask.shape) * mask, "attention_mask": mask, **more}


def ignoring(lengths: tuple[int, ...], width: int) -> Tensor:
    counted = torch.arange(width) < torch.tensor(lengths)[:, None]
    return torch.randint(1, WORDS, counted.shape).masked_fill(~counted, -100)


CASES: dict[str, tuple[Callable[[], Any], Callable[[], dict[str, Tensor]]]] = {
    "classes": (lambda: bert(**NO_DROPOUT), lambda: encoded(labels=torch.arange(9) % 2)),
    "tokens": (
        lambda: bert("MaskedLM", **NO_DROPOUT),
        lambda: encoded(labels=ignoring(LENGTHS, 16), token_type_ids=torch.zeros(9, 16, dtype=torch.long)),
    ),
    "encoder and decoder": (t5, lambda: encoded(labels=ignoring(ANSWERS, 11))),
}


@pytest.mark.parametrize("case", CASES)
def test_the_update_is_the_padded_batch_s(case: str) -> None:
    torch.manual_seed(0)
    make, draw = CASES[case]
    model, batch = make().double().train(), hf.BatchEncoding(draw())
    full = copy.deepcopy(model)
    torch.autograd.backward(full(**batch).loss)
    torch.optim.SGD(full.parameters(), lr=1.0).step()
    accumulator = Accumulator(model, torch.optim.SGD(model.parameters(), lr=1.0), micro_tokens=24, check="strict")
    result = accumulator.step(batch)
    assert len(result.micro_batches) > 3
    assert max(result.micro_batches) < 9
    for mine, whole in zip(model.parameters(), full.parameters(), strict=True):
        torch.testing.assert_close(mine, whole, rtol=1e-12, atol=1e-12)

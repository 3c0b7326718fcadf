"""Samples that are equally long hide a wrong weight: they are shortened, or the answer says what was not tested."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import small_verified as small
import torch
from command_line import Command
from factories import codes
from torch import Tensor, nn
from torch.nn import functional

from autoaccum import Workload, verify
from autoaccum.verification.verification_result import Verification

LENGTH = small.LENGTH


def full(size: int) -> dict[str, Tensor]:
    ids = torch.randint(1, small.WORDS, (size, LENGTH))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}


def masked(size: int) -> tuple[Tensor, Tensor, Tensor]:
    ids = torch.randint(1, small.WORDS, (size, LENGTH))
    return ids, ids, torch.ones(size, LENGTH)


def masked_loss(model: nn.Module, batch: Any) -> Tensor:
    each = functional.cross_entropy(model(batch[0]).transpose(1, 2), batch[1], reduction="none")
    return torch.as_tensor((each * batch[2]).sum() / batch[2].sum())


def indexed_loss(model: nn.Module, batch: Any) -> Tensor:
    """Raises where a label is ignored."""
    each = -model(batch[0]).log_softmax(-1).gather(2, batch[1][..., None])[..., 0]
    return torch.as_tensor((each * batch[2]).sum() / batch[2].sum())


def mean_loss(model: nn.Module, batch: Any) -> Tensor:
    return torch.as_tensor(model(batch[0]).square().mean())


def stubborn_loss(model: nn.Module, batch: Any) -> Tensor:
    if not bool(batch["attention_mask"].all()):
        raise ValueError("nothing may be padded")
    return small.token_loss(model, batch)


def found(loss: Any, batch: Any, **more: Any) -> Verification:
    made = Workload(model=small.Gpt, batch=batch, loss=loss, **more)
    return verify(made, target_batch=8, micro_batch=3)


WRONG: dict[str, tuple[Any, Any, str]] = {
    "tokens": (small.token_loss, full, '(batch["labels"] != -100).sum()'),
    "a mask": (masked_loss, masked, "batch[2].sum()"),
    "a mask, and labels that cannot be ignored": (indexed_loss, masked, "batch[2].sum()"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_weight_shows_on_samples_that_are_equally_long(case: str) -> None:
    loss, batch, code = WRONG[case]
    verification = found(loss, batch)
    assert [(one.window, one.equal) for one in verification.comparisons][:2] == [("whole", True), ("uneven", False)]
    assert not verification.equivalent
    assert not verification.untested
    (cause,) = verification.causes
    assert cause.change.facts["code"] == code
    assert codes(verification.notes) == ["samples_shortened"]


RIGHT: dict[str, tuple[Any, Any, Any]] = {
    "tokens, by labels": (small.token_loss, full, small.token_weight),
    "tokens, by the mask": (small.token_loss, full, lambda batch: batch["attention_mask"].sum()),
    "a mask": (masked_loss, masked, lambda batch: batch[2].sum()),
    "samples, whatever the mask": (mean_loss, masked, None),
}


@pytest.mark.parametrize("case", RIGHT)
def test_a_right_weight_is_no_false_alarm(case: str) -> None:
    loss, batch, weight = RIGHT[case]
    verification = found(loss, batch, weight=weight)
    assert verification.equivalent
    assert "uneven" in [one.window for one in verification.comparisons]


def test_what_cannot_be_shortened_is_not_called_equivalent() -> None:
    verification = found(stubborn_loss, full)
    assert not verification.equivalent
    assert all(one.equal for one in verification.comparisons)
    assert verification.untested == ('batch["attention_mask"]',)


def test_short_and_long_samples_are_taken_though_the_longest_are_all_alike() -> None:
    lengths = torch.randint(2, 12, (400,), generator=torch.Generator().manual_seed(0)).clamp(max=LENGTH)
    dataset = [torch.randint(1, small.WORDS, (int(length),)) for length in lengths]

    def collate(samples: list[Tensor]) -> dict[str, Tensor]:
        ids = nn.utils.rnn.pad_sequence(samples, batch_first=True)
        return {"input_ids": ids, "labels": ids.masked_fill(ids == 0, -100)}

    made = Workload(model=small.Gpt, dataset=dataset, collate=collate, loss=small.token_loss)
    verification = verify(made, longest_of=200)
    assert not verification.equivalent
    assert [one.window for one in verification.comparisons] == ["whole", "last"]


def test_the_exit_code_says_that_something_was_not_tested(tmp_path: Path, command: Command) -> None:
    (tmp_path / "model.py").write_text(
        "import torch\nfrom torch import nn\nmodel = nn.Embedding(9, 9)\n"
        "def batch(size):\n"
        "    ids = torch.randint(1, 9, (size, 6))\n"
        "    return {'ids': ids, 'mask': torch.ones_like(ids)}\n"
        "def loss(model, batch):\n"
        "    assert batch['mask'].all()\n"
        "    return nn.functional.cross_entropy(model(batch['ids']).flatten(0, 1), batch['ids'].flatten())\n"
    )
    done = command(tmp_path, "verify", "model.py")
    assert done.returncode == 3, done.stderr
    assert done.stdout.startswith("equal on 16 samples of equal length: ")

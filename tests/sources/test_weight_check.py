from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from autoaccum.errors import WorkloadError
from autoaccum.sources.objective import match_weights
from autoaccum.sources.weight_check import check_weighting
from autoaccum.sources.workload import Workload

LENGTHS = [9, 3, 7, 2, 5, 8, 4]
WORDS = 11


class TinyText(nn.Module):
    def __init__(self, *, zero_head: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, 8)
        self.drop = nn.Dropout(0.5)
        self.head = nn.Linear(8, WORDS)
        if zero_head:
            nn.init.zeros_(self.head.weight)
            nn.init.zeros_(self.head.bias)

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = self.head(self.drop(self.embed(ids)))
        return out


def text_batch(size: int, *, ignored: int = -100) -> dict[str, Tensor]:
    lengths = torch.tensor([LENGTHS[index % len(LENGTHS)] for index in range(size)])
    ids = torch.randint(1, WORDS, (size, 10))
    mask = torch.arange(10)[None] < lengths[:, None]
    labels = torch.where(mask, ids, torch.full_like(ids, ignored))
    return {"ids": ids.masked_fill(~mask, 0), "attention_mask": mask.long(), "labels": labels, "lengths": lengths}


def full_batch(size: int) -> dict[str, Tensor]:
    """The worst case: nothing is padded."""
    ids = torch.randint(1, WORDS, (size, 10))
    return {"ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}


def tagged(size: int) -> tuple[Tensor, Tensor, Tensor]:
    made = text_batch(size)
    return made["ids"], made["lengths"], made["labels"]


def shifted_loss(model: nn.Module, batch: Any) -> Any:
    logits = model(batch["ids"])[:, :-1].float()
    return functional.cross_entropy(logits.flatten(0, 1), batch["labels"][:, 1:].flatten())


def token_loss(model: nn.Module, batch: Any) -> Any:
    return functional.cross_entropy(model(batch["ids"]).flatten(0, 1), batch["labels"].flatten())


def sample_loss(model: nn.Module, batch: Any) -> Any:
    return model(batch["ids"]).square().mean()


def workload(loss: Any, batch: Callable[[int], Any] = text_batch, model: Any = TinyText, **more: Any) -> Workload:
    return Workload(model=model, batch=batch, loss=loss, **more)


def masked(model: nn.Module, batch: Any) -> Any:
    each = model(batch["ids"]).square().mean(-1)
    return (each * batch["attention_mask"]).sum() / batch["attention_mask"].sum()


def summed(model: nn.Module, batch: Any) -> Any:
    return model(batch["ids"]).square().sum()


def marked(ignored: int) -> dict[str, Any]:
    """A loss of tokens that are not `ignored`, and its batches."""

    def loss(model: nn.Module, batch: Any) -> Any:
        logits, labels = model(batch["ids"]).flatten(0, 1), batch["labels"].flatten()
        return functional.cross_entropy(logits, labels, ignore_index=ignored)

    return {"loss": loss, "batch": lambda size: text_batch(size, ignored=ignored)}


SHIFTED, LABELS = '(batch["labels"][:, 1:] != -100).sum()', '(batch["labels"] != -100).sum()'
WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "shifted tokens": ({"loss": shifted_loss}, f"def weight(batch): return {SHIFTED}"),
    "shifted tokens, and a head that starts at zero": (
        {"loss": shifted_loss, "model": lambda: TinyText(zero_head=True)},
        f"return {SHIFTED}",
    ),
    "tokens": (marked(-100), f"return {LABELS}"),
    "tokens other than 0": (marked(0), 'return (batch["labels"] != 0).sum()'),
    "tokens other than 255": (marked(255), 'return (batch["labels"] != 255).sum()'),
    "mask": ({"loss": masked}, 'return (batch["attention_mask"] != 0).sum()'),
    "sum": ({"loss": summed}, 'the loss is a sum; write reduction = "sum"'),
    "mean over samples, said to be a sum": (
        {"loss": sample_loss, "reduction": "sum"},
        'without reduction = "sum" is probably: def weight(batch): return len(batch["ids"])',
    ),
    "mean over tokens, said to be a sum": (
        {"loss": token_loss, "reduction": "sum"},
        f'without reduction = "sum" is probably: def weight(batch): return {LABELS}',
    ),
    "mean over samples, weighted by tokens": (
        {"loss": sample_loss, "weight": lambda b: (b["labels"] != -100).sum()},
        'def weight(batch): return len(batch["ids"])',
    ),
    "mask, of samples that are equally long": (
        {"loss": masked, "batch": full_batch},
        'return (batch["attention_mask"] != 0).sum()',
    ),
    "tokens, of samples that are equally long": ({"loss": token_loss, "batch": full_batch}, f"return {LABELS}"),
    "labels that do not come second, beside padded ids": (
        {"loss": lambda m, b: token_loss(m, {"ids": b[0], "labels": b[2]}), "batch": tagged},
        "return (batch[2] != -100).sum()",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_names_what_a_loss_divides_by(case: str) -> None:
    given, end = WRONG[case]
    (sentence,) = check_weighting(workload(**given))
    assert str(sentence).startswith("the weighting does not match the loss (the loss of 5 samples is")
    assert str(sentence).endswith(end)


def test_says_nothing_of_right_weights() -> None:
    def by_labels(batch: Any) -> Any:
        return (batch["labels"] != -100).sum()

    assert check_weighting(workload(summed, reduction="sum")) == []
    for batch in (text_batch, full_batch):
        assert check_weighting(workload(sample_loss, batch)) == []
        assert check_weighting(workload(token_loss, batch, weight=by_labels)) == []
    assert check_weighting(workload(token_loss, full_batch, weight=lambda batch: (batch["ids"] != 0).sum())) == []


@pytest.mark.parametrize(("is_right", "zero_head", "builds"), [(True, False, 0), (True, True, 1), (False, True, 1)])
def test_a_built_model_spares_another_if_it_shows_that_weights_are_right(
    is_right: bool, zero_head: bool, builds: int
) -> None:
    models = []

    def model() -> nn.Module:
        models.append(TinyText())
        return models[-1]

    weight = {"weight": lambda batch: (batch["labels"] != -100).sum()} if is_right else {}
    found = check_weighting(workload(token_loss, text_batch, model, **weight), built=TinyText(zero_head=zero_head))
    assert (found == [], len(models)) == (is_right, builds)


def test_compares_every_term_with_its_own_weight() -> None:
    def loss(model: nn.Module, batch: Any) -> dict[str, Tensor]:
        return {"tokens": token_loss(model, batch), "samples": sample_loss(model, batch)}

    (sentence,) = check_weighting(workload(loss))
    assert "the loss's term 'tokens'" in str(sentence)
    assert str(sentence).endswith('return {"tokens": (batch["labels"] != -100).sum(), "samples": len(batch["ids"])}')
    made = text_batch(4)
    own: dict[str, Callable[[Any], Any]] = {
        "tokens": lambda b: (b["labels"] != -100).sum(),
        "samples": lambda b: len(b["ids"]),
    }
    right = workload(loss, weight=lambda batch: {name: count(batch) for name, count in own.items()})
    assert match_weights(right.objective.weight(made), ["tokens", "samples"])["samples"] == 4.0
    assert check_weighting(right) == []


def test_says_nothing_if_coupling_is_known() -> None:
    def contrastive(model: nn.Module, batch: Any) -> Any:
        vectors = functional.normalize(model(batch["ids"]).mean(1), dim=-1)
        return functional.cross_entropy(vectors @ vectors.T / 0.1, torch.arange(len(vectors)))

    assert check_weighting(workload(contrastive), coupled=True) == []
    (sentence,) = check_weighting(workload(contrastive))
    assert "no usual weight fits: run autoaccum verify" in str(sentence)


def test_the_model_is_checked_in_eval_mode() -> None:
    model = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 4))
    made = Workload(
        model=model,
        batch=lambda n: (torch.randn(n, 3), torch.arange(n) % 4),
        criterion=nn.CrossEntropyLoss(weight=torch.tensor([1.0, 5.0, 2.0, 0.5]), label_smoothing=0.1),
    )
    assert check_weighting(made) == []
    assert all(module.training for module in model.modules())


def test_a_model_with_a_loss_only_in_train_mode_is_checked_in_train_mode() -> None:
    def loss(model: nn.Module, batch: Any) -> Any:
        assert model.training
        return model(batch[0]).square().mean()

    assert check_weighting(workload(loss, lambda n: (torch.randn(n, 3),), lambda: nn.Linear(3, 2))) == []
    (sentence,) = check_weighting(
        workload(loss, lambda n: (torch.randn(n, 3),), lambda: nn.Sequential(nn.Linear(3, 2), nn.Dropout(0.5)))
    )
    assert "could not be checked: the loss differs from run to run" in str(sentence)


def test_uses_the_dataset_if_it_collates_to_the_same_structure() -> None:
    def constant(size: int) -> tuple[Tensor, Tensor]:
        ids = torch.randint(1, WORDS, (size, 10))
        return ids, ids

    def loss(model: nn.Module, batch: Any) -> Any:
        return functional.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten(), ignore_index=0)

    made = text_batch(20, ignored=0)
    dataset = [(made["ids"][index], made["labels"][index]) for index in range(20)]
    assert check_weighting(workload(loss, constant)) == []
    (sentence,) = check_weighting(workload(loss, constant, dataset=dataset))
    assert str(sentence).endswith("def weight(batch): return (batch[1] != 0).sum()")
    assert check_weighting(workload(loss, constant, dataset=[{"other": 1}] * 9)) == []
    assert check_weighting(workload(loss, constant, dataset=iter(dataset))) == []
    assert check_weighting(workload(loss, constant, dataset=dataset[:3])) == []


def test_shows_what_the_model_raises_as_the_users() -> None:
    def broken(model: nn.Module, batch: Any) -> Any:
        raise ValueError("no such thing")

    with pytest.raises(WorkloadError, match="the loss of 5 samples raised ValueError: no such thing") as caught:
        check_weighting(workload(broken))
    shown = caught.value.user_traceback or ""
    assert "in broken" in shown
    assert "autoaccum/sources" not in shown
    assert "During handling" not in shown


RAISING: dict[str, tuple[dict[str, Any], str]] = {
    "weight": ({"weight": lambda b: b["none"]}, r"weight\(batch\) raised KeyError: 'none'"),
    "weight of other terms": ({"weight": lambda b: {"a": 1}}, r"loss has the terms loss, weight has a"),
    "nan": ({"loss": lambda m, b: m(b["ids"]).sum() * float("nan")}, r"the loss of a batch of 5 samples is nan"),
}


@pytest.mark.parametrize("case", RAISING)
def test_refuses_a_workload_that_cannot_run(case: str) -> None:
    changes, message = RAISING[case]
    with pytest.raises(WorkloadError, match=message):
        check_weighting(Workload(**{"model": TinyText, "batch": text_batch, "loss": token_loss, **changes}))


def test_leaves_everything_as_it_was() -> None:
    model = TinyText()
    model.eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    numbers = random.getstate(), np.random.get_state()[1].tolist(), torch.random.get_rng_state()  # type: ignore[index]
    check_weighting(workload(shifted_loss, model=model))
    check_weighting(workload(shifted_loss, model=lambda: model))
    assert random.getstate() == numbers[0]
    assert np.random.get_state()[1].tolist() == numbers[1]  # type: ignore[index]
    assert torch.equal(torch.random.get_rng_state(), numbers[2])
    assert not model.training
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_half_precision_models_are_compared_within_their_rounding() -> None:
    made = Workload(
        model=nn.Linear(3, 2, dtype=torch.bfloat16),
        batch=lambda n: (torch.randn(n, 3).bfloat16(), torch.randn(n, 2).bfloat16()),
        criterion=nn.MSELoss(),
    )
    assert check_weighting(made) == []

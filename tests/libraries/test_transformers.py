"""Objects of transformers and peft: they are taken as they are, and nothing that the libraries keep is written to."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from state_digests import state_digest
from tiny_transformers import WORDS, bert, llama
from torch import Tensor, nn

import autoaccum
from autoaccum import Accumulator, Workload

pytestmark = pytest.mark.usefixtures("warm_children")
IMPORTED = ("transformers.models.bert.modeling_bert", "transformers.models.llama.modeling_llama", "peft")


def adapted() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # peft asks transformers by an old name.
        from peft import LoraConfig, get_peft_model

        return get_peft_model(llama(), LoraConfig(r=2, target_modules=["q_proj", "v_proj"], lora_dropout=0.1))


def sentences(size: int) -> dict[str, Tensor]:
    return {"input_ids": torch.randint(0, WORDS, (size, 8)), "labels": torch.arange(size) % 2}


def texts(size: int) -> dict[str, Tensor]:
    ids = torch.randint(0, WORDS, (size, 8))
    lengths = torch.arange(size)[:, None] % 5 + 3
    return {"input_ids": ids, "labels": ids.where(torch.arange(8) < lengths, -100)}


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    found: Tensor = model(**batch).loss
    return found


def shifted(batch: dict[str, Tensor]) -> Tensor:
    return (batch["labels"][:, 1:] != -100).sum()


KINDS: dict[str, dict[str, Any]] = {
    "bert": {"model": bert, "batch": sentences, "loss": loss},
    "llama": {"model": llama, "batch": texts, "loss": loss, "weight": shifted},
    "lora": {"model": adapted, "batch": texts, "loss": loss, "weight": shifted},
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_is_verified_planned_and_trained(kind: str) -> None:
    made = KINDS[kind]
    assert autoaccum.verify(Workload(**made), target_batch=2).equivalent
    model = made["model"]()
    optimizer = torch.optim.AdamW(model.parameters())
    from transformers.activations import ACT2FN

    before, gelu = state_digest(model, optimizer), dict.__getitem__(ACT2FN, "gelu")
    autoaccum.plan(**made | {"model": model}, optimizer=optimizer, target_batch=4, max_micro_batch=2)
    assert state_digest(model, optimizer) == before
    assert dict.__getitem__(ACT2FN, "gelu") is gelu
    made["model"]()  # Another one can be built in this process.
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        accumulator = Accumulator(model, optimizer, loss, weight=made.get("weight"), micro_batch=2)
        for _ in range(2):
            assert accumulator.step(made["batch"](4)).updated


TEACHER: Any = None
WEIGHTS = torch.tensor([1.0, 2.0])


def taught(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """A distillation: a teacher, and class weights, of the loss's module."""
    wanted = TEACHER(batch["input_ids"]).logits.detach().softmax(-1)
    return nn.functional.cross_entropy(model(batch["input_ids"]).logits, wanted, weight=WEIGHTS)


def test_a_teacher_that_the_loss_names_is_in_float64_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "TEACHER", bert().eval())
    before = {name: tensor.clone() for name, tensor in TEACHER.state_dict().items()}
    found = autoaccum.verify(Workload(model=bert, batch=sentences, loss=taught), target_batch=6)
    assert (found.equivalent, found.precision) == (True, "fp64")
    assert all(torch.equal(tensor, before[name]) for name, tensor in TEACHER.state_dict().items())
    assert next(TEACHER.parameters()).dtype == WEIGHTS.dtype == torch.float32

"""Losses that models of transformers compute: what they divide by, as their class tells and experiments prove."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from factories import codes
from imported_files import import_file
from tiny_transformers import SIZES, WORDS, bert, gpt2, hf, llama, t5, vit, whisper
from torch import Tensor
from torch.optim import SGD

import autoaccum
from autoaccum import Accumulator, Workload
from autoaccum.accumulation.step_result import AccumulationWarning
from autoaccum.sources.weight_check import check_weighting

IMPORTED = ("transformers.models.llama.modeling_llama",)
SMALL: dict[str, Any] = {**SIZES, "vocab_size": WORDS}
HEAD = """
import torch
from transformers import LlamaConfig, LlamaForCausalLM

def model():
    sizes = dict(vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2)
    return LlamaForCausalLM(LlamaConfig(num_key_value_heads=1, **sizes))

def batch(size):
    ids = torch.randint(0, 64, (size, 12))
    labels = ids.clone()
    for row in range(size):
        labels[row, : 1 + 3 * row % 8] = -100
    return {"input_ids": ids, "labels": labels}
"""


def text(size: int, length: int = 12) -> dict[str, Tensor]:
    """Labels of which another number counts in each sample; the first one always does."""
    ids = torch.randint(1, 64, (size, length))
    labels = ids.clone()
    for row in range(size):
        labels[row, 1 : 2 + 3 * row % 8] = -100
    return {"input_ids": ids, "labels": labels}


def images(size: int) -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(size, 3, 16, 16), "labels": torch.randint(0, 2, (size,))}


def speech(size: int) -> dict[str, Tensor]:
    return {"input_features": torch.randn(size, 8, 20), "labels": text(size)["labels"]}


def ctc() -> Any:
    config = hf.Wav2Vec2Config(
        **SMALL,
        conv_dim=(8,),
        conv_kernel=(8,),
        conv_stride=(8,),
        num_conv_pos_embeddings=4,
        num_conv_pos_embedding_groups=2,
        num_feat_extract_layers=1,
        mask_time_prob=0.0,
    )
    return hf.Wav2Vec2ForCTC(config)


def sounds(size: int) -> dict[str, Tensor]:
    return {"input_values": torch.randn(size, 200), "labels": torch.randint(1, 64, (size, 5))}


def resnet() -> Any:
    config = hf.ResNetConfig(embedding_size=8, hidden_sizes=[8, 8], depths=[1, 1], num_labels=2)
    return hf.ResNetForImageClassification(config)


def regression(size: int) -> dict[str, Tensor]:
    return {"input_ids": text(size)["input_ids"], "labels": torch.randn(size)}


SHIFTED, MARKED = "labels[..., 1:] != -100", "labels != -100"
MODELS: dict[str, tuple[Callable[[], Any], Callable[[int], Any], str]] = {
    "Llama": (llama, text, f"{SHIFTED} (LlamaForCausalLM)"),
    "GPT-2": (gpt2, text, f"{SHIFTED} (GPT2LMHeadModel)"),
    "BERT, masked words": (partial(bert, "MaskedLM"), text, f"{MARKED} (BertForMaskedLM)"),
    "BERT, tags": (partial(bert, "TokenClassification", num_labels=64), text, f"{MARKED} (BertForTokenClassification)"),
    "BERT, a number": (
        partial(bert, "SequenceClassification", num_labels=1),
        regression,
        "samples (BertForSequenceClassification)",
    ),
    "T5": (t5, text, f"{MARKED} (T5ForConditionalGeneration)"),
    "Whisper": (whisper, speech, f"{MARKED} (WhisperForConditionalGeneration)"),
    "ViT": (vit, images, f"{MARKED} (ViTForImageClassification)"),
    "ResNet": (resnet, images, f"{MARKED} (ResNetForImageClassification)"),
    "Wav2Vec2": (ctc, sounds, "nothing: the loss is a sum"),
}


@pytest.mark.parametrize("name", MODELS)
def test_the_loss_of_a_model_and_what_it_divides_by(name: str) -> None:
    model, batch, source = MODELS[name]
    workload = Workload(model=model, batch=batch)
    assert check_weighting(workload) == []
    assert workload.objective.divisor_label == source


@pytest.mark.parametrize("name", ["Llama", "BERT, masked words", "T5", "Whisper"])
def test_a_weighting_by_samples_is_told_and_the_right_one_proposed(name: str) -> None:
    model, batch, source = MODELS[name]
    workload = Workload(model=model, batch=batch, loss=lambda model, batch: model(**batch).loss)
    (sentence,) = check_weighting(workload)
    cut = "[:, 1:]" if source.startswith(SHIFTED) else ""
    assert f'def weight(batch): return (batch["labels"]{cut} != -100).sum()' in str(sentence)


def test_labels_that_do_not_count_are_told_of_by_the_class_of_the_model() -> None:
    model = llama()
    accumulator = Accumulator(model, SGD(model.parameters(), lr=1.0), lambda m, b: m(**b).loss, micro_batch=2)
    with pytest.warns(autoaccum.AccumulationWarning, match=r'return \(batch\["labels"\]\[:, 1:\] != -100\).sum\(\)'):
        accumulator.step(text(4))


@pytest.mark.usefixtures("warm_children")
def test_a_plan_without_a_loss_and_the_step_it_emits(tmp_path: Path) -> None:
    from autoaccum.reporting.emit import emit_wrapper
    from autoaccum.reporting.plan_report import accumulator_line

    file = tmp_path / "llama.py"
    file.write_text(HEAD)
    plan = autoaccum.plan(file, target_batch=16, gpu="rtx3090", max_micro_batch=3)
    assert (plan.workload.loss, plan.workload.weight) == ("model", f"{SHIFTED} (LlamaForCausalLM)")
    assert "weight_assumed" in codes(plan.notes)
    assert not plan.warnings
    assert accumulator_line(plan) == "autoaccum.Accumulator(model, optimizer, micro_batch=3).step(batch)"
    step = tmp_path / "train_step.py"
    step.write_text(emit_wrapper(plan))
    emitted = import_file(step)
    first, batch = llama().double(), text(7)
    other = copy.deepcopy(first)
    Accumulator(first, SGD(first.parameters(), lr=1.0), micro_batch=7).step(batch)
    emitted.train_step(other, SGD(other.parameters(), lr=1.0), batch)
    for one, another in zip(first.parameters(), other.parameters(), strict=True):
        assert torch.allclose(one, another, atol=1e-6)


@pytest.mark.usefixtures("warm_children")
def test_a_predicted_plan_warns_of_ignored_labels_and_emits_nothing_wrong(tmp_path: Path) -> None:
    from autoaccum.reporting.emit import emit_wrapper

    file = tmp_path / "llama_loss.py"
    file.write_text(HEAD + "def loss(model, batch): return model(**batch).loss\n")
    plan = autoaccum.plan(file, target_batch=16, gpu="rtx3090", max_micro_batch=4)
    (warning,) = plan.warnings
    assert str(warning).endswith('def weight(batch): return (batch["labels"][..., 1:] != -100).sum()')
    with pytest.raises(autoaccum.errors.UsageError, match="give its parts wrong weights"):
        emit_wrapper(plan)


def mixtral(**settings: Any) -> Callable[[], Any]:
    sizes = {"num_key_value_heads": 1, "num_local_experts": 4, "num_experts_per_tok": 2, **SMALL}
    config = hf.MixtralConfig(**sizes, router_aux_loss_coef=0.1, **settings)
    return lambda: hf.MixtralForCausalLM(config)


def verify(workload: Workload) -> Any:
    return autoaccum.verify(workload, target_batch=6, micro_batch=2, precision="fp32")


def test_the_loss_that_balances_experts_is_blamed_and_no_expert() -> None:
    model = mixtral(output_router_logits=True)
    (cause,) = verify(Workload(model=model, batch=text)).causes
    assert (cause.kind, cause.where) == ("coupled loss", ("the loss",))
    assert verify(Workload(model=mixtral(), batch=text)).equivalent


def test_a_step_in_parts_warns_of_the_loss_that_balances_experts() -> None:
    torch.manual_seed(0)
    model = mixtral(output_router_logits=True)()
    accumulator = Accumulator(model, SGD(model.parameters(), lr=0.1), micro_batch=2)
    with pytest.warns(AccumulationWarning, match="output_router_logits=False leaves it out"):
        accumulator.step(text(4))

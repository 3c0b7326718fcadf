"""Micro-batches by tokens of models of transformers, which compute their loss themselves."""

from __future__ import annotations

import copy
from collections.abc import Callable
from importlib import import_module
from typing import Any

import pytest
import torch
from tiny_transformers import NO_DROPOUT, WORDS, bert, gpt2, hf, t5
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


def tokenizer(side: str) -> Any:
    tokenizers: Any = import_module("tokenizers")
    vocabulary = {"pad": 0, **{f"w{number}": number for number in range(1, WORDS)}}
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="pad"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return hf.PreTrainedTokenizerFast(tokenizer_object=words, pad_token="pad", padding_side=side)


def collated(collator: str, side: str = "right", **settings: Any) -> Any:
    """Return texts of unequal length as a collator of transformers or TRL pads them."""
    of_texts = tokenizer(side)
    drawn = [torch.randint(1, WORDS, (length,)).tolist() for length in LENGTHS]
    rows = of_texts([" ".join(f"w{number}" for number in ids) for ids in drawn])["input_ids"]
    if collator == "DataCollatorWithPadding":
        samples = [{"input_ids": ids, "label": len(ids) % 2} for ids in rows]
    elif collator == "DataCollatorForSeq2Seq":
        samples = [{"input_ids": ids, "labels": ids[:number]} for ids, number in zip(rows, ANSWERS, strict=True)]
    else:
        samples = [{"input_ids": ids} for ids in rows]
    if collator == "trl":
        return import_module("trl.trainer.sft_trainer").DataCollatorForLanguageModeling(pad_token_id=0)(samples)
    return getattr(hf, collator)(of_texts, **settings)(samples)


def causal_loss(logits: Tensor, labels: Tensor, vocab_size: int, **_: Any) -> Tensor:
    """Compute `ForCausalLMLoss` in float64: its logits are float32, which rounds gradients to 1e-8."""
    following = torch.nn.functional.pad(labels, (0, 1), value=-100)[:, 1:]
    return torch.nn.functional.cross_entropy(logits.reshape(-1, vocab_size), following.reshape(-1))


def small_gpt2() -> Any:
    model = gpt2()
    model.loss_function = causal_loss
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    return model


def following_tokens(batch: Any) -> Tensor:
    return torch.as_tensor((batch["labels"][:, 1:] != -100).sum())


CASES: dict[str, tuple[Callable[[], Any], Callable[[], dict[str, Tensor]]]] = {
    "classes": (lambda: bert(**NO_DROPOUT), lambda: encoded(labels=torch.arange(9) % 2)),
    "tokens": (
        lambda: bert("MaskedLM", **NO_DROPOUT),
        lambda: encoded(labels=ignoring(LENGTHS, 16), token_type_ids=torch.zeros(9, 16, dtype=torch.long)),
    ),
    "encoder and decoder": (t5, lambda: encoded(labels=ignoring(ANSWERS, 11))),
    "collated classes": (lambda: bert(**NO_DROPOUT), lambda: collated("DataCollatorWithPadding")),
    "collated language": (small_gpt2, lambda: collated("DataCollatorForLanguageModeling", mlm=False)),
    "padded on the left": (small_gpt2, lambda: collated("DataCollatorForLanguageModeling", "left", mlm=False)),
    "collated answers": (t5, lambda: collated("DataCollatorForSeq2Seq")),
    "collated by TRL": (small_gpt2, lambda: collated("trl")),
}


@pytest.mark.parametrize("case", CASES)
def test_the_update_is_the_padded_batch_s(case: str) -> None:
    torch.manual_seed(0)
    make, draw = CASES[case]
    model, batch = make().double().train(), hf.BatchEncoding(draw())
    full = copy.deepcopy(model)
    torch.autograd.backward(full(**batch).loss)
    torch.optim.SGD(full.parameters(), lr=1.0).step()
    weight = following_tokens if make is small_gpt2 else None  # Its loss is not the library's.
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    accumulator = Accumulator(model, optimizer, weight=weight, micro_tokens=24, check="strict")
    result = accumulator.step(batch)
    assert len(result.micro_batches) > 3
    assert max(result.micro_batches) < 9
    for mine, whole in zip(model.parameters(), full.parameters(), strict=True):
        torch.testing.assert_close(mine, whole, rtol=1e-12, atol=1e-12)

"""Trainers of transformers with tiny models and ragged texts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tiny_transformers import WORDS, hf, llama
from torch import Tensor
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset

LONGEST = 12


class Texts(Dataset[dict[str, Tensor]]):
    """Texts of 3 to 12 words; the labels of every other one begin in its middle."""

    def __init__(self, count: int) -> None:
        draw = torch.Generator().manual_seed(0)
        lengths = torch.randint(3, LONGEST, (count,), generator=draw).tolist()
        lengths[-1] = LONGEST
        self._texts = [torch.randint(1, WORDS, (length,), generator=draw) for length in lengths]

    def __len__(self) -> int:
        return len(self._texts)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        text = self._texts[index]
        labels = text.clone()
        labels[: len(text) // 2 * (index % 2)] = -100
        return {"input_ids": text, "labels": labels}


def pad(samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    texts = pad_sequence([sample["input_ids"] for sample in samples], batch_first=True)
    labels = pad_sequence([sample["labels"] for sample in samples], batch_first=True, padding_value=-100)
    return {"input_ids": texts, "attention_mask": (texts != 0).long(), "labels": labels}


def wide_loss(logits: Tensor, labels: Tensor, num_items_in_batch: Any = None, **_: Any) -> Tensor:
    """As `ForCausalLMLoss`, which computes in float32, in the dtype of the logits."""
    shifted = labels[:, 1:].flatten()
    total = functional.cross_entropy(logits[:, :-1].flatten(0, 1), shifted, reduction="sum")
    return total / ((shifted != -100).sum() if num_items_in_batch is None else num_items_in_batch)


def make_arguments(folder: Path, **settings: Any) -> Any:
    usual: dict[str, Any] = {"per_device_train_batch_size": 4, "max_steps": 3, "save_strategy": "no", "use_cpu": True}
    usual |= {"report_to": "none", "disable_tqdm": True, "logging_steps": 1, "dataloader_pin_memory": False}
    return hf.TrainingArguments(output_dir=str(folder / "out"), **usual | settings)


def make_trainer(folder: Path, kind: Any = None, *, samples: int = 40, further: Any = None, **settings: Any) -> Any:
    """A Trainer of a Llama; `further` are its own arguments, `settings` TrainingArguments."""
    torch.manual_seed(0)
    given = {"train_dataset": Texts(samples), "data_collator": pad, **(further or {})}
    model = given.pop("model", None) or llama()
    return (kind or hf.Trainer)(model, make_arguments(folder, **settings), **given)

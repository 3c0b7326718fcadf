"""BERT-base of Hugging Face with random weights, masked language modelling: sentences of 8 to 64 tokens, padded to 64.

The loss is a mean over the masked tokens, of which sentences have 1 to 10.
"""

from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.data import default_collate
from transformers import BertConfig, BertForMaskedLM

LENGTH, SENTENCES, IGNORED, MASK, FIRST_WORD, MASKED_SHARE = 64, 48, -100, 103, 1000, 0.15
config = BertConfig()
optimizer = partial(torch.optim.AdamW, fused=True)
generator = torch.Generator().manual_seed(0)


def sentence(length: int) -> dict[str, Tensor]:
    """Random words, 15 % of them masked, and padding."""
    words = torch.randint(FIRST_WORD, config.vocab_size, (LENGTH,), generator=generator)
    position = torch.arange(LENGTH)
    is_masked = position % round(1 / MASKED_SHARE) == 0
    is_word = position < length
    return {
        "input_ids": torch.where(is_word, torch.where(is_masked, MASK, words), config.pad_token_id),
        "attention_mask": is_word.long(),
        "labels": torch.where(is_word & is_masked, words, IGNORED),
    }


words = torch.randint(LENGTH // 8, LENGTH + 1, (SENTENCES,), generator=generator)
dataset = [sentence(int(length)) for length in words]


def model() -> nn.Module:
    """110 million parameters."""
    made: nn.Module = BertForMaskedLM(config)
    return made


def batch(size: int) -> dict[str, Tensor]:
    """`size` sentences."""
    made: dict[str, Tensor] = default_collate([dataset[index % SENTENCES] for index in range(size)])
    return made

"""T5 with padded sources and targets, of which padding does not count."""

import torch
from transformers import T5Config, T5ForConditionalGeneration


def model():
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
    return T5ForConditionalGeneration(T5Config(vocab_size=128, decoder_start_token_id=0, use_cache=False, **sizes))


def batch(size):
    mask = (torch.arange(24) < 24 - torch.arange(size)[:, None] % 9).long()
    labels = torch.randint(1, 128, (size, 12))
    return {
        "input_ids": torch.randint(1, 128, (size, 24)) * mask,
        "attention_mask": mask,
        "labels": labels.where(torch.arange(12) < 12 - torch.arange(size)[:, None] % 5, -100),
    }

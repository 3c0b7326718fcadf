"""BERT with padded sentences as a tokenizer gives them: a dict with an attention mask."""

import torch
from transformers import BertConfig, BertForSequenceClassification


def model():
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    return BertForSequenceClassification(BertConfig(vocab_size=128, num_labels=3, **sizes))


def batch(size):
    mask = (torch.arange(24) < 24 - torch.arange(size)[:, None] % 9).long()
    ids = torch.randint(1, 128, (size, 24)) * mask
    return {
        "input_ids": ids,
        "token_type_ids": torch.zeros_like(ids),
        "attention_mask": mask,
        "labels": torch.arange(size) % 3,
    }

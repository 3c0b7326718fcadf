"""Mixtral: each token goes to two of four experts."""

import torch
from transformers import MixtralConfig, MixtralForCausalLM

precision = "bf16"


def model():
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2}
    return MixtralForCausalLM(MixtralConfig(vocab_size=128, num_key_value_heads=2, use_cache=False, **sizes, **experts))


def batch(size):
    ids = torch.randint(0, 128, (size, 24))
    return {"input_ids": ids, "labels": ids.clone()}

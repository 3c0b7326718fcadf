"""Llama with LoRA and gradient checkpointing, in bf16, as peft's users train it."""

import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

precision = "bf16"


def model():
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    llama = LlamaForCausalLM(LlamaConfig(vocab_size=128, num_key_value_heads=2, use_cache=False, **sizes))
    llama.activation_checkpointing_enable()
    llama.enable_input_require_grads()
    return get_peft_model(llama, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))


def batch(size):
    ids = torch.randint(0, 128, (size, 24))
    return {"input_ids": ids, "labels": ids.where(torch.arange(24) < 23 - torch.arange(size)[:, None] % 9, -100)}

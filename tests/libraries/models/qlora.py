"""QLoRA: a Llama whose weights bitsandbytes holds in 4 bits, loaded from a checkpoint, with adapters of peft."""

import tempfile
from functools import cache

import torch
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
from transformers import BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM

precision = "bf16"


@cache
def checkpoint():
    """Write a model of random weights, in place of one from the hub."""
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    folder = tempfile.mkdtemp()
    LlamaForCausalLM(LlamaConfig(vocab_size=128, num_key_value_heads=2, **sizes)).save_pretrained(folder)
    return folder


def model():
    four_bits = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
    )
    llama = LlamaForCausalLM.from_pretrained(checkpoint(), quantization_config=four_bits, use_cache=False)
    llama = prepare_model_for_kbit_training(llama)
    return get_peft_model(llama, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))


def batch(size):
    ids = torch.randint(0, 128, (size, 24))
    return {"input_ids": ids, "labels": ids.clone()}

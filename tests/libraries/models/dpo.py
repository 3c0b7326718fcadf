"""DPO with a frozen reference, in bf16: chosen and rejected answers of one prompt are one sample."""

import torch
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM

precision = "bf16"


def model():
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=128, num_key_value_heads=2, use_cache=False, **sizes))


reference = model().eval().requires_grad_(False)


def batch(size):
    ids = torch.randint(0, 128, (size, 2, 24))
    answer = torch.arange(24) >= 8 + torch.arange(size)[:, None, None] % 5
    return {"ids": ids, "answer": answer.expand_as(ids).clone()}


def log_probability(model, ids, answer):
    """Return that of each answer, of shape [samples, 2]."""
    found = model(input_ids=ids.flatten(0, 1)).logits[:, :-1].log_softmax(-1)
    chosen = found.gather(-1, ids.flatten(0, 1)[:, 1:, None]).squeeze(-1)
    return (chosen * answer.flatten(0, 1)[:, 1:]).sum(-1).view(ids.shape[:2])


def loss(model, batch):
    ours = log_probability(model, **batch)
    with torch.no_grad():
        theirs = log_probability(reference, **batch)
    gain = ours - theirs
    return -F.logsigmoid(0.1 * (gain[:, 0] - gain[:, 1])).mean()

"""A vision transformer of transformers."""

import torch
from transformers import ViTConfig, ViTForImageClassification

precision = "bf16"


def model():
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    return ViTForImageClassification(ViTConfig(image_size=32, patch_size=8, num_labels=10, **sizes))


def batch(size):
    return {"pixel_values": torch.randn(size, 3, 32, 32), "labels": torch.randint(0, 10, (size,))}

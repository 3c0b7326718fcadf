"""CLIP: `usual` computes the loss of each micro-batch, the file itself that of the whole batch's outputs."""

import torch
from torch.nn import functional as F
from transformers import CLIPConfig, CLIPModel

import autoaccum

coupled = True


def model():
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    text = {**sizes, "vocab_size": 128, "max_position_embeddings": 16, "bos_token_id": 126, "eos_token_id": 127}
    vision = {**sizes, "image_size": 32, "patch_size": 8}
    return CLIPModel(CLIPConfig(text_config=text, vision_config=vision, projection_dim=16))


def batch(size):
    ids = torch.randint(1, 127, (size, 12))
    ids[:, -1] = 127
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "pixel_values": torch.randn(size, 3, 32, 32)}


def outputs(model, batch):
    found = model(**batch)
    return found.image_embeds, found.text_embeds, model.logit_scale


def coupled_loss(outputs, batch):
    images, texts, scale = outputs
    similarity, own = images @ texts.T * scale.exp(), torch.arange(len(images), device=images.device)
    return (F.cross_entropy(similarity, own) + F.cross_entropy(similarity.T, own)) / 2


def own_loss(model, batch):
    return model(**batch, return_loss=True).loss


usual = autoaccum.Workload(model=model, batch=batch, loss=own_loss)

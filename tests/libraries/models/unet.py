"""The UNet of diffusers, which learns the noise in latents under a text."""

import torch
from diffusers import DDPMScheduler, UNet2DConditionModel
from torch.nn import functional as F

precision = "bf16"
noising = DDPMScheduler(num_train_timesteps=100)


def model():
    return UNet2DConditionModel(
        sample_size=8,
        block_out_channels=(32,),
        layers_per_block=1,
        down_block_types=("CrossAttnDownBlock2D",),
        up_block_types=("CrossAttnUpBlock2D",),
        cross_attention_dim=32,
        attention_head_dim=8,
    )


def batch(size):
    return {"latents": torch.randn(size, 4, 8, 8), "text": torch.randn(size, 7, 32)}


def loss(model, batch):
    latents = batch["latents"]
    noise = torch.randn_like(latents)
    steps = torch.randint(0, noising.config.num_train_timesteps, (len(latents),), device=latents.device)
    noisy = noising.add_noise(latents, noise, steps)
    return F.mse_loss(model(noisy, steps, encoder_hidden_states=batch["text"]).sample.float(), noise.float())

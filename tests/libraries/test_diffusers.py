"""Objects of diffusers: their configurations are frozen mappings, which nothing may write to."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from state_digests import state_digest
from torch import Tensor, nn
from torch.nn import functional as F

import autoaccum
from autoaccum import Accumulator

IMPORTED = ("diffusers.models.unets.unet_2d", "diffusers.schedulers.scheduling_ddpm")


def unet() -> Any:
    from diffusers import UNet2DModel  # Here, since it takes each worker of pytest 7 s.

    return UNet2DModel(
        sample_size=8,
        in_channels=1,
        out_channels=1,
        layers_per_block=1,
        block_out_channels=(8, 8),
        norm_num_groups=4,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        attention_head_dim=4,
    )


def pictures(size: int) -> dict[str, Tensor]:
    return {"pictures": torch.randn(size, 1, 8, 8), "steps": torch.randint(0, 10, (size,))}


def noising() -> Any:
    """Made anew at each call: a cached function cannot be sent to a child by value."""
    from diffusers import DDPMScheduler

    return DDPMScheduler(num_train_timesteps=10)


def denoising(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    noise = torch.randn_like(batch["pictures"])
    return F.mse_loss(
        model(noising().add_noise(batch["pictures"], noise, batch["steps"]), batch["steps"]).sample, noise
    )


@pytest.mark.usefixtures("warm_children")
def test_a_unet_is_planned_and_trained() -> None:
    model = unet()
    optimizer = torch.optim.AdamW(model.parameters())
    config, before = dict(model.config), state_digest(model, optimizer)
    autoaccum.plan(model=model, batch=pictures, loss=denoising, optimizer=optimizer, target_batch=4, max_micro_batch=2)
    assert state_digest(model, optimizer) == before
    assert dict(model.config) == config
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            assert Accumulator(model, optimizer, denoising, micro_batch=2).step(pictures(4)).updated

"""A GAN has two optimizers, so it has two plans and two Accumulators; each plan includes the other network.

autoaccum plan examples/gan.py:discriminator --target-batch 4096 --gpu rtx3090 --memory 48MiB --max-trials 4 --json
python examples/gan.py
"""

from functools import partial

import torch
from torch import nn
from torch.nn import functional as F

from autoaccum import Accumulator, Workload, plan

generator_net = nn.Sequential(nn.Linear(64, 512), nn.GELU(), nn.Linear(512, 784), nn.Tanh())
discriminator_net = nn.Sequential(nn.Linear(784, 512), nn.GELU(), nn.Linear(512, 256), nn.GELU(), nn.Linear(256, 1))
angles = torch.linspace(0, 6.3, 784)


def train_only(net):
    """Return `net` after freezing the other network, which then takes part without gradients."""
    for other in (generator_net, discriminator_net):
        other.requires_grad_(other is net)
    return net


def batch(size):
    """Return waves of random phase, and the noise that is the input of the generator."""
    return torch.sin(3 * angles + 6.3 * torch.rand(size, 1)), torch.randn(size, 64)


def discriminator_loss(discriminator_net, batch):
    real, noise = batch
    return F.softplus(-discriminator_net(real)).mean() + F.softplus(discriminator_net(generator_net(noise))).mean()


def generator_loss(generator_net, batch):
    return F.softplus(-discriminator_net(generator_net(batch[1]))).mean()


adam = partial(torch.optim.Adam, lr=2e-4, betas=(0.5, 0.99))
discriminator = Workload(
    model=partial(train_only, discriminator_net), batch=batch, loss=discriminator_loss, optimizer=adam
)
generator = Workload(model=partial(train_only, generator_net), batch=batch, loss=generator_loss, optimizer=adam)

if __name__ == "__main__":
    torch.manual_seed(0)
    steps = {}
    for name, work in {"discriminator": discriminator, "generator": generator}.items():
        found = plan(f"{__file__}:{name}", target_batch=4096, device="cpu", max_micro_batch=512)
        net = work.build_model()
        steps[name] = net, Accumulator(net, adam(net.parameters()), work.loss, plan=found)
        print(f"{name}: {found.micro_batches}")
    for _ in range(2):
        for name, (net, accumulator) in steps.items():
            train_only(net)
            print(f"{name} {accumulator.step(batch(4096)).loss:.3f}")

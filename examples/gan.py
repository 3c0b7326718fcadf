"""A GAN: two optimizers, so two plans and two Accumulators; each network is planned in the presence of the other.

autoaccum plan examples/gan.py:discriminator --target-batch 4096 --gpu rtx3090 --memory 48MiB --max-trials 4 --json
python examples/gan.py
"""

from functools import partial

import torch
from torch import nn
from torch.nn import functional as F

from autoaccum import Accumulator, Workload, plan

painter = nn.Sequential(nn.Linear(64, 512), nn.GELU(), nn.Linear(512, 784), nn.Tanh())
critic = nn.Sequential(nn.Linear(784, 512), nn.GELU(), nn.Linear(512, 256), nn.GELU(), nn.Linear(256, 1))
angles = torch.linspace(0, 6.3, 784)


def alone(net):
    """Return `net`, with the other network frozen: it takes part, and gets no gradients."""
    for other in (painter, critic):
        other.requires_grad_(other is net)
    return net


def batch(size):
    """Waves of random phase, and the noise that the painter begins with."""
    return torch.sin(3 * angles + 6.3 * torch.rand(size, 1)), torch.randn(size, 64)


def tells_apart(critic, batch):
    real, noise = batch
    return F.softplus(-critic(real)).mean() + F.softplus(critic(painter(noise))).mean()


def deceives(painter, batch):
    return F.softplus(-critic(painter(batch[1]))).mean()


adam = partial(torch.optim.Adam, lr=2e-4, betas=(0.5, 0.99))
discriminator = Workload(model=partial(alone, critic), batch=batch, loss=tells_apart, optimizer=adam)
generator = Workload(model=partial(alone, painter), batch=batch, loss=deceives, optimizer=adam)

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
            alone(net)
            print(f"{name} {accumulator.step(batch(4096)).loss:.3f}")

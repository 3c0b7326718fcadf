"""PPO: one update over a rollout, of which a sample is one step; advantages are normalised over the whole of it."""

import torch
from torch import nn
from torch.distributions import Categorical

from autoaccum import Workload, whole_batch


class Agent(nn.Module):
    def __init__(self):
        super().__init__()
        self.actor = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 4))
        self.critic = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 1))


model = Agent


def batch(size):
    return {
        "states": torch.randn(size, 16),
        "actions": torch.randint(0, 4, (size,)),
        "log_probs": torch.full((size,), -1.4),
        "advantages": torch.randn(size),
        "returns": torch.randn(size),
    }


def ppo(model, batch, normalised):
    policy = Categorical(logits=model.actor(batch["states"]))
    ratio = (policy.log_prob(batch["actions"]) - batch["log_probs"]).exp()
    value = nn.functional.mse_loss(model.critic(batch["states"]).squeeze(-1), batch["returns"])
    surrogate = torch.min(ratio * normalised, ratio.clamp(0.8, 1.2) * normalised).mean()
    return 0.5 * value - surrogate - 0.01 * policy.entropy().mean()


def loss(model, batch):
    advantages, whole = batch["advantages"], whole_batch(batch["advantages"])
    return ppo(model, batch, (advantages - whole.mean()) / (whole.std() + 1e-8))


def usual_loss(model, batch):
    advantages = batch["advantages"]
    return ppo(model, batch, (advantages - advantages.mean()) / (advantages.std() + 1e-8))


usual = Workload(model=model, batch=batch, loss=usual_loss)

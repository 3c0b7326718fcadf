"""A small net in the ways of sharding it that FSDP2 has, with sizes that few numbers of ranks divide."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from autoaccum import Workload

TOKENS, WIDTH, INNER, BLOCKS, LENGTH = 37, 24, 50, 3, 5


class Block(nn.Module):
    """A perceptron behind its normalisation and around a shortcut."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """[samples, length, WIDTH] in and out."""
        return x + torch.as_tensor(self.down(torch.relu(self.up(self.norm(x)))))


class Net(nn.Module):
    """Token ids [samples, length] to logits [samples, length, TOKENS]."""

    places: Tensor

    def __init__(self, *, tied: bool = False) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(TOKENS, WIDTH), nn.Linear(WIDTH, TOKENS, bias=False)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.register_buffer("places", torch.zeros(LENGTH, WIDTH))
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, ids: Tensor) -> Tensor:
        """Logits."""
        x = self.tokens(ids) + self.places
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(x.to(self.head.weight.dtype))
        return logits


def frozen_net() -> Net:
    """A net of which only the blocks are trained."""
    net = Net()
    net.tokens.requires_grad_(False)
    net.head.requires_grad_(False)
    return net


def batch(size: int) -> tuple[Tensor, Tensor]:
    """Random tokens twice."""
    return torch.randint(0, TOKENS, (size, LENGTH)), torch.randint(0, TOKENS, (size, LENGTH))


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """The mean over all tokens."""
    return nn.functional.cross_entropy(model(batch[0]).flatten(0, 1).float(), batch[1].flatten())


def shard(model: Any, mesh: Any, **options: Any) -> None:
    """Shard each block, and the rest."""
    for block in model.blocks:
        fully_shard(block, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)


def shard_blocks(model: Any, mesh: Any) -> None:
    """Shard the blocks alone: each rank holds the whole embedding and head."""
    for block in model.blocks:
        fully_shard(block, mesh=mesh)


make = partial(Workload, model=Net, batch=batch, loss=loss, optimizer=torch.optim.AdamW)
plain = make()
tied = make(model=partial(Net, tied=True))
frozen = make(model=frozen_net)
half = make(model=lambda: Net().bfloat16(), accumulate_in="parameters")
mixed = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
bf16_and_fp32 = make(parallelize=partial(shard, mp_policy=mixed))
kept = make(parallelize=partial(shard, reshard_after_forward=False))
resharded_to_two = make(parallelize=partial(shard, reshard_after_forward=2))
blocks_alone = make(
    parallelize=shard_blocks,
    optimizer=partial(torch.optim.AdamW, foreach=False),  # Lists of both kinds are refused.
)

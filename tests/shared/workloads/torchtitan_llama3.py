"""Llama 3 8B as torchtitan trained it for its published peaks: FSDP2 in mixed precision with selective checkpointing.

The settings are those of torchtitan's commit 9dec370 (2024-12-26), which `benchmarks/llama3_h100_202412_torchtitan.md`
names, with `train_configs/llama3_8b.toml` and `batch_size = 2`: sequences of 8192, bf16 parameters and fp32 sums of
gradients over ranks, no compilation, AdamW over lists of tensors, norms clipped. 82.4 GiB were reserved on each of
8 H100 of 96 GB, 67.0 GiB on each of 128.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

VOCABULARY, LENGTH, WIDTH, INNER, LAYERS, HEADS, KEY_HEADS = 128256, 8192, 4096, 14336, 32, 32, 8
HEAD = WIDTH // HEADS
THETA, EPSILON = 500_000.0, 1e-5
SAVED = {
    torch.ops.aten.mm.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops._c10d_functional.reduce_scatter_tensor.default,
    torch.ops.aten.abs.default,
    torch.ops.aten.max.default,
}
"""Operators whose outputs are kept for backward; of matrix products, every second one is computed again."""


def linear(inputs: int, outputs: int) -> nn.Linear:
    """A product without bias."""
    return nn.Linear(inputs, outputs, bias=False)


class Norm(nn.Module):
    """Root mean square normalisation, computed in fp32 by single operators."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        """Any shape that ends in WIDTH."""
        return self._scaled(x.float()).type_as(x) * self.weight

    def _scaled(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPSILON)


def turned(x: Tensor, turns: Tensor) -> Tensor:
    """Turn pairs of [samples, length, heads, HEAD] as complex numbers in fp32."""
    pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * turns).flatten(3)


def rotate(query: Tensor, key: Tensor, turns: Tensor) -> tuple[Tensor, Tensor]:
    """Turn both, then round both to their dtype."""
    turned_query, turned_key = turned(query, turns), turned(key, turns)
    return turned_query.type_as(query), turned_key.type_as(key)


def repeat_heads(x: Tensor) -> Tensor:
    """[samples, length, KEY_HEADS, HEAD] to [samples, length, HEADS, HEAD], copied."""
    samples, length = x.shape[:2]
    return x.unsqueeze(3).expand(-1, -1, -1, HEADS // KEY_HEADS, -1).reshape(samples, length, HEADS, HEAD)


class Attention(nn.Module):
    """Causal attention, four query heads to a key."""

    def __init__(self) -> None:
        super().__init__()
        self.query = linear(WIDTH, WIDTH)
        self.key, self.value = linear(WIDTH, KEY_HEADS * HEAD), linear(WIDTH, KEY_HEADS * HEAD)
        self.out = linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, turns: Tensor) -> Tensor:
        """[samples, length, WIDTH] in and out."""
        projected = (self.query(x), self.key(x), self.value(x))
        query, key, value = (each.unflatten(-1, (-1, HEAD)) for each in projected)
        query, key = rotate(query, key, turns)
        keys, values = repeat_heads(key), repeat_heads(value)
        query, key, value = (each.transpose(1, 2) for each in (query, keys, values))
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):  # PyTorch's choice then; of late it prefers cuDNN's on an H100.
            mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        mixed = mixed.transpose(1, 2).contiguous()
        return torch.as_tensor(self.out(mixed.flatten(2)))


class Gated(nn.Module):
    """A gated perceptron."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.down, self.up = linear(WIDTH, INNER), linear(INNER, WIDTH), linear(WIDTH, INNER)

    def forward(self, x: Tensor) -> Tensor:
        """[samples, length, WIDTH] in and out."""
        return torch.as_tensor(self.down(F.silu(self.gate(x)) * self.up(x)))


class Layer(nn.Module):
    """Attention and a gated perceptron, each behind its normalisation and around a shortcut."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.gated = Attention(), Gated()
        self.attention_norm, self.gated_norm = Norm(), Norm()

    def forward(self, x: Tensor, turns: Tensor) -> Tensor:
        """[samples, length, WIDTH] in and out."""
        x = x + self.attention(self.attention_norm(x), turns)
        return x + torch.as_tensor(self.gated(self.gated_norm(x)))


def turns_of_positions() -> Tensor:
    """The turns of all positions, as [1, LENGTH, 1, HEAD / 2] complex numbers."""
    speeds = 1.0 / THETA ** (torch.arange(0, HEAD, 2).float() / HEAD)
    angles = torch.outer(torch.arange(LENGTH), speeds).float()
    return torch.polar(torch.ones_like(angles), angles).view(1, LENGTH, 1, -1)


class Llama(nn.Module):
    """8,030,261,248 parameters: token ids [samples, length] to logits [samples, length, VOCABULARY]."""

    turns: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.register_buffer("turns", turns_of_positions())
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.norm = Norm()
        self.head = linear(WIDTH, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        """Logits."""
        x = self.tokens(ids)
        for layer in self.layers:
            x = layer(x, self.turns)
        logits: Tensor = self.head(self.norm(x))
        return logits


def model() -> Llama:
    """A model without memory, which `parallelize` gives memory and weights."""
    with torch.device("meta"):
        return Llama()


def keep_every_second_product() -> Any:
    """Return the contexts of a layer: what its forward keeps, and what is computed again."""
    products = {"forward": 0, "recompute": 0}

    def policy(context: Any, operator: Any, *_: Any, **__: Any) -> CheckpointPolicy:
        if operator == torch.ops.aten.mm.default:
            products["recompute" if context.is_recompute else "forward"] += 1
        is_second = products["recompute" if context.is_recompute else "forward"] % 2 == 0
        if operator in SAVED and not (operator == torch.ops.aten.mm.default and is_second):
            return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)  # type: ignore[no-untyped-call]


def parallelize(model: Llama, mesh: DeviceMesh) -> nn.Module:
    """Checkpoint each layer selectively, shard it and the root, and only then take memory for this rank's shards."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for number, layer in enumerate(model.layers):
        wrapped = checkpoint_wrapper(layer, context_fn=keep_every_second_product, preserve_rng_state=False)
        model.layers[number] = wrapped
        # FSDP2 would gather the last layer again at once.
        fully_shard(wrapped, mesh=mesh, mp_policy=policy, reshard_after_forward=number < LAYERS - 1)
    # FSDP2 kept the root gathered then, whatever it was told.
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    model.to_empty(device=mesh.device_type)
    with torch.no_grad():
        fill(model, mesh.device_type)
    return model


def fill(model: Llama, device: str) -> None:
    """Draw this rank's shards of the weights."""
    with torch.device(device):
        model.turns = turns_of_positions()
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight)
        elif isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.02)
        elif isinstance(module, Norm):
            nn.init.ones_(module.weight)


def batch(size: int) -> tuple[Tensor, Tensor]:
    """Random tokens, and those that follow."""
    ids = torch.randint(0, VOCABULARY, (size, LENGTH + 1))
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def loss(model: Callable[[Tensor], Tensor], batch: tuple[Tensor, Tensor]) -> Tensor:
    """The mean over all tokens in fp32, of which each sample has as many."""
    inputs, targets = batch
    return F.cross_entropy(model(inputs).flatten(0, 1).float(), targets.flatten())


def optimizer(params: Iterable[Tensor]) -> torch.optim.Optimizer:
    """As `fused = false` has it."""
    return torch.optim.AdamW(params, lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=False, foreach=True)

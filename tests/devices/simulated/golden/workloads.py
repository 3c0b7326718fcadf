"""Small workloads whose predictions are recorded: each goes another way through the simulation."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from autoaccum import Workload

foreach_adamw = partial(torch.optim.AdamW, foreach=True)
fused_adamw = partial(torch.optim.AdamW, fused=True)
momentum = partial(torch.optim.SGD, lr=0.1, momentum=0.9, foreach=True)


def rows(size: int) -> tuple[Tensor, Tensor]:
    return torch.randn(size, 256), torch.randint(0, 10, (size,))


def images(size: int, side: int = 32) -> tuple[Tensor, Tensor]:
    return torch.randn(size, 3, side, side), torch.randint(0, 10, (size,))


def tokens(size: int, length: int = 64) -> tuple[Tensor, Tensor]:
    ids = torch.randint(0, 500, (size, length + 1))
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def token_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())


class Mlp(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(256, 512), nn.ReLU(), nn.Dropout(0.1), nn.Linear(512, 512), nn.Tanh())
        self.append(nn.Linear(512, 10))


class Residual(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), nn.BatchNorm2d(outputs)
        self.second, self.other = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False), nn.BatchNorm2d(outputs)
        self.short = nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        inner = F.relu(self.norm(self.first(x)), inplace=True)
        return F.relu(self.other(self.second(inner)) + self.short(x), inplace=True)


def resnet() -> nn.Module:
    blocks = [Residual(16, 16, 1), Residual(16, 32, 2), Residual(32, 64, 2)]
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10)]
    return nn.Sequential(nn.Conv2d(3, 16, 3, 1, 1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2), *blocks, *head)


def resnet_last() -> nn.Module:
    return resnet().to(memory_format=torch.channels_last)  # type: ignore[call-overload, no-any-return]


class Attention(nn.Module):
    def __init__(self, width: int, heads: int, kind: str, dropout: float) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.heads, self.kind, self.dropout = heads, kind, dropout

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        length, mask = x.shape[1], None
        if self.kind == "masked":
            mask = (torch.arange(length, device=x.device) < length - 7).expand(len(x), 1, length, length)
        out = F.scaled_dot_product_attention(q, k, v, mask, self.dropout, is_causal=self.kind == "causal")
        return torch.as_tensor(self.out(out.transpose(1, 2).flatten(2)))


class Block(nn.Module):
    def __init__(self, width: int, heads: int, kind: str, dropout: float) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads, kind, dropout)
        self.inner = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.first(x)))
        return torch.as_tensor(x + self.dropout(self.inner(self.second(x))))


class Decoder(nn.Module):
    """A language model whose head is tied to its embedding."""

    def __init__(
        self, kind: str = "causal", dropout: float = 0.0, checkpointed: bool = False, width: int = 128, heads: int = 4
    ) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(500, width), nn.Embedding(64, width)
        self.blocks = nn.ModuleList(Block(width, heads, kind, dropout) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 500, bias=False)
        self.head.weight = self.tokens.weight
        self.checkpointed = checkpointed

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        return torch.as_tensor(self.head(self.norm(x)))


class RmsNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return self.weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


class LlamaBlock(nn.Module):
    """Grouped heads, rotated positions and a gated unit."""

    def __init__(self, width: int = 128, heads: int = 4, groups: int = 2) -> None:
        super().__init__()
        self.size, self.heads, self.groups = width // heads, heads, groups
        self.q, self.o = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.kv = nn.Linear(width, 2 * groups * self.size, bias=False)
        self.gate, self.up = nn.Linear(width, 256, bias=False), nn.Linear(width, 256, bias=False)
        self.down = nn.Linear(256, width, bias=False)
        self.first, self.second = RmsNorm(width), RmsNorm(width)

    def rotate(self, x: Tensor, angles: Tensor) -> Tensor:
        half = x.shape[-1] // 2
        turned = torch.cat((-x[..., half:], x[..., :half]), -1)
        return x * angles.cos().to(x.dtype) + turned * angles.sin().to(x.dtype)

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        normed = self.first(x)
        q = self.rotate(self.q(normed).unflatten(-1, (self.heads, -1)).transpose(1, 2), angles)
        k, v = self.kv(normed).unflatten(-1, (2, self.groups, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        k = self.rotate(k, angles)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.o(out.transpose(1, 2).flatten(2))
        normed = self.second(x)
        return torch.as_tensor(x + self.down(F.silu(self.gate(normed)) * self.up(normed)))


class Llama(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.norm, self.head = nn.Embedding(500, 128), RmsNorm(128), nn.Linear(128, 500, bias=False)
        self.blocks = nn.ModuleList(LlamaBlock() for _ in range(2))

    def forward(self, ids: Tensor) -> Tensor:
        steps = torch.arange(ids.shape[1], device=ids.device)[:, None]
        rates = 1 / 10000 ** (torch.arange(0, 32, 2, device=ids.device) / 32)
        angles = torch.cat((steps * rates, steps * rates), -1)
        x = self.tokens(ids)
        for block in self.blocks:
            x = block(x, angles)
        return torch.as_tensor(self.head(self.norm(x)))


def llama_in_bf16() -> nn.Module:
    return Llama().bfloat16()


class Encoder(nn.Module):
    """PyTorch's own encoder layers, with a mask of what is padding."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(96, 6, 192, 0.1, batch_first=True, activation="gelu")
        self.tokens, self.layers = nn.Embedding(500, 96, padding_idx=0), nn.TransformerEncoder(layer, 2)
        self.head = nn.Linear(96, 500)

    def forward(self, ids: Tensor) -> Tensor:
        return torch.as_tensor(self.head(self.layers(self.tokens(ids), src_key_padding_mask=ids == 0)))


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.Module] = nn.LSTM) -> None:
        super().__init__()
        self.tokens = nn.Embedding(500, 64)
        self.cells = kind(64, 96, 2, batch_first=True, dropout=0.2, bidirectional=True)
        self.head = nn.Linear(192, 500)

    def forward(self, ids: Tensor) -> Tensor:
        return torch.as_tensor(self.head(self.cells(self.tokens(ids))[0]))


class Speech(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ears, self.cells, self.head = (
            nn.Conv1d(20, 64, 5, 2, 2),
            nn.GRU(64, 64, batch_first=True),
            nn.Linear(64, 30),
        )

    def forward(self, sound: Tensor) -> Tensor:
        return torch.as_tensor(self.head(self.cells(F.relu(self.ears(sound)).transpose(1, 2))[0]).log_softmax(-1))


def speech(size: int) -> tuple[Tensor, Tensor]:
    return torch.randn(size, 20, 120), torch.randint(1, 30, (size, 12))


def speech_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    scores = model(batch[0]).transpose(0, 1)
    lengths = torch.full((scores.shape[1],), scores.shape[0], dtype=torch.long)
    return F.ctc_loss(scores, batch[1], lengths, torch.full_like(lengths, 12))


class Recommender(nn.Module):
    """Mostly tables, some of them with sparse gradients."""

    def __init__(self, sparse: bool = False) -> None:
        super().__init__()
        self.users, self.items = nn.Embedding(40_000, 32, sparse=sparse), nn.EmbeddingBag(20_000, 32, sparse=sparse)
        self.head = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, ids: Tensor) -> Tensor:
        return torch.as_tensor(self.head(torch.cat((self.users(ids[:, 0]), self.items(ids[:, 1:])), -1)))[:, 0]


def visits(size: int) -> tuple[Tensor, Tensor]:
    return torch.randint(0, 20_000, (size, 9)), torch.rand(size)


class UNet(nn.Module):
    """Skips, transposed convolutions, group norm and interpolation."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.down = self.twice(3, 16), self.twice(16, 32)
        self.up, self.join = nn.ConvTranspose2d(32, 16, 2, 2), self.twice(32, 16)
        self.head = nn.Conv2d(16, 5, 1)

    def twice(self, inputs: int, outputs: int) -> nn.Module:
        layers = [nn.Conv2d(inputs, outputs, 3, padding=1), nn.GroupNorm(4, outputs), nn.SiLU()]
        return nn.Sequential(*layers, nn.Conv2d(outputs, outputs, 3, padding=1), nn.InstanceNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        skip = self.first(x)
        inner = self.up(self.down(F.avg_pool2d(skip, 2)))
        out = self.head(self.join(torch.cat((skip, inner), 1)))
        return F.interpolate(out, scale_factor=2.0, mode="bilinear")


def maps(size: int) -> tuple[Tensor, Tensor]:
    return torch.randn(size, 3, 32, 32), torch.randint(0, 5, (size, 64, 64))


class Swish(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x.sigmoid()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        gate = x.sigmoid()
        return torch.as_tensor(grads[0] * (gate + x * gate * (1 - gate)))


class Penalised(nn.Module):
    """A function of its own, and a gradient within the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.utils.parametrizations.weight_norm(nn.Linear(256, 256)), nn.Linear(256, 10)

    def forward(self, x: Tensor) -> Tensor:
        return torch.as_tensor(self.second(Swish.apply(self.first(x))))  # type: ignore[no-untyped-call]


def penalised_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    inputs = batch[0].requires_grad_()
    outputs = model(inputs)
    (slope,) = torch.autograd.grad(outputs.sum(), inputs, create_graph=True)
    return F.cross_entropy(outputs, batch[1]) + 0.1 * slope.square().sum(1).mean()


class Picker(nn.Module):
    """Indices and masks whose values the simulation has to know."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.inner, self.head = nn.Embedding(500, 64), nn.Linear(64, 64), nn.Linear(64, 500)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids)
        real = torch.arange(ids.shape[1], device=ids.device).expand_as(ids) % 4 != 0
        picked = self.inner(x[real])
        out = torch.zeros_like(x).index_put((real,), picked)
        scores = out.flatten(0, 1)[torch.nonzero(real.flatten())[:, 0]].softmax(-1)
        top = scores.topk(4).indices
        out = out.flatten(0, 1).scatter_add(1, top, scores[:, :4])
        return torch.as_tensor(self.head(out.cumsum(0).sort(1).values))


def picked_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1].flatten())


def contrastive_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """All samples against all: memory that is not affine in the batch."""
    views = F.normalize(model(batch[0]), dim=-1)
    return F.cross_entropy(views @ views.T / math.sqrt(0.1), torch.arange(len(views), device=views.device))


classes = nn.CrossEntropyLoss()

mlp_sgd = Workload(model=Mlp, batch=rows, criterion=classes, optimizer=momentum)
mlp_one_by_one = Workload(
    model=Mlp, batch=rows, criterion=classes, optimizer=partial(torch.optim.Adam, foreach=False), precision="fp16"
)
mlp_held = Workload(
    model=Mlp, batch=rows, criterion=classes, ema=True, hold_outputs=True, evaluation_batch=512, optimizer=fused_adamw
)
resnet_fp32 = Workload(model=resnet, batch=images, criterion=classes, optimizer=momentum)
resnet_bf16_last = Workload(
    model=resnet_last, batch=images, criterion=classes, optimizer=fused_adamw, precision="bf16", batchnorm="running"
)
gpt_bf16 = Workload(model=Decoder, batch=tokens, loss=token_loss, optimizer=foreach_adamw, precision="bf16")
gpt_fp32 = Workload(model=partial(Decoder, heads=2), batch=tokens, loss=token_loss, optimizer="Adam")
gpt_checkpointed = Workload(
    model=partial(Decoder, checkpointed=True, dropout=0.1), batch=tokens, loss=token_loss, precision="bf16"
)
masked_fp16 = Workload(
    model=partial(Decoder, "masked", 0.1, width=96, heads=8), batch=tokens, loss=token_loss, precision="fp16"
)
llama_bf16 = Workload(model=llama_in_bf16, batch=tokens, loss=token_loss, optimizer=fused_adamw)
encoder_fp32 = Workload(model=Encoder, batch=tokens, loss=token_loss, optimizer="NAdam")
lstm_fp32 = Workload(model=Recurrent, batch=tokens, loss=token_loss, optimizer=partial(torch.optim.SGD, lr=1.0))
gru_bf16 = Workload(model=partial(Recurrent, nn.GRU), batch=tokens, loss=token_loss, precision="bf16")
speech_fp32 = Workload(model=Speech, batch=speech, loss=speech_loss, optimizer="RMSprop")
tables_dense = Workload(model=Recommender, batch=visits, criterion=nn.MSELoss(), optimizer="Adagrad")
tables_sparse = Workload(model=partial(Recommender, True), batch=visits, criterion=nn.MSELoss(), optimizer="SGD")
unet_fp16 = Workload(model=UNet, batch=maps, criterion=classes, optimizer=momentum, precision="fp16")
penalised = Workload(model=Penalised, batch=rows, loss=penalised_loss)
picker = Workload(model=Picker, batch=tokens, loss=picked_loss)
contrastive = Workload(model=Mlp, batch=rows, loss=contrastive_loss)

"""The workloads whose peaks are compared with a card's: five families, each in several precisions and optimizers.

Loaded by children as a file, so that it imports nothing from beside it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from autoaccum import Workload

CLASSES, IGNORED, VOCABULARY, LENGTH = 1000, -100, 50304, 512
LAST = torch.channels_last
foreach, fused = partial(torch.optim.AdamW, foreach=True), partial(torch.optim.AdamW, fused=True)
sgd = partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=1e-4)


def images(side: int, size: int, layout: torch.memory_format = torch.contiguous_format) -> tuple[Tensor, Tensor]:
    return torch.randn(size, 3, side, side).contiguous(memory_format=layout), torch.randint(0, CLASSES, (size,))


def texts(size: int) -> tuple[Tensor, Tensor]:
    ids = torch.randint(0, VOCABULARY, (size, LENGTH + 1))
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def token_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten(), ignore_index=IGNORED)


# A ResNet of 23 million parameters on 176 x 176 images.


def convolution(inputs: int, outputs: int, kernel: int, stride: int = 1) -> nn.Sequential:
    layer = nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2, bias=False)
    return nn.Sequential(layer, nn.BatchNorm2d(outputs))


class Bottleneck(nn.Module):
    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            *(convolution(inputs, width, 1), nn.ReLU(inplace=True)),
            *(convolution(width, width, 3, stride), nn.ReLU(inplace=True)),
            convolution(width, 4 * width, 1),
        )
        self.shortcut = nn.Identity() if inputs == 4 * width else convolution(inputs, 4 * width, 1, stride)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        return torch.as_tensor(self.relu(self.body(x) + self.shortcut(x)))


def resnet(layout: torch.memory_format = torch.contiguous_format, benchmark: bool = False) -> nn.Module:
    torch.backends.cudnn.benchmark = benchmark
    layers: list[nn.Module] = [convolution(3, 64, 7, 2), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)]
    inputs = 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            layers.append(Bottleneck(inputs, width, 2 if width > 64 and block == 0 else 1))
            inputs = 4 * width
    made = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, CLASSES))
    return made.to(memory_format=layout)  # type: ignore[call-overload, no-any-return]


# Transformers: a GPT of 45 million parameters on 512 tokens, with tied embeddings; an encoder whose texts have padding,
# so that attention has a mask; a vision transformer of 29 million on 224 x 224 images, without dropout.


class Block(nn.Module):
    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out, self.drop = nn.Linear(width, 3 * width), nn.Linear(width, width), nn.Dropout(dropout)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU("tanh"), nn.Linear(4 * width, width))

    def forward(self, x: Tensor, mask: Tensor | None, causal: bool) -> Tensor:
        query, key, value = self.qkv(self.first(x)).unflatten(-1, (3, -1, 64)).permute(2, 0, 3, 1, 4)
        dropout = self.drop.p if self.training else 0.0
        mixed = F.scaled_dot_product_attention(query, key, value, mask, dropout, causal)
        x = x + self.drop(self.out(mixed.transpose(1, 2).flatten(2)))
        return torch.as_tensor(x + self.drop(self.mlp(self.second(x))))


class Transformer(nn.Module):
    """Blocks of `width`, of which some are checkpointed: all or none."""

    def __init__(self, width: int, layers: int, length: int, dropout: float, checkpointed: bool) -> None:
        super().__init__()
        self.positions = nn.Parameter(0.02 * torch.randn(length, width))
        self.blocks = nn.ModuleList(Block(width, dropout) for _ in range(layers))
        self.norm, self.checkpointed = nn.LayerNorm(width), checkpointed

    def encode(self, x: Tensor, mask: Tensor | None = None, causal: bool = False) -> Tensor:
        x = x + self.positions
        for block in self.blocks:
            run = partial(checkpoint, block, use_reentrant=False) if self.checkpointed else block
            x = run(x, mask, causal)
        return torch.as_tensor(self.norm(x))


class TextModel(Transformer):
    def __init__(self, causal: bool, checkpointed: bool = False) -> None:
        super().__init__(512, 6, LENGTH, 0.1, checkpointed)
        self.tokens, self.head = nn.Embedding(VOCABULARY, 512), nn.Linear(512, VOCABULARY, bias=False)
        nn.init.normal_(self.tokens.weight, std=0.02)
        self.head.weight, self.causal = self.tokens.weight, causal

    def forward(self, ids: Tensor) -> Tensor:
        mask = None if self.causal else (ids != 0)[:, None, None]
        return torch.as_tensor(self.head(self.encode(self.tokens(ids), mask, self.causal)))


class VisionTransformer(Transformer):
    def __init__(self, checkpointed: bool = False) -> None:
        super().__init__(448, 12, 197, 0.0, checkpointed)
        self.patches, self.head = nn.Conv2d(3, 448, 16, 16), nn.Linear(448, CLASSES)
        self.first = nn.Parameter(torch.zeros(1, 1, 448))

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2)
        return torch.as_tensor(self.head(self.encode(torch.cat((self.first.expand(len(x), -1, -1), x), 1))[:, 0]))


def masked_texts(size: int) -> tuple[Tensor, Tensor]:
    """Text whose last 32 tokens are padding, and a label for 15 % of the others."""
    ids = torch.randint(1, VOCABULARY, (size, LENGTH)).masked_fill(torch.arange(LENGTH) >= LENGTH - 32, 0)
    return ids, ids.masked_fill((torch.rand(size, LENGTH) >= 0.15) | (ids == 0), IGNORED)


def labelled(batch: tuple[Tensor, Tensor]) -> Tensor:
    return (batch[1] != IGNORED).sum()


class Recurrent(nn.Module):
    """Two LSTM layers (48 million parameters)."""

    def __init__(self, dropout: float = 0.0, bidirectional: bool = False) -> None:
        super().__init__()
        self.tokens = nn.Embedding(10000, 1024)
        self.cells = nn.LSTM(1024, 512, 2, batch_first=True, dropout=dropout, bidirectional=bidirectional)
        self.head = nn.Linear(1024 if bidirectional else 512, 10000)

    def forward(self, ids: Tensor) -> Tensor:
        return torch.as_tensor(self.head(self.cells(self.tokens(ids))[0]))


def short_texts(size: int) -> tuple[Tensor, Tensor]:
    return torch.randint(0, 10000, (size, 128)), torch.randint(0, 10000, (size, 128))


Make = Callable[..., Workload]
cnn: Make = partial(Workload, model=resnet, batch=partial(images, 176), criterion=nn.CrossEntropyLoss())
cnn_last = partial(cnn, model=partial(resnet, LAST), batch=partial(images, 176, layout=LAST))
gpt: Make = partial(Workload, model=partial(TextModel, causal=True), batch=texts, loss=token_loss)
bert: Make = partial(
    Workload, model=partial(TextModel, causal=False), batch=masked_texts, loss=token_loss, weight=labelled
)
vit: Make = partial(Workload, model=VisionTransformer, batch=partial(images, 224), criterion=nn.CrossEntropyLoss())
lstm: Make = partial(Workload, model=Recurrent, batch=short_texts, loss=token_loss)

WORKLOADS: dict[str, tuple[Workload, tuple[int, ...]]] = {
    "cnn_fp32_sgd": (cnn(optimizer=sgd), (16, 64)),
    "gpt_bf16_foreach": (gpt(optimizer=foreach, precision="bf16"), (8, 24)),
    "vit_bf16_fused": (vit(optimizer=fused, precision="bf16"), (16, 96)),
    "bert_fp32_foreach": (bert(optimizer=foreach), (4, 16)),
    "lstm_fp32_sgd": (lstm(optimizer=sgd), (64, 256)),
    "cnn_bf16_channels_last": (cnn_last(optimizer=sgd, precision="bf16"), (96,)),
    "gpt_fp32_foreach": (gpt(optimizer=foreach), (12,)),
    "vit_fp32_adamw": (vit(optimizer=torch.optim.AdamW), (48,)),
    "bert_bf16_fused": (bert(optimizer=fused, precision="bf16"), (24,)),
    "lstm_fp16_foreach": (lstm(optimizer=foreach, precision="fp16"), (256,)),
    "gpt_bf16_checkpointed": (
        gpt(model=partial(TextModel, True, checkpointed=True), optimizer=foreach, precision="bf16"),
        (8, 24),
    ),
    "cnn_fp16_fused": (cnn(optimizer=fused, precision="fp16"), (64,)),
    "gpt_fp16_fused": (gpt(optimizer=fused, precision="fp16"), (24,)),
    "vit_fp16_sgd": (vit(optimizer=sgd, precision="fp16"), (96,)),
    "vit_bf16_checkpointed": (
        vit(model=partial(VisionTransformer, checkpointed=True), optimizer=fused, precision="bf16"),
        (128,),
    ),
    "lstm_fp32_bidirectional": (lstm(model=partial(Recurrent, 0.2, bidirectional=True), optimizer=sgd), (128,)),
    "cnn_fp32_channels_last": (cnn_last(optimizer=sgd), (64,)),
    "cnn_fp16_benchmark": (cnn(model=partial(resnet, benchmark=True), optimizer=sgd, precision="fp16"), (64,)),
}
"""Each with the micro-batches it is compared at, in the order of measurement: every family and precision comes early,
in case time runs short."""


def __getattr__(name: str) -> Workload:  # So that `compared.py:NAME` is one of them.
    if name not in WORKLOADS:
        raise AttributeError(name)
    return WORKLOADS[name][0]

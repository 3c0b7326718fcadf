"""The sample project of a guard, edits of its source that cost memory, and edits that cost none."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple

from autoaccum.simulation.trace_records import Category

BASE: Final = '''
"""A small GPT over spectrograms: a stem, checkpointed blocks, and a head over a vocabulary."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

WIDTH, HEADS, LENGTH, VOCABULARY, CHANNELS = 256, 4, 2048, 1024, 1024
precision = "bf16"


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        samples, length, _ = x.shape
        q, k, v = self.qkv(x).view(samples, length, 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(samples, length, WIDTH))


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.act = nn.GELU()
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        return self.down(self.act(self.up(x)))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.attn = nn.LayerNorm(WIDTH), Attention()
        self.norm2, self.mlp = nn.LayerNorm(WIDTH), MLP()
        self.drop = nn.Dropout(0.1)

    def forward(self, x):
        x = x + self.drop(self.attn(self.norm1(x)))
        return x + self.drop(self.mlp(self.norm2(x)))


class Stem(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv1d(16, CHANNELS, 3, padding=1)
        self.norm = nn.BatchNorm1d(CHANNELS)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv1d(CHANNELS, WIDTH, 1)

    def forward(self, x):
        return self.conv2(self.relu(self.norm(self.conv1(x)))).transpose(1, 2)


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = Stem()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.register_buffer("positions", torch.ones(LENGTH, WIDTH))
        self.early = nn.ModuleList([Block()])
        self.blocks = nn.ModuleList([Block(), Block()])
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens, sound):
        x = (self.tokens(tokens) + self.stem(sound)) * self.positions
        for block in self.early:
            x = checkpoint(block, x, use_reentrant=False)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def model():
    return GPT()


def batch(size):
    tokens = torch.zeros(size, LENGTH, dtype=torch.long)
    return tokens, torch.zeros(size, 16, LENGTH), tokens


def loss(model, batch):
    tokens, sound, targets = batch
    logits = model(tokens, sound)
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def optimizer(params):
    return torch.optim.AdamW(params, lr=1e-3)
'''


Edits = tuple[tuple[str, str], ...]


def edited(edits: Edits, source: str = BASE) -> str:
    """Return the source with each text replaced everywhere; each must occur."""
    for old, new in edits:
        assert old in source, f"{old!r} is not in the sample project"
        source = source.replace(old, new)
    return source


class Regression(NamedTuple):
    """An edit that costs memory: what its memory is for, of which module, what is different about it, as in `Growth`.

    `start` are edits that were made before.
    """

    told: tuple[Category, str, str]
    edits: Edits
    start: Edits


def regression(told: tuple[Category, str, str], *edits: tuple[str, str], start: Edits = ()) -> Regression:
    return Regression(told, edits, start)


_MODEL = "def model():\n    return GPT()\n"
_ADAMW = "torch.optim.AdamW(params, lr=1e-3)"
_FORWARD = "        return self.down(self.act(self.up(x)))\n"
_HEAD = "        return self.head(self.norm(x))\n"
_TIED = "        self.head.weight = self.tokens.weight\n"
_LOSS = "    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())\n"
_LOGITS = "    logits = model(tokens, sound)\n"

_ATTENTION = "        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)\n"
_BY_HAND = (_ATTENTION, "        y = F.softmax(q @ k.transpose(-2, -1), -1) @ v\n")
_LOSS_WITHIN = (
    ("2048, 1024, 1024\n", "2048, 4096, 1024\n"),
    (_TIED, _TIED + "        self.expand, self.shrink = nn.Conv1d(WIDTH, 6144, 1), nn.Conv1d(6144, WIDTH, 1)\n"),
    ("forward(self, tokens, sound)", "forward(self, tokens, sound, targets)"),
    (
        _HEAD,
        "        wide = self.expand(x.transpose(1, 2))\n"
        "        hidden = F.relu(wide, inplace=True)\n"
        "        logits = self.head(self.norm(x + self.shrink(hidden).transpose(1, 2)))\n"
        "        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())\n",
    ),
    (_LOGITS, "    return model(tokens, sound, targets)\n"),
)
"""A model that computes its loss itself, so that its local variables are alive at the peak."""

REGRESSIONS: Final[Mapping[str, Regression]] = {
    "an activation kept in a list across updates": regression(
        ("parameters", "", "aten.add in fp32"),
        (_TIED, _TIED + "        self.seen = []\n"),
        (_HEAD, "        self.seen.append(x.detach())\n" + _HEAD),
    ),
    "a lost inplace": regression(
        ("temporaries", "expand", "aten.convolution in bf16"),
        *_LOSS_WITHIN,
        ("F.relu(wide, inplace=True)", "F.relu(wide)"),
        start=_LOSS_WITHIN,
    ),
    "an fp32 cast under autocast": regression(
        ("activations", "blocks.{0,1}.mlp", "bf16 -> fp32"),
        (_FORWARD, "        return self.down(self.act(self.up(x).float()))\n"),
    ),
    "checkpointing removed": regression(
        ("activations", "early.0", ""), ("checkpoint(block, x, use_reentrant=False)", "block(x)")
    ),
    "a wider layer": regression(("activations", "blocks.{0,1}.mlp", ""), ("4 * WIDTH", "6 * WIDTH")),
    "momentum": regression(
        ("optimizer_state", "", "new"),
        (_ADAMW, "torch.optim.SGD(params, lr=1e-3, momentum=0.9)"),
        start=((_ADAMW, "torch.optim.SGD(params, lr=1e-3)"),),
    ),
    "an EMA": regression(("averages", "", "new"), ('precision = "bf16"', 'precision = "bf16"\nema = True')),
    "a copy of the blocks kept as a teacher": regression(
        ("parameters", "teacher.{0,1}", "new"),
        (
            _TIED,
            _TIED + "        import copy\n        self.teacher = copy.deepcopy(self.blocks).requires_grad_(False)\n",
        ),
    ),
    "attention that drops in the score matrix by hand": regression(
        ("activations", "blocks.{0,1}.attn", "aten._softmax in fp32"), _BY_HAND
    ),
    "outputs kept by the loop": regression(
        ("outputs", "head", "new"), ('precision = "bf16"', 'precision = "bf16"\nhold_outputs = True')
    ),
    "a GELU by hand": regression(
        ("activations", "blocks.{0,1}.mlp", "aten.mul in bf16"),
        (
            _FORWARD,
            "        h = self.up(x)\n"
            "        return self.down(0.5 * h * (1 + torch.tanh(0.8 * (h + 0.04 * h * h * h))))\n",
        ),
    ),
    "weights no longer tied": regression(("optimizer_state", "head", "new"), (_TIED, "")),
    "one more head": regression(
        ("temporaries", "other", "new"),
        (_TIED, _TIED + "        self.other = nn.Linear(WIDTH, VOCABULARY)\n"),
        (_HEAD, "        x = self.norm(x)\n        return self.head(x), self.other(x)\n"),
        (_LOGITS, "    logits, others = model(tokens, sound)\n"),
        (_LOSS, _LOSS.rstrip() + " + F.cross_entropy(others.flatten(0, 1), targets.flatten())\n"),
    ),
    "a second forward for a metric": regression(
        ("temporaries", "blocks.{0,1}", ""),
        (_LOSS, "    again = model(tokens, sound)\n" + _LOSS.rstrip() + " + 0 * again.argmax(-1).float().mean()\n"),
    ),
    "one-hot targets in fp64": regression(
        ("temporaries", "", "fp32 -> fp64, in no module"),
        (
            _LOSS,
            "    wanted = F.one_hot(targets, VOCABULARY).double()\n"
            "    return F.cross_entropy(logits.flatten(0, 1), wanted.flatten(0, 1))\n",
        ),
    ),
    "longer sequences": regression(
        ("activations", "", "in several modules"), ("4, 2048, 1024, 1024\n", "4, 2560, 1024, 1024\n")
    ),
    "fp32 in place of bf16": regression(
        ("activations", "blocks.{0,1}", "bf16 -> fp32"), ('precision = "bf16"', 'precision = "fp32"')
    ),
    "one more block": regression(
        ("activations", "blocks.2.mlp", "new"),
        ("self.blocks = nn.ModuleList([Block(), Block()])", "self.blocks = nn.ModuleList([Block(), Block(), Block()])"),
    ),
    "an update that now decides": regression(
        ("optimizer_state", "", "new"),
        (_ADAMW, _ADAMW),
        ("4, 2048, 1024, 1024\n", "4, 1, 16, 1024\n"),
        start=((_ADAMW, "torch.optim.SGD(params, lr=1e-3)"), ("4, 2048, 1024, 1024\n", "4, 1, 16, 1024\n")),
    ),
}


_BATCH = "    tokens, sound, targets = batch\n"
_MADE = "    return tokens, torch.zeros(size, 16, LENGTH), tokens\n"

REFACTORINGS: Final[Mapping[str, Edits]] = {
    "modules and classes renamed": (
        ("self.mlp", "self.feed_forward"),
        ("self.blocks", "self.layers"),
        ("self.attn", "self.mixer"),
        ("MLP(", "FeedForward("),
    ),
    "functions in place of modules": (("        self.act = nn.GELU()\n", ""), ("self.act(", "F.gelu(")),
    "a Sequential in place of a forward": (
        (
            "        self.up = nn.Linear(WIDTH, 4 * WIDTH)\n        self.act = nn.GELU()\n"
            "        self.down = nn.Linear(4 * WIDTH, WIDTH)\n",
            "        self.all = nn.Sequential(\n"
            "            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)\n"
            "        )\n",
        ),
        (_FORWARD, "        return self.all(x)\n"),
    ),
    "a module within another": (
        ("        self.stem = Stem()\n", "        self.stem = nn.Sequential(Stem(), nn.Identity())\n"),
    ),
    "a dict as a batch": (
        (_MADE, '    return {"tokens": tokens, "sound": torch.zeros(size, 16, LENGTH), "targets": tokens}\n'),
        (_BATCH, '    tokens, sound, targets = batch["tokens"], batch["sound"], batch["targets"]\n'),
    ),
    "the model as an instance": ((_MODEL, "model = GPT()\n"),),
    "a Workload in place of names": (
        ('precision = "bf16"\n', ""),
        (
            f"def optimizer(params):\n    return {_ADAMW}\n",
            "from autoaccum import Workload\n\nworkload = Workload(\n    model=model, batch=batch, loss=loss, "
            f'precision="bf16", optimizer=lambda params: {_ADAMW}\n)\ndel model, batch, loss\n',
        ),
    ),
    "reshape in place of view and flatten": (
        (".view(samples, length, 3, HEADS", ".reshape(samples, length, 3, HEADS"),
        ("logits.flatten(0, 1), targets.flatten()", "logits.reshape(-1, VOCABULARY), targets.reshape(-1)"),
    ),
    "a loop as a Sequential": (
        ("self.blocks = nn.ModuleList([Block(), Block()])", "self.blocks = nn.Sequential(Block(), Block())"),
        ("        for block in self.blocks:\n            x = block(x)\n", "        x = self.blocks(x)\n"),
    ),
    "a residual added in place": (
        ("self.tokens(tokens) + self.stem(sound)", "self.stem(sound).add_(self.tokens(tokens))"),
    ),
    "a scalar that is kept": (
        (_LOSS, _LOSS.replace("    return", "    value =") + "    model.last = value.detach()\n    return value\n"),
    ),
}
"""Edits that change the sample project's source but not its memory."""

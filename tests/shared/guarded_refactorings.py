"""What changes the sample project's source and not its memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from guarded_edits import Edits


@dataclass(frozen=True, kw_only=True)
class Refactoring:
    """An edit that costs nothing.

    Attributes:
        name: Of the test.
        edits: What is replaced by what.
        files: Source by name of files that lie beside it.
        moved: What is cut from it into a file beside: (the file's name, the first line, the line it ends before).
        outcome: What it comes to, where the same is held in fewer segments.
    """

    name: str
    edits: Edits = ()
    files: Mapping[str, str] = field(default_factory=dict)
    moved: tuple[str, str, str] | None = None
    outcome: str = "within"


_MLP_FORWARD = "        return self.down(self.act(self.up(x)))\n"
_BATCH = "    tokens, sound, targets = batch\n"
_MADE = "    return tokens, torch.zeros(size, 16, LENGTH), tokens\n"
_LOSS = "    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())\n"
_MODEL = "def model():\n    return GPT()\n"
_BLOCK = "        x = x + self.drop(self.attn(self.norm1(x)))\n        return x + self.drop(self.mlp(self.norm2(x)))\n"
_ADAMW = "torch.optim.AdamW(params, lr=1e-3)"

REFACTORINGS: Final = (
    Refactoring(
        name="modules and classes renamed",
        edits=(
            ("self.mlp", "self.feed_forward"),
            ("self.blocks", "self.layers"),
            ("self.attn", "self.mixer"),
            ("MLP(", "FeedForward("),
        ),
    ),
    Refactoring(
        name="children renamed in another order of the alphabet",
        edits=(("self.up", "self.zoom_in"), ("self.act", "self.middle"), ("self.down", "self.back")),
    ),
    Refactoring(
        name="modules moved to another file",
        moved=("guarded_layers.py", "class Attention", "class Stem"),
        edits=(("class Stem", "from guarded_layers import Block\n\n\nclass Stem"),),
    ),
    Refactoring(
        name="arguments by name and in another order",
        edits=(
            (
                "nn.Conv1d(16, CHANNELS, 3, padding=1)",
                "nn.Conv1d(padding=1, kernel_size=3, out_channels=CHANNELS, in_channels=16)",
            ),
            (
                "F.scaled_dot_product_attention(q, k, v, is_causal=True)",
                "F.scaled_dot_product_attention(is_causal=True, value=v, key=k, query=q)",
            ),
            ("nn.Linear(WIDTH, 4 * WIDTH)", "nn.Linear(out_features=4 * WIDTH, in_features=WIDTH)"),
        ),
    ),
    Refactoring(
        name="comments and docstrings",
        edits=(
            ("class MLP(nn.Module):\n", 'class MLP(nn.Module):\n    """Two linear layers."""\n\n'),
            (_MLP_FORWARD, "        # Wide and back.\n" + _MLP_FORWARD),
        ),
    ),
    Refactoring(
        name="functions in place of modules",
        edits=(("        self.act = nn.GELU()\n", ""), ("self.act(", "F.gelu(")),
    ),
    Refactoring(
        name="a Sequential in place of a forward",
        edits=(
            (
                "        self.up = nn.Linear(WIDTH, 4 * WIDTH)\n        self.act = nn.GELU()\n"
                "        self.down = nn.Linear(4 * WIDTH, WIDTH)\n",
                "        self.all = nn.Sequential(\n"
                "            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)\n"
                "        )\n",
            ),
            (_MLP_FORWARD, "        return self.all(x)\n"),
        ),
    ),
    Refactoring(
        name="a module within another",
        edits=(("        self.stem = Stem()\n", "        self.stem = nn.Sequential(Stem(), nn.Identity())\n"),),
    ),
    Refactoring(
        name="attributes in another order",
        edits=(
            (
                "        self.norm1, self.attn = nn.LayerNorm(WIDTH), Attention()\n"
                "        self.norm2, self.mlp = nn.LayerNorm(WIDTH), MLP()\n",
                "        self.mlp, self.norm2 = MLP(), nn.LayerNorm(WIDTH)\n"
                "        self.attn, self.norm1 = Attention(), nn.LayerNorm(WIDTH)\n",
            ),
        ),
    ),
    Refactoring(
        name="type hints",
        edits=(
            ("    def forward(self, x):\n", "    def forward(self, x: torch.Tensor) -> torch.Tensor:\n"),
            ("def batch(size):", "def batch(size: int) -> tuple[torch.Tensor, ...]:"),
        ),
    ),
    Refactoring(
        name="a function extracted",
        edits=(
            (
                "class Block(",
                "def residual(x, layer, norm, drop):\n    return x + drop(layer(norm(x)))\n\n\nclass Block(",
            ),
            (
                _BLOCK,
                "        x = residual(x, self.attn, self.norm1, self.drop)\n"
                "        return residual(x, self.mlp, self.norm2, self.drop)\n",
            ),
        ),
    ),
    Refactoring(
        name="an f-string, a print, and training said explicitly",
        edits=((_BATCH, _BATCH + '    print(f"{len(tokens)} samples")\n    model.train()\n'),),
    ),
    Refactoring(
        name="a dataclass as a batch",
        edits=(
            (
                "def model():",
                "from dataclasses import dataclass\n\n\n@dataclass\nclass Samples:\n    tokens: torch.Tensor\n"
                "    sound: torch.Tensor\n    targets: torch.Tensor\n\n\ndef model():",
            ),
            (_MADE, "    return Samples(tokens, torch.zeros(size, 16, LENGTH), tokens)\n"),
            (_BATCH, "    tokens, sound, targets = batch.tokens, batch.sound, batch.targets\n"),
        ),
    ),
    Refactoring(
        name="a dict as a batch",
        edits=(
            (_MADE, '    return {"tokens": tokens, "sound": torch.zeros(size, 16, LENGTH), "targets": tokens}\n'),
            (_BATCH, '    tokens, sound, targets = batch["tokens"], batch["sound"], batch["targets"]\n'),
        ),
    ),
    Refactoring(
        name="a loss under another name",
        edits=(
            ("def loss(model, batch):", "def next_token_loss(model, batch):"),
            ("def optimizer(", "loss = next_token_loss\n\n\ndef optimizer("),
        ),
    ),
    Refactoring(name="the model as an instance", edits=((_MODEL, "model = GPT()\n"),)),
    Refactoring(name="the model as a class", edits=((_MODEL, "model = GPT\n"),)),
    Refactoring(
        name="a Workload in place of names",
        edits=(
            ('precision = "bf16"\n', ""),
            (
                f"def optimizer(params):\n    return {_ADAMW}\n",
                "from autoaccum import Workload\n\nworkload = Workload(\n    model=model, batch=batch, loss=loss, "
                f'precision="bf16", optimizer=lambda params: {_ADAMW}\n)\ndel model, batch, loss\n',
            ),
        ),
    ),
    Refactoring(
        name="reshape in place of view and flatten",
        edits=(
            (".view(samples, length, 3, HEADS", ".reshape(samples, length, 3, HEADS"),
            ("logits.flatten(0, 1), targets.flatten()", "logits.reshape(-1, VOCABULARY), targets.reshape(-1)"),
        ),
    ),
    Refactoring(
        name="a property and a base class",
        edits=(
            (
                "class Attention(nn.Module):\n",
                "class Wide:\n    @property\n    def width(self):\n        return WIDTH\n\n\n"
                "class Attention(Wide, nn.Module):\n",
            ),
            ("reshape(samples, length, WIDTH)", "reshape(samples, length, self.width)"),
        ),
    ),
    Refactoring(
        name="the optimizer's arguments spelled out",
        edits=((_ADAMW, "torch.optim.AdamW(list(params), lr=3e-4, betas=(0.9, 0.999), weight_decay=0.1)"),),
    ),
    Refactoring(
        name="a loop as a Sequential",
        edits=(
            ("self.blocks = nn.ModuleList([Block(), Block()])", "self.blocks = nn.Sequential(Block(), Block())"),
            ("        for block in self.blocks:\n            x = block(x)\n", "        x = self.blocks(x)\n"),
        ),
    ),
    Refactoring(
        name="a residual added in place",
        edits=(("self.tokens(tokens) + self.stem(sound)", "self.stem(sound).add_(self.tokens(tokens))"),),
        outcome="improved",
    ),
    Refactoring(
        name="a scalar that is kept",
        edits=(
            (_LOSS, _LOSS.replace("    return", "    value =") + "    model.last = value.detach()\n    return value\n"),
        ),
    ),
)

"""What makes the sample project take more, as edits of its source, and what a guard has to say of each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from guarded_edits import Edits

from autoaccum.devices.explanation import Category


@dataclass(frozen=True, kw_only=True)
class Regression:
    """An edit that costs memory.

    Attributes:
        name: Of the test.
        edits: What is replaced by what.
        category: What its memory is for.
        module: Whose it is, as `Growth.module`.
        change: A part of what is different about it.
        place: Which of the growths it is at the latest, the largest first; above 1 only where others are as right.
        start: Edits that were made before.
    """

    name: str
    edits: Edits
    category: Category
    module: str = ""
    change: str = ""
    place: int = 1
    start: Edits = ()


_ADAMW = "torch.optim.AdamW(params, lr=1e-3)"
_FORWARD = "        return self.down(self.act(self.up(x)))\n"
_RESIDUAL = "        x = x + self.drop(self.attn(self.norm1(x)))\n"
_HEAD = "        return self.head(self.norm(x))\n"
_TIED = "        self.head.weight = self.tokens.weight\n"
_LOSS = "    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())\n"
_PLAIN = "        for block in self.blocks:\n            x = block(x)\n"
_LOGITS = "    logits = model(tokens, sound)\n"

_ATTENTION = "        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)\n"
_BY_HAND = (_ATTENTION, "        y = F.softmax(q @ k.transpose(-2, -1), -1) @ v\n")
_WRAPPED = (
    "def model():\n    return GPT()\n",
    "class Wrapper(nn.Module):\n"
    "    def __init__(self):\n"
    "        super().__init__()\n"
    "        self.inner = GPT()\n\n"
    "    def forward(self, *given):\n"
    "        return self.inner(*given)\n\n\n"
    "def model():\n    return Wrapper()\n",
)
_LOSS_WITHIN = (
    ("128, 1024, 1024\n", "128, 4096, 1024\n"),
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
"""A model that has its loss within, so that its local variables are there when most is held."""

REGRESSIONS: Final = (
    Regression(
        name="an activation kept in a list across updates",
        edits=((_TIED, _TIED + "        self.seen = []\n"), (_HEAD, "        self.seen.append(x.detach())\n" + _HEAD)),
        category="parameters",
        change="kept from update to update: aten.add in fp32, in the model itself",
    ),
    Regression(
        name="a model that is wrapped and wider",
        edits=(_WRAPPED, ("4 * WIDTH", "6 * WIDTH")),
        category="activations",
        module="inner.blocks.*.mlp",
    ),
    Regression(
        name="a wider layer in every second block",
        start=(("[Block(), Block()]", "[Block(), Block(), Block(), Block()]"),),
        edits=(
            ("[Block(), Block()]", "[Block(6), Block(), Block(6), Block()]"),
            (
                "__init__(self):\n        super().__init__()\n        self.up",
                "__init__(self, times):\n        super().__init__()\n        self.up",
            ),
            (
                "__init__(self):\n        super().__init__()\n        self.norm1",
                "__init__(self, times=4):\n        super().__init__()\n        self.norm1",
            ),
            ("4 * WIDTH", "times * WIDTH"),
            ("MLP()", "MLP(times)"),
        ),
        category="activations",
        module="blocks.{0,2}.mlp",
    ),
    Regression(
        name="activations kept in a list within the update",
        edits=(
            (
                "    def forward(self, x):\n" + _RESIDUAL,
                "    def forward(self, x):\n        self.kept = []\n" + _RESIDUAL,
            ),
            (_RESIDUAL, _RESIDUAL + "        self.kept.append(x.float().square())\n"),
        ),
        category="activations",
        module="blocks.*",
    ),
    Regression(
        name="a lost inplace",
        start=_LOSS_WITHIN,
        edits=(*_LOSS_WITHIN, ("F.relu(wide, inplace=True)", "F.relu(wide)")),
        category="temporaries",
        module="expand",
        change="aten.convolution in bf16",
        place=2,  # After its result, which takes as much in place of it.
    ),
    Regression(
        name="an fp32 cast under autocast",
        edits=((_FORWARD, "        return self.down(self.act(self.up(x).float()))\n"),),
        category="activations",
        module="blocks.*.mlp",
        change="bf16 -> fp32",
    ),
    Regression(
        name="checkpointing removed",
        edits=(("checkpoint(block, x, use_reentrant=False)", "block(x)"),),
        category="activations",
        module="early.0",
    ),
    Regression(
        name="a wider layer",
        edits=(("4 * WIDTH", "6 * WIDTH"),),
        category="activations",
        module="blocks.*.mlp",
    ),
    Regression(
        name="an optimizer with one more state",
        edits=((_ADAMW, "torch.optim.AdamW(params, lr=1e-3, amsgrad=True)"),),
        category="optimizer_state",
    ),
    Regression(
        name="momentum",
        start=((_ADAMW, "torch.optim.SGD(params, lr=1e-3)"),),
        edits=((_ADAMW, "torch.optim.SGD(params, lr=1e-3, momentum=0.9)"),),
        category="optimizer_state",
        change="new",
    ),
    Regression(
        name="an EMA",
        edits=(('precision = "bf16"', 'precision = "bf16"\nkeeps = "ema"'),),
        category="averages",
        change="new",
    ),
    Regression(
        name="a copy of the blocks kept as a teacher",
        edits=(
            (
                _TIED,
                _TIED
                + "        import copy\n        self.teacher = copy.deepcopy(self.blocks).requires_grad_(False)\n",
            ),
        ),
        category="parameters",
        module="teacher.*",
        change="new",
    ),
    Regression(
        name="a loss on unreduced logits",
        edits=(
            (
                _LOSS,
                "    likely = F.log_softmax(logits.float(), -1)\n"
                "    return -(likely * F.one_hot(targets, VOCABULARY)).sum(-1).mean()\n",
            ),
        ),
        category="activations",
        change="aten._to_copy in int64",
    ),
    Regression(
        name="a graph retained for a gradient penalty",
        start=(_BY_HAND,),
        edits=(
            _BY_HAND,
            (
                _LOSS,
                _LOSS.replace("return", "value =")
                + "    (slope,) = torch.autograd.grad(value, model.head.weight, create_graph=True)\n"
                "    return value + slope.square().sum()\n",
            ),
        ),
        category="activations",
        module="blocks",
        change="aten._to_copy in fp32",
    ),
    Regression(
        name="a graph retained for another backward",
        edits=(
            (_LOSS, _LOSS.replace("return", "value =") + "    value.backward(retain_graph=True)\n    return value\n"),
        ),
        category="temporaries",
        module="early.0",
        place=2,  # After the workspace of the backward that comes next, at a moment that had none before.
    ),
    Regression(
        name="attention by the math path",
        edits=(
            (
                _ATTENTION,
                "        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):\n"
                "            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)\n",
            ),
        ),
        category="activations",
        module="blocks.*.attn",
        change="flash attention -> math",
    ),
    Regression(
        name="attention that drops in the score matrix by hand",
        edits=(_BY_HAND,),
        category="activations",
        module="blocks.*.attn",
        change="flash attention -> math",
    ),
    Regression(
        name="a large fp32 buffer",
        edits=((_TIED, _TIED + '        self.register_buffer("relative", torch.zeros(HEADS, 1024, 1024))\n'),),
        category="parameters",
        change="in the model itself",
    ),
    Regression(
        name="positions repeated",
        edits=(("* self.positions", "* self.positions.repeat(len(tokens), 1, 1)"),),
        category="activations",
        change="aten.repeat in fp32, in the model itself",
    ),
    Regression(
        name="outputs kept by the loop",
        edits=(('precision = "bf16"', 'precision = "bf16"\nkeeps = "outputs"'),),
        category="outputs",
        module="head",
        change="new",
    ),
    Regression(
        name="a GELU by hand",
        edits=(
            (
                _FORWARD,
                "        h = self.up(x)\n"
                "        return self.down(0.5 * h * (1 + torch.tanh(0.8 * (h + 0.04 * h * h * h))))\n",
            ),
        ),
        category="activations",
        module="blocks.*.mlp",
        change="aten.mul in bf16",
    ),
    Regression(
        name="all hidden states side by side",
        edits=(
            (_TIED, _TIED + "        self.mix = nn.Linear(3 * WIDTH, WIDTH)\n"),
            (_PLAIN, "        states = [x]\n" + _PLAIN + "            states.append(x)\n"),
            (_HEAD, "        x = self.mix(torch.cat(states, -1))\n" + _HEAD),
        ),
        category="activations",
        module="mix",
        change="new",
    ),
    Regression(
        name="dropout by hand with a float mask",
        edits=(
            (
                _RESIDUAL,
                "        y = self.attn(self.norm1(x))\n"
                "        kept = torch.rand_like(y, dtype=torch.float) > 0.1\n"
                "        x = x + y * kept.float() / 0.9\n",
            ),
        ),
        category="activations",
        module="blocks.*",
        change="fp32",
    ),
    Regression(
        name="weights no longer tied",
        edits=((_TIED, ""),),
        category="optimizer_state",
        module="head",
        change="new",
    ),
    Regression(
        name="a stem of more channels",
        edits=(("1024, 1024\n", "1024, 2048\n"),),
        category="activations",
        module="stem",
    ),
    Regression(
        name="one more head",
        edits=(
            (_TIED, _TIED + "        self.other = nn.Linear(WIDTH, VOCABULARY)\n"),
            (_HEAD, "        x = self.norm(x)\n        return self.head(x), self.other(x)\n"),
            (_LOGITS, "    logits, others = model(tokens, sound)\n"),
            (_LOSS, _LOSS.rstrip() + " + F.cross_entropy(others.flatten(0, 1), targets.flatten())\n"),
        ),
        category="temporaries",
        module="other",
        change="new",
        place=2,  # After what their losses make of its outputs.
    ),
    Regression(
        name="hooks that log outputs",
        edits=(
            (
                "def model():\n    return GPT()\n",
                "def model():\n    made = GPT()\n    made.log = {}\n"
                "    for name, module in made.named_modules():\n"
                "        if name.endswith('mlp'):\n"
                "            module.register_forward_hook(lambda m, i, o, name=name: made.log.update({name: o}))\n"
                "    return made\n",
            ),
        ),
        category="activations",
        module="blocks.*.mlp.down",
        change="aten.addmm in bf16",
        place=2,  # After the batch of the update before, which is kept by their graph.
    ),
    Regression(
        name="a second forward for a metric",
        edits=(
            (_LOSS, "    again = model(tokens, sound)\n" + _LOSS.rstrip() + " + 0 * again.argmax(-1).float().mean()\n"),
        ),
        category="temporaries",
        module="blocks.*",
    ),
    Regression(
        name="one-hot targets in fp64",
        edits=(
            (
                _LOSS,
                "    wanted = F.one_hot(targets, VOCABULARY).double()\n"
                "    return F.cross_entropy(logits.flatten(0, 1), wanted.flatten(0, 1))\n",
            ),
        ),
        category="temporaries",
        change="aten.mul in fp64, in no module",
    ),
    Regression(
        name="a gated MLP",
        edits=(
            (
                "        self.act = nn.GELU()\n",
                "        self.act, self.gate = nn.GELU(), nn.Linear(WIDTH, 4 * WIDTH)\n",
            ),
            (_FORWARD, "        return self.down(self.act(self.gate(x)) * self.up(x))\n"),
        ),
        category="activations",
        module="blocks.*.mlp",
    ),
    Regression(
        name="longer sequences",
        edits=(("4, 128, 1024, 1024\n", "4, 160, 1024, 1024\n"),),
        category="activations",
        change="throughout the model",
    ),
    Regression(
        name="fp32 in place of bf16",
        edits=(('precision = "bf16"', 'precision = "fp32"'),),
        category="activations",
        change="bf16 -> fp32",
        module="blocks",
    ),
    Regression(
        name="one more block",
        edits=(
            (
                "self.blocks = nn.ModuleList([Block(), Block()])",
                "self.blocks = nn.ModuleList([Block(), Block(), Block()])",
            ),
        ),
        category="activations",
        module="blocks.2",
        change="new",
    ),
    Regression(
        name="an update that now decides",
        start=((_ADAMW, "torch.optim.SGD(params, lr=1e-3)"), ("4, 128, 1024, 1024\n", "4, 1, 16, 1024\n")),
        edits=((_ADAMW, _ADAMW), ("4, 128, 1024, 1024\n", "4, 1, 16, 1024\n")),
        category="optimizer_state",
        change="new",
    ),
)

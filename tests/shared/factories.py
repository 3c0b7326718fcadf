"""What most tests need: four stock models with their batches and losses, a maker of plans, and a clock that is set."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from autoaccum.accumulation.schedule import make_schedule
from autoaccum.devices.base import Inspection, Trial
from autoaccum.messages import Message
from autoaccum.planning.plan_record import Plan, Solved, Spread, TokenBudget, ValueTrial
from autoaccum.spec import SPEC_FIELDS, DeviceFacts, TrainingSpec, WorkloadFacts
from autoaccum.units import GIB, MIB

FEATURES, CLASSES = 6, 4
SIDE = 8
WORDS, LENGTH = 13, 7
IGNORED = -100
CRITERION = nn.CrossEntropyLoss()


class Classifier(nn.Module):
    """Two linear layers; `norm` and `dropout` make it one whose updates depend on how a batch is split.

    Takes (samples, FEATURES), and returns (samples, CLASSES).
    """

    def __init__(self, hidden: int = 8, *, norm: bool = False, dropout: float = 0.0) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, hidden)
        self.norm = nn.BatchNorm1d(hidden) if norm else nn.Identity()
        self.drop = nn.Dropout(dropout)
        self.last = nn.Linear(hidden, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return torch.as_tensor(self.last(self.drop(torch.tanh(self.norm(self.first(x))))))


class ImageClassifier(nn.Module):
    """A convolution, BatchNorm and a linear layer; takes (samples, 3, SIDE, SIDE), and returns (samples, CLASSES)."""

    def __init__(self, channels: int = 6) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, channels, 3, padding=1)
        self.norm = nn.BatchNorm2d(channels)
        self.head = nn.Linear(channels, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return torch.as_tensor(self.head(torch.relu(self.norm(self.conv(x))).mean((2, 3))))


class LanguageModel(nn.Module):
    """A block of causal attention over tokens; takes (samples, length), and returns (samples, length, WORDS)."""

    def __init__(self, width: int = 8, *, dropout: float = 0.0) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, width)
        self.qkv = nn.Linear(width, 3 * width)
        self.drop = nn.Dropout(dropout)
        self.head = nn.Linear(width, WORDS, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        query, key, value = self.qkv(x).chunk(3, -1)
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return torch.as_tensor(self.head(x + self.drop(attended)))


class TwoTowers(nn.Module):
    """Two towers and a temperature; takes (samples, 2, FEATURES), and returns their (samples, samples) similarities."""

    def __init__(self, width: int = 5) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(FEATURES, width), nn.Linear(FEATURES, width)
        self.scale = nn.Parameter(torch.tensor(1.5))

    def towers(self, pairs: Tensor) -> tuple[Tensor, Tensor]:
        """Return the embeddings of both towers, (samples, width) each."""
        left, right = self.left(pairs[:, 0]), self.right(pairs[:, 1])
        return functional.normalize(left, dim=-1), functional.normalize(right, dim=-1)

    def forward(self, pairs: Tensor) -> Tensor:
        left, right = self.towers(pairs)
        return torch.as_tensor(self.scale.exp() * left @ right.T)


def labelled_rows(samples: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """Return a batch of `Classifier`."""
    return torch.randn(samples, FEATURES, dtype=dtype), torch.randint(0, CLASSES, (samples,))


def labelled_images(samples: int, dtype: torch.dtype = torch.float64, side: int = SIDE) -> tuple[Tensor, Tensor]:
    """Return a batch of `ImageClassifier`."""
    return torch.randn(samples, 3, side, side, dtype=dtype), torch.randint(0, CLASSES, (samples,))


def tokens(samples: int) -> tuple[Tensor, Tensor]:
    """Return ids and labels of `LanguageModel`; the samples have from 2 to LENGTH tokens, the rest is IGNORED."""
    ids = torch.randint(0, WORDS, (samples, LENGTH))
    lengths = torch.tensor([2 + index % (LENGTH - 1) for index in range(samples)])
    return ids, ids.masked_fill(torch.arange(LENGTH) >= lengths[:, None], IGNORED)


def pairs(samples: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Return a batch of `TwoTowers`."""
    return torch.randn(samples, 2, FEATURES, dtype=dtype)


def class_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Return the mean cross entropy over samples."""
    return functional.cross_entropy(model(batch[0]), batch[1])


def token_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Return the mean cross entropy over the tokens that are not IGNORED."""
    return functional.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten(), ignore_index=IGNORED)


def contrastive_loss(similarities: Tensor) -> Tensor:
    """Return the mean cross entropy of each pair among all pairs of the batch."""
    return functional.cross_entropy(similarities, torch.arange(len(similarities), device=similarities.device))


def sgd(model: nn.Module, lr: float = 1.0) -> torch.optim.SGD:
    """Return an optimizer whose update is the gradient times `lr`."""
    return torch.optim.SGD(model.parameters(), lr=lr)


def assert_close(model: nn.Module, other: nn.Module, tolerance: float = 1e-10) -> None:
    """Check that parameters are equal to a tolerance, relative and absolute."""
    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=tolerance, atol=tolerance)


def recorded(facts: Mapping[str, Any], of: Plan | Inspection | None = None) -> dict[str, Any]:
    """Return the fields `workload` and `spec` of a plan or an inspection, those of `of` but for some facts by name."""
    of_spec = set(SPEC_FIELDS) - {"optimizer"}  # Its class is a fact of the workload.
    spec = {name: value for name, value in facts.items() if name in of_spec}
    others = {name: value for name, value in facts.items() if name not in of_spec}
    workload = WorkloadFacts() if of is None else of.workload
    if isinstance(recipe := others.get("recipe"), Mapping):
        others["recipe"] = dataclasses.replace(workload.recipe, **recipe)
    return {
        "workload": dataclasses.replace(workload, **others),
        "spec": dataclasses.replace(TrainingSpec() if of is None else of.spec, **spec),
    }


def make_inspection(environment: Mapping[str, Any] | None = None, **fields: Any) -> Inspection:
    """Return the inspection of a workload, by default of a small net in float32."""
    own = {field.name for field in dataclasses.fields(Inspection)}
    facts = {
        "name": "net",
        "digest": "d1",
        "model": "Net",
        "parameters": 10,
        "parameter_bytes": 40,
        "dtypes": ("fp32",),
    }
    facts |= {"optimizer": "AdamW", "weight": "samples"}
    facts |= {name: fields.pop(name) for name in list(fields) if name not in own}
    return Inspection(**recorded(facts), environment=environment or {}, **fields)


def change_facts(of: Any, **facts: Any) -> Any:
    """Return a plan or an inspection with other facts of its workload or spec."""
    return dataclasses.replace(of, **recorded(facts, of))


def make_plan(
    target: int = 256, ceiling: int = 100, *, world_size: int = 1, equal: bool = False, **fields: Any
) -> Plan:
    """Return a measured plan on the CPU, of the schedule that a largest micro-batch of `ceiling` gives."""
    schedule = make_schedule(target, ceiling, world_size=world_size, equal=equal)
    defaults: dict[str, Any] = {
        "kind": "measured",
        "largest_fit": ceiling,
        "capped": False,
        "limit_bytes": GIB,
        "peak_bytes": 900 * MIB,
        "device": DeviceFacts(name="cpu"),
        "environment": {},
        "trials": (
            Trial(parts=(ceiling, ceiling), outcome="ok", seconds=1.0),
            Trial(parts=(ceiling + 1,) * 2, outcome="oom", phase="backward", seconds=1.0),
            Trial(parts=schedule.trial_parts, outcome="ok", seconds=1.0, fresh=True),
        ),
    }
    facts = recorded(fields.pop("workload", {"weight": "samples"}))
    return Plan.of_schedule(schedule, **defaults | facts | fields)


def make_token_budget(micro_tokens: int = 64, **fields: Any) -> TokenBudget:
    """Return a budget of tokens, found by one trial."""
    tried = (ValueTrial(value=micro_tokens, trial=Trial(parts=(1,), lengths=(9,), outcome="ok")),)
    found = {"name": "micro_tokens", "value": micro_tokens, "low": 1, "high": micro_tokens, "step": 1}
    spreads = dict.fromkeys(("lengths", "samples", "costs", "iter_sizes"), Spread(least=1, median=3, most=9))
    given = {"search": Solved(**found, micro_batch=1, tried=tried), "padding": "longest", **spreads}  # type: ignore[arg-type]
    return TokenBudget(micro_tokens=micro_tokens, **{"padding_saved": 0.5, "speed_up": 2.0, **given, **fields})


class FakeClock:
    """In place of `time.monotonic`: gives `seconds`, which a test sets."""

    def __init__(self, seconds: float = 100.0) -> None:
        self.seconds = seconds

    def __call__(self) -> float:
        return self.seconds


def codes(messages: Iterable[Message]) -> list[str]:
    """Return the codes of messages, in order."""
    return [message.code for message in messages]


def message_at(place: str) -> Message:
    """Return a message that names a place: `the check at <place> was assumed to pass`."""
    return Message("check_assumed", {"place": place})

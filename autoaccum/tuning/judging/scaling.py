"""What two rules say of the learning rate for another effective batch: advice, never a result of the study.

- Linear: k times the batch, k times the rate. Goyal et al. 2017, "Accurate, Large Minibatch SGD: Training ImageNet in
  1 Hour" (arXiv 1706.02677), for SGD, with a warm-up, and up to a batch beyond which it fails.
- Square root: k times the batch, the square root of k times the rate. Krizhevsky 2014, "One weird trick for
  parallelizing convolutional neural networks" (arXiv 1404.5997), where it follows from keeping the variance of the
  update; Malladi et al. 2022, "On the SDEs and Scaling Rules for Adaptive Gradient Algorithms" (arXiv 2205.10287),
  who derive it for Adam and RMSprop.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autoaccum.tuning.records import Advice
from autoaccum.tuning.settings import Setting

DOUBLINGS = (-2, -1, 1, 2)
"""How often the effective batch is doubled, or halved, for what is advised."""


@dataclass(frozen=True)
class Rule:
    """How the learning rate goes with the effective batch.

    Attributes:
        name: As a person calls it.
        power: The rate goes with this power of the batch.
        source: Where it comes from: authors, year, number at arXiv.
        optimizers: Classes of optimizers that the source is about.
    """

    name: str
    power: float
    source: str
    optimizers: frozenset[str]

    def rate(self, setting: Setting, target_batch: int) -> float:
        """The learning rate it gives for another effective batch."""
        return float(setting.learning_rate * (target_batch / setting.target_batch) ** self.power)


LINEAR = Rule("linear", 1.0, "Goyal et al. 2017, arXiv 1706.02677", frozenset({"SGD"}))
SQUARE_ROOT = Rule(
    "square root",
    0.5,
    "Krizhevsky 2014, arXiv 1404.5997; Malladi et al. 2022, arXiv 2205.10287",
    frozenset({"Adam", "AdamW", "RMSprop"}),
)
RULES = (LINEAR, SQUARE_ROOT)


def advise(setting: Setting, doublings: Sequence[int] = DOUBLINGS) -> tuple[Advice, ...]:
    """What both rules say of doublings and halvings of the effective batch, ascending.

    A half is rounded down, and its rate is that of the batch so rounded; below one sample there is none.

    >>> setting = Setting(learning_rate=0.1, target_batch=64, micro_batch=32)
    >>> advise(setting, [-2, 2])
    (Advice(target_batch=16, linear=0.025, square_root=0.05), Advice(target_batch=256, linear=0.4, square_root=0.2))
    """
    own = setting.target_batch
    others = {own << times if times >= 0 else own >> -times for times in doublings} - {0, own}
    return tuple(
        Advice(target_batch=other, linear=LINEAR.rate(setting, other), square_root=SQUARE_ROOT.rate(setting, other))
        for other in sorted(others)
    )


def favoured_rule(optimizer: str) -> Rule | None:
    """The rule whose source is about an optimizer, by the name of its class; None where neither is.

    AdamW counts as Adam: what it does with a gradient is the same.

    >>> favoured_rule("AdamW").name, favoured_rule("SGD").name, favoured_rule("Muon")
    ('square root', 'linear', None)
    """
    return next((rule for rule in RULES if optimizer in rule.optimizers), None)

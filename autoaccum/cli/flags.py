"""The flags of what several commands take, one for each field of `autoaccum.options.Options`, and kinds of values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, TypeVar

import click

count, natural = click.IntRange(1), click.IntRange(0)
positive = seconds = click.FloatRange(0, min_open=True)
"""What is infinite or no number at all is refused with the request."""

_Command = TypeVar("_Command", bound=Callable[..., Any])

_MODE = "What BatchNorm sees and remembers of a batch in parts, instead of the workload's."
_SUMS = "What gradients of half-precision parameters are summed in, instead of the workload's."
_FLAGS: Final[dict[str, dict[str, Any]]] = {
    "device": {"default": "auto", "metavar": "auto|cpu|cuda|cuda:N", "help": "Where trials run."},
    "gpu": {"metavar": "NAME", "help": "Predict for this card, which need not be here; see `autoaccum gpus`."},
    "memory": {"metavar": "SIZE", "help": "The budget: 10GiB, 24GB, 80%.  [default: what is free]"},
    "reserve": {"metavar": "SIZE", "help": "Kept free of it."},
    "precision": {"metavar": "fp32|bf16|fp16", "help": "Instead of the workload's."},
    "batchnorm": {"metavar": "micro|running|frozen", "help": _MODE},
    "accumulate_in": {"metavar": "fp32|parameters", "help": _SUMS},
    "optimizer": {"metavar": "NAME", "help": "One of torch.optim, instead of the workload's."},
    "keeps": {
        "multiple": True,
        "callback": lambda context, parameter, words: words or None,
        "metavar": "outputs|ema",
        "help": "What training keeps beside the step: the last micro-batch's outputs, an average of the weights. "
        "Repeatable.",
    },
    "evaluation_batch": {"type": count, "metavar": "N", "help": "Plan for an evaluation in batches of N, too."},
    "worst_of": {"type": count, "metavar": "N", "help": "Batches of the longest of N samples of the dataset."},
    "world_size": {"type": count, "metavar": "N", "default": 1, "help": "Ranks that share the target."},
    "multiple_of": {"type": count, "metavar": "N", "help": "Micro-batches that are multiples of N only."},
    "equal": {"is_flag": True, "help": "Equal micro-batches only."},
    "time_limit": {"type": seconds, "metavar": "SECONDS", "help": "The search ends after so many seconds."},
    "trial_limit": {"type": seconds, "metavar": "SECONDS", "help": "When a trial is given up.  [default: 600]"},
}


def options(*names: str, **changes: Any) -> Callable[[_Command], _Command]:
    """A decorator that gives a command these flags.

    Args:
        names: Fields of `Options`, in the order of `--help`.
        changes: By field, what the command says otherwise: a help text, or keyword arguments of `click.option`.
    """

    def decorate(command: _Command) -> _Command:
        for name in reversed(names):
            change = changes.get(name, {})
            settings = {
                "show_default": "default" in _FLAGS[name],
                **_FLAGS[name],
                **({"help": change} if isinstance(change, str) else change),
            }
            command = click.option(f"--{name.replace('_', '-')}", **settings)(command)
        return command

    return decorate

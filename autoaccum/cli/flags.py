"""The flags that several commands share, one for each field of `autoaccum.options.Options`, and help with headings."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any, Final, TypeVar

import click

from autoaccum.options import Command, taken_by

count, natural = click.IntRange(1), click.IntRange(0)
positive = seconds = click.FloatRange(0, min_open=True)
"""The request refuses infinity and NaN."""

_RANGE = re.compile(r"(\d+)\.\.(\d+)", re.ASCII)


class CountOrRange(click.ParamType):  # type: ignore[type-arg]
    """A number from 1 on, or a range of such numbers with both ends, such as `1..64`."""

    name = "count"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int | range:
        """Return the number, or the range."""
        ends = _RANGE.fullmatch(str(value))
        if ends is None:
            return int(count(value, param, ctx))
        first, last = (int(count(end, param, ctx)) for end in ends.groups())
        if last < first:
            self.fail(f"{value} is an empty range.", param, ctx)
        return range(first, last + 1)


_Command = TypeVar("_Command", bound=Callable[..., Any])

_FLAGS: Final[dict[str, dict[str, Any]]] = {
    "device": {"default": "auto", "metavar": "auto|cpu|cuda|cuda:N", "help": "Where trials run; auto: a GPU, if any."},
    "gpu": {
        "metavar": "NAME",
        "help": "Predict for this card instead, without a GPU: a name of `autoaccum gpus`, or a size such as 24GiB.",
    },
    "values": {
        "metavar": "cpu",
        "help": "With --gpu: also run each traced step on the CPU, with the same samples, to answer code that reads "
        "values (.item(), a boolean mask, nonzero, unique, nms). Takes as long as a step on the CPU.",
    },
    "memory": {"metavar": "SIZE", "help": "Memory budget: 10GiB, 24GB, or 80% of the total.  [default: what is free]"},
    "reserve": {"metavar": "SIZE", "help": "Leave this much of the budget free."},
    "precision": {"metavar": "fp32|bf16|fp16", "help": "Precision (by autocast), in place of the workload's."},
    "batchnorm": {
        "metavar": "micro|running|frozen|exact",
        "help": "BatchNorm mode, in place of the workload's. micro: per micro-batch, as PyTorch does; running: also, "
        "but running statistics are those of the full batch; frozen: normalise by the running statistics and leave "
        "them unchanged; exact: normalise by the whole effective batch, as without accumulation, with activations in "
        "host memory. The gradient of the last two is exactly the full batch's.",
    },
    "coupled": {
        "type": click.Choice(["yes", "no"]),
        "metavar": "yes|no",
        "callback": lambda context, parameter, word: {"yes": True, "no": False}.get(word, word),
        "help": "Compute a loss that compares samples once, of the outputs of the whole effective batch, in place of "
        "the workload's choice. Each micro-batch runs forward twice.",
    },
    "accumulate_in": {
        "metavar": "fp32|parameters",
        "help": "Sum gradients of half-precision parameters in fp32, or in the parameters' own dtype, which saves "
        "memory and rounds with each part. In place of the workload's.",
    },
    "savers": {
        "multiple": True,
        "callback": lambda context, parameter, words: words or None,
        "metavar": "SAVER",
        "help": "A way to take less memory for the same gradient. recompute: run the model's repeated blocks again in "
        "backward (recompute=N: N of them); offload-activations, offload-gradients, offload-optimizer: keep these in "
        "host memory. Repeatable. plan and fit also take auto, alone: the least costly savers that suffice. "
        "plan with --gpu also takes show, alone: a table of the Pareto-optimal sets (time, largest micro-batch).",
    },
    "optimizer": {"metavar": "NAME", "help": "Optimizer of torch.optim, in place of the workload's."},
    "keeps": {
        "multiple": True,
        "callback": lambda context, parameter, words: words or None,
        "metavar": "outputs|ema",
        "help": "Memory that the training loop holds beside the step. outputs: outputs and loss of the last "
        "micro-batch, as a loop that logs them does; ema: an average of the weights. Repeatable.",
    },
    "evaluation_batch": {"type": count, "metavar": "N", "help": "Also fit an evaluation in batches of N samples."},
    "worst_of": {"type": count, "metavar": "N", "help": "Make batches of the longest of N samples of the dataset."},
    "world_size": {"type": count, "metavar": "N", "default": 1, "help": "Ranks that share the target batch."},
    "parallel": {
        "metavar": "ddp|fsdp2",
        "help": "How ranks train one model: each holds all of it, or a shard.  [default: fsdp2 if the workload has "
        "parallelize, else ddp]",
    },
    "mesh": {"metavar": "N|RxN", "help": "Ranks in one dimension, or R replicas of a model sharded over N (HSDP)."},
    "multiple_of": {"type": count, "metavar": "N", "help": "Use only micro-batches that are multiples of N."},
    "equal": {"is_flag": True, "help": "Use only equal micro-batches."},
    "time_limit": {
        "type": seconds,
        "metavar": "SECONDS",
        "help": "End the search then, with the largest size that ran.",
    },
    "trial_limit": {"type": seconds, "metavar": "SECONDS", "help": "End a trial after this time.  [default: 600]"},
}


class HelpWithHeadings(click.Command):
    """A command whose help keeps the lines below a heading such as `Exit codes:` as they are."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        # click does not rewrap a paragraph that starts with a backspace.
        self.help = re.sub(r"(?m)^(?=[A-Z][^.\n]*:\n)", "\b\n", inspect.cleandoc(self.help or ""))


report_option = click.option(
    "--report",
    metavar="FILE",
    help="Write the result as one HTML page with charts, which loads nothing from the network: .html.",
)
"""The flag of each command that writes a page."""


def options(of: Command, **changes: Any) -> Callable[[_Command], _Command]:
    """Return a decorator that gives a command the flags of the options it takes.

    Args:
        of: Its name.
        changes: By option, a help text of the command's own, or keyword arguments of `click.option`; None: the command
            has a flag of its own for it.
    """

    def decorate(command: _Command) -> _Command:
        own = {name for name, change in changes.items() if change is None}
        for name in sorted(taken_by(of) - own, key=list(_FLAGS).index, reverse=True):
            change = changes.get(name, {})
            settings = {
                "show_default": "default" in _FLAGS[name],
                **_FLAGS[name],
                **({"help": change} if isinstance(change, str) else change),
            }
            command = click.option(f"--{name.replace('_', '-')}", **settings)(command)
        return command

    return decorate

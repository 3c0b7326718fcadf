"""The flags that several commands share, one for each field of `autoaccum.options.Options`, and help with headings."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any, Final, TypeVar

import click

from autoaccum.cli.settings import read_defaults, withdraw_defaults
from autoaccum.errors import UsageError
from autoaccum.options import Command, taken_by
from autoaccum.sources.command import refuse_command

count, natural = click.IntRange(1), click.IntRange(0)
positive = seconds = click.FloatRange(0, min_open=True)
"""The request refuses infinity and NaN."""

_VALUE = re.compile(r"""(?:"[^"]*"|\[[^\]]*\]|\([^)]*\)|\{[^}]*\}|[^,])+""")
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


def _words(context: click.Context, parameter: click.Parameter, words: tuple[str, ...]) -> tuple[str, ...] | None:
    return words or None


def _overrides(context: click.Context, parameter: click.Parameter, given: tuple[str, ...]) -> dict[str, str]:
    """Return the values that are set by name; they stay texts, since what they are replaces has their type."""
    pairs = [text.partition("=") for text in given]
    for name, equals, _ in pairs:
        if not (equals and name.isidentifier()):
            raise UsageError(f"--set {name}{equals} is no NAME=VALUE", hint="write --set length=1024")
    values = {name: value for name, _, value in pairs}
    if len(values) < len(pairs):
        raise UsageError("--set names something twice", hint="give each name once; compare takes NAME=VALUE,VALUE")
    return values


def split_overrides(context: click.Context, parameter: click.Parameter, given: tuple[str, ...]) -> dict[str, list[str]]:
    """Return the values of each name, each once, which commas separate, except within brackets or double quotes.

    >>> split_overrides(None, None, ("length=1024,2048,1024", "sizes=[64,128],[32,64]", 'layers="q,v",all'))
    {'length': ['1024', '2048'], 'sizes': ['[64,128]', '[32,64]'], 'layers': ['q,v', 'all']}
    """
    texts = _overrides(context, parameter, given)
    values = {name: dict.fromkeys(value.strip('"') for value in _VALUE.findall(text)) for name, text in texts.items()}
    return {name: list(given) or [""] for name, given in values.items()}


_FLAGS: Final[dict[str, dict[str, Any]]] = {
    "device": {
        "default": "auto",
        "metavar": "auto|cpu|cuda|cuda:N",
        "help": "Where trials run. auto takes a GPU if there is one.",
    },
    "gpu": {
        "metavar": "NAME",
        "help": "Predict for this card, without a GPU: a name of `autoaccum gpus`, or a size such as 24GiB.",
    },
    "values": {
        "metavar": "cpu",
        "help": "With --gpu: also compute each traced step on the CPU, for code that reads values (.item(), a boolean "
        "mask).",
    },
    "memory": {"metavar": "SIZE", "help": "Memory budget: 10GiB, 24GB, or 80% of the total.  [default: what is free]"},
    "reserve": {"metavar": "SIZE", "help": "Leave this much of the budget free."},
    "precision": {"metavar": "fp32|bf16|fp16", "help": "Precision (autocast), instead of the workload's."},
    "batchnorm": {
        "metavar": "micro|running|frozen|exact",
        "help": "How BatchNorm normalises: by the micro-batch (micro); the same, with running statistics of the full "
        "batch (running); by its running statistics (frozen); or by the whole batch (exact).",
    },
    "coupled": {
        "default": None,
        "flag": "--coupled/--no-coupled",
        "help": "Compute the loss from the outputs of the whole batch, for losses that compare samples. Each "
        "micro-batch then runs forward twice.",
    },
    "accumulate_in": {
        "metavar": "fp32|parameters",
        "help": "Sum half-precision gradients in fp32, or in the parameters' own dtype, which saves memory but rounds "
        "more.",
    },
    "savers": {
        "multiple": True,
        "callback": _words,
        "metavar": "SAVER",
        "help": "Save memory at the cost of time: recompute, recompute=N (blocks), offload-activations, "
        "offload-gradients, offload-optimizer, or none. Repeatable; auto takes the cheapest savers that suffice.",
    },
    "optimizer": {"metavar": "NAME", "help": "Optimizer of torch.optim, instead of the workload's."},
    "ema": {
        "default": None,
        "flag": "--ema/--no-ema",
        "help": "Leave room for a moving average of the weights on the same device.",
    },
    "hold_outputs": {
        "default": None,
        "flag": "--hold-outputs/--no-hold-outputs",
        "help": "Leave room for the outputs of the last micro-batch, as in loops that log them.",
    },
    "evaluation_batch": {"type": count, "metavar": "N", "help": "Leave room for evaluations in batches of N samples."},
    "longest_of": {
        "type": count,
        "metavar": "N",
        "help": "Build batches from the longest of N dataset samples.",
    },
    "world_size": {"type": count, "metavar": "N", "default": 1, "help": "Ranks that share the target batch."},
    "parallel": {
        "metavar": "ddp|fsdp2",
        "help": "How ranks train one model: ddp copies it, fsdp2 shards it.  [default: fsdp2 if the workload has "
        "parallelize, else ddp]",
    },
    "mesh": {"metavar": "N|RxN", "help": "Shape of the ranks: RxN is R replicas of a model sharded over N (HSDP)."},
    "multiple_of": {"type": count, "metavar": "N", "help": "Use only micro-batches that are multiples of N."},
    "equal": {"is_flag": True, "help": "Use only equal micro-batches."},
    "time_limit": {
        "type": seconds,
        "metavar": "SECONDS",
        "help": "End the search after this time, with the largest size that ran.",
    },
    "trial_limit": {"type": seconds, "metavar": "SECONDS", "help": "End a trial after this time.  [default: 600]"},
    "overrides": {
        "flag": "--set",
        "multiple": True,
        "callback": _overrides,
        "metavar": "NAME=VALUE",
        "help": "Set a constant of the workload file, a parameter of a named model, or {NAME} in COMMAND. Repeatable.",
    },
    "updates": {
        "type": click.IntRange(2),
        "default": 3,
        "show_default": True,
        "metavar": "N",
        "help": "For COMMAND: stop each run after N optimizer steps.",
    },
}

OUTPUT_FLAGS: Final = (
    *("as_json", "output", "emit", "plot", "report", "write_workload", "help_model"),
    *("force", "verbose", "quiet"),
)
"""The parameters of commands that concern only the output of a run."""

WORKLOAD_OR_COMMAND: Final = "WORKLOAD|-- COMMAND"
"""How the usage line of a command shows that it takes either."""

SET_OF_WORKLOAD: Final = "Set a constant of the workload file, or a parameter of a named model. Repeatable."
"""The help of --set of the commands that take no training command."""

_COMMAND: Final = "COMMAND"
"""Stands for the words after `--` while click reads the rest."""

_HEADINGS: Final[dict[str, tuple[str, ...]]] = {
    "The micro-batch": (
        *("max_micro_batch", "fit_micro_batch", "micro_batch", "prefer", "multiple_of", "equal", "exact_max"),
        *("reserve", "max_trials", "time_limit", "trial_limit", "values", "updates"),
    ),
    "The training loop": ("optimizer", "batchnorm", "coupled", "ema", "hold_outputs", "evaluation_batch", "longest_of"),
    "Memory savers": ("savers", "accumulate_in"),
    "Ranks": ("world_size", "parallel", "mesh"),
    "Output": OUTPUT_FLAGS,
}
"""Headings in the help of every command, and the options below each; all others come first."""


class HelpWithHeadings(click.Command):
    """A command whose help has its options below headings, and keeps the lines below those such as `Exit codes:`."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        # click does not rewrap a paragraph that starts with a backspace.
        self.help = re.sub(r"(?m)^(?=[A-Z][^.\n]*:\n)", "\b\n", inspect.cleandoc(self.help or ""))

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Take what follows `--` for a training command, as the workload: a tuple of its words.

        One word without a place for a size is the name of a file, such as `-model.py`.
        """
        at = args.index("--") if "--" in args else len(args)
        is_file = len(args) - at <= 2 and "{" not in "".join(args[at:])
        if "--" not in args and "{micro_batch}" in "".join(args):
            raise UsageError(
                "-- is missing", hint="write -- before the training command, and autoaccum's own flags before that"
            )
        if not {*ctx.help_option_names} & {*args[:at]}:  # Help is there even where a setting is wrong.
            ctx.default_map = read_defaults(ctx)
        if is_file or not any(parameter.name == "workload" for parameter in self.params):
            rest = super().parse_args(ctx, args)
        else:
            refuse_command(args[at + 1 :], self.name or "")
            rest = super().parse_args(ctx, [*args[:at], _COMMAND])
            ctx.params["workload"] = tuple(args[at + 1 :])
        withdraw_defaults(ctx)
        return rest

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options below their headings."""
        headings = {name: heading for heading, names in _HEADINGS.items() for name in names}
        sections: dict[str, list[tuple[str, str]]] = {"Options": [], **{heading: [] for heading in _HEADINGS}}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is not None and isinstance(parameter, click.Option):
                sections[headings.get(parameter.name or "", "Options")].append(record)
        for heading, records in sections.items():
            if records:
                with formatter.section(heading):
                    formatter.write_dl(records)


_COMMON: Final[dict[str, dict[str, Any]]] = {
    "target_batch": {
        "type": count,
        "metavar": "N",
        "required": True,
        "help": "Samples per update (optimizer step), over all ranks.",
    },
    "target_tokens": {
        "type": count,
        "metavar": "N",
        "help": "Tokens per update, without padding, instead of --target-batch: whole samples are added until N is "
        "reached.",
    },
    "max_micro_batch": {"type": count, "metavar": "N", "help": "Try no larger micro-batch."},
    "fit_micro_batch": {
        "type": count,
        "metavar": "N",
        "help": "With --savers auto or --solve: the micro-batch that must fit.  [default: 1]",
    },
    "micro_batch": {"type": count, "metavar": "N", "help": "The most samples to run at once."},
    "exact_max": {"is_flag": True, "help": "Find the exact largest micro-batch, which takes more trials."},
    "as_json": {
        "flag": "--json",
        "is_flag": True,
        "help": "Print the result as JSON on stdout, and nothing else there.",
    },
    "output": {"flag": "-o, --output", "metavar": "FILE", "help": "Write the result to a file."},
    "report": {"metavar": "FILE", "help": "Write the result as a single HTML page that loads no other file."},
    "force": {"is_flag": True, "help": "Overwrite existing files."},
    "verbose": {"flag": "-v, --verbose", "is_flag": True, "help": "Show all details and every note."},
    "quiet": {"flag": "-q, --quiet", "is_flag": True, "help": "Show no progress; warnings and errors remain."},
}
"""Other flags that commands share; `flag` is how it is written, where that is not its name."""


RENAMED_FLAGS: Final = {
    "--ceiling": "--exact-max",
    "--keep": "--max-checkpoints",
    "--keeps": "--ema or --hold-outputs",
    "--micro-batch": "--fit-micro-batch",  # Of the commands that have no --micro-batch.
    "--worst-of": "--longest-of",
}
"""The new names of flags that were renamed."""


def options(of: Command, *others: str, **changes: Any) -> Callable[[_Command], _Command]:
    """Return a decorator that gives a command the flags of the options it takes.

    Args:
        of: Its name.
        others: Names of flags in `_COMMON`.
        changes: By flag, a help text of the command's own, or keyword arguments of `click.option`; None: the command
            has a flag of its own for it.
    """

    def decorate(command: _Command) -> _Command:
        own = {name for name, change in changes.items() if change is None}
        known = _FLAGS | _COMMON
        order = ["target_batch", "target_tokens", *known]
        for name in sorted({*taken_by(of), *others} - own, key=order.index, reverse=True):
            change = changes.get(name, {})
            settings = {
                "show_default": "default" in known[name],
                **known[name],
                **({"help": change} if isinstance(change, str) else change),
            }
            words = settings.pop("flag", f"--{name.replace('_', '-')}").split(", ")
            command = click.option(*words, name, **settings)(command)
        return command

    return decorate

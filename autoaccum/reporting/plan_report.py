"""Show a plan: six lines and its warnings, or all of it on request."""

from __future__ import annotations

import json
import shlex
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rich.text import Text

from autoaccum.checks import counted
from autoaccum.options import mesh_word
from autoaccum.planning.plan_messages import peak_bytes
from autoaccum.planning.plan_record import Plan, Solved, Spread, TokenBudget
from autoaccum.planning.throughput import Speed, Throughput
from autoaccum.reporting.console import Block, Facts, Table, copied, first_messages, offer
from autoaccum.reporting.explain_report import explanation_blocks
from autoaccum.serialization import to_plain
from autoaccum.sources.command import CommandSource
from autoaccum.sources.source import FileSource
from autoaccum.spec import OFFLOADS
from autoaccum.units import MIB, format_bytes, format_overrides, format_parts, format_rate

_MANY_PARTS = 60
_MODES = {
    "running": "running: normalises by the micro-batch, running statistics are the full batch's",
    "frozen": "frozen: normalises by its running statistics, which do not change",
    "exact": "exact: normalises by the whole effective batch",
}
_MICRO_BATCHES = {"each": "each micro-batch", "last": "the last micro-batch"}


def plan_blocks(
    plan: Plan, *, kept: Path | None = None, seconds: float | None = None, verbose: bool = False
) -> list[Block]:
    """Return the answer of a plan, and the first warnings and notes.

    Args:
        plan: The plan.
        kept: The file of the plan, if it was written.
        seconds: The time that planning took, if it was just made.
        verbose: Return all that is known, and every note.
    """
    blocks: list[Block] = [Facts([*answer_rows(plan, kept), *(detail_rows(plan, seconds) if verbose else ())])]
    if verbose and plan.throughput is not None:
        blocks.append(speeds_table(plan.throughput))
    return blocks + first_messages(Facts.of_messages(plan.warnings, plan.notes), verbose=verbose)


def constant_blocks(source: FileSource) -> list[Block]:
    """Return the constants of a workload file, which `--set` gives other values."""
    table = Table("name", "value", "what it is")
    for constant in source.constants.values():
        table.add(Text(constant.name, "bold"), repr(constant.value), constant.comment)
    return [table, "", *offer("change one", f"autoaccum plan {source.name} --set NAME=VALUE ...")]


def memory_blocks(plan: Plan) -> list[Block]:
    """Return where the memory of a plan goes, if that was explained."""
    if plan.explanation is None:
        return []
    title = Text("where the memory goes", "bold")
    return ["", title, *explanation_blocks(plan.explanation, measured_peak(plan))]


def measured_peak(plan: Plan) -> int | None:
    """Return the peak of real trials, if there were any."""
    return plan.peak_bytes if plan.kind == "measured" else None


def answer_rows(plan: Plan, kept: Path | None = None) -> Iterator[tuple[str, str | Text]]:
    """Yield the rows of the answer, at least six: name and value.

    What to train with are the lines of a framework, if the plan has its arguments.
    """
    if plan.solved is not None:
        yield f"{plan.solved.name} ", _solved(plan.solved, predicted=plan.kind == "predicted")
    solved = None if plan.solved is None else plan.solved.name
    overrides = {name: value for name, value in plan.workload.overrides.items() if name != solved}
    if overrides and not plan.workload.command:
        yield "set", format_overrides(overrides)
    if plan.tokens is not None:
        yield from _token_rows(plan, plan.tokens)
    else:
        yield "micro-batch", Text(str(plan.micro_batch), "bold green")
        yield "iter_size", f"{plan.iter_size}{_ranks(plan)}"
        yield "parts", _parts(plan)
    if plan.grad_sync is not None and plan.iter_size > 1:
        yield "grad_sync", _grad_sync(plan)
    yield "peak", _peak(plan)
    if plan.host_bytes is not None:
        offloads = [word for word in plan.spec.savers if word in OFFLOADS]
        yield "host memory", f"{format_bytes(plan.host_bytes)} for {' and '.join(offloads) or 'what backward needs'}"
    if plan.throughput is not None:
        rate = format_rate(plan.throughput.at_knee.samples_per_second)
        yield "speed", f"{rate} samples/s, {plan.throughput.kind} for updates of {plan.throughput.target_batch}"
    yield "device", _device(plan)
    lines = [line for name, given in (to_plain(plan.arguments) or {}).items() for line in code_lines(name, given)]
    for number, line in enumerate(lines or [accumulator_line(plan, kept)]):
        yield "" if number else "train with", copied(line, "cyan")


def detail_rows(plan: Plan, seconds: float | None = None) -> Iterator[tuple[str, str]]:
    """Yield the rows of details: name and value."""
    yield "largest fit", _largest_fit(plan)
    if plan.min_budget_bytes is not None:
        yield "minimum", f"{format_bytes(plan.min_budget_bytes)}: with less memory the schedule would not run"
    if plan.uncertainty_bytes is not None:
        uncertainty = format_bytes(plan.uncertainty_bytes)
        yield "uncertainty", f"{uncertainty} either way, of what is needed and of what the card has free"
    if extra := describe_extra_memory(plan):
        yield "along with", "; ".join(extra)
    if plan.spec.longest_of is not None:
        yield "batches", f"made of the longest of {plan.spec.longest_of} samples of the dataset"
    if plan.spec.batchnorm in _MODES:
        yield "batchnorm", _MODES[plan.spec.batchnorm]
    if plan.learning_rate is not None:
        yield "tuned rate", f"{plan.learning_rate:.6g}, the learning rate that `autoaccum fit --plan` uses"
    predicted = " predicted" if plan.kind == "predicted" else ""
    took = "" if seconds is None else f"; planning took {seconds:.1f} s"
    yield "trials", f"{len(plan.trials)}{predicted} in {sum(trial.seconds for trial in plan.trials):.1f} s{took}"


def speeds_table(throughput: Throughput) -> Table:
    """List samples per second by micro-batch, with the knee marked."""
    where = f"in updates of {throughput.target_batch} on {throughput.device}"
    table = Table(">micro-batch", ">iter_size", ">samples/s", where)
    for speed in throughput.speeds:
        cells = (str(speed.micro_batch), str(speed.iter_size), format_rate(speed.samples_per_second))
        marks = [name for name in ("knee", "fastest") if getattr(throughput, name) == speed.micro_batch]
        table.add(*cells, ", ".join([*marks, _speed_words(speed)]), style="bold green" if "knee" in marks else "")
    return table


def _speed_words(speed: Speed) -> str:
    if speed.samples_per_second is None:
        return "not measured: the next larger ones are far from the fastest"
    span = f"{format_rate(speed.low)} to {format_rate(speed.high)}"
    return f"{span} in the middle half of {counted(speed.updates, 'update')}" if speed.updates else f"{span}, estimated"


def describe_extra_memory(plan: Plan) -> list[str]:
    """Return phrases for what the plan's trials held besides the step: outputs, an EMA, an evaluation."""
    kept = ["the last micro-batch's outputs and loss, held until the next ones exist"] if plan.spec.hold_outputs else []
    kept += ["an average of the weights (EMA)"] if plan.spec.ema else []
    samples = plan.spec.evaluation_batch
    return kept if samples is None else [*kept, f"an evaluation between updates, in batches of {samples}"]


def accumulator_line(plan: Plan, kept: Path | None = None) -> str:
    """Return the line of Python that trains by the plan: with its file, or with its numbers; or what gives it."""
    workload, spec = plan.workload, plan.spec
    if workload.command:
        sizes = {"micro_batch": plan.micro_batch, "iter_size": plan.iter_size, "world_size": plan.world_size}
        return shlex.join(CommandSource(workload.reference, "").fill(**sizes))
    if trainer := workload.recipe.trainer:
        if trainer != "transformers" or spec.precision == "fp16":
            return f"the arguments that --for {trainer} prints"
        given = f"micro_batch={plan.micro_batch}" if kept is None else f"plan={str(kept)!r}"
        return f"autoaccum.integrations.transformers.AccumulatorTrainer(..., {given}).train()"
    given = {"loss": "loss, ", "criterion": "criterion=criterion, ", "model": ""}[workload.loss]
    if spec.coupled and workload.loss != "criterion":
        given = "outputs=outputs, coupled_loss=coupled_loss, "
    named: dict[str, object] = {"reduction": workload.reduction}
    named |= {name: getattr(spec, name) for name in ("precision", "coupled", "batchnorm", "savers")}
    named |= {"grad_sync": plan.grad_sync, "multiple_of": plan.multiple_of if plan.multiple_of > 1 else None}
    usual = ("mean", "fp32", "micro", "each", "longest")
    options = [f"micro_batch={plan.micro_batch}"]
    if plan.tokens is not None:
        options = [f"micro_tokens={plan.tokens.micro_tokens}"]
        named["padding"] = plan.tokens.padding
    options += [f"{name}={value!r}".replace("'", '"') for name, value in named.items() if value and value not in usual]
    if kept is not None:
        options = [f"plan=autoaccum.Plan.load({str(kept)!r})"]
    if workload.has_weight:
        options.append("weight=weight")
    if workload.recipe.batch == "own":
        options += ["split=split", "size=size"]
    if plan.tokens is not None:
        options += [f"{name}={name}" for name in workload.token_functions]
    return f"autoaccum.Accumulator(model, optimizer, {given}{', '.join(options)}).step(batch)"


def _solved(solved: Solved, *, predicted: bool) -> Text:
    fails, why = solved.next_fail, "largest that fits"
    if solved.value == solved.high or solved.stopped is not None:
        why = "the largest allowed" if solved.value == solved.high else f"largest before the limit on {solved.stopped}"
    elif fails is not None:
        needs = f"needs {format_bytes(peak_bytes(fails.trial) or 0)}" if predicted else "does not"
        why = f"largest that fits; {fails.value:,} {'is tight' if fails.trial.ran else needs}"
    return Text.assemble((f"{solved.value:,}", "bold green"), f" ({why})")


def _token_rows(plan: Plan, tokens: TokenBudget) -> Iterator[tuple[str, str | Text]]:
    """Yield the rows of micro-batches that are made by their tokens, and what they are worth."""
    yield "micro_tokens", _solved(tokens.search, predicted=False)
    yield "iter_size", f"{_in_words(tokens.iter_sizes)}{_ranks(plan)}"
    yield "samples", f"{_in_words(tokens.samples)} per micro-batch"
    yield "tokens", f"{_in_words(tokens.lengths)} per sample; {_in_words(tokens.costs)} per micro-batch, padded"
    by_count = counted(plan.micro_batch, "sample")
    saved = f"{tokens.padding_saved:.0%} fewer padded tokens, and " if tokens.padding_saved > 0 else ""
    yield "saved", f"{saved}about {tokens.speed_up:.1f} times as fast as micro-batches of {by_count} (estimated)"
    yield "by count", f"{by_count} of any length, {counted(plan.iter_size, 'micro-batch')} per update"


def _in_words(spread: Spread) -> str:
    return f"{spread.least:,} to {spread.most:,} (median {spread.median:,})"


def _parts(plan: Plan) -> str:
    if plan.ranks is None:
        return _short(plan.micro_batches) + (f" = {plan.target_batch}" if plan.iter_size > 1 else "")
    return "; ".join(f"{counted(count, 'rank')} of {_short(parts)}" for parts, count in Counter(plan.ranks).items())


def _ranks(plan: Plan) -> str:
    if plan.world_size == 1:
        return ""
    mesh = None if plan.mesh is None else f"mesh {mesh_word(plan.mesh)}"
    how = ", ".join(word for word in (plan.parallel, mesh) if word is not None)
    return f" on each of {plan.world_size} ranks{f' ({how})' if how else ''}"


def _grad_sync(plan: Plan) -> str:
    peaks = {way: format_bytes(peak) for way, peak in plan.grad_sync_peaks.items()}
    others = "".join(f"; {way} takes {peak}" for way, peak in peaks.items() if way != plan.grad_sync)
    return f"{plan.grad_sync}: gradients are summed over ranks with {_MICRO_BATCHES[str(plan.grad_sync)]}{others}"


def _short(parts: tuple[int, ...]) -> str:
    text = format_parts(parts)
    return text if len(text) <= _MANY_PARTS else f"{len(parts)} parts of {min(parts)} to {max(parts)}"


def _largest_fit(plan: Plan) -> str:
    if plan.capped and any(warning.code == "data_ends" for warning in plan.warnings):
        return f"{plan.largest_fit}, the largest before the script's data ended the search"
    if plan.capped:
        return f"{plan.largest_fit}, the largest size allowed"
    if plan.stopped is not None:
        return f"{plan.largest_fit}, the largest before the limit on {plan.stopped} ended the search"
    above = [trial for trial in plan.trials if trial.outcome != "ok" and trial.micro_batch > plan.largest_fit]
    if not above:
        return f"{plan.largest_fit}"
    first = min(above, key=lambda trial: (trial.micro_batch, trial.outcome != "oom"))
    return f"{plan.largest_fit} ({first.micro_batch} {'does not fit' if first.outcome == 'oom' else 'is tight'})"


def _device(plan: Plan) -> str:
    device = plan.device
    words = [device.name or "unknown"]
    if device.card:
        words.append(device.card)
    if device.kind == "simulated":
        words.append(format_bytes(device.total_bytes or 0))
    if device.used_by_others_bytes:
        words.append(f"of which others hold {format_bytes(device.used_by_others_bytes)}")
    if plan.devices is not None:
        words.append(f"where the least fits of {len(plan.devices)} that were tried at once")
    elif plan.world_size > 1 and plan.kind == "measured":
        words.append(f"tried for all {plan.world_size} ranks")
    return ", ".join(words)


def _peak(plan: Plan) -> str:
    limit = format_bytes(plan.limit_bytes)
    if plan.tokens is not None and (held := peak_bytes(plan.tokens.search.proof)) is not None:
        return f"{format_bytes(held)} of {limit}" + (
            " (predicted, held by tensors)" if plan.kind == "predicted" else ""
        )
    if plan.peak_bytes is None or plan.headroom_bytes is None:
        return f"not measured, the budget is {limit}"
    peak, label = format_bytes(plan.peak_bytes), "" if plan.kind == "measured" else " (predicted)"
    if plan.device.kind == "cpu":
        label = " added to the process"
    if plan.min_budget_bytes is not None and plan.headroom_bytes < 0:
        needed = format_bytes(plan.min_budget_bytes)
        return f"{needed} needed of {limit}{label}; with more memory, PyTorch would cache {peak}"
    return f"{peak} of {limit}{label}, headroom {plan.headroom_bytes / MIB:,.0f} MiB"


def code_lines(framework: str, arguments: Mapping[str, Any]) -> list[str]:
    """Return arguments as lines to be pasted: calls of Python, flags, or a configuration as JSON.

    >>> code_lines("torchtitan", {"training": {"local_batch_size": 4, "global_batch_size": 8}})
    ['--training.local_batch_size 4 --training.global_batch_size 8']
    >>> code_lines("lightning", {"trainer": {"precision": "bf16-mixed"}, "dataloader": {"batch_size": 4}})
    ['Trainer(precision="bf16-mixed")', 'DataLoader(..., batch_size=4)']
    """
    if framework == "transformers":
        return [_call("TrainingArguments", arguments), _flags(arguments)]
    if framework == "torchtitan":
        named = {f"{group}.{name}": value for group, held in arguments.items() for name, value in held.items()}
        return [_flags(named)]
    if framework == "deepspeed":
        return [json.dumps(arguments)]
    loader = _call("DataLoader", arguments["dataloader"], "...")
    if framework == "lightning":
        return [_call("Trainer", arguments["trainer"]), loader]
    plugin = f"gradient_accumulation_plugin={_call('GradientAccumulationPlugin', arguments['plugin'])}"
    return [_call("Accelerator", arguments["accelerator"], last=plugin), loader]


def _call(function: str, arguments: Mapping[str, Any], first: str = "", last: str = "") -> str:
    given = [f"{name}={value!r}".replace("'", '"') for name, value in arguments.items()]
    return f"{function}({', '.join(filter(None, (first, *given, last)))})"


def _flags(arguments: Mapping[str, Any]) -> str:
    words = []
    for name, value in arguments.items():
        plain = f"'{json.dumps(value)}'" if isinstance(value, Mapping) else str(value)
        words.append(f"--{name}" if value is True else f"--{name} {plain}")
    return " ".join(words)

"""Show a plan: six lines and its warnings, or all of it on request."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from autoaccum.accumulation.schedule import format_parts
from autoaccum.checks import counted
from autoaccum.options import OFFLOADS, mesh_word
from autoaccum.planning.framework_arguments import code_lines
from autoaccum.planning.plan_record import Plan
from autoaccum.planning.throughput import Speed, Throughput, format_rate
from autoaccum.reporting.console import make_table, path_value, print_messages, print_rows, print_table
from autoaccum.reporting.explain_report import print_explanation
from autoaccum.serialization import to_plain
from autoaccum.units import MIB, format_bytes

_MANY_PARTS = 60
_MODES = {
    "running": "running: normalises by the micro-batch, running statistics are the full batch's",
    "frozen": "frozen: normalises by its running statistics, which do not change",
    "exact": "exact: normalises by the whole effective batch",
}
_MICRO_BATCHES = {"each": "each micro-batch", "last": "the last micro-batch"}
_WRITTEN = {
    "-o": "kept in {}",
    "--emit": "train without autoaccum: {} is the step in plain PyTorch",
    "--plot": "picture in {}",
    "--report": "report in {}",
}
_KEPT = {
    "outputs": "the last micro-batch's outputs and loss, held until the next ones exist",
    "ema": "an average of the weights (EMA)",
}


def print_plan(
    console: Console,
    plan: Plan,
    *,
    command: Sequence[str],
    written: Mapping[str, Path],
    name: str = "plan.json",
    seconds: float | None = None,
    verbose: bool = False,
) -> None:
    """Print a plan: the answer, the first warnings and notes, the files written, and where memory goes.

    Args:
        console: The console.
        plan: The plan.
        command: The command that made it, to be suggested again with `-o`.
        written: The files that were written, by the flags that name them.
        name: A new file name to suggest for `-o`.
        seconds: The time that planning took, if it was just made.
        verbose: Print everything.
    """
    kept = written.get("-o")
    print_rows(console, answer_rows(plan, kept))
    if verbose:
        print_rows(console, detail_rows(plan, seconds))
        if plan.throughput is not None:
            print_table(console, speeds_table(plan.throughput))
    messages = [*(("warning", text) for text in plan.warnings), *(("note", text) for text in plan.notes)]
    print_messages(console, messages, verbose=verbose)
    for flag, file in written.items():
        console.print(_WRITTEN[flag].format(file), soft_wrap=True)
    if plan.explanation is not None:
        console.print()
        print_explanation(console, plan.explanation, plan.peak_bytes if plan.kind == "measured" else None)
    if verbose and kept is None:
        console.print("\nkeep the plan:")
        console.print(Text(f"  {shlex.join([*command, '-o', name])}", "cyan"), soft_wrap=True)


def answer_rows(plan: Plan, kept: Path | None = None) -> Iterator[tuple[str, Text]]:
    """Yield the rows of the answer, at least six: name and value.

    What to train with are the lines of a framework, if the plan has its arguments.
    """
    yield "micro-batch", Text(str(plan.micro_batch), "bold green")
    yield "iter_size", Text(f"{plan.iter_size}{_ranks(plan)}")
    yield "parts", Text(_parts(plan))
    if plan.reduce is not None and plan.iter_size > 1:
        yield "reduce", Text(_reduce(plan))
    yield "peak", Text(_peak(plan))
    if plan.host_bytes is not None:
        offloads = [word for word in plan.workload.get("savers") or () if word in OFFLOADS]
        what = " and ".join(offloads) or "what backward needs"
        yield "host memory", Text(f"{format_bytes(plan.host_bytes)} for {what}")
    if plan.throughput is not None:
        rate = format_rate(plan.throughput.at_knee.samples_per_second)
        yield "speed", Text(f"{rate} samples/s, {plan.throughput.kind} for updates of {plan.throughput.target_batch}")
    yield "device", Text(_device(plan))
    lines = [line for each, found in (to_plain(plan.arguments) or {}).items() for line in code_lines(each, found)]
    for name, line in zip_longest(["train with"], lines or [accumulator_line(plan, kept)], fillvalue=""):
        yield name, path_value(line, "cyan")


def detail_rows(plan: Plan, seconds: float | None = None) -> Iterator[tuple[str, Text]]:
    """Yield the rows of details: name and value."""
    yield "largest fit", Text(_largest_fit(plan))
    if plan.least_bytes is not None:
        yield "least budget", Text(f"{format_bytes(plan.least_bytes)}, where the schedule would still run")
    if plan.band_bytes is not None:
        band = format_bytes(plan.band_bytes)
        yield "band", Text(f"{band} either way, of what is needed and of what the card has free")
    if extra := describe_extra_memory(plan):
        yield "along with", Text("; ".join(extra))
    if plan.workload.get("worst_of") is not None:
        yield "batches", Text(f"of the longest of {plan.workload['worst_of']} samples of the dataset")
    if plan.workload.get("batchnorm") in _MODES:
        yield "batchnorm", Text(_MODES[plan.workload["batchnorm"]])
    if plan.learning_rate is not None:
        yield "tuned rate", Text(f"{plan.learning_rate:.6g}, the learning rate that `autoaccum fit --plan` uses")
    yield "trials", Text(_trials(plan, seconds))


def speeds_table(known: Throughput) -> Table:
    """List samples per second by micro-batch, with the knee marked."""
    where = f"in updates of {known.target_batch} on {known.device}"
    table = make_table(">micro-batch", ">iter_size", ">samples/s", where)
    for speed in known.speeds:
        cells = (str(speed.micro_batch), str(speed.iter_size), format_rate(speed.samples_per_second))
        marks = [name for name in ("knee", "fastest") if getattr(known, name) == speed.micro_batch]
        style = "bold green" if "knee" in marks else ""
        table.add_row(*cells, ", ".join([*marks, _speed_words(speed)]), style=style)
    return table


def _speed_words(speed: Speed) -> str:
    if speed.samples_per_second is None:
        return "not measured: the next larger ones are far from the fastest"
    if not speed.updates:
        return f"{format_rate(speed.low)} to {format_rate(speed.high)}, by an estimate"
    middle = f"{format_rate(speed.low)} to {format_rate(speed.high)} in the middle half"
    return f"{middle} of {counted(speed.updates, 'update')}"


def describe_extra_memory(plan: Plan) -> list[str]:
    """Return phrases for what the plan's trials held besides the step: outputs, an EMA, an evaluation."""
    kept = [_KEPT.get(keep, str(keep)) for keep in plan.workload.get("keeps") or ()]
    samples = plan.workload.get("evaluation_batch")
    return kept if samples is None else [*kept, f"an evaluation between updates, in batches of {samples}"]


def accumulator_line(plan: Plan, kept: Path | None = None) -> str:
    """Return the line of Python that trains by the plan: with its file, or with its numbers; or what gives it."""
    if trainer := plan.workload.get("recipe", {}).get("trainer"):
        if trainer != "transformers" or plan.workload.get("precision") == "fp16":
            return f"the arguments that --for {trainer} prints"
        given = f"micro_batch={plan.micro_batch}" if kept is None else f"plan={str(kept)!r}"
        return f"autoaccum.integrations.transformers.AccumulatorTrainer(..., {given}).train()"
    workload = plan.workload
    given = {"criterion": "criterion=criterion, ", "model": ""}.get(str(workload.get("loss")), "loss, ")
    if workload.get("coupled") and workload.get("loss") != "criterion":
        given = "outputs=outputs, coupled_loss=coupled_loss, "
    named = {name: workload.get(name) for name in ("reduction", "precision", "coupled", "batchnorm", "savers")}
    named |= {"reduce": plan.reduce, "multiple_of": plan.multiple_of if plan.multiple_of > 1 else None}
    usual = ("mean", "fp32", "micro", "each")
    options = [f"micro_batch={plan.micro_batch}"]
    options += [f"{name}={value!r}".replace("'", '"') for name, value in named.items() if value and value not in usual]
    if kept is not None:
        options = [f"plan=autoaccum.Plan.load({str(kept)!r})"]
    if workload.get("weight") == "the workload's weight()":
        options.append("weight=weight")
    if workload.get("recipe", {}).get("batch") == "own":
        options += ["split=split", "size=size"]
    return f"autoaccum.Accumulator(model, optimizer, {given}{', '.join(options)}).step(batch)"


def _parts(plan: Plan) -> str:
    total = f" = {plan.target_batch}"
    if plan.ranks is None:
        return _short(plan.micro_batches) + (total if plan.iter_size > 1 else "")
    alike: dict[tuple[int, ...], int] = {}
    for parts in plan.ranks:
        alike[parts] = alike.get(parts, 0) + 1
    return "; ".join(f"{count} ranks of {_short(parts)}" for parts, count in alike.items()).replace("1 ranks", "1 rank")


def _ranks(plan: Plan) -> str:
    if plan.world_size == 1:
        return ""
    mesh = None if plan.mesh is None else f"mesh {mesh_word(plan.mesh)}"
    how = ", ".join(word for word in (plan.parallel, mesh) if word is not None)
    return f" on each of {plan.world_size} ranks{f' ({how})' if how else ''}"


def _reduce(plan: Plan) -> str:
    peaks = {way: format_bytes(peak) for way, peak in plan.reduce_peaks.items()}
    others = "".join(f"; {way} takes {peak}" for way, peak in peaks.items() if way != plan.reduce)
    return f"{plan.reduce}: gradients are summed over ranks with {_MICRO_BATCHES[str(plan.reduce)]}{others}"


def _short(parts: tuple[int, ...]) -> str:
    text = format_parts(parts)
    return text if len(text) <= _MANY_PARTS else f"{len(parts)} parts of {min(parts)} to {max(parts)}"


def _largest_fit(plan: Plan) -> str:
    if plan.capped:
        return f"{plan.largest_fit}, the largest size allowed"
    if plan.stopped is not None:
        return f"{plan.largest_fit}, the largest before the limit on {plan.stopped} ended the search"
    failed = [trial for trial in plan.trials if trial.outcome != "ok"]
    above = [trial for trial in failed if trial.micro_batch > plan.largest_fit]
    if not above:
        return f"{plan.largest_fit}"
    first = min(above, key=lambda trial: (trial.micro_batch, trial.outcome != "oom"))
    return f"{plan.largest_fit} ({first.micro_batch} {'does not fit' if first.outcome == 'oom' else 'is tight'})"


def _device(plan: Plan) -> str:
    device = plan.device
    known = [str(device.get("name", "unknown"))]
    if device.get("card"):
        known.append(str(device["card"]))
    if device.get("kind") == "simulated":
        known.append(format_bytes(device.get("total_bytes") or 0))
    if device.get("used_by_others_bytes"):
        known.append(f"of which others hold {format_bytes(device['used_by_others_bytes'])}")
    if plan.devices is not None:
        known.append(f"where the least fits of {len(plan.devices)} that were tried at once")
    elif plan.world_size > 1 and plan.kind == "measured":
        known.append(f"tried for all {plan.world_size} ranks")
    return ", ".join(known)


def _trials(plan: Plan, seconds: float | None) -> str:
    within = sum(trial.seconds for trial in plan.trials)
    began = "" if seconds is None else f" of {seconds:.1f} s in all"
    return f"{len(plan.trials)}{' predicted' if plan.kind == 'predicted' else ''} in {within:.1f} s{began}"


def _peak(plan: Plan) -> str:
    limit = format_bytes(plan.limit_bytes)
    if plan.peak_bytes is None or plan.headroom_bytes is None:
        return f"not measured, the budget is {limit}"
    peak, least = format_bytes(plan.peak_bytes), plan.least_bytes
    label = "" if plan.kind == "measured" else " (predicted)"
    if least is not None and plan.headroom_bytes < 0:
        return f"{format_bytes(least)} needed of {limit}, {peak} if the allocator had room{label}"
    return f"{peak} of {limit}{label}, headroom {plan.headroom_bytes / MIB:,.0f} MiB"

"""A plan as six lines and what must be known of it; all else where it is asked for."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.console import Console
from rich.text import Text

from autoaccum.accumulation.schedule import format_parts
from autoaccum.planning.plan import Plan
from autoaccum.reporting.explain_report import print_explanation
from autoaccum.reporting.tables import path_value, print_remarks, print_rows
from autoaccum.units import MIB, format_bytes

_MANY_PARTS = 60
_MODES = {
    "running": "running: normalises by the micro-batch, running statistics are the full batch's",
    "frozen": "frozen: normalises by its running statistics, which stay as they are",
}
_KEPT = {
    "outputs": "the last micro-batch's outputs and loss, kept until the next has its own",
    "ema": "an average of the weights",
}


def print_plan(
    console: Console,
    plan: Plan,
    *,
    command: Sequence[str],
    kept: Path | None = None,
    emitted: Path | None = None,
    pictured: Path | None = None,
    name: str = "plan.json",
    seconds: float | None = None,
    verbose: bool = False,
) -> None:
    """Draw a plan: the answer, the first of its warnings and notes, what was written, and where memory goes.

    Args:
        console: Where to.
        plan: The plan.
        command: The words of the command that made it, to be offered again with `-o`.
        kept: Where the plan was written, if it was.
        emitted: Where the training step was written, if it was.
        pictured: Where the picture was written, if it was.
        name: What is offered to `-o`: a file that is not there yet.
        seconds: What all of it took, if it was just made.
        verbose: Draw all that is known.
    """
    print_rows(console, answer_rows(plan, kept))
    if verbose:
        print_rows(console, detail_rows(plan, seconds))
    remarks = [*(("warning", text) for text in plan.warnings), *(("note", text) for text in plan.notes)]
    print_remarks(console, remarks, verbose=verbose)
    if kept is not None:
        console.print(f"kept in {kept}", soft_wrap=True)
    if emitted is not None:
        console.print(f"train without autoaccum: {emitted} is the step in plain PyTorch", soft_wrap=True)
    if pictured is not None:
        alone = ", of the trials alone: where memory goes is told of cards" if plan.device.get("kind") == "cpu" else ""
        console.print(f"picture in {pictured}{alone}", soft_wrap=True)
    if plan.explanation is not None:
        console.print()
        print_explanation(console, plan.explanation, plan.peak_bytes if plan.kind == "measured" else None)
    if verbose and kept is None:
        console.print("\nkeep the plan:")
        console.print(Text(f"  {shlex.join([*command, '-o', name])}", "cyan"), soft_wrap=True)


def answer_rows(plan: Plan, kept: Path | None = None) -> Iterator[tuple[str, Text]]:
    """The six lines that everybody needs: name and value."""
    yield "micro-batch", Text(str(plan.micro_batch), "bold green")
    each = "" if plan.world_size == 1 else f" on each of {plan.world_size} ranks"
    yield "iter_size", Text(f"{plan.iter_size}{each}")
    yield "parts", Text(_parts(plan))
    yield "peak", Text(_peak(plan))
    yield "device", Text(_device(plan))
    yield "train with", path_value(accumulator_line(plan, kept), "cyan")


def detail_rows(plan: Plan, seconds: float | None = None) -> Iterator[tuple[str, Text]]:
    """What else is known: name and value."""
    yield "largest fit", Text(_largest_fit(plan))
    if plan.least_bytes is not None:
        ran = "still ran" if plan.kind == "measured" else "would still run"
        yield "least budget", Text(f"{format_bytes(plan.least_bytes)}, where the schedule {ran}")
    if plan.band_bytes is not None:
        yield (
            "band",
            Text(f"{format_bytes(plan.band_bytes)} either way, of what is needed and of what the card has free"),
        )
    if companions := describe_companions(plan):
        yield "along with", Text("; ".join(companions))
    if plan.workload.get("worst_of") is not None:
        yield "batches", Text(f"of the longest of {plan.workload['worst_of']} samples of the dataset")
    if plan.workload.get("batchnorm") in _MODES:
        yield "batchnorm", Text(_MODES[plan.workload["batchnorm"]])
    if plan.learning_rate is not None:
        yield "tuned rate", Text(f"{plan.learning_rate:.6g}, the learning rate that `autoaccum fit --plan` trains by")
    yield "trials", Text(_trials(plan, seconds))


def describe_companions(plan: Plan) -> list[str]:
    """What was held in the plan's trials beside the step, as phrases."""
    kept = [_KEPT.get(keep, str(keep)) for keep in plan.workload.get("keeps") or ()]
    samples = plan.workload.get("evaluation_batch")
    return kept if samples is None else [*kept, f"an evaluation between updates, in batches of {samples}"]


def accumulator_line(plan: Plan, kept: Path | None = None) -> str:
    """The line of Python that trains by the plan: by the file that keeps it, or by its numbers."""
    given = {"criterion": "criterion=criterion, ", "model": ""}.get(str(plan.workload.get("loss")), "loss, ")
    numbers = [f"micro_batch={plan.micro_batch}"]
    if plan.workload.get("reduction") == "sum":
        numbers.append('reduction="sum"')
    if plan.workload.get("precision") in ("bf16", "fp16"):
        numbers.append(f'precision="{plan.workload["precision"]}"')
    if plan.workload.get("batchnorm") in _MODES:
        numbers.append(f'batchnorm="{plan.workload["batchnorm"]}"')
    own = ["split=split", "size=size"] if plan.workload.get("recipe", {}).get("batch") == "own" else []
    if plan.multiple_of > 1:
        numbers.append(f"multiple_of={plan.multiple_of}")
    options = numbers if kept is None else [f"plan=autoaccum.Plan.load({str(kept)!r})"]
    if plan.workload.get("weight") == "the workload's weight()":
        options.append("weight=weight")
    options += own
    return f"autoaccum.Accumulator(model, optimizer, {given}{', '.join(options)}).step(batch)"


def _parts(plan: Plan) -> str:
    total = f" = {plan.target_batch}"
    if plan.ranks is None:
        return _short(plan.micro_batches) + (total if plan.iter_size > 1 else "")
    alike: dict[tuple[int, ...], int] = {}
    for parts in plan.ranks:
        alike[parts] = alike.get(parts, 0) + 1
    return "; ".join(f"{count} ranks of {_short(parts)}" for parts, count in alike.items()).replace("1 ranks", "1 rank")


def _short(parts: tuple[int, ...]) -> str:
    text = format_parts(parts)
    return text if len(text) <= _MANY_PARTS else f"{len(parts)} parts of {min(parts)} to {max(parts)}"


def _largest_fit(plan: Plan) -> str:
    if plan.capped:
        return f"{plan.largest_fit}, the most that was asked for"
    if plan.stopped is not None:
        return f"{plan.largest_fit}, the largest before the limit on {plan.stopped} ended the search"
    above = {trial.outcome for trial in plan.trials if trial.micro_batch == plan.largest_fit + 1}
    why = "does not fit" if "oom" in above else "is tight" if "tight" in above else ""
    return f"{plan.largest_fit} ({plan.largest_fit + 1} {why})" if why else f"{plan.largest_fit}"


def _device(plan: Plan) -> str:
    device = plan.device
    known = [str(device.get("name", "unknown"))]
    if device.get("card"):
        known.append(str(device["card"]))
    if device.get("kind") == "simulated":
        known.append(format_bytes(device.get("total_bytes") or 0))
    if device.get("in_place"):
        known.append("in this process")
    if device.get("used_by_others_bytes"):
        known.append(f"of which others hold {format_bytes(device['used_by_others_bytes'])}")
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
        return f"{format_bytes(least)} of {limit} at least, {peak} with room to spare{label}"
    asked = "" if least is None or label else f", least budget {format_bytes(least)}"
    return f"{peak} of {limit}{label}, headroom {plan.headroom_bytes / MIB:,.0f} MiB{asked}"

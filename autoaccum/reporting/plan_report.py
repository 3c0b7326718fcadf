"""Show a plan: six lines and its warnings, or all of it on request; and the progress of planning."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from autoaccum.accumulation.schedule import format_parts
from autoaccum.checks import counted, join_words
from autoaccum.devices.base import Trial
from autoaccum.options import OFFLOADS, mesh_word
from autoaccum.planning import plan_events
from autoaccum.planning.framework_arguments import code_lines
from autoaccum.planning.plan_record import Plan
from autoaccum.planning.saver_choice import format_savers
from autoaccum.planning.throughput import Speed, Throughput, format_rate
from autoaccum.reporting.console import make_table, one_line, path_value, print_messages, print_rows, print_table
from autoaccum.reporting.explain_report import print_explanation
from autoaccum.reporting.progress import Progress
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
    named |= {"reduce": plan.reduce, "multiple_of": plan.multiple_of}
    usual = (None, "mean", "fp32", "micro", "each", 1)
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


def trials_table(plan: Plan) -> Table:
    """List all trials in the order they ran."""
    table = make_table(">trial", ">micro-batch", "outcome", ">peak", ">time", "")
    predicted = plan.kind == "predicted"
    for number, trial in enumerate(plan.trials, start=1):
        remark = "; ".join(filter(None, (_failure(trial), trial.message)))
        outcome = Text(_outcome(trial, predicted), _STYLES[trial.outcome])
        peak = _trial_peak(trial, predicted)
        table.add_row(str(number), _trial_sizes(trial), outcome, peak, f"{trial.seconds:.1f} s", one_line(remark))
    return table


_STYLES = {"ok": "green", "tight": "yellow", "oom": "magenta", "error": "bold red"}
_NO_FIT = "no fit"
_COLUMNS = "{size:>11}  {outcome:<7}  {peak:>9}  {seconds:>8}"


class PlanProgress(Progress):
    """Shows planning: one line per trial, and a live line for the trial that runs."""

    _predicted = False

    def notify(self, event: plan_events.Event) -> None:
        """Show one event."""
        if isinstance(event, plan_events.Loading):
            self.show(f"loading {event.reference} ...")
        elif isinstance(event, plan_events.Inspected):
            self.stop()
            self._predicted = event.predicted
            self.say(_headline(event))
            for caution in event.inspection.cautions if event.predicted else ():
                self.say(f"warning: {caution}", "yellow")
            self.say(_COLUMNS.format(size="micro-batch", outcome="outcome", peak="peak", seconds="time"), "dim")
        elif isinstance(event, plan_events.SaversTried):
            self._try_savers(event)
        elif isinstance(event, plan_events.Tracing):
            self.show("tracing small sizes ...")
        elif isinstance(event, plan_events.TracedAlone):
            self.stop()
            slow = event.reason.replace("was traced", "is traced")
            self.say(f"{slow}: to stop earlier with the best size so far, give --time-limit", "dim")
        elif isinstance(event, plan_events.TimingStarted):
            self.show(f"timing updates in micro-batches of {event.micro_batch} ...")
        elif isinstance(event, plan_events.ExplanationStarted):
            self.show("finding out where the memory goes ...")
        elif isinstance(event, plan_events.Explained):
            self.stop()
        elif isinstance(event, plan_events.TrialStarted):
            self._begin(event)
        elif isinstance(event, plan_events.TrialFinished):
            self._end(event)

    def _try_savers(self, event: plan_events.SaversTried) -> None:
        name = format_savers(event.savers)
        if event.trial is None:
            self.show(f"trying {name} ...")
            return
        self.stop()
        outcome = "does not fit" if event.trial.outcome == "oom" else event.trial.outcome
        self.say(f"micro-batch {_sizes(event.trial.parts)} with {name}: {outcome}", "dim")

    def _begin(self, event: plan_events.TrialStarted) -> None:
        doing = "predicting" if self._predicted else f"trial {event.number}:"
        sizes = f"{event.parts[0]} and larger ones" if event.grows else _sizes(event.parts)
        self.show(f"{doing} micro-batch {sizes} ...")

    def _end(self, event: plan_events.TrialFinished) -> None:
        self.stop()
        line = trial_line(event.trial, predicted=self._predicted)
        if event.trial.host_bytes is not None:
            line.append(f"  and {format_bytes(event.trial.host_bytes)} of host memory", "dim")
        if event.trial.fresh and event.trial.ran:
            line.append("  by a trace of its own" if self._predicted else "  from a clean state", "dim")
        self.say(line)


def trial_line(trial: Trial, *, predicted: bool = False) -> Text:
    """Return one trial as a line: size, outcome, peak, seconds, and what went wrong.

    A predicted trial that does not fit has a peak as well: what it would take.

    >>> trial_line(Trial(parts=(8, 8), outcome="oom", phase="backward", seconds=1.25)).plain
    '          8  oom              -     1.2 s  in backward'
    """
    outcome = _outcome(trial, predicted)
    line = _COLUMNS.format(
        size=_trial_sizes(trial),
        outcome=outcome,
        peak=_trial_peak(trial, predicted),
        seconds=f"{trial.seconds:.1f} s",
    )
    text = Text(line)
    text.highlight_words([f" {outcome} "], _STYLES[trial.outcome])
    return text.append(f"  {failure}", "dim") if (failure := _failure(trial)) else text


def _outcome(trial: Trial, predicted: bool) -> str:
    return _NO_FIT if predicted and trial.outcome == "oom" else trial.outcome


def _trial_peak(trial: Trial, predicted: bool) -> str:
    peak = trial.peak_allocated_bytes if trial.peak_reserved_bytes is None else trial.peak_reserved_bytes
    return "-" if peak is None or not (trial.ran or predicted) else format_bytes(peak)


def _failure(trial: Trial) -> str:
    if trial.timed_out:
        return "took too long"
    return f"in {trial.phase}" if trial.phase and not trial.ran else ""


def parameter_words(number: int, dtypes: tuple[str, ...], precision: str) -> str:
    """Return the number of parameters, their dtypes if they are not all fp32, and the precision."""
    if dtypes == ("fp32",):
        return f"{number:,} parameters, {precision}"
    autocast = "no autocast" if precision == "fp32" else f"autocast to {precision}"
    return f"{number:,} parameters in {join_words(dtypes)}, {autocast}"


def _headline(event: plan_events.Inspected) -> Text:
    seen = event.inspection
    where = "predicted for" if event.predicted else "on"
    return Text.assemble(
        (seen.name, "bold"),
        f": {seen.model}, {parameter_words(seen.parameters, seen.dtypes, seen.precision)}, {seen.optimizer}; "
        f"{where} {event.device} with {format_bytes(event.limit_bytes)}, sizes up to {event.cap}",
    )


def _trial_sizes(trial: Trial) -> str:
    return f"{trial.parts[0]} to {trial.micro_batch}" if len(trial.peaks) > 1 else _sizes(trial.parts)


def _sizes(parts: tuple[int, ...]) -> str:
    return " + ".join(str(part) for part in dict.fromkeys(parts))

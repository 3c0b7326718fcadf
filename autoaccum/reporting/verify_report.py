"""Show a verification: the verdict, the largest error of each quantity, the causes, and what to do next."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from rich.text import Text

from autoaccum.checks import counted
from autoaccum.reporting.console import Block, Facts, Table, first_messages, offer
from autoaccum.reporting.progress import Progress
from autoaccum.units import format_parts
from autoaccum.verification.verification_result import (
    Cause,
    Compared,
    Comparison,
    Diagnosing,
    Difference,
    Quantity,
    Verification,
    VerificationStarted,
)

_WINDOWS = {
    "whole": "whole window",
    "uneven": "samples shortened",
    "last": "shorter window, as at the end of an epoch",
    "tokens": "packed by tokens, padding trimmed",
}
_SCALES = {"loss": " of the loss", "gradients": " of the largest gradient entry", "buffers": " of its largest entry"}


def verification_blocks(
    result: Verification, *, again: Sequence[str] = (), verbose: bool = False, answered: bool = False
) -> list[Block]:
    """Return a verification: one line where all is equal, else the verdict, its causes and what to do.

    `again` is the command that verified it, if one did; `answered`: the verdict is shown already.
    """
    blocks: list[Block] = [] if answered else [verdict(result, verbose=verbose)]
    for number, cause in enumerate(result.causes, start=1):
        blocks += ["", *_cause_blocks(cause, number, len(result.causes))]
    if verbose or not (result.equivalent or result.causes or result.untested):
        for comparison in result.comparisons:
            blocks += ["", Text(_comparison_title(comparison), "bold"), _comparison_table(comparison)]
    if verbose:
        modes = [("batchnorm", result.batchnorm)] if result.batchnorm != "micro" else []
        modes += [("coupled", str(result.coupled))] if result.coupled else []
        scale = _scale(result.comparisons[0]) if result.comparisons else ""
        tolerance = f"{result.tolerance:.0e}{scale}, in {result.precision}"
        blocks += ["", Facts([*modes, ("tolerance", tolerance), ("time", f"{result.seconds:.1f} s")])]
    elif result.notes and result.comparisons and not result.equivalent:
        blocks.append("")
    if (verbose or not result.equivalent) and result.comparisons:
        blocks += first_messages(Facts.of_messages((), result.notes), verbose=verbose)
    if not result.equivalent and result.comparisons:
        words, command = _next_command(result, again)
        words += "" if verbose or result.untested else " (-v shows all that was compared)"
        blocks += ["", *(offer(words, command) if command else [Text(words)])]
    return blocks


def verdict(result: Verification, *, verbose: bool = False) -> Text:
    """Return the verdict in one line: equivalent or not and by how much, or what was not tested."""
    if result.equivalent:
        more = "" if verbose or not result.notes else f"; -v shows {counted(len(result.notes), 'note')}"
        neutral = " but for random numbers, which were replaced by neutral values" if result.neutral_random else ""
        how = f"{neutral}: the accumulated update is the full batch's, {_how_equal(result)}{more}"
        return Text.assemble(("equivalent", "bold green"), how)
    if not result.comparisons:
        return Text.assemble(("undecided", "bold yellow"), f": {result.notes[0]}")
    if result.untested:
        missing = "of equal length: weighting by tokens was not tested"
        return Text.assemble(("equal", "bold yellow"), f" on {result.target_batch} samples {missing}")
    return difference_line(next(comparison for comparison in result.comparisons if not comparison.equal))


def difference_line(comparison: Comparison) -> Text:
    """Return the verdict on a comparison that is not equal."""
    worst = max((difference for difference in comparison.differences if not difference.equal), key=_urgency)
    where = f", at {_where(worst)}" if _where(worst) else ""
    verb = "is" if worst.quantity == "loss" else "are"
    if comparison.method == "command" and math.isfinite(worst.error):
        how = f": the gradient of {worst.where} differs by {worst.error:#.2g} times its norm"
        return Text.assemble(("not equivalent", "bold red"), how)
    off = f"off by {_error(worst.error)}{_scale(comparison, worst.quantity)}"
    how = off if math.isfinite(worst.error) else "missing or infinite in one"
    return Text.assemble(("not equivalent", "bold red"), f": the {worst.quantity} {verb} {how}{where}")


def _scale(comparison: Comparison, quantity: Quantity = "gradients") -> str:
    """Return what an error is relative to."""
    return " of the norm of the tensor" if comparison.method == "command" else _SCALES[quantity]


def _comparison_title(comparison: Comparison) -> str:
    """Return what accumulated, the window and its parts."""
    makers = {"accumulate": "accumulate() of the workload", "command": "the command"}
    method = makers.get(comparison.method, "the Accumulator")
    parts = f"{format_parts(comparison.micro_batches)} = {sum(comparison.micro_batches)}"
    return f"{method}, {_WINDOWS[comparison.window]}: {parts}"


def _comparison_table(comparison: Comparison) -> Table:
    """List the largest difference of each quantity."""
    table = Table("", ">compared", ">largest error", ">tolerance", "at", "")
    for difference in comparison.differences:
        if difference.compared:
            table.add(
                difference.quantity,
                str(difference.compared),
                Text(_error(difference.error), "" if difference.equal else "bold red"),
                _tolerance(difference.tolerance),
                _where(difference),
                Text("" if difference.equal else "differs", "red"),
            )
    return table


def _cause_blocks(cause: Cause, number: int, of: int) -> list[Block]:
    """Return what was found, what makes it equal, a line of code for that, and whether it was proved."""
    code = f"def weight(batch): return {cause.change.facts['code']}" if cause.change.code == "write_weight" else ""
    found = str(cause.found) if cause.kind == "accumulate" else f"{cause.kind}: {cause.found}"
    rows = [
        ("cause" if of == 1 else f"cause {number}", found),
        ("change", str(cause.change).removesuffix(code).rstrip()),
    ]
    done = "all of these done" if of > 1 else _mode(cause) or "this done"
    proof: tuple[str, str | Text] = ("unproved", Text("no experiment made the comparison equal", "dim"))
    if cause.proved:
        proof = ("proved", f"with {done}, the same comparison is equal")
    return [Facts(rows), *([Text(f"  {code}")] if code else []), Facts([proof])]


def _mode(cause: Cause) -> str:
    """Return the option that takes a cause away as it is written in a workload file; empty where there is none."""
    options = (f"{name} = {value}" if value is True else f'{name}="{value}"' for name, value in cause.mode.items())
    return ", ".join(options)


def _next_command(result: Verification, again: Sequence[str]) -> tuple[str, str | Sequence[str]]:
    """Return what to do after a difference, and the command or the code for it; empty where there is none."""
    if result.untested:
        return f"could not shorten {', '.join(result.untested)}: let batch(size) return short and long samples", ()
    mode = next((cause.mode["batchnorm"] for cause in result.causes if "batchnorm" in cause.mode), None)
    if mode is not None and result.batchnorm not in ("exact", "frozen"):
        call = f'autoaccum.verify(..., batchnorm="{mode}")'
        # Of an option that is given twice the last one counts.
        return f"see what remains with BatchNorm {mode}", [*again, "--batchnorm", mode] if again else call
    if result.causes:
        return "make the change, and verify again", again
    return "look at the tensors that differ", ()


def _how_equal(result: Verification) -> str:
    """Write the largest gradient error of all comparisons, with the batch, the precision and its tolerance."""
    error = max(comparison.gradients.error for comparison in result.comparisons)
    rough = "" if result.precision == "fp64" else f", tolerance {_tolerance(result.tolerance)}"
    precision = result.precision.replace("bf", "bfloat").replace("fp", "float")
    tensors = counted(result.comparisons[0].gradients.compared, "tensor")
    batch = f"{tensors}, {result.target_batch} samples as {format_parts(result.comparisons[0].micro_batches)}"
    if result.world_size > 1:
        batch += f" over {result.world_size} ranks"
    return f"to {_error(error)}{_scale(result.comparisons[0])} ({batch}, {precision}{rough})"


def _urgency(difference: Difference) -> tuple[int, float]:
    """Return a sort key that puts gradients first: other differences usually follow from them."""
    return ("buffers", "loss", "gradients").index(difference.quantity), difference.error


def _where(difference: Difference) -> str:
    """Return the name of the tensor or term; empty for a loss with a single term."""
    return "" if difference.where in (None, "loss") and difference.quantity == "loss" else difference.where or ""


def _error(error: float) -> str:
    if not math.isfinite(error):
        return "infinite"
    return "0" if error == 0 else f"{error:.1e}"


def _tolerance(tolerance: float) -> str:
    return "exact" if tolerance == 0 else f"{tolerance:.1e}"


OPENINGS = ("loading ...", "running the command to its first update ...")
"""What is done first of a workload, and of a command."""


class VerificationProgress(Progress):
    """Shows a verification's progress: one line for the workload, and a live line for the comparison."""

    def notify(self, event: Any) -> None:
        """Show one event."""
        if isinstance(event, VerificationStarted):
            about = f": {event.model}, {event.parameters:,} parameters"
            self.say(Text.assemble((event.name, "bold"), f"{about}; compared in {event.precision} on {event.device}"))
            self.show("comparing with the full batch (faster with --target-batch 4 --micro-batch 2) ...")
        elif isinstance(event, Compared):
            self.show("comparing a shorter window ...")
        elif isinstance(event, Diagnosing):
            limit = f" (at most {event.limit_seconds:g} s, see --time-limit)"
            self.show(f"{format_parts(event.comparison.micro_batches)} differs: searching for the cause{limit} ...")

"""`autoaccum plan`: find the micro-batch that fits, and the schedule of the batch."""

from __future__ import annotations

import os
import re
import time
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from autoaccum.accumulation.schedule import has_coarse_parts
from autoaccum.checks import is_one_of_ranks, join_words
from autoaccum.cli.flags import OUTPUT_FLAGS, WORKLOAD_OR_COMMAND, CountOrRange, HelpWithHeadings, count, options
from autoaccum.cli.outputs import CODE_INTERRUPTED, Outputs, page, running_words
from autoaccum.errors import AutoaccumError, RankLostError, UsageError
from autoaccum.integrations.arguments_from_plan import FRAMEWORKS, check_framework, for_framework
from autoaccum.options import Options, resolve_spec, taken_by
from autoaccum.reporting.console import make_console, offer, show
from autoaccum.sources.command import refuse_command
from autoaccum.sources.source import find_source
from autoaccum.spec import TrainingSpec

if TYPE_CHECKING:
    from autoaccum.devices.explanation import MemoryReport
    from autoaccum.planning.plan_events import Event
    from autoaccum.planning.plan_record import Plan
    from autoaccum.reporting.console import Block


_VALUES = re.compile(r"(\w+)=(\d+)\.\.(\d+)(?::([1-9]\d*))?", re.ASCII)


def _values(context: click.Context, parameter: click.Parameter, given: str | None) -> dict[str, range] | None:
    """Return the values of a name to try, which include HIGH if steps lead there."""
    match = _VALUES.fullmatch(given or "")
    if given is not None and match is None:
        raise UsageError(f"--solve {given} is no NAME=LOW..HIGH[:STEP]", hint="write --solve length=512..8192:128")
    return match and {match[1]: range(int(match[2]), int(match[3]) + 1, int(match[4] or 1))}


@click.command("plan", cls=HelpWithHeadings, short_help="Find the micro-batch that fits, and the schedule.")
@click.argument("workload", metavar=WORKLOAD_OR_COMMAND)
@options(
    "plan",
    *("target_batch", "target_tokens", "max_micro_batch", "fit_micro_batch", "exact_max", "as_json", "output"),
    *("report", "force", "verbose", "quiet"),
    world_size={"type": CountOrRange()},
    target_batch={"required": False},
    output="Write the plan to a file, for `fit --plan` and Plan.load.",
)
@click.option(
    "--explain", is_flag=True, help="Show where the memory goes at the peak, and which changes would save memory."
)
@click.option(
    "--for",
    "framework",
    type=click.Choice(FRAMEWORKS),
    metavar="FRAMEWORK",
    help=f"Show the arguments that make a framework train by the plan: {join_words(FRAMEWORKS, 'or')}.",
)
@click.option(
    "--prefer",
    type=click.Choice(["largest", "fastest"]),
    metavar="largest|fastest",
    default="largest",
    show_default=True,
    help="Of the micro-batches that fit, take the largest, or the smallest that is as fast as any.",
)
@click.option(
    "--solve",
    callback=_values,
    metavar="NAME=LOW..HIGH[:STEP]",
    help="Find the largest value that fits of anything --set takes, such as a length. Without --target-batch, an "
    "update is one micro-batch.",
)
@click.option("--max-trials", type=count, metavar="N", help="End the search after N trials, with the largest that ran.")
@click.option("--emit", metavar="FILE", help="Write the training step to a .py file that needs only PyTorch.")
@click.option(
    "--write-workload",
    metavar="FILE",
    help="Write the workload to a .py file, with the values of --set filled in, to edit further.",
)
@click.option("--help-model", is_flag=True, help="List what --set can set in WORKLOAD, and exit.")
@click.option("--plot", metavar="FILE", help="Draw the memory over an update (on a CPU, the trials) as .svg or .png.")
def command(workload: str | tuple[str, ...], framework: str | None, help_model: bool, **request: Any) -> None:
    """Find the largest micro-batch of a training that fits into memory, and the schedule of an update.

    COMMAND is what you type to train, with {micro_batch} and {iter_size} where it takes its batch size and its
    accumulation steps: python train.py, torchrun, accelerate launch, a shell script. The script needs no changes. Each
    trial runs it for three optimizer steps, then stops its processes; none of your files is overwritten. Without
    {iter_size}, omit --target-batch to find the largest batch that fits. For several ranks, {world_size} is their
    number, and {total_iter_size} the micro-batches of all. Options that describe a workload, such as --precision, are
    refused: set them in COMMAND.

    WORKLOAD is a file, model.py or model.py:name, or a model by name: hf:Qwen/Qwen2.5-7B, timm:resnet50,
    torchvision:vit_b_16. No weights are downloaded. A file defines `model`, `batch(size)`, and
    `loss(model, batch)` or `criterion`. It may also define `optimizer(params)`, `precision`, `weight(batch)` (for a
    mean that is not over samples), and most of the flags below by name. With a `dataset` and `length(sample)`,
    the tokens of a sample, plan also finds micro_tokens: the most padded tokens per micro-batch.

    Each trial of a workload makes two updates in a child process, with the Accumulator that will train. Under torchrun
    every rank plans on its own card: omit --world-size. With --gpu, trials are predicted from traces.

    Outcomes of trials:
      ok      it ran
      tight   it ran only because the allocator released its cache and retried
      oom     it ran out of memory, in the phase shown; "no fit" if predicted

    Examples:
      autoaccum plan --target-batch 480 -- python train.py --bs={micro_batch} --accum={iter_size}
      autoaccum plan model.py --target-batch 256                          on this machine
      autoaccum plan model.py --target-batch 256 --gpu rtx4090 --explain  for a simulated card
      autoaccum plan model.py --target-batch 256 -o plan.json --emit train_step.py
      autoaccum plan model.py --target-batch 256 --for transformers       for a Trainer
      autoaccum plan hf:Qwen/Qwen2.5-7B --set lora=16 --set length=2048 --gpu t4 --target-batch 64
      autoaccum plan model.py --gpu t4 --solve LENGTH=512..8192:128       the largest length that fits
      autoaccum compare model.py --target-batch 256 --gpu all             for many cards, in a table

    Exit codes:
      0  a plan was made
      1  nothing fits: not even one sample, with savers (--savers auto), or at LOW (--solve)
      2  wrong usage, or the workload or command is missing or fails
      3  the trials gave no answer
    """
    from autoaccum.api import plan
    from autoaccum.planning.plan_events import Explained, Inspected
    from autoaccum.reporting.emit import check_emittable, emit_wrapper, module_name
    from autoaccum.reporting.plan_report import constant_blocks, memory_blocks, plan_blocks
    from autoaccum.reporting.progress import PlanProgress

    if help_model:
        refuse_command(workload, "--help-model")
        show(make_console(), *constant_blocks(find_source(str(workload))))
        return
    _check_is_one_plan(request)
    of_workloads = {"--emit": request["emit"], "--for": framework, "--write-workload": request["write_workload"]}
    for flag, given in of_workloads.items():
        if given is not None:
            refuse_command(workload, flag)
    of_ranks = is_one_of_ranks()
    source = click.get_current_context().get_parameter_source("world_size")
    if request["parallel"] == "fsdp2" and source is ParameterSource.DEFAULT and not of_ranks:
        raise UsageError("--parallel fsdp2 shards over ranks, and there is one", hint="say how many (--world-size N)")
    outputs = Outputs(request, workload)
    if framework is not None:
        request["equal"] = True
        options = _read_options(request)
        asked: dict[str, Any] = {name: getattr(options, name) for name in ("parallel", "mesh", "chooses_savers")}
        check_framework(framework, resolve_spec(options.spec), **asked)
        request["exact_max"] |= has_coarse_parts((request["target_batch"] or 1) // request["world_size"])
    if "--emit" in outputs.files:
        module_name(outputs.files["--emit"])
        check_emittable(TrainingSpec(), world_size=2 if of_ranks else request["world_size"])
    request |= {"picture": "--plot" in outputs.files, "report": "--report" in outputs.files}
    if of_ranks and os.environ.get("RANK", "0") != "0":
        _plan_silently(workload, **request)
        return
    on_one = of_ranks or request["solve"] is not None  # One device tries the values for all ranks.
    if isinstance(workload, str) and request["world_size"] > 1 and not on_one and _run_ranks(request):
        return
    memory: MemoryReport | None = None

    def listen(event: Event) -> None:
        """Show an event, keep what is drawn, and refuse before any trial a step that cannot be given out."""
        nonlocal memory
        progress.notify(event)
        if isinstance(event, Explained):
            memory = event.report
        elif isinstance(event, Inspected):
            seen = event.inspection
            if framework is not None:
                check_framework(framework, seen.spec, seen.workload, parallel=seen.parallel)
            if "--emit" in outputs.files:
                check_emittable(seen.spec, seen.workload)

    with PlanProgress(make_console(stderr=True), quiet=outputs.quiet) as progress:
        began = time.monotonic()
        # A command prints much more than a workload does.
        on_output = progress.print_output if outputs.verbose or isinstance(workload, str) else None
        result = plan(workload, on_event=listen, on_output=on_output, **request)
        seconds = time.monotonic() - began
    if framework is not None:
        result = for_framework(result, framework)
    if outputs.as_json:
        for warning in result.warnings:
            progress.warn(str(warning))

    def below() -> list[Block]:
        again = running_words(without=OUTPUT_FLAGS, further=["-o", "plan.json"])
        offers = ["", *offer("keep the plan", again)] if outputs.verbose and "-o" not in outputs.written else []
        return [*memory_blocks(result), *offers]

    about: dict[str, Any] = {"seconds": seconds, "verbose": outputs.verbose}
    outputs.show(
        result.to_json,
        lambda: plan_blocks(result, kept=outputs.written.get("-o"), **about),
        files={
            "-o": lambda _: result.to_json(),
            "--emit": lambda file: emit_wrapper(result, module=module_name(file)),
            "--write-workload": lambda _: find_source(str(workload), result.workload.overrides).encoded_text,
            "--plot": lambda file: _picture(result, memory, file),
            "--report": lambda _: _page(result, memory, seconds),
        },
        below=below,
        apart=True,
    )


def _picture(plan: Plan, memory: MemoryReport | None, file: str) -> bytes:
    from autoaccum.reporting.figures import draw_memory, picture_format

    return draw_memory(plan, memory, picture_format(file))


def _page(plan: Plan, memory: MemoryReport | None, seconds: float) -> str:
    from autoaccum.reporting.figures import plan_title
    from autoaccum.reporting.page import plan_sections

    made_of: tuple[Any, ...] = (plan.workload, plan.spec, plan.environment)
    if plan.workload.command:  # Nothing else is known of how it trains.
        known = ("reference", "digest", "model", "parameters", "parameter_bytes", "optimizer")
        facts = {name: getattr(plan.workload, name) for name in known}
        made_of = (facts, {"precision": plan.spec.precision}, plan.environment)
    return page(plan_title(plan), plan_sections(plan, memory, seconds), made_of, about=f", {plan.kind}")


def _check_is_one_plan(request: dict[str, Any]) -> None:
    """Refuse what asks for several plans."""
    gpu = request["gpu"] or ""
    several = isinstance(request["world_size"], range) or "all" in (gpu.strip().casefold(), *(request["savers"] or ()))
    if "," in gpu or several:
        raise UsageError("plan makes one plan, and these options ask for several", hint="run `autoaccum compare`")


def _read_options(request: dict[str, Any]) -> Options:
    return Options.of("plan", {name: value for name, value in request.items() if name in taken_by("plan")})


def _run_ranks(request: dict[str, Any]) -> bool:
    """Run this command on a rank for each device, if there are enough; leave with their exit code unless it is 0."""
    from autoaccum.devices.device_choice import has_device_for_each

    options = _read_options(request)
    if not has_device_for_each(options):
        return False
    from autoaccum.accumulation.ranks.launch import run_ranks

    words = running_words()
    if code := run_ranks(options.world_size, ["-m", "autoaccum", *words[words.index("plan") :]]):
        raise click.exceptions.Exit(code)
    return True


def _plan_silently(workload: Any, **request: Any) -> None:
    """Plan as a rank that is not the first, which says and writes what comes of it, errors too, unless it has ended."""
    from autoaccum.api import plan

    try:
        plan(workload, **request)
    except RankLostError:
        raise
    except AutoaccumError:
        return
    except KeyboardInterrupt:
        raise click.exceptions.Exit(CODE_INTERRUPTED) from None

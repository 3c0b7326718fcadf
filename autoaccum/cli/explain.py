"""`autoaccum explain`: lay a snapshot that a card recorded beside the prediction of a workload."""

from __future__ import annotations

from typing import Any

import click

from autoaccum.cli.flags import SET_OF_WORKLOAD, HelpWithHeadings, options
from autoaccum.cli.outputs import Outputs
from autoaccum.reporting.console import make_console

_CODE_DIFFERENT = 1


@click.command("explain", cls=HelpWithHeadings, short_help="Compare a card's own memory snapshot with the prediction.")
@click.argument("snapshot")
@click.argument("workload")
@options(
    "explain",
    *("target_batch", "micro_batch", "as_json", "quiet"),
    target_batch={"required": False, "help": "Samples per update (optimizer step).  [default: one micro-batch]"},
    micro_batch={"required": True, "help": "The most samples that ran at once."},
    gpu={"required": True, "help": "The card that recorded it: a name of `autoaccum gpus`, or a size such as 24GiB."},
    overrides=SET_OF_WORKLOAD,
)
def command(snapshot: str, workload: str, micro_batch: int, target_batch: int | None, **asked: Any) -> None:
    """Compare SNAPSHOT, which torch.cuda.memory._dump_snapshot wrote on a card, with the prediction of WORKLOAD.

    Its last update is compared with that of WORKLOAD in the same micro-batches on the simulated card: both peaks, the
    first request for memory that differs, and what only one of them holds at the peak, by module, operator or line.

    The snapshot must end right after an update and include an earlier one, since the first creates the optimizer's
    state. Use the release of torch that recorded it. No code in the file is run, and a file with anything but plain
    containers is refused.

    Record it in the training script:
      torch.cuda.memory._record_memory_history(max_entries=1_000_000)
      ...                                                  # a few updates
      torch.cuda.memory._dump_snapshot("step.pickle")      # after optimizer.step()

    Example:
      autoaccum explain step.pickle model.py --gpu rtx4090 --micro-batch 32 --target-batch 128

    Exit codes:
      0  both peaks agree
      1  they do not
      2  wrong usage; no snapshot, or it ends with another update; the workload is missing or raises
      3  the workload cannot be simulated
    """
    from autoaccum.devices.device_choice import make_simulated
    from autoaccum.devices.simulated.recorded_update import compare_snapshot
    from autoaccum.options import Options
    from autoaccum.planning.plan_request import PlanRequest
    from autoaccum.planning.plan_setup import make_setup
    from autoaccum.reporting.explain_report import snapshot_blocks
    from autoaccum.reporting.progress import Progress
    from autoaccum.serialization import to_plain

    outputs = Outputs(asked)
    samples = target_batch or micro_batch
    request = PlanRequest(samples, Options.of("explain", asked))
    with Progress(make_console(stderr=True), quiet=outputs.quiet) as progress:
        progress.show("tracing the update ...")
        setup = make_setup(workload, request, on_output=progress.print_output, verb="explain")
        with setup.running(), make_simulated(setup.settings, asked["gpu"]) as device:
            update = compare_snapshot(snapshot, device, samples, micro_batch)
    outputs.show(lambda: {"agrees": update.agrees, **to_plain(update)}, lambda: snapshot_blocks(update))
    if not update.agrees:
        raise click.exceptions.Exit(_CODE_DIFFERENT)

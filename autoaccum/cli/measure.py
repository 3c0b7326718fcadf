"""`autoaccum measure`: run a training command on a CUDA card, and write down what its memory did."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from autoaccum.cli.flags import OUTPUT_FLAGS, HelpWithHeadings
from autoaccum.cli.outputs import Outputs, running_words
from autoaccum.errors import NotMeasuredError, UsageError
from autoaccum.sources.command import ITER_SIZE, MICRO_BATCH, cannot_run, fill_places

_LAUNCHERS = ("torch.distributed.run", "torch.distributed.launch", "accelerate.commands.launch")
_SAID = (0, 1, 2, 3)
"""The exit codes of `measured_run.py`, which has then said what happened."""


@click.command("measure", cls=HelpWithHeadings, short_help="Write down what a training command needs on this card.")
@click.argument("workload", metavar="-- COMMAND")
@click.option("--micro-batch", type=click.IntRange(1), metavar="N", help="Samples per micro-batch, for {micro_batch}.")
@click.option("--iter-size", type=click.IntRange(1), metavar="N", help="Micro-batches per update, for {iter_size}.")
@click.option(
    "--updates", type=click.IntRange(2), default=3, show_default=True, help="End after N updates.", metavar="N"
)
@click.option("--include-script", is_flag=True, help="Include the text of the script.")
@click.option(
    "-o", "--output", default="measured_run.json", show_default=True, metavar="FILE", help="The file to write."
)
@click.option("--json", "as_json", is_flag=True, help="Also print the file on stdout, and nothing else there.")
@click.option("--force", is_flag=True, help="Overwrite an existing file.")
def command(workload: str | tuple[str, ...], **asked: Any) -> None:
    """Run COMMAND on a CUDA card for a few updates, and write down what its memory did, for others to compare with.

    The file has the peaks of each update, the size of each request for memory in the last one, the card, versions, and
    the command line. It has no data, and the script only with --include-script.

    COMMAND runs as it is, files that it writes included, and is ended after its updates. Its Python needs PyTorch only.
    For a machine without autoaccum, copy the file autoaccum/devices/measured_run.py: it does the same.

    Examples:
      autoaccum measure -- python train.py --batch-size 8
      autoaccum measure --micro-batch 8 --iter-size 4 -- torchrun train.py --bs={micro_batch} --accum={iter_size}
      python measured_run.py train.py --batch-size 8

    Exit codes:
      0  measured
      1  CUDA ran out of memory; that is written, too
      2  wrong usage, or there is no CUDA card
      3  not measured: the script failed, or made too few updates on the card
    """
    if isinstance(workload, str):
        raise UsageError("measure runs a training command", hint=f"write -- before it: -- python {workload}")
    words = fill_places(workload, {MICRO_BATCH: asked["micro_batch"], ITER_SIZE: asked["iter_size"]})
    outputs = Outputs(asked)
    path = Path(outputs.files["-o"])
    typed = running_words(without=(*OUTPUT_FLAGS, "workload"))
    told = ["-o", str(path), "--force", *typed[typed.index("measure") + 1 :]]
    before = _written_at(path)
    try:
        done = subprocess.run(insert_file(words, told), stdout=2 if outputs.as_json else None, check=False)
    except OSError as error:
        raise cannot_run(words[0], error) from None
    code = done.returncode
    if _written_at(path) == before and code not in _SAID[2:]:
        raise NotMeasuredError(f"the command left with exit status {code}, and nothing was measured", hint="see above")
    if outputs.as_json and _written_at(path) != before:
        click.echo(path.read_text(encoding="utf-8"))
    raise click.exceptions.Exit(code if code in _SAID else 0)


def insert_file(words: Sequence[str], told: Sequence[str]) -> list[str]:
    """Return a command with `measured_run.py` and its options before its script, or before the -m of a module.

    Raises:
        UsageError: It has no Python script.
    """
    from autoaccum.devices import measured_run

    file = str(measured_run.__file__)
    for at, (word, following) in enumerate(zip(words, [*words[1:], ""], strict=True)):
        if at and (word.endswith(".py") or (word == "-m" and following not in _LAUNCHERS)):
            return [*words[:at], file, *told, *words[at:]]
    raise UsageError(
        f"`{words[0]}` is run, and no Python script is named",
        hint=f"write `python train.py`; where another script starts Python, write {file} before the script there",
    )


def _written_at(path: Path) -> int | None:
    return path.stat().st_mtime_ns if path.exists() else None

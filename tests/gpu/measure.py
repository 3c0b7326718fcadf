"""`python -m tests.gpu.measure -o card.json`: a card's constants, its allocator and its peaks, beside the simulation's.

Rows are written one by one, and those that are there are not measured again: run it once more to go on. A row that
fails keeps its error, and the others run on.
"""

from __future__ import annotations

import argparse
import gc
import os
import platform
import re
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from autoaccum.accumulation.out_of_memory import is_context_dead, release_memory
from autoaccum.devices.base import Device, TrialSettings
from autoaccum.devices.cuda import CudaDevice
from autoaccum.devices.device_choice import make_device
from autoaccum.devices.meters import read_card
from autoaccum.options import Options
from autoaccum.simulation.cards import Card, find_card
from autoaccum.units import GIB, MemorySize
from tests.gpu.comparison import CASES, Case, measure, predict
from tests.gpu.constants import compare_operation, measure_operation
from tests.gpu.operations import Operation, all_operations
from tests.gpu.probes import measure_context, measure_growth
from tests.gpu.simulated_operations import Simulated, ask_simulation
from tests.gpu.table import SECTIONS, Table, read_table, summarise

_STAND_IN = "rtx3090"
STEERING = "CUDA", "PYTORCH", "CUBLAS", "NVIDIA", "TORCH"
Row = Mapping[str, Any]
Job = tuple[str, str, Callable[[], Row]]
"""A section, the title of a row, and how to make it."""


def main(arguments: list[str] | None = None) -> None:
    """Measure the requested rows that are not there yet, then sum up."""
    options = _read_options(arguments)
    gc.freeze()  # Garbage is collected before every row, and PyTorch itself never becomes any.
    place = None if options.gpu is not None and options.device is None else _place(options.device or "cuda:0")
    card = _choose_card(place, options.gpu)
    try:
        table = Table(options.output, describe(place, card))
    except ValueError as error:
        raise SystemExit(str(error)) from None
    steering = {name: value for name, value in os.environ.items() if name.startswith(STEERING)}
    table.write("machine", "variables", steering)
    wanted = re.compile(options.match)
    jobs = list_jobs(place, card, options.match, options.size)
    chosen = (job for job in jobs if job[0] in options.only and wanted.search(f"{job[0]}: {job[1]}"))
    measure_rows(chosen, table, options.limit_seconds, again=options.again)
    print("\n".join(summarise(read_table(options.output))))


def list_jobs(place: torch.device | None, card: Card, match: str = "", size: int | None = None) -> Iterator[Job]:
    """Yield all rows, in the order in which they are measured.

    Args:
        place: Where operations and trials run: a card, or a stand-in; None: nothing runs, all is only predicted.
        card: Which is simulated.
        match: The pattern of the rows that are wanted.
        size: Samples in a micro-batch, of all cases; None: as they have it.
    """
    simulated: dict[str, Simulated] = {}

    def constant(operation: Operation) -> Row:
        if not simulated:
            simulated.update(ask_simulation(card, match))
        measured = None if place is None else measure_operation(operation, place)
        return compare_operation(simulated[operation.title], measured)

    def compare(case: Case) -> Row:
        predicted, measured = predict(case, card), None
        if place is not None:
            with _make_device(place, case.settings) as device:
                measured = measure(case, device, predicted)
        return {"parts": list(case.parts), "simulated": predicted, "measured": measured}

    if place is not None:
        yield "probes", "context", partial(measure_context, place)
        yield "probes", "growth", partial(measure_growth, place)
    for operation in all_operations():
        yield "constants", operation.title, partial(constant, operation)
    for case in CASES:
        yield "comparison", case.title, partial(compare, case if size is None else replace(case, size=size))


def _make_device(place: torch.device, settings: TrialSettings) -> Device:
    """The card, with all that is free of it; of the host 4 GiB."""
    if place.type == "cuda":
        return CudaDevice(settings, index=place.index)
    return make_device(replace(settings, options=Options(device="cpu", memory=MemorySize(bytes=4 * GIB))))


def measure_rows(jobs: Iterable[Job], table: Table, limit_seconds: float, *, again: bool = False) -> None:
    """Measure what is not in the table, until the time is over.

    Args:
        jobs: In order.
        table: Gets each row at once.
        limit_seconds: After which no row is begun.
        again: Whether rows that failed are tried again.
    """
    began = time.monotonic()
    for section, title, make in jobs:
        if table.has(section, title, again=again):
            continue
        if time.monotonic() - began > limit_seconds:
            print(f"{limit_seconds:.0f} s are over: run the same command again to go on from {section}: {title}")
            return
        row, seconds = attempt(make), time.monotonic() - began
        table.write(section, title, row)
        print(f"{seconds:5.0f} s  {section}: {title}: {row.get('error', 'done')}", flush=True)
        if row.get("dead"):
            raise SystemExit("the card's context is dead: run the same command again to go on in a fresh process")


def attempt(make: Any) -> Row:
    """Measure a row; return its error if it fails, so that the next one still runs."""
    began = time.perf_counter()
    row: dict[str, Any]
    try:
        row = {**make(), "row_seconds": round(time.perf_counter() - began, 3)}
    except Exception as error:
        message = str(error).splitlines() or [""]
        row = {"error": f"{type(error).__name__}: {message[0]}", "traceback": traceback.format_exc()}
        if is_context_dead(error):
            return {**row, "dead": True}
    release_memory()
    return row


def describe(place: torch.device | None, card: Card) -> dict[str, Any]:
    """Describe the machine and its versions."""
    cudnn: Any = torch.backends.cudnn
    return {
        "place": "none" if place is None else place.type,
        "card": card.title,
        "capability": list(card.capability),
        "multiprocessors": card.multiprocessors,
        "total_bytes": card.total_bytes,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": cudnn.version() if cudnn.is_available() else None,
    }


def _choose_card(place: torch.device | None, gpu: str | None) -> Card:
    """Return the installed card, or else the one that is named."""
    if place is None or place.type == "cpu":
        return find_card(gpu or _STAND_IN)
    try:
        return read_card(place.index).to_simulate()
    except (RuntimeError, AssertionError) as error:  # A build without CUDA asserts that it has it.
        raise SystemExit(f"{place}: {error}: predict with --gpu NAME, try it out with --device cpu") from None


def _place(name: str) -> torch.device:
    place = torch.device(name)
    return torch.device("cuda", place.index or 0) if place.type == "cuda" else place


def _read_options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-o", "--output", type=Path, default=Path("card.json"), help="the table, new or begun")
    parser.add_argument("--device", help="cuda:N (the default); cpu shows that all of it runs")
    parser.add_argument("--gpu", help="without --device nothing runs: only what is predicted for that card")
    parser.add_argument("--only", nargs="+", choices=SECTIONS[1:], default=SECTIONS[1:], help="sections")
    parser.add_argument("--match", default="", help="only rows whose `section: title` this pattern finds")
    parser.add_argument("--size", type=int, help="micro-batch of all cases, to try it out")
    parser.add_argument("--limit-seconds", type=float, default=float("inf"), help="begin no row after this time")
    parser.add_argument("--again", action="store_true", help="measure rows again that failed")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()

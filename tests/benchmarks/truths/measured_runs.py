"""Runs that users measured with `autoaccum/devices/measured_run.py`: the same command, on the simulated card."""

from __future__ import annotations

import base64
import json
import lzma
import shlex
import sys
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any, Final, Literal, TypedDict

import msgspec
from truths.loops import predict_trace
from truths.scores import NotBuilt, Predicted

from autoaccum.devices.base import TrialSettings
from autoaccum.devices.command.command_runs import CommandRun, check_ran
from autoaccum.errors import UsageError
from autoaccum.options import Options
from autoaccum.simulation.allocator.replay import SizedTrace
from autoaccum.simulation.cards import Card, context_memory, find_card
from autoaccum.simulation.releases import Release
from autoaccum.simulation.trace_records import Trace
from autoaccum.sources.command import CommandSource
from autoaccum.units import KIB, MIB, format_bytes

KIND: Final = "measured_run"
_SMALLEST: Final = 64 * KIB
"""Smaller requests are not compared one by one: loops differ in scalars."""

_LONGEST_HISTORY: Final = 64 * MIB
_Count = Annotated[int, msgspec.Meta(ge=1, le=10_000_000)] | None


class _MeasuredCard(TypedDict):
    name: str
    total_bytes: int
    capability: tuple[int, int]
    multiprocessors: int
    in_use_before_bytes: int | None
    cards_used: int


class _Record(TypedDict):
    """What is read of a record, which a stranger may have written."""

    schema: Literal[1]
    command: Annotated[list[str], msgspec.Meta(min_length=1)]
    module: bool
    script: str | None
    micro_batch: _Count
    iter_size: _Count
    card: _MeasuredCard
    versions: dict[str, Any]
    environment: dict[str, str]
    updates: Annotated[list[dict[str, Any]], msgspec.Meta(min_length=1)]


def find_runs(folder: Path, *, run_scripts: bool) -> Iterator[dict[str, str]]:
    """A row for each file of the folder that holds a run; `run_scripts` says that their commands may be run."""
    for path in sorted(folder.glob("*.json")):
        try:
            record = json.loads(path.read_text(encoding="utf-8"))
            if not isinstance(record, dict) or record.get("kind") != KIND:
                continue
            msgspec.convert(record, _Record)
        except msgspec.ValidationError as error:
            print(f"{path} is no run that can be read ({error}): skipped", file=sys.stderr)
        except (OSError, RecursionError, ValueError) as error:  # Also of text that is not UTF-8.
            print(f"{path} is not JSON in UTF-8 ({error}): skipped", file=sys.stderr)
        else:
            yield {"file": str(path), "run_scripts": "yes" if run_scripts else ""}


@cache
def read_run(file: str) -> Any:
    """The record in a file, as the docstring of `measured_run.py` describes it."""
    return json.loads(Path(file).read_text(encoding="utf-8"))


def card_of_run(row: Mapping[str, str]) -> Card:
    """The card of the catalogue with the memory that was measured; one that is not there has what the record says."""
    measured = read_run(row["file"])["card"]
    try:
        return replace(find_card(measured["name"]), total_bytes=measured["total_bytes"])
    except UsageError:
        return Card(
            name=measured["name"],
            title=measured["name"],
            total_bytes=measured["total_bytes"],
            capability=tuple(measured["capability"]),
            multiprocessors=measured["multiprocessors"],
            source=row["file"],
        )


def predict_run(row: Mapping[str, str], card: Card, release: Release) -> Predicted:
    """The prediction of a run; its note says where its requests for memory part from those that were recorded.

    Raises:
        NotBuilt: The run cannot be repeated here.
    """
    record = read_run(row["file"])
    conf = {name: value for name, value in record["environment"].items() if "CONF" in name}
    if not row["run_scripts"]:  # `python -m timeit CODE` needs no script to do harm.
        raise NotBuilt("its command would be run: read it and its script in the file first, and add --run-scripts")
    trace = _trace(record, card, release, conf)
    batch, outside = record["micro_batch"] or 0, context_memory(card)
    taken_bytes = record["card"]["in_use_before_bytes"] or 0
    predicted, sized = predict_trace(trace, card, batch, release, outside, conf, taken_bytes)
    return replace(predicted, note=_compare_requests(record, sized) if record["history"] else "")


def _trace(record: Any, card: Card, release: Release, conf: Mapping[str, str]) -> Trace:
    words, script, last = record["command"], record["script"], record["updates"][-1]
    if record["world_size"] > 1 or record["card"]["cards_used"] > 1:
        raise NotBuilt("only runs of one process on one card are predicted")
    if record["allocator"]["backend"] != "native":
        raise NotBuilt(f"the allocator {record['allocator']['backend']} is not simulated")
    if record["outcome"] == "ok" and any(update["ooms"] for update in record["updates"]):
        raise NotBuilt("the script ran out of memory, caught that, and went on")
    with TemporaryDirectory() as folder:
        if script is None and (record["module"] or Path(words[0]).is_file()):
            words = ["-m", *words] if record["module"] else words
        elif script is None:
            raise NotBuilt(f"{words[0]} is not here: run this where it lies, or measure with --include-script")
        else:
            path = Path(folder, f"{Path(words[0]).stem}.py")
            path.write_text(script, encoding="utf-8")
            words = [str(path), *words[1:]]
        source = CommandSource(shlex.join([sys.executable, *words]), str(Path.cwd()))
        parts = (record["micro_batch"] or 1,) * (record["iter_size"] or max(last["backwards"], 1))
        updates = len(record["updates"]) if record["outcome"] == "ok" else Options.updates
        settings = TrialSettings(rank_samples=sum(parts), source=source, options=Options(updates=updates))
        with closing(CommandRun(settings, parts, environment=conf, card=card, torch_version=release)) as run:
            report = check_ran(*run.finish(card.name), card.name)
    assert report.simulated is not None
    assert report.simulated.trace is not None
    return report.simulated.trace


def _compare_requests(record: Any, sized: SizedTrace) -> str:
    """Say at which request of the last update, of at least 64 KiB, the recorded ones and the predicted ones part."""
    packed = base64.b64decode(record["history"])
    events = json.loads(lzma.LZMADecompressor().decompress(packed, _LONGEST_HISTORY))["events"]
    recorded = [size for size in events if size >= _SMALLEST]
    blocks = (event for event in sized.trace.events[sized.trace.last_update :] if event >= 0)
    predicted = [sized.sizes[block] for block in blocks if sized.sizes[block] >= _SMALLEST]
    pairs = enumerate(zip(recorded, predicted, strict=False), 1)
    parting = next(((number, *pair) for number, pair in pairs if pair[0] != pair[1]), None)
    if parting is not None:
        number, seen, expected = parting
        return f"request {number} of {len(recorded)} was of {format_bytes(seen)}, predicted: {format_bytes(expected)}"
    same = len(recorded) == len(predicted)
    return "" if same else f"{len(recorded)} requests were recorded, and {len(predicted)} predicted"

"""What `autoaccum doctor` shows: the machine, its versions and settings, and a plan, without what is private."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, TypeAlias

from rich.text import Text

import autoaccum
from autoaccum.devices.budget import AvailableMemory
from autoaccum.devices.environment import CARD_VARIABLES, HOST_VARIABLES, read_environment
from autoaccum.devices.host_memory import memory_cgroups, read_host_memory
from autoaccum.devices.installed_torch import NOT_FOUND, cudnn_package, package_version, torch_build
from autoaccum.devices.measured_run import SECRET, without_secrets
from autoaccum.devices.nvml import list_cards
from autoaccum.errors import NotMeasuredError, PlanFileError
from autoaccum.planning.plan_record import Plan
from autoaccum.reporting.console import Block, Facts
from autoaccum.reporting.plan_report import answer_rows, detail_rows
from autoaccum.serialization import read_record, to_plain
from autoaccum.spec import TrainingSpec
from autoaccum.units import MIB, format_bytes, format_overrides

FoundPlan: TypeAlias = "tuple[Path, Plan] | str"
"""A plan and its file, or the reason why there is none."""

_NOT_AVAILABLE = "not available"
_USUAL: Final = to_plain(TrainingSpec())
_MOST_FILES, _MOST_BYTES = 20, 4 * MIB
"""Of the JSON files of a folder, so many of the newest are read, unless they are larger: those are data."""

_SECRET: Final = rf"(?<![\w.-])[\w.-]*{SECRET}"
"""Names of options, variables and parameters."""


def find_plan(name: str | None) -> FoundPlan:
    """Read the plan in the file `name`, or else the newest plan in the current folder."""
    if name is not None:
        try:
            return Path(name), Plan.load(name)
        except PlanFileError as error:
            return error.message
    dated = [(path.stat(), path) for path in Path().glob("*.json") if path.is_file()]
    for status, path in sorted(dated, key=lambda pair: -pair[0].st_mtime)[:_MOST_FILES]:
        if status.st_size <= _MOST_BYTES:
            with suppress(PlanFileError):
                return path, Plan.load(path)
    return "the current folder has no plan"


def doctor_record(libraries: Sequence[str], found: FoundPlan) -> dict[str, Any]:
    """Return the machine, its versions and settings, and the plan, as JSON values; None is what is not available.

    Args:
        libraries: The distributions whose versions matter.
        found: The plan.
    """
    torch, cuda = torch_build()
    nvml = list_cards()
    host: AvailableMemory | None = None
    with suppress(NotMeasuredError):
        host = read_host_memory()
    limits = [limit for group in memory_cgroups() if (limit := group.limit_bytes()) is not None]
    versions = {name: package_version(name) for name in libraries}
    record = {
        "autoaccum": autoaccum.__version__,
        **read_environment((*HOST_VARIABLES, *CARD_VARIABLES)),
        "torch": None if torch == NOT_FOUND else torch,
        "cuda": cuda,
        "cudnn": cudnn_package(),
        "libraries": {name: version for name, version in versions.items() if version is not None},
        "driver": nvml.driver,
        "cards": [{"name": name, "total_bytes": size} for name, size in nvml.cards],
        "nvml_missing": nvml.missing,
        "host": {
            "total_bytes": host and host.total_bytes,
            "free_bytes": host and host.free_bytes,
            "cgroup_limit_bytes": min(limits, default=None),
        },
        "plan": None if isinstance(found, str) else {"file": str(found[0]), **to_plain(found[1])},
    }
    return {name: _public(value) for name, value in record.items()}


def doctor_blocks(record: Mapping[str, Any], found: FoundPlan) -> list[Block]:
    """Return the rows of a record, and those of its plan as `autoaccum plan` shows them."""
    rows = list(_machine_rows(record))
    if isinstance(found, str):
        return [Facts([*rows, ("plan", f"{_NOT_AVAILABLE} ({_public(found)})")])]
    plan = read_record(record["plan"], Plan)
    spec = {name: value for name, value in to_plain(plan.spec).items() if value != _USUAL[name]}
    codes = ", ".join(message.code for message in (*plan.warnings, *plan.notes))
    rows += [
        ("plan", f"{record['plan']['file']}, {plan.kind} with torch {plan.environment.get('torch', _NOT_AVAILABLE)}"),
        ("workload", plan.workload.reference),
        ("spec", format_overrides(spec) or "none"),
        *answer_rows(plan),
        *detail_rows(plan),
        ("messages", codes or "none"),
    ]
    return [Facts(rows)]


def _machine_rows(record: Mapping[str, Any]) -> Iterator[tuple[str, str | Text]]:
    host, build = record["host"], record["cuda"] and f"CUDA {record['cuda']}, cuDNN {record['cudnn'] or _NOT_AVAILABLE}"
    yield "autoaccum", record["autoaccum"]
    yield "python", f"{record['python']}, {record['platform']}"
    yield "torch", f"{record['torch']}, {build or 'built without CUDA'}" if record["torch"] else _NOT_AVAILABLE
    yield "libraries", ", ".join(f"{name} {version}" for name, version in record["libraries"].items()) or "none"
    yield "driver", record["driver"] or f"{_NOT_AVAILABLE} ({record['nvml_missing'] or 'NVML does not tell'})"
    for card in record["cards"]:
        yield "card", f"{card['name'] or _NOT_AVAILABLE}, {_size(card['total_bytes'])}"
    yield "settings", format_overrides(record["variables"]) or "none"
    limit = host["cgroup_limit_bytes"]
    cgroup = "no limit by a cgroup" if limit is None else f"the cgroup's limit is {_size(limit)}"
    yield "host memory", f"{_size(host['total_bytes'])}, {_size(host['free_bytes'])} free; {cgroup}"
    yield "processors", f"{record['processors']} of {record['processor']}"


def _size(count: int | None) -> str:
    return _NOT_AVAILABLE if count is None else format_bytes(count)


def _public(value: Any, name: str = "") -> Any:
    """Return JSON values with the home folder as ~, and secrets as ***.

    Args:
        value: The values.
        name: The key of a mapping that stands before the value.
    """
    if isinstance(value, Mapping):
        return {key: _public(item, key) for key, item in value.items()}
    if isinstance(value, list):
        is_command = all(isinstance(item, str) for item in value)
        return [_public(item) for item in (without_secrets(value) if is_command else value)]
    if not isinstance(value, str):
        return value
    if re.fullmatch(_SECRET, name):
        return "***"
    home = os.environ.get("HOME", "").rstrip("/")
    value = re.sub(rf"{re.escape(home)}(?![\w.-])", "~", value) if home else value
    value = re.sub(rf"'({_SECRET}=)[^']*'", r"\1***", value)  # As `shlex` quotes a word with spaces.
    return re.sub(rf"({_SECRET}[=\s]+)(?:'[^']*'|\"[^\"]*\"|[^\s\"'])+", r"\1***", value)

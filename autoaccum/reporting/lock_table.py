"""Write what trains on which card, by the lock, into a marked region of a file such as a README."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Final

from autoaccum.checks import join_words
from autoaccum.errors import UsageError
from autoaccum.files import write_bytes
from autoaccum.guarding.cases import Case, case_name
from autoaccum.guarding.guard_result import Measurement
from autoaccum.reporting.console import one_line

_BEGIN: Final = "<!-- autoaccum -->"
_END: Final = "<!-- /autoaccum -->"


def lock_table(entries: Mapping[Case, Measurement]) -> str:
    """Return a table in Markdown: a row for each workload or command with its options, a column for each card."""
    limits, rows = dict[str, int](), dict[str, dict[str, str]]()
    for case, measurement in sorted(entries.items(), key=lambda entry: case_name(entry[0])):
        card = str(case.options.gpu)
        name = case_name(dataclasses.replace(case, options=dataclasses.replace(case.options, gpu=None)))
        limits[card] = max(limits.get(card, 0), measurement.limit_bytes)
        rows.setdefault(name, {})[card] = _cell(case, measurement)
    cards = sorted(limits, key=lambda card: (limits[card], card))
    versions = sorted({str(measurement.environment["torch"]) for measurement in entries.values()})
    lines = [["Training", *cards], ["---", *("--:" for _ in cards)]]
    for label, cells in zip(_labels(rows), rows.values(), strict=True):
        lines.append([_code(label), *(cells.get(card, "") for card in cards)])
    return "\n".join(
        [
            *(f"| {' | '.join(line)} |" for line in lines),
            "",
            "The largest micro-batch that fits, with the number of micro-batches per update in parentheses, as"
            f" predicted by `autoaccum guard` with torch {join_words(versions)}.",
        ]
    )


def _labels(names: Collection[str]) -> list[str]:
    """Return labels of cases: script, options, and the arguments not in all runs of it; full names of equal labels."""
    cases, labels = [f" {name}".partition(" -- ") for name in names], []
    for options, _, command in cases:
        script = _script(command)
        alike = [set(_arguments(other, script)) for _, _, other in cases if _script(other) == script]
        common = set.intersection(*alike) - {script}
        kept = [argument for argument in _arguments(command, script) if argument not in common]
        labels.append(f"{' '.join(kept)}{options}".strip())
    return [name if labels.count(label) > 1 else label for name, label in zip(names, labels, strict=True)]


def _arguments(command: str, script: str) -> list[str]:
    """Return the words of a command, each flag with its value: the next word that is no flag or script."""
    return re.findall(rf"-[^\s=]+ (?!-\D|{re.escape(script)}(?!\S))\S+|\S+", command)


def _script(command: str) -> str:
    """Return the script of a command, its module after -m, or else its first word."""
    found = re.search(r"\S+\.(?:py|sh)(?!\S)|(?<=-m )\S+", command)
    return found[0] if found else command.partition(" ")[0]


def _cell(case: Case, measurement: Measurement) -> str:
    largest = f"{measurement.largest:,}"
    return largest if case.target_batch is None else f"{largest} ({len(measurement.micro_batches):,})"


def _code(text: str) -> str:
    """Return text as code in a cell, which a bar would end even there."""
    text, (fence, space) = one_line(text), ("``", " ") if "`" in text else ("`", "")
    return f"{fence}{space}{text}{space}{fence}".replace("|", "\\|")


def write_lock_table(path: Path, entries: Mapping[Case, Measurement]) -> bool:
    """Replace what is between the markers of a file, and return whether that changed it.

    Raises:
        UsageError: The file cannot be read or written, or does not have each marker once, in order.
    """
    try:
        text = path.read_bytes().decode()
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} cannot be read ({error})", hint="name a file such as README.md") from None
    before, _, rest = text.partition(_BEGIN)
    _, end, after = rest.partition(_END)
    if not end or text.count(_BEGIN) > 1 or text.count(_END) > 1:
        raise UsageError(
            f"{path} does not have exactly one place for the table",
            hint=f"write {_BEGIN} and {_END} around it, each once",
        )
    newline = "\r\n" if "\r\n" in before + after else "\n"
    region = f"{_BEGIN}\n\n{lock_table(entries)}\n\n{_END}".replace("\n", newline)
    written = f"{before}{region}{after}"
    if written == text:
        return False
    write_bytes(path, written.encode(), force=True)
    return True

"""The page of a verification: the verdict, what was compared, the causes, and what to do next."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence

from autoaccum.accumulation.schedule import format_parts
from autoaccum.reporting.page.blocks import (
    Block,
    Facts,
    Grid,
    Heading,
    Lines,
    Messages,
    Page,
    Section,
    Tone,
    plain_facts,
)
from autoaccum.reporting.verify_report import (
    comparison_table,
    comparison_title,
    describe_cause,
    next_command,
    verdict,
)
from autoaccum.verification.verification_result import Verification

_TONES: dict[str, Tone] = {"equivalent": "good", "not equivalent": "bad", "weighting not tested": "warn"}


def verify_page(found: Verification, *, again: Sequence[str]) -> Page:
    """Return the page of a verification; `again` is the command that suggestions begin with."""
    compared = sum(one.compared for comparison in found.comparisons for one in comparison.differences)
    answer = "equivalent" if found.equivalent else "weighting not tested" if found.untested else "not equivalent"
    name = str(found.workload.get("model") or found.workload.get("name") or "the workload")
    return Page(
        kind="autoaccum verify",
        title=f"{name}: {verdict(found, verbose=True).plain}",
        tiles=[
            ("the accumulated update", answer, _TONES[answer]),
            ("samples, in parts of", f"{found.target_batch} / {found.micro_batch}", ""),
            ("precision", found.precision, ""),
            ("tensors and terms compared", f"{compared:,}", ""),
        ],
        sections=[
            Section("Causes", tuple(_causes(found, again))),
            Section("Comparison", tuple(_comparisons(found))),
            Section("Notes", (Messages.of(("note", note) for note in found.notes),) if found.notes else ()),
            Section("Made with", (Facts.of(_settings(found)),)),
        ],
    )


def _causes(found: Verification, again: Sequence[str]) -> Iterator[Block]:
    for number, cause in enumerate(found.causes, start=1):
        rows, code, proof = describe_cause(cause, number=number, of=len(found.causes))
        yield Facts.of(rows)
        if code:
            yield Lines((code,), is_code=True)
        yield Facts.of([proof])
    if not found.equivalent:
        words, line = next_command(found, again)
        yield Lines((words,))
        if line:
            yield Lines((shlex.join(line),), is_code=True)


def _comparisons(found: Verification) -> Iterator[Block]:
    for comparison in found.comparisons:
        yield Heading(comparison_title(comparison))
        yield Grid.of(comparison_table(comparison))
    if not found.comparisons:
        yield Lines((f"parts of {format_parts((found.micro_batch,))} could not be compared",))


def _settings(found: Verification) -> Iterator[tuple[str, str]]:
    yield "tolerance", found.rounding
    yield "batchnorm", found.batchnorm
    if found.coupled:
        yield "coupled", str(found.coupled)
    yield "device", found.device
    yield "ranks", str(found.world_size)
    yield "time", f"{found.seconds:.1f} s"
    yield from plain_facts(found.workload)
    yield from plain_facts(found.environment)

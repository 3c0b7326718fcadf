"""The lists below a study's table: settings that were repeated, trials, micro-batches, advice."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Console
from rich.text import Text

from autoaccum.reporting.rows import row_lines
from autoaccum.reporting.tune_lines import compared_header, compared_line
from autoaccum.reporting.tune_words import (
    LABELS,
    TrialColumns,
    counted,
    format_loss,
    format_rate,
    last_loss,
    remarks,
    setting_words,
)
from autoaccum.tuning.judging.scaling import RULES, favoured_rule
from autoaccum.tuning.records import Row, Tuning

MOST_TRIALS = 15
_ORDER = tuple(LABELS)


def standing_lines(tuning: Tuning) -> Iterator[Text]:
    """Settings that several seeds have run, best first; none where nothing was repeated."""
    repeated = [one for one in tuning.standings if len(one.losses) + one.failed > 1]
    if not repeated:
        return
    yield Text(f"{'trial':>5}  {'runs':>4}  {'mean loss':>9}  {'spread':>9}  repeated with other seeds", "dim")
    for one in repeated:
        runs = len(one.losses) + one.failed
        line = Text(f"{one.trial:>5}  {runs:>4}  {format_loss(one.mean):>9}  {format_loss(one.spread):>9}  ")
        line.append(setting_words(one.setting, tuning.space))
        if one.failed:
            line.append(f"; {counted(one.failed, 'run')} came to no finite loss", "magenta")
        if tuning.best is not None and one.trial == tuning.best.trial:
            line.stylize("bold green")
        yield line


def trial_lines(tuning: Tuning) -> Iterator[Text]:
    """The trials of the search, best first; of many only the first."""
    rows = sorted((row for row in tuning.rows if row.confirms is None), key=_rank)
    if not rows:
        return
    columns = TrialColumns.of(tuning.space)
    yield Text(columns.header(), "dim")
    for row in rows[:MOST_TRIALS]:
        line = columns.row(row)
        if said := "; ".join(remarks(row)):
            line.append(f"  {said}", "dim")
        yield line
    if len(rows) > MOST_TRIALS:
        yield Text(f"{len(rows) - MOST_TRIALS:>5}  more: --json has them all", "dim")


def _rank(row: Row) -> tuple[int, int, float, int]:
    """Best first: complete ones by loss, then pruned ones, those that came furthest first."""
    loss = last_loss(row)
    percent = row.losses[-1][0] if row.state == "pruned" and row.losses else 0
    return _ORDER.index(row.state), -percent, float("inf") if loss is None else loss, row.number


def speed_lines(tuning: Tuning) -> Iterator[Text]:
    """Samples per second over micro-batches, the knee marked."""
    known = tuning.throughput
    best = next((one.samples_per_second for one in known.speeds if one.micro_batch == known.fastest), None)
    yield Text(f"{compared_header()}  in updates of {known.target_batch} on {known.device}", "dim")
    for speed in known.speeds:
        is_mark = {"knee": speed.micro_batch == known.knee, "fastest": speed.micro_batch == known.fastest}
        yield compared_line(speed, best, ", ".join(mark for mark, so in is_mark.items() if so))


def advice_lines(console: Console, tuning: Tuning) -> Iterator[Text]:
    """What rules of others say of other effective batches, with their sources; advice, nothing that was measured."""
    if not tuning.advice or tuning.best is None:
        return
    found = tuning.best.setting
    yield Text(f"{'batch':>11}  {'linear':>9}  {'square root':>11}  as advice: none of these rates was tried", "dim")
    lines = {found.target_batch: Text(f"{format_rate(found.learning_rate):>9}  {'':>11}  found", "bold")}
    for one in tuning.advice:
        lines[one.target_batch] = Text(f"{format_rate(one.linear):>9}  {format_rate(one.square_root):>11}")
    for batch in sorted(lines):
        yield Text(f"{batch:>11}  ").append_text(lines[batch])
    optimizer = str(tuning.workload.get("optimizer", ""))
    favoured = favoured_rule(optimizer)
    for rule in RULES:
        meant = f"; its source is about {optimizer} or its kin" if rule is favoured else ""
        yield from row_lines(console, rule.name, Text(f"{rule.source}{meant}", "dim"))

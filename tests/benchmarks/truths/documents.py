"""The pages and the picture that publish the scores in `tests/benchmarks/scores`.

A page has blocks, `<!-- scores: NAME -->` to `<!-- end -->`, whose contents are written here.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

from matplotlib.figure import SubFigure
from matplotlib.ticker import FuncFormatter
from measuring import ROOT, format_markdown
from truths.scores import FITS, Score, Scores, errors_of, judge_limits, load, order_and_slope

from autoaccum.reporting.figures import LIGHT, draw_panels

SCORES: Final = Path(__file__).parents[1] / "scores"
_ACCURACY: Final = ROOT / "examples" / "docs" / "concepts" / "accuracy.md"
PICTURE: Final = _ACCURACY.with_suffix(".svg")
PAGES: Final = (ROOT / "README.md", ROOT / "tests" / "benchmarks" / "README.md", _ACCURACY)
_BLOCK: Final = re.compile(r"(<!-- scores: (?P<name>[\w ]+) -->\n).*?(<!-- end -->)", re.DOTALL)
_HEADINGS: Final = {
    "h100_runs": "H100",
    "fitcheck_t4_dev": "Tesla T4",
    "peft_l40s_dev": "L40S",
    "xmem_rtx4060": "RTX 4060",
    "bert_large_v100": "V100",
    "timm_rtx3090": "RTX 3090",
    "measured_runs": "Runs of users",
}
"""Each table of scores and its name in the pages."""
_DRAWN: Final = {
    "h100_runs": ("reserved", "temporaries"),
    "fitcheck_t4_dev": ("reserved", "parameters"),
    "peft_l40s_dev": ("reserved", "gradients"),
    "xmem_rtx4060": ("growth of the process", "activations"),
    "bert_large_v100": ("process", "optimizer_state"),
}
"""What is drawn of each table, and in which colour."""
_BY_GROUP: Final = ("allocated", "reserved", "growth of the process")
_PEERS: Final = {"predicted": "autoaccum", "fitcheck": "fitcheck", "accelerate": "accelerate"}
_PEERS_COLOURS: Final = {"predicted": "parameters", "fitcheck": "gradients", "accelerate": "optimizer_state"}


def load_all() -> dict[str, Scores]:
    """The scores that are kept, by table."""
    return {name: load(SCORES / f"{name}.csv") for name in _HEADINGS if (SCORES / f"{name}.csv").exists()}


def write_pages() -> None:
    """Write all pages and the picture from the scores that are kept."""
    tables = load_all()
    for page in PAGES:
        page.write_text(fill(page.read_text(encoding="utf-8"), tables), encoding="utf-8")
    PICTURE.write_bytes(draw(tables))


def fill(page: str, tables: Mapping[str, Scores]) -> str:
    """`page` with the contents of its blocks."""

    def content(block: re.Match[str]) -> str:
        kind, _, name = block["name"].partition(" ")
        return f"{block[1]}\n{_BLOCKS[kind](tables, name)}\n\n{block[3]}"

    return _BLOCK.sub(content, page)


def format_table(about: str, scores: Scores) -> str:
    """All that the scores of a table say."""
    lines = scores.lines
    parts = [f"### {about}", limits_table(lines), errors_table(lines), peers_table(lines), order_table(lines)]
    parts += [runs_table(lines), missed(lines), not_predicted(lines), scores.origin]
    return "\n\n".join(filter(None, parts))


def limits_table(lines: Sequence[Score]) -> str:
    """How often limits are right, by group."""
    rows = [["runs", "judged", "right", "would crash", "too timid", "right of those with both limits"]]
    for name, group in _groups(score for score in lines if score.quantity == FITS):
        counts, both = judge_limits(group), judge_limits(group, both_sides=True)
        shares = [_share(count, counts.runs) for count in (counts.right, counts.would_crash, counts.too_timid)]
        rows.append([name, str(counts.runs), *shares, _share(both.right, both.runs)])
    return format_markdown(rows) if len(rows) > 1 else ""


def errors_table(lines: Sequence[Score]) -> str:
    """The errors of what was measured in bytes, by quantity, and the more telling ones by group."""
    rows = [["runs", "memory", "measured", "median error", "95th percentile", "worst"]]
    groups = dict(_groups(score for score in lines if score.quantity not in ("", FITS)))
    for name, group in groups.items():
        for quantity in dict.fromkeys(score.quantity for score in group):
            errors = errors_of(group, quantity)
            if errors is not None and (quantity in _BY_GROUP or len(group) == max(map(len, groups.values()))):
                figures = [_percent(value) for value in (errors.median, errors.high, errors.worst)]
                rows.append([name, quantity, str(errors.runs), *figures])
    return format_markdown(rows) if len(rows) > 1 else ""


def peers_table(lines: Sequence[Score]) -> str:
    """The errors of each tool on the runs that a peer states something of."""
    rows = [["memory", "tool", "runs", "median error", "95th percentile", "worst"]]
    for quantity in dict.fromkeys(score.quantity for score in lines):
        for peer in ("fitcheck", "accelerate"):
            shared = [score for score in lines if getattr(score, peer) is not None]
            for by in ("predicted", peer):
                errors = errors_of(shared, quantity, by)
                if errors is not None:
                    figures = [_percent(value) for value in (errors.median, errors.high, errors.worst)]
                    rows.append([quantity, _PEERS[by], str(errors.runs), *figures])
    return format_markdown(rows) if len(rows) > 1 else ""


def order_table(lines: Sequence[Score]) -> str:
    """The order and the slope over methods, of tables whose runs differ in nothing else."""
    rows = [["runs", "methods", "rank correlation", "slope"]]
    for name, group in _groups(score for score in lines if score.table == "peft_l40s_dev"):
        found = order_and_slope(group) if name != "all" else None
        if found is not None:
            rows.append([name, str(found[0]), f"{found[1]:.2f}", f"{found[2]:.2f}"])
    return format_markdown(rows) if len(rows) > 1 else ""


def runs_table(lines: Sequence[Score]) -> str:
    """Each measurement of the table whose runs nobody chose together."""
    rows = [["run", "memory", "measured, MiB", "predicted, MiB", "error", "note"]]
    for score in lines:
        error = score.error() if score.table == "measured_runs" else None
        if error is not None:
            figures = f"{score.measured:.1f}", f"{score.predicted:.1f}", f"{100 * error:+.2f} %"
            rows.append([f"{score.model} {score.run}", score.quantity, *figures, score.note])
    return format_markdown(rows) if len(rows) > 1 else ""


def missed(lines: Sequence[Score]) -> str:
    """The limits that a prediction contradicts, one a line."""
    wrong = [
        f"- {score.model}, {score.run}: {'would crash' if score.would_crash else 'too timid'} ({score.note})"
        for score in lines
        if score.would_crash or score.too_timid
    ]
    return "\n".join([f"{len(wrong)} limits are missed:", "", *wrong]) if wrong else ""


def not_predicted(lines: Sequence[Score]) -> str:
    """The runs that could not be predicted, by the reason."""
    reasons: dict[str, list[str]] = {}
    for score in lines:
        if not score.quantity:
            reasons.setdefault(score.note, []).append(f"{score.model}, {score.run}")
    count = sum(map(len, reasons.values()))
    listed = [f"- {reason}: {'; '.join(runs)}" for reason, runs in reasons.items()]
    return "\n".join([f"{count} runs are not predicted:", "", *listed]) if count else ""


def _whole(tables: Mapping[str, Scores], name: str) -> str:
    scores = tables.get(name)
    return "not run yet" if scores is None else format_table(_HEADINGS[name], scores).partition("\n\n")[2]


def _figures(tables: Mapping[str, Scores], _: str) -> str:
    """The three figures of the README."""
    rows = [["compared with", "result", "command"]]
    t4, rtx = tables.get("fitcheck_t4_dev"), tables.get("timm_rtx3090")
    for quantity in ("allocated", "reserved"):
        errors = None if t4 is None else errors_of(t4.lines, quantity)
        if errors is not None:
            said = f"Tesla T4, {errors.runs} runs of LoRA and QLoRA: peak {quantity} by PyTorch"
            figures = f"median error {_percent(errors.median)}, 95th percentile {_percent(errors.high)}"
            rows.append([said, figures, _command("fitcheck_t4_dev")])
    if rtx is not None:
        counts = judge_limits(rtx.lines)
        said = f"RTX 3090, {counts.runs} models of timm: the batch that trained fits, the next one does not"
        crash = f"{100 * counts.would_crash / counts.runs:.1f} % would have crashed"
        rows.append([said, f"{100 * counts.right / counts.runs:.1f} %; {crash}", _command("timm_rtx3090")])
    return format_markdown(rows)


def _command(table: str) -> str:
    return f"`python tests/benchmarks/accuracy.py TRUTH_FOLDER --tables {table}`"


def _summary(tables: Mapping[str, Scores], _: str) -> str:
    """A row for each card and what was measured there."""
    rows = [["card", "memory", "runs", "median error", "95th percentile", "limits right"]]
    for name, scores in tables.items():
        counts, drawn = judge_limits(scores.lines), dict.fromkeys(score.quantity for score in scores.lines)
        limits = _share(counts.right, counts.runs)
        for quantity in [each for each in drawn if each in ("allocated", "reserved", _DRAWN.get(name, ("",))[0])]:
            errors = errors_of(scores.lines, quantity)
            if errors is not None:
                figures = [str(errors.runs), _percent(errors.median), _percent(errors.high)]
                rows.append([_HEADINGS[name], quantity, *figures, limits])
                limits = ""
        if limits:
            rows.append([_HEADINGS[name], "", str(counts.runs), "", "", limits])
    return format_markdown(rows)


def _peers(tables: Mapping[str, Scores], name: str) -> str:
    return peers_table(tables[name].lines) if name in tables else "not run yet"


def _origins(tables: Mapping[str, Scores], _: str) -> str:
    return "\n".join(f"- {_HEADINGS[name]}: {scores.origin}" for name, scores in tables.items())


_BLOCKS: Final[Mapping[str, Callable[[Mapping[str, Scores], str], str]]] = {
    "whole": _whole,
    "figures": _figures,
    "summary": _summary,
    "peers": _peers,
    "origins": _origins,
}


def _groups(lines: Iterator[Score]) -> Iterator[tuple[str, list[Score]]]:
    """The scores of each group, then all."""
    groups: dict[str, list[Score]] = {}
    for score in lines:
        groups.setdefault(score.group, []).append(score)
    yield from sorted(groups.items(), key=lambda item: item[0].lower())
    if len(groups) > 1:
        yield "all", [score for group in groups.values() for score in group]


def _share(count: int, of: int) -> str:
    return f"{count} of {of} ({100 * count / of:.1f} %)" if of else "-"


def _percent(value: float) -> str:
    """Two digits below 1 %.

    >>> _percent(0.00024), _percent(0.0123)
    ('0.02 %', '1.2 %')
    """
    return f"{100 * value:.{2 if value < 0.00995 else 1}f} %"


@dataclass(frozen=True)
class _Points:
    """What is drawn in one colour."""

    label: str
    colour: str
    marker: str
    measured: Sequence[float]
    predicted: Sequence[float]


def draw(tables: Mapping[str, Scores]) -> bytes:
    """Predicted over measured memory: by card, and on the T4 by tool; one point for each run."""
    cards = [_points(tables[name].lines, *_DRAWN[name], _HEADINGS[name]) for name in _DRAWN if name in tables]
    t4 = tables["fitcheck_t4_dev"].lines
    tools = [_points(t4, "process", _PEERS_COLOURS[by], _PEERS[by], by) for by in _PEERS]
    panels = [
        partial(_draw_points, points=cards, title="Reserved memory, or that of the process"),
        partial(_draw_points, points=tools, title="Memory of the process on a Tesla T4, by three tools"),
    ]
    return draw_panels(panels, title="Predicted and measured on real cards", height=4.6)


def _points(lines: Sequence[Score], quantity: str, colour: str, label: str, by: str = "predicted") -> _Points:
    known = [score for score in lines if score.quantity == quantity and score.error(by) is not None]
    errors = errors_of(known, quantity, by)
    said = f"{label}: {len(known)} runs" + ("" if errors is None else f", median error {_percent(errors.median)}")
    marker = {"gradients": "s", "optimizer_state": "^", "activations": "D"}.get(colour, "o")
    measured = [(score.measured or 0) / 1024 for score in known]
    return _Points(said, colour, marker, measured, [getattr(score, by) / 1024 for score in known])


def _draw_points(figure: SubFigure, *, points: Sequence[_Points], title: str) -> None:
    """Draw on two logarithmic axes with the same ends, so that the diagonal means what was measured."""
    axes = figure.subplots()
    ends = [value for each in points for value in (*each.measured, *each.predicted)]
    low, high = 0.8 * min(ends), 1.25 * max(ends)
    axes.plot([low, high], [low, high], color=LIGHT["muted"], linewidth=1.0, label="predicted as measured")
    for each in points:
        (line,) = axes.plot(each.measured, each.predicted, each.marker, color=LIGHT[each.colour], label=each.label)
        line.set(markersize=4.5, markerfacecolor="none")
    axes.set(xscale="log", yscale="log", xlim=(low, high), ylim=(low, high), title=title)
    axes.set_xlabel("measured, in GiB")
    axes.set_ylabel("predicted, in GiB")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_ticks([tick for tick in (0.5, 1, 2, 4, 8, 16, 32) if low <= tick <= high])
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axis.set_minor_formatter(FuncFormatter(lambda *_: ""))
    figure.legend(loc="outside lower left", ncols=2)

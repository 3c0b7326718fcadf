"""What a guard found, as GitHub's markdown: a table of the cases, and details where there is something to see."""

from __future__ import annotations

import re
from collections.abc import Iterator

from autoaccum.guarding.asked.cases import case_name
from autoaccum.guarding.judgements import Judgement, Report
from autoaccum.reporting.guard_figures import NONE, FigureWords, figures, largest_words, outcome_counts
from autoaccum.reporting.guard_text import LABELS, compared, growth_words, hint_title
from autoaccum.reporting.plain_text import one_line
from autoaccum.units import precise_bytes, signed_bytes

_SPECIAL = re.compile(r"[&<\\`*_\[\]|~$]")
"""What markdown, GitHub's additions to it or HTML may read as structure anywhere. A character reference is never read
so (CommonMark 0.31, 2.5)."""
_OPENING = re.compile(r"^\s*(?:[-+=](?=[-+=\s]|$)|[#>:]|\d(?=\d*[.)](?:\s|$)))")
"""What else is structure where a block begins: a list, a heading, a quote, the line below a heading or a table's."""
_CODE = re.compile(r"`([^`]+)`")
_MOST_GROWTHS = 20


def report_markdown(report: Report, *, details: bool = True) -> str:
    """The report for a comment or a step summary.

    Args:
        report: What to tell.
        details: Tell what grew, why, and the way out, too.
    """
    blocks = [f"### autoaccum guard: {_heading(report)}", escape(_capital(compared(report)))]
    if report.judgements:
        rows = [_row(judgement) for judgement in report.judgements]
        head = ["| case | outcome | peak | least budget | largest fit |", "| --- | --- | --- | --- | --- |"]
        blocks.append("\n".join([*head, *rows]))
    if details:
        blocks += [block for judgement in report.judgements for block in _details(judgement)]
    return "\n\n".join(blocks) + "\n"


def escape(text: str) -> str:
    """A sentence as markdown that shows it as it is, but for `code`, which stays code.

    >>> escape("blocks.*.mlp `a|b`")
    'blocks.&#42;.mlp <code>a&#124;b</code>'
    """
    parts = [code(part) if number % 2 else _referred(part) for number, part in enumerate(_CODE.split(text))]
    opening = _OPENING.match(parts[0])
    if opening:
        parts[0] = f"&#{ord(opening[0][-1])};{parts[0][opening.end() :]}"
    return "".join(parts).replace("@", "@<!-- -->")  # No person or team is called by it.


def code(text: str) -> str:
    """A name as code, whatever is in it."""
    return f"<code>{_referred(text)}</code>"


def _heading(report: Report) -> str:
    counts = outcome_counts(report)
    return ", ".join(f"{count} {LABELS[outcome]}" for outcome, count in counts.items()) or "nothing was measured"


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def _row(judgement: Judgement) -> str:
    outcome = LABELS[judgement.outcome]
    cells = [code(case_name(judgement.case)), f"**{outcome}**" if judgement.exit_code else outcome]
    now, both = judgement.now, {figure.name: figure for figure in figures(judgement)}
    if now is None:
        cells += [NONE] * 3
    elif both:
        cells += [_change(both.get(name)) for name in ("peak", "least budget", "largest fit")]
    else:
        least = NONE if now.least_bytes is None else precise_bytes(now.least_bytes)
        cells += [precise_bytes(now.peak_bytes), least, largest_words(now)]
    return f"| {' | '.join(cells)} |"


def _change(figure: FigureWords | None) -> str:
    if figure is None:
        return NONE
    if figure.before == figure.now:
        return figure.now
    share = f" ({escape(figure.share)})" if figure.share else ""
    return f"{figure.before} → {figure.now}{share}"


def _details(judgement: Judgement) -> Iterator[str]:
    """What lies behind one row, folded away where all is well."""
    body = [block for block in _body(judgement) if block]
    if not body:
        return
    title = f"{LABELS[judgement.outcome]}: {code(case_name(judgement.case))}"
    opened = "<details open>" if judgement.exit_code else "<details>"
    yield f"{opened}<summary>{title}</summary>"
    yield from body
    yield "</details>"


def _body(judgement: Judgement) -> Iterator[str]:
    yield escape(one_line(judgement.explanation))
    growths = judgement.growths if judgement.outcome in ("regressed", "improved") else ()
    if growths:
        rows = [
            f"| {signed_bytes(one.bytes)} | {escape(growth_words(one))} | {escape(one.change)} |"
            for one in growths[:_MOST_GROWTHS]
        ]
        rest = growths[_MOST_GROWTHS:]
        if rest:
            rows.append(f"| {signed_bytes(sum(one.bytes for one in rest))} | {len(rest)} more | |")
        yield "\n".join(["| change | for what | how |", "| ---: | --- | --- |", *rows])
    if judgement.traceback:
        # Indented code would end at the first line that is not; a fence, at one in the text.
        yield f"<pre>{_referred(judgement.traceback.rstrip(), keep=chr(10)).replace(chr(10), '<br>')}</pre>"
    points = [*judgement.reasons, *(f"warning: {one}" for one in judgement.warnings)]
    points += [f"note: {one}" for one in judgement.notes]
    lines = [f"- {escape(one_line(point))}" for point in points]
    if judgement.hint:
        words = f"- {hint_title(judgement)}: {escape(one_line(judgement.hint))}"
        lines.append(f"{words}: {code(judgement.command)}" if judgement.command else words)
    yield "\n".join(lines)


def _referred(text: str, keep: str = "") -> str:
    shown = "".join(letter if letter.isprintable() or letter in keep else " " for letter in text)
    return _SPECIAL.sub(lambda found: f"&#{ord(found[0])};", shown)
